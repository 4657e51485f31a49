"""Tests of the gradient norm and of clipping, bit for bit against torch.nn.utils."""

import copy
import math

import pytest
import torch
from torch import nn

from hyper_parallel.platform.torch.grad_norm import clip_grad_norm_, get_total_norm


def parameters_with_grads(dtypes=(torch.float32,), seed=0):
    torch.manual_seed(seed)
    parameters = []
    for index in range(6):
        dtype = dtypes[index % len(dtypes)]
        parameter = nn.Parameter(torch.zeros(index, 3, dtype=dtype))
        if index != 4:
            parameter.grad = torch.randn(index, 3).to(dtype)
        parameters.append(parameter)
    return parameters


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3, 0.5, math.inf, "inf"])
@pytest.mark.parametrize("max_norm", [0.0, 0.1, 2, 1e9, math.inf])
@pytest.mark.parametrize("foreach", [None, False, True])
def test_numbers_are_those_of_torch(norm_type, max_norm, foreach):
    ours = parameters_with_grads()
    theirs = copy.deepcopy(ours)
    for parameter, copied in zip(ours, theirs, strict=True):
        copied.grad = None if parameter.grad is None else parameter.grad.clone()
    if math.isinf(float(norm_type)):  # torch refuses the maximum of an empty tensor
        theirs = theirs[1:]
    norm = clip_grad_norm_(ours, max_norm, norm_type, foreach=foreach)
    expected = nn.utils.clip_grad_norm_(theirs, max_norm, norm_type, foreach=foreach)
    assert torch.equal(norm, expected)
    for parameter, copied in zip(ours[-len(theirs) :], theirs, strict=True):
        assert (parameter.grad is None) == (copied.grad is None)
        assert parameter.grad is None or torch.equal(parameter.grad, copied.grad)


@pytest.mark.parametrize("foreach", [None, False, True])
def test_mixed_dtypes(foreach):
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    ours, theirs = parameters_with_grads(dtypes), parameters_with_grads(dtypes)
    assert torch.equal(
        clip_grad_norm_(ours, 1.0, foreach=foreach), nn.utils.clip_grad_norm_(theirs, 1.0, foreach=foreach)
    )
    for parameter, copied in zip(ours, theirs, strict=True):
        assert parameter.grad is None or torch.equal(parameter.grad, copied.grad)


def test_one_tensor_a_generator_and_nothing():
    one = parameters_with_grads()[3]
    norm = one.grad.norm()
    assert torch.equal(clip_grad_norm_(one, 0.5), norm)
    assert one.grad.norm().item() == pytest.approx(0.5, rel=1e-4)
    parameters = parameters_with_grads()
    expected = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    assert torch.equal(clip_grad_norm_((parameter for parameter in parameters), 1.0), expected)
    assert clip_grad_norm_([nn.Parameter(torch.zeros(2))], 1.0).item() == 0.0
    assert clip_grad_norm_([], 1.0).item() == 0.0
    assert get_total_norm([]).item() == 0.0
    for norm_type in (1.0, 2.0, math.inf):
        assert get_total_norm([torch.zeros(0, 2), torch.zeros(0)], norm_type).item() == 0.0


def test_the_norm_carries_no_graph():
    x = torch.ones(3, requires_grad=True)
    assert not get_total_norm(x * 2).requires_grad
    assert get_total_norm(x * 2).item() == pytest.approx(math.sqrt(12))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_norms(bad):
    parameters = parameters_with_grads()
    parameters[2].grad[0, 0] = bad
    before = parameters[3].grad.clone()
    with pytest.raises(RuntimeError, match=rf"order 2.0 of 5 gradients is {bad}, .*pass error_if_nonfinite=False"):
        clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    assert torch.equal(parameters[3].grad, before), "nothing is scaled before the error"
    assert not math.isfinite(clip_grad_norm_(parameters, 1.0).item())


def test_mistakes_say_what_to_write():
    with pytest.raises(ValueError, match=r"max_norm must be 0 or more, got -1\.0"):
        clip_grad_norm_([], -1)
    with pytest.raises(ValueError, match="max_norm must be 0 or more, got nan"):
        clip_grad_norm_([], math.nan)
    with pytest.raises(ValueError, match="norm_type is nan"):
        get_total_norm([torch.ones(1)], math.nan)
    with pytest.raises(
        TypeError, match=r"got tuple at position 0; give model.parameters\(\), not model.named_parameters"
    ):
        clip_grad_norm_(nn.Linear(1, 1).named_parameters(), 1.0)
    with pytest.raises(TypeError, match="get_total_norm takes tensors, got NoneType at position 1"):
        get_total_norm([torch.ones(1), None])
    with pytest.raises(RuntimeError, match="foreach=True cannot be used for tensors on meta"):
        get_total_norm([torch.ones(1, device="meta")], foreach=True)
