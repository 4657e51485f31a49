"""Gradients asked for in the ways of PyTorch alone: ``torch.autograd``, ``torch.utils.checkpoint``, inference mode."""

import functools
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.shard.validator import layouts_of, tensor
from tests.world import run_on_ranks


def _mesh(num_axes: int = 1):
    return hp.init_device_mesh("cpu", (2,) * num_axes, mesh_dim_names=("x", "y")[:num_axes])


def _leaf(value: torch.Tensor, mesh, *placements) -> hp.DTensor:
    return hp.distribute_tensor(value.detach().clone().requires_grad_(), mesh, list(placements))


def _network(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.linear(x, weight, bias).tanh() * bias).square()


VALUES = (tensor(5, 4), tensor(3, 4, seed=1), tensor(3, seed=2))


@run_on_ranks(2)
def test_grad_of_a_number_unused_inputs_and_inner_tensors() -> None:
    mesh = _mesh()
    x, unused = _leaf(tensor(5, 3), mesh, hp.Shard(0)), _leaf(tensor(2), mesh, hp.Shard(0))
    hidden = x.exp()
    loss = hidden.square().sum()
    assert loss.placements == (hp.Partial(),)
    of_hidden, nothing = torch.autograd.grad(loss, [hidden, unused], allow_unused=True, retain_graph=True)
    assert nothing is None
    assert of_hidden.layout is hidden.layout
    torch.testing.assert_close(of_hidden.full_tensor(), 2 * tensor(5, 3).exp())
    zeros = torch.autograd.grad(loss, unused, materialize_grads=True, allow_unused=True, retain_graph=True)[0]
    assert zeros.layout is unused.layout and zeros.full_tensor().abs().sum() == 0
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(loss, unused, retain_graph=True)
    (whole,) = torch.autograd.grad(loss.full_tensor(), x)
    torch.testing.assert_close(whole.full_tensor(), 2 * (2 * tensor(5, 3)).exp())


@run_on_ranks(2)
def test_backward_of_several() -> None:
    mesh = _mesh()
    plain = tensor(5, 3).requires_grad_()
    torch.autograd.backward([plain.sum(), plain.exp()], [None, tensor(5, 3, seed=1)])
    x = _leaf(plain, mesh, hp.Shard(0))
    other = _leaf(tensor(5, 3), mesh, hp.Shard(0))
    seed = hp.distribute_tensor(tensor(5, 3, seed=1), mesh, [hp.Shard(1)])
    torch.autograd.backward([x.sum(), x.exp() + 0 * other], [None, seed], inputs=[x])
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
    assert other.grad is None
    y = _leaf(plain, mesh, hp.Shard(1))
    y.exp().backward(hp.distribute_tensor(tensor(5, 3, seed=1), mesh, [hp.Replicate()]), inputs=y)
    torch.testing.assert_close(y.grad.full_tensor(), plain.grad - 1)
    z = _leaf(plain, mesh, hp.Shard(0))
    z.sum().full_tensor().backward(inputs=[z])
    torch.testing.assert_close(z.grad.full_tensor(), torch.ones(5, 3, dtype=torch.float64))


@run_on_ranks(2)
def test_wrong_gradients_are_named() -> None:
    mesh = _mesh()
    x = _leaf(tensor(4, 2), mesh, hp.Shard(0))
    with pytest.raises(RuntimeError, match=r"only for scalar outputs, not for one of shape \(4, 2\)"):
        torch.autograd.grad(x.exp(), x)
    with pytest.raises(
        TypeError, match=r"shape \(4, 2\) must be a distributed tensor, got Tensor; use distribute_tensor"
    ):
        torch.autograd.grad(x.exp(), x, torch.ones(4, 2))
    with pytest.raises(ValueError, match=r"a gradient of shape \(2, 2\) for a tensor of shape \(4, 2\)"):
        torch.autograd.grad(x.exp(), x, hp.distribute_tensor(torch.ones(2, 2), mesh, [hp.Shard(0)]))
    with pytest.raises(ValueError, match="is_grads_batched=True: collectives cannot be vectorised"):
        torch.autograd.grad(x.exp(), x, x.detach(), is_grads_batched=True)
    with pytest.raises(RuntimeError, match=r"input 0, a distributed tensor of shape \(4, 2\), does not require grad"):
        torch.autograd.grad(x.sum(), x.detach())
    with pytest.raises(RuntimeError, match="backward: got 2 tensors and 1 gradients"):
        torch.autograd.backward([x.exp(), x.sin()], [x.detach()])


def _second_order(x, weight, bias):
    """A gradient penalty: the gradient of the gradient's norm."""
    loss = _network(x, weight, bias).sum()
    first = torch.autograd.grad(loss, [x, weight, bias], create_graph=True)
    penalty = sum(gradient.square().sum() for gradient in first)
    return [penalty, *torch.autograd.grad(penalty, [x, weight, bias])]


@run_on_ranks(4)
def test_gradients_of_gradients_under_many_layouts() -> None:
    mesh = _mesh(2)
    expected = _second_order(*(value.clone().requires_grad_() for value in VALUES))
    pick = random.Random(4)
    for _ in range(25):
        layouts = [pick.choice(layouts_of(mesh, value, True)) for value in VALUES]
        ours = [
            hp.distribute_tensor(value.clone().requires_grad_(), mesh, layout)
            for value, layout in zip(VALUES, layouts, strict=True)
        ]
        for mine, want in zip(_second_order(*ours), expected, strict=True):
            torch.testing.assert_close(mine.full_tensor(), want, msg=lambda text, at=layouts: f"{at}: {text}")


@run_on_ranks(2)
def test_gradients_of_gradients_through_redistributions() -> None:
    mesh = _mesh()
    value = tensor(4, 3)
    layouts = layouts_of(mesh, value, True)

    def second_order(x, function):
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    expected = second_order(value.clone().requires_grad_(), lambda x: x.pow(3) * x)
    reordered = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("r",), rank_list=(1, 0))
    pending_elsewhere = hp.Layout.from_placements(reordered, [hp.Partial()], 2)
    for start in layouts:
        for middle in [*layouts, pending_elsewhere]:
            for end in layouts:
                found = second_order(
                    hp.distribute_tensor(value.clone().requires_grad_(), mesh, start),
                    lambda x, middle=middle, end=end: (
                        (x.redistribute(middle.mesh, middle) * 1).redistribute(mesh, end).pow(3)
                        * x.redistribute(mesh, end)
                    ),
                )
                torch.testing.assert_close(found.full_tensor(), expected)


class _Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient


@run_on_ranks(2)
def test_gradients_of_gradients_through_functions_of_pending_sums() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))

    def penalty(x):
        (first,) = torch.autograd.grad((_Squared.apply(x.sin().sum(0)) ** 3).sum(), x, create_graph=True)
        (first**2).sum().backward()
        return first

    plain = tensor(5, 3).requires_grad_()
    expected = penalty(plain)
    for placement in (hp.Shard(0), hp.Shard(1), hp.Replicate()):
        x = hp.distribute_tensor(plain.detach(), mesh, [placement]).requires_grad_()
        torch.testing.assert_close(penalty(x).full_tensor(), expected)
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


@run_on_ranks(2)
def test_functional_products() -> None:
    mesh = _mesh()
    x, v = tensor(4, 3), tensor(4, 3, seed=1)
    ours, ours_v = (hp.distribute_tensor(value, mesh, [hp.Shard(0)]) for value in (x, v))

    def function(x):
        return (x.exp() * x).sum()

    for product in (torch.autograd.functional.vjp, torch.autograd.functional.hvp, torch.autograd.functional.vhp):
        given = () if product is torch.autograd.functional.vjp else (v,)
        _, want = product(function, x, *given)
        _, mine = product(function, ours, *((ours_v,) if given else ()))
        torch.testing.assert_close(mine.full_tensor(), want)
    for mapping in (lambda x: x.exp() * x, lambda x: x.sum(0), lambda x: x.sin() @ x.T):
        _, want = torch.autograd.functional.jvp(mapping, x, v)
        _, mine = torch.autograd.functional.jvp(mapping, ours, ours_v)
        torch.testing.assert_close(mine.full_tensor(), want)


@run_on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    mesh = _mesh()
    plain = [value.clone().requires_grad_() for value in VALUES]
    _network(*plain).sum().backward()
    for layouts in ((hp.Shard(0), hp.Shard(0), hp.Shard(0)), (hp.Shard(1), hp.Shard(1), hp.Replicate())):
        ours = [_leaf(value, mesh, placement) for value, placement in zip(VALUES, layouts, strict=True)]
        out = checkpoint(_network, *ours, use_reentrant=reentrant)
        assert isinstance(out, hp.DTensor) and out.requires_grad
        out.sum().backward()
        for mine, want in zip(ours, plain, strict=True):
            assert mine.grad.layout is mine.layout
            torch.testing.assert_close(mine.grad.full_tensor(), want.grad)


@run_on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_repeats_dropout(reentrant: bool) -> None:
    mesh = _mesh()
    x = _leaf(torch.ones(64, 4, dtype=torch.float64), mesh, hp.Shard(0))
    hp.manual_seed(1)
    out = checkpoint(lambda x: torch.nn.functional.dropout(x * 3, 0.5) * x, x, use_reentrant=reentrant)
    out.sum().backward()
    # d(3 m x^2)/dx = 6 m x, and the output is 3 m: the same mask in both.
    torch.testing.assert_close(x.grad.full_tensor(), 2 * out.detach().full_tensor())
    after = torch.nn.functional.dropout(x.detach(), 0.5).full_tensor()
    hp.manual_seed(1)
    torch.nn.functional.dropout(x.detach(), 0.5)
    torch.testing.assert_close(torch.nn.functional.dropout(x.detach(), 0.5).full_tensor(), after)


@run_on_ranks(2)
@pytest.mark.parametrize("reentrant", [(False, False), (True, False), (False, True)], ids=str)
def test_checkpoints_inside_checkpoints(reentrant: tuple[bool, bool]) -> None:
    mesh = _mesh()
    outer_kind, inner_kind = reentrant

    def inner(x, weight):
        assert x.shape == (6, 6)
        return nn.functional.dropout(torch.relu(x @ weight).sin(), 0.5)

    def middle(x, weight):
        return checkpoint(inner, inner(x.cos(), weight), weight, use_reentrant=inner_kind)

    def outer(x, weight):
        once = checkpoint(middle, x, weight, use_reentrant=inner_kind)
        return checkpoint(middle, once, weight, use_reentrant=inner_kind)

    results = []
    for function in (lambda x, w: middle(middle(x, w), w), outer):
        x, weight = _leaf(tensor(6, 6), mesh, hp.Shard(0)), _leaf(tensor(6, 6, seed=1), mesh, hp.Shard(1))
        hp.manual_seed(4)
        kept = functools.partial(checkpoint, function, use_reentrant=outer_kind) if function is outer else function
        kept(x, weight).square().sum().backward()
        results.append([x.grad.full_tensor(), weight.grad.full_tensor()])
    torch.testing.assert_close(*results)


@run_on_ranks(2)
def test_wrappers_for_recompute_and_swap_nest() -> None:
    mesh, platform = _mesh(), get_platform()
    wrappers = {"ckpt": platform.ckpt_wrapper, "swap": platform.swap_wrapper}
    expected = None
    for names in ([], ["ckpt", "swap"], ["swap", "ckpt"], ["ckpt", "ckpt"], ["ckpt", "ckpt", "swap"]):
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)).double()
        hp.distribute_module(module, mesh)
        x = _leaf(tensor(6, 6), mesh, hp.Shard(0))
        wrapped = module
        for name in names:
            wrapped = wrappers[name](wrapped)
        wrapped(x).square().sum().backward()
        found = [parameter.grad.full_tensor() for parameter in module.parameters()]
        expected = expected or found
        torch.testing.assert_close(found, expected)


@run_on_ranks(2)
def test_detach_no_grad_and_inference_mode() -> None:
    mesh = _mesh()
    x = _leaf(tensor(4, 3), mesh, hp.Shard(0))
    detached = x.exp().detach()
    assert not detached.requires_grad and detached.layout is x.layout
    y = x.exp()
    assert y.detach_() is y and not y.requires_grad
    assert y.requires_grad_() is y and y.requires_grad
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            weight = hp.distribute_tensor(tensor(3, 5), mesh, [hp.Replicate()])
            out = (x @ weight).relu().sum(1)
            assert not out.requires_grad
            out.add_(1.0)
            torch.testing.assert_close(out.full_tensor(), (tensor(4, 3) @ tensor(3, 5)).relu().sum(1) + 1)
            sorted_rows = torch.linalg.lstsq(x[:3].redistribute(mesh, [hp.Replicate()]), weight[:3]).solution
            assert sorted_rows.shape == (3, 5)


# ---------------------------------------------------------------------------------------------------------------------
# Autograd functions of users
# ---------------------------------------------------------------------------------------------------------------------


class _WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x, y):
        return x * y, x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient, passed):
        x, y = ctx.saved_tensors
        return gradient * y + passed, gradient * x


@run_on_ranks(2)
def test_functions_with_a_setup_and_inputs_handed_through() -> None:
    mesh = _mesh()
    plain = [tensor(4, 2).requires_grad_(), tensor(4, 2, seed=1).requires_grad_()]
    ours = [_leaf(plain[0], mesh, hp.Shard(0)), _leaf(plain[1], mesh, hp.Replicate())]
    for tensors in (plain, ours):
        product, passed = _WithSetup.apply(*tensors)
        (product.sum() + passed.square().sum()).backward()
    assert isinstance(passed, hp.DTensor) and passed.layout is ours[0].layout
    for mine, want in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), want.grad)


@run_on_ranks(2)
def test_functions_inside_skip_dispatch_see_blocks() -> None:
    mesh = _mesh()
    x = _leaf(tensor(4, 2), mesh, hp.Shard(0))
    with hp.SkipDTensorDispatch():
        out, _ = _WithSetup.apply(x, x)
        assert not isinstance(out, hp.DTensor) and out.shape == (2, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Functions that TorchScript has compiled
# ---------------------------------------------------------------------------------------------------------------------


def _scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, 0) * y.size(0) + y.sum()


@run_on_ranks(2)
def test_compiled_functions_see_whole_tensors() -> None:
    mesh = _mesh()
    scripted = torch.jit.script(_scaled)
    for function in (scripted, torch.jit.trace(_scaled, (tensor(5, 3), tensor(5, 1)))):
        plain = [tensor(5, 3).requires_grad_(), tensor(5, 1, seed=1).requires_grad_()]
        ours = [_leaf(one, mesh, hp.Shard(0)) for one in plain]
        want, got = function(*plain), function(ours[0], y=ours[1])
        torch.testing.assert_close(got.full_tensor(), want)
        assert function is not scripted or got.placements == (hp.Shard(0),)  # it ran by operators, and gathered nothing
        want.square().sum().backward()
        got.square().sum().backward()
        for mine, one in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), one.grad)
