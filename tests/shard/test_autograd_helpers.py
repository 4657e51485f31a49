"""Gradients asked for in other ways than ``loss.backward()``, functions of users, recomputation."""

from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.dtensor.comm_recorder import CommRecorder
from hyper_parallel.platform import get_platform
from tests.frameworks import assert_close, distribute_tensor, grad, leaf, on_mindspore, ours
from tests.frameworks.functions import dropout, linear, relu
from tests.frameworks.models import fill, sequential
from tests.frameworks.models import linear as linear_layer
from tests.shard.validator import layouts_of, tensor
from tests.world import run_on_ranks


def _mesh(num_axes: int = 1) -> hp.DeviceMesh:
    return hp.init_device_mesh("cpu", (2,) * num_axes, mesh_dim_names=("x", "y")[:num_axes])


def _leaf(value: torch.Tensor, mesh: hp.DeviceMesh, *placements: Any) -> hp.DTensor:
    return distribute_tensor(leaf(value), mesh, list(placements))


def _network(x: Any, weight: Any, bias: Any) -> Any:
    return (linear(x, weight, bias).tanh() * bias).square()


VALUES = (tensor(5, 4), tensor(3, 4, seed=1), tensor(3, seed=2))


@run_on_ranks(2)
def test_grad() -> None:
    mesh = _mesh()
    plain = [value.clone().requires_grad_() for value in VALUES]
    out = _network(*plain)
    seed = tensor(*out.shape, seed=5)
    expected = torch.autograd.grad(out, plain, seed)
    for layouts in ((hp.Shard(0), hp.Replicate(), hp.Replicate()), (hp.Shard(1), hp.Shard(1), hp.Partial())):
        cut = [_leaf(value, mesh, placement) for value, placement in zip(VALUES, layouts, strict=True)]
        for placement in (hp.Replicate(), hp.Shard(1), hp.Partial()):
            given = distribute_tensor(seed, mesh, [placement])
            found = grad(_network(*cut), cut, given)
            for mine, one, want in zip(found, cut, expected, strict=True):
                assert mine.layout is one.layout.gradient()
                assert_close(mine.full_tensor(), want)
            assert all(one.grad is None for one in cut)


@run_on_ranks(2)
def test_grad_of_a_number_unused_inputs_and_inner_tensors() -> None:
    mesh = _mesh()
    x, unused = _leaf(tensor(5, 3), mesh, hp.Shard(0)), _leaf(tensor(2), mesh, hp.Shard(0))
    hidden = x.exp()
    loss = hidden.square().sum()
    assert loss.placements == (hp.Partial(),)
    of_hidden, nothing = grad(loss, [hidden, unused], allow_unused=True, retain_graph=True)
    assert nothing is None
    assert of_hidden.layout is hidden.layout
    assert_close(of_hidden.full_tensor(), 2 * tensor(5, 3).exp())
    with pytest.raises(RuntimeError, match=r"not have been used|not computed from the input"):
        grad(loss, [unused], retain_graph=True)
    (whole,) = grad(loss.full_tensor(), [x])
    assert_close(whole.full_tensor(), 2 * (2 * tensor(5, 3)).exp())


@run_on_ranks(2)
def test_backward_of_several() -> None:
    mesh = _mesh()
    plain = tensor(5, 3).requires_grad_()
    torch.autograd.backward([plain.sum(), plain.exp()], [None, tensor(5, 3, seed=1)])
    x = _leaf(plain, mesh, hp.Shard(0))
    seed = distribute_tensor(tensor(5, 3, seed=1), mesh, [hp.Shard(1)])
    hp.backward([x.sum(), x.exp()], [None, seed])
    assert_close(x.grad.full_tensor(), plain.grad)
    y = _leaf(plain, mesh, hp.Shard(1))
    y.exp().backward(distribute_tensor(tensor(5, 3, seed=1), mesh, [hp.Replicate()]))
    assert_close(y.grad.full_tensor(), plain.grad - 1)


@run_on_ranks(2)
def test_checkpoint() -> None:
    mesh = _mesh()
    plain = [value.clone().requires_grad_() for value in VALUES]
    _network(*plain).sum().backward()
    for layouts in ((hp.Shard(0), hp.Shard(0), hp.Shard(0)), (hp.Shard(1), hp.Shard(1), hp.Replicate())):
        cut = [_leaf(value, mesh, placement) for value, placement in zip(VALUES, layouts, strict=True)]
        out = get_platform().checkpoint(_network, *cut)
        assert isinstance(out, hp.DTensor) and out.requires_grad
        out.sum().backward()
        for mine, want in zip(cut, plain, strict=True):
            assert mine.grad.layout is mine.layout
            assert_close(mine.grad.full_tensor(), want.grad)


@run_on_ranks(2)
def test_checkpoint_repeats_dropout() -> None:
    mesh = _mesh()
    x = _leaf(torch.ones(64, 4, dtype=torch.float64), mesh, hp.Shard(0))
    hp.manual_seed(1)
    out = get_platform().checkpoint(lambda x: dropout(x * 3, 0.5) * x, x)
    out.sum().backward()
    # d(3 m x^2)/dx = 6 m x, and the output is 3 m: the same mask in both.
    assert_close(x.grad.full_tensor(), (out.detach() * 2).full_tensor())
    after = dropout(x.detach(), 0.5).full_tensor()
    hp.manual_seed(1)
    dropout(x.detach(), 0.5)
    assert_close(dropout(x.detach(), 0.5).full_tensor(), after)


@run_on_ranks(2)
def test_checkpoints_inside_checkpoints() -> None:
    mesh, checkpoint = _mesh(), get_platform().checkpoint

    def inner(x, weight):
        assert x.shape == (6, 6)
        return dropout(relu(x @ weight).sin(), 0.5)

    def middle(x, weight):
        return checkpoint(inner, inner(x.cos(), weight), weight)

    def outer(x, weight):
        return checkpoint(middle, checkpoint(middle, x, weight), weight)

    results = []
    for function in (lambda x, w: middle(middle(x, w), w), lambda x, w: checkpoint(outer, x, w)):
        x, weight = _leaf(tensor(6, 6), mesh, hp.Shard(0)), _leaf(tensor(6, 6, seed=1), mesh, hp.Shard(1))
        hp.manual_seed(4)
        function(x, weight).square().sum().backward()
        results.append([x.grad.full_tensor(), weight.grad.full_tensor()])
    for once, again in zip(*results, strict=True):
        assert_close(once, again)


@run_on_ranks(2)
def test_detach_and_no_grad() -> None:
    mesh = _mesh()
    x = _leaf(tensor(4, 3), mesh, hp.Shard(0))
    detached = x.exp().detach()
    assert not detached.requires_grad and detached.layout is x.layout
    with get_platform().no_grad():
        weight = distribute_tensor(tensor(3, 5), mesh, [hp.Replicate()])
        out = relu(x @ weight).sum(1)
        assert not out.requires_grad
        out.add_(1.0)
        assert_close(out.full_tensor(), (tensor(4, 3) @ tensor(3, 5)).relu().sum(1) + 1)


# ---------------------------------------------------------------------------------------------------------------------
# Autograd functions of users
# ---------------------------------------------------------------------------------------------------------------------


class _ScaledExp(get_platform().Function):
    """Saves an output and an input, and sums the gradient of a row over all rows."""

    @staticmethod
    def forward(ctx, x, row, factor):
        result = (x * row).exp() * factor
        ctx.save_for_backward(result, x, row)
        return result

    @staticmethod
    def backward(ctx, gradient):
        result, x, row = ctx.saved_tensors
        inner = gradient * result
        return inner * row, (inner * x).sum(0), None


class _HandsThrough(get_platform().Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class _ReturnsPlain(get_platform().Function):
    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        return ours(torch.ones(tuple(gradient.shape)))


@run_on_ranks(4)
def test_functions_of_users_are_right_under_every_layout(sweep: bool) -> None:
    mesh = _mesh(2)
    values = [tensor(5, 3), tensor(3, seed=1)]
    plain = [value.clone().requires_grad_() for value in values]
    ((plain[0] * plain[1]).exp() * 2.0).square().sum().backward()
    step = 2 if sweep or not on_mindspore else 5
    for first in layouts_of(mesh, values[0], True)[::step]:
        for second in layouts_of(mesh, values[1], True)[:: step + 1]:
            cut = [
                distribute_tensor(leaf(value), mesh, layout)
                for value, layout in zip(values, (first, second), strict=True)
            ]
            out = _ScaledExp.apply(*cut, 2.0)
            assert isinstance(out, hp.DTensor)
            out.square().sum().backward()
            for mine, want in zip(cut, plain, strict=True):
                assert mine.grad.layout is mine.layout.gradient()
                assert_close(mine.grad.full_tensor(), want.grad)


@run_on_ranks(2)
def test_functions_that_hand_through_or_return_plain_gradients() -> None:
    x = _leaf(tensor(4, 2), _mesh(), hp.Shard(0))
    same = _HandsThrough.apply(x)
    assert isinstance(same, hp.DTensor) and same.layout is x.layout
    assert_close(grad(same.sum(), [x])[0].full_tensor(), torch.full((4, 2), 3.0, dtype=torch.float64))
    out = _ReturnsPlain.apply(x)
    with pytest.raises(TypeError, match=r"the backward of _ReturnsPlain returned a plain tensor of shape \(4, 2\)"):
        out.sum().backward()


@run_on_ranks(2)
def test_functions_inside_skip_dispatch_see_blocks() -> None:
    x = _leaf(tensor(4, 2), _mesh(), hp.Shard(0))
    with hp.SkipDTensorDispatch():
        out = _ScaledExp.apply(x, x, 1.0)
        assert not isinstance(out, hp.DTensor) and tuple(out.shape) == (2, 2)


@run_on_ranks(2)
def test_one_backward_reduction_through_a_module() -> None:
    mesh = _mesh()
    module = fill(sequential(linear_layer(4, 3, dtype=torch.float64)))
    hp.distribute_module(module, mesh)
    parameters = list(get_platform().parameters_dict(module).values())
    out = module(distribute_tensor(tensor(6, 4), mesh, [hp.Shard(0)]))
    with CommRecorder() as recorder:
        gradients = grad(out.square().sum(), parameters)
    assert recorder.counts == {"all_reduce": 2}
    assert all(gradient.placements == (hp.Replicate(),) for gradient in gradients)
