"""Tests of the gradient norm and of clipping against torch.nn.utils: on PyTorch bit for bit, else to a rounding."""

import math

import pytest
import torch
from torch import nn

from hyper_parallel.platform import get_platform
from tests.frameworks import assert_close, grad_of, leaf, on_mindspore, ours, requires_grad, theirs

clip_grad_norm_, get_total_norm = get_platform().clip_grad_norm_, get_platform().get_total_norm


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


def of_the_framework(parameters):
    """The same parameters with the same gradients, for the platform under test."""
    made = ours(parameters)
    if on_mindspore:
        for parameter, theirs_ in zip(made, parameters, strict=True):
            get_platform().set_grad(parameter, ours(theirs_.grad))
    return made


def assert_same(ours_, expected):
    exact = {} if on_mindspore else {"rtol": 0, "atol": 0}
    assert_close(ours_, expected, **exact)


def assert_same_grads(parameters, expected):
    for parameter, theirs_ in zip(parameters, expected, strict=True):
        assert (grad_of(parameter) is None) == (theirs_.grad is None)
        if theirs_.grad is not None:
            assert_same(grad_of(parameter), theirs_.grad)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3, 0.5, math.inf, "inf"])
@pytest.mark.parametrize("max_norm", [0.0, 0.1, 2, 1e9, math.inf])
@pytest.mark.parametrize("foreach", [None, False, True])
def test_numbers_are_those_of_torch(norm_type, max_norm, foreach):
    ours_, theirs_ = of_the_framework(parameters_with_grads()), parameters_with_grads()
    compared = slice(1 if math.isinf(float(norm_type)) else 0, None)  # torch refuses the maximum of an empty tensor
    norm = clip_grad_norm_(ours_, max_norm, norm_type, foreach=foreach)
    assert_same(norm, nn.utils.clip_grad_norm_(theirs_[compared], max_norm, norm_type, foreach=foreach))
    assert_same_grads(ours_[compared], theirs_[compared])


@pytest.mark.parametrize("foreach", [None, False, True])
def test_mixed_dtypes(foreach):
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    ours_, theirs_ = of_the_framework(parameters_with_grads(dtypes)), parameters_with_grads(dtypes)
    norm = clip_grad_norm_(ours_, 1.0, foreach=foreach)
    assert_same(norm, nn.utils.clip_grad_norm_(theirs_, 1.0, foreach=foreach))
    assert_same_grads(ours_, theirs_)


@pytest.mark.parametrize("norm_type", [2.0, 3.0, 0.7])
def test_double_precision(norm_type):
    ours_, theirs_ = (parameters_with_grads((torch.float64,)) for _ in range(2))
    ours_ = of_the_framework(ours_)
    norm = clip_grad_norm_(ours_, 0.1, norm_type)
    expected = nn.utils.clip_grad_norm_(theirs_, 0.1, norm_type).item()
    assert theirs(norm).item() == pytest.approx(expected, rel=1e-13)
    for mine, other in zip(ours_, theirs_, strict=True):
        if other.grad is not None:
            assert_close(grad_of(mine), other.grad, rtol=1e-13, atol=1e-15)


def test_one_tensor_a_generator_and_nothing():
    one = of_the_framework(parameters_with_grads())[3]
    norm = theirs(grad_of(one)).norm()
    assert_same(clip_grad_norm_(one, 0.5), norm)
    assert theirs(grad_of(one)).norm().item() == pytest.approx(0.5, rel=1e-4)
    parameters = of_the_framework(parameters_with_grads())
    expected = get_total_norm([grad_of(parameter) for parameter in parameters if grad_of(parameter) is not None])
    assert_same(clip_grad_norm_((parameter for parameter in parameters), 1.0), expected)
    assert clip_grad_norm_(ours([nn.Parameter(torch.zeros(2))]), 1.0).item() == 0.0
    assert clip_grad_norm_([], 1.0).item() == 0.0
    assert get_total_norm([]).item() == 0.0
    for norm_type in (1.0, 2.0, math.inf):
        assert get_total_norm(ours([torch.zeros(0, 2), torch.zeros(0)]), norm_type).item() == 0.0


def test_the_norm_carries_no_graph():
    x = leaf(torch.ones(3))
    assert not requires_grad(get_total_norm(x * 2))
    assert get_total_norm(x * 2).item() == pytest.approx(math.sqrt(12))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_norms(bad):
    plain = parameters_with_grads()
    plain[2].grad[0, 0] = bad
    parameters = of_the_framework(plain)
    before = theirs(grad_of(parameters[3])).clone()
    with pytest.raises(RuntimeError, match=rf"order 2.0 of 5 gradients is {bad}, .*pass error_if_nonfinite=False"):
        clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)
    assert torch.equal(theirs(grad_of(parameters[3])), before), "nothing is scaled before the error"
    assert not math.isfinite(clip_grad_norm_(parameters, 1.0).item())


def test_mistakes_say_what_to_write():
    with pytest.raises(ValueError, match=r"max_norm must be 0 or more, got -1\.0"):
        clip_grad_norm_([], -1)
    with pytest.raises(ValueError, match="max_norm must be 0 or more, got nan"):
        clip_grad_norm_([], math.nan)
    with pytest.raises(ValueError, match="norm_type is nan"):
        get_total_norm(ours([torch.ones(1)]), math.nan)
    with pytest.raises(TypeError, match=r"clip_grad_norm_ takes tensors, got tuple at position 0; give model\."):
        clip_grad_norm_([("weight", ours(torch.ones(1)))], 1.0)
    with pytest.raises(TypeError, match="get_total_norm takes tensors, got NoneType at position 1"):
        get_total_norm(ours([torch.ones(1), None]))
    with pytest.raises(
        ValueError if on_mindspore else RuntimeError, match=r"cannot be used for tensors on meta|on the meta device"
    ):
        get_total_norm(ours([torch.ones(1, device="meta")]), foreach=True)
