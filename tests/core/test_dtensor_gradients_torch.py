"""Leaves, gradients and hooks of a DTensor as a PyTorch tensor, and writing into it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from tests.core.layout_cases import make_mesh, numbers
from tests.world import run_on_ranks

# ---------------------------------------------------------------- leaves, gradients and hooks


@run_on_ranks(4)
def test_loss_backward_for_every_kind_of_loss():
    mesh = make_mesh()
    rank = mesh.get_rank()
    reference = numbers(5, 3).requires_grad_()
    (reference**2).sum().backward()
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        leaf = distribute_tensor(numbers(5, 3), mesh, placements).requires_grad_()
        loss = (leaf**2).sum()  # pending where leaf is cut, whole where it is whole
        loss.backward()
        assert torch.equal(leaf.grad.full_tensor(), reference.grad), placements
        leaf.grad = None
        (leaf**2).sum().redistribute(placements=[Replicate()]).backward()
        assert torch.equal(leaf.grad.full_tensor(), reference.grad), placements
        leaf.grad = None
        torch.autograd.backward([(leaf**2).sum()])
        assert torch.equal(leaf.grad.full_tensor(), reference.grad), placements
        (gradient,) = torch.autograd.grad((leaf**2).sum(), leaf)
        assert gradient.layout is leaf.layout and torch.equal(gradient.full_tensor(), reference.grad)
    for op, expected in (("avg", [0.25] * 4), ("max", [0, 0, 0, 1]), ("min", [1, 0, 0, 0]), ("prod", [24, 12, 8, 6])):
        summand = torch.tensor(float(rank + 1), requires_grad=True)
        DTensor.from_local(summand, mesh, [Partial(op)]).backward()
        assert summand.grad == expected[rank], op


@run_on_ranks(2)
def test_torch_autograd_grad_gives_distributed_gradients():
    mesh = make_mesh()
    first = distribute_tensor(numbers(5), mesh, [Shard(0)]).requires_grad_()
    second = distribute_tensor(numbers(5), mesh, [Replicate()]).requires_grad_()
    plain = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    unused = distribute_tensor(numbers(4), mesh, [Shard(0)]).requires_grad_()
    loss = ((first + second.redistribute(placements=[Shard(0)])) ** 2).sum() * plain
    inputs = (first, second, plain, unused)
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True, create_graph=True)
    for gradient, tensor in zip(gradients[:2], inputs[:2], strict=True):
        assert type(gradient) is DTensor and gradient.layout is tensor.layout
        assert torch.equal(gradient.full_tensor(), numbers(5) * 8)
    assert type(gradients[2]) is torch.Tensor and gradients[3] is None
    (again,) = torch.autograd.grad(gradients[0].sum(), first)
    assert torch.equal(again.full_tensor(), torch.full((5,), 4.0).double())
    assert first.grad is None


@run_on_ranks(2)
def test_hooks_see_distributed_gradients():
    mesh = make_mesh()
    leaf = distribute_tensor(numbers(3), mesh, [Shard(0)]).requires_grad_()
    seen = []
    leaf.register_hook(lambda gradient: seen.append(gradient))
    doubling = leaf.register_hook(lambda gradient: gradient * 2)
    leaf.register_post_accumulate_grad_hook(lambda tensor: seen.append((tensor, tensor.grad)))
    leaf.full_tensor().sum().backward()
    assert type(seen[0]) is DTensor and seen[0].layout is leaf.layout
    assert torch.equal(seen[0].full_tensor(), torch.ones(3).double())
    assert seen[1][0] is leaf and torch.equal(seen[1][1].full_tensor(), torch.full((3,), 2.0).double())
    doubling.remove()
    leaf.register_hook(lambda gradient: gradient.redistribute(placements=[Replicate()]) * 3)  # brought to its place
    leaf.full_tensor().sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), torch.full((3,), 5.0).double())
    leaf.register_hook(lambda gradient: gradient.to_local())
    with pytest.raises(TypeError, match=r"the hook of a distributed tensor of shape \(3,\) must return a distributed"):
        leaf.full_tensor().sum().backward()


@run_on_ranks(2)
def test_what_hooks_compute_is_differentiated():
    mesh = make_mesh()

    def penalty(x):
        rows, total = x.sin(), x.sum(0)  # total is pending where x is cut
        for one in (rows, total, x):
            one.register_hook(lambda gradient: gradient * gradient)
        (first,) = torch.autograd.grad((rows**3).sum() + (total**3).sum(), x, create_graph=True)
        (first**2).sum().backward()
        return first

    plain = (numbers(5, 3) / 20).requires_grad_()
    expected = penalty(plain)
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        leaf = distribute_tensor(plain.detach(), mesh, placements).requires_grad_()
        torch.testing.assert_close(penalty(leaf).full_tensor(), expected)
        torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad)


@run_on_ranks(2)
def test_backward_hooks_of_modules_see_distributed_gradients():
    mesh = make_mesh()

    def run(x):
        module, seen = nn.Flatten(0), []
        module.register_full_backward_pre_hook(lambda _, outputs: (outputs[0] * 3,))
        module.register_full_backward_hook(lambda _, inputs, outputs: seen.extend((*inputs, *outputs)))
        module.register_full_backward_hook(lambda _, inputs, outputs: (inputs[0] / outputs[0].sum(),))
        (module(x) ** 2).sum().backward()
        return [*seen, x.grad]

    plain = numbers(5, 3).requires_grad_()
    expected = run(plain)
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        leaf = distribute_tensor(plain.detach(), mesh, placements).requires_grad_()
        for ours, wanted in zip(run(leaf), expected, strict=True):
            torch.testing.assert_close(ours.full_tensor(), wanted)


@run_on_ranks(2)
def test_the_gradient_of_a_computed_tensor_can_be_kept():
    mesh = make_mesh()
    leaf = distribute_tensor(numbers(3), mesh, [Shard(0)]).requires_grad_()
    squared = leaf**2
    squared.retain_grad()
    assert not squared.is_leaf and squared.grad_fn is not None and squared.retains_grad
    (squared.full_tensor() * 3).sum().backward()
    assert type(squared.grad) is DTensor and squared.grad.layout is squared.layout
    assert torch.equal(squared.grad.full_tensor(), torch.full((3,), 3.0).double())


@run_on_ranks(2)
def test_set_takes_the_layout_with_the_memory():
    mesh = make_mesh()
    module = nn.Linear(4, 4, bias=False, dtype=torch.float64)
    module.weight = nn.Parameter(distribute_tensor(numbers(4, 4), mesh, [Shard(0)]))
    parametrize.register_parametrization(module, "weight", _Transposed())
    parametrize.remove_parametrizations(module, "weight")  # original.set_(its transpose)
    assert module.weight.placements == (Shard(1),)
    assert torch.equal(module.weight.full_tensor(), numbers(4, 4).t())
    source = distribute_tensor(numbers(5), mesh, [Shard(0)])
    module.weight.detach().set_(source).add_(1)
    assert torch.equal(source.full_tensor(), numbers(5) + 1)
    with pytest.raises(RuntimeError, match=r"set_ would change the memory .* behind its layout; set it to a distr"):
        source.set_(numbers(5))


class _Transposed(nn.Module):
    def forward(self, weight):
        return weight.t()


@run_on_ranks(2)
def test_detach_data_and_requires_grad():
    mesh = make_mesh()
    leaf = distribute_tensor(numbers(3, 2), mesh, [Shard(0)])
    assert leaf.requires_grad_() is leaf and leaf.requires_grad
    for other in (leaf.detach(), leaf.data):
        assert type(other) is DTensor and other.layout is leaf.layout and not other.requires_grad
        assert other.to_local().data_ptr() == leaf.to_local().data_ptr()
    alive = leaf * 2
    leaf.data = distribute_tensor(numbers(5, 2), mesh, [Replicate()])
    assert leaf.shape == (5, 2) and leaf.layout.is_replicated and leaf.is_leaf and leaf.requires_grad
    (leaf * leaf).sum().backward()  # although the graph of another layout is still there
    assert alive.requires_grad and torch.equal(leaf.grad.full_tensor(), 2 * numbers(5, 2))
    with pytest.raises(TypeError, match="can only be set to a distributed tensor, got Tensor"):
        leaf.data = torch.ones(5, 2)
    leaf.requires_grad = False
    assert not leaf.requires_grad
    assert torch.equal(leaf.detach().full_tensor(), numbers(5, 2))


# ---------------------------------------------------------------- updates in place


@run_on_ranks(2)
def test_a_leaf_is_not_written_in_a_graph():
    parameter = nn.Parameter(distribute_tensor(numbers(5), make_mesh(), [Shard(0)]))
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        parameter.add_(1)
