"""Every way in which a tensor enters an operator: from any layout to any other, along any axes on which others vary.

Two axes cut at most four dims, before and behind. So all is run on tensors of the dims that are cut, and once more with
dims before, between and behind them that are not.
"""

import itertools

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.dtensor.autograd_edges import move
from hyper_parallel.core.shard.dispatching.input_edges import bring_input
from hyper_parallel.platform import get_platform
from tests.shard.validator import _block, layouts_of, spread, tensor

only_on = "torch"  # the same code of core on both; each way is run with PyTorch's tensors, which are ten times as fast

# Shapes, and which of their dims are cut.
CASES = [
    *(((), ()), ((5,), (0,)), ((5, 3), (0, 1)), ((3, 2, 5), (0, 1, 2)), ((2, 3, 5, 2), (0, 1, 2, 3))),
    *(((5, 2), (0,)), ((2, 5), (1,)), ((2, 5, 2), (1,)), ((2, 5, 2, 3, 2), (1, 3))),
    *(((2, 3, 1, 2, 2, 5, 1), (1, 3, 5)), ((1, 2, 2, 3, 1, 5, 2, 2, 1), (1, 3, 5, 7))),
]


def check_every_way(mesh_shape: tuple[int, ...], shape: tuple[int, ...], dims: tuple[int, ...]) -> list[str]:
    """Runs on every rank; what was wrong. Where an operator varies, the ranks' parts of a gradient are their own."""
    mesh = hp.init_device_mesh("cpu", mesh_shape)
    whole, gradient = tensor(*shape), tensor(*shape, seed=1)
    layouts = [layout for layout in layouts_of(mesh, whole, partial=True) if _cut_dims(layout) <= set(dims)]
    starts = [spread(whole, layout) for layout in layouts]
    wrong = []
    for target, start in itertools.product(layouts, starts):
        source = start.layout
        if _cut_dims(target) | _cut_dims(source) != set(dims):
            continue  # another case
        for axes in _sets_of_whole_axes(target):
            leaf = start.detach().requires_grad_()
            entered = bring_input(leaf, target, axes)
            if entered is leaf:
                continue
            if isinstance(entered, hp.DTensor):  # of a partial value; it remembers what it was reduced to
                entered = get_platform().local_alias(entered)
            part = _block(gradient, target.gradient())
            for axis in axes:  # they add up to the gradient: twice on the first rank, taken off once on the second
                part = part * (2 if mesh.get_coordinate()[axis] == 0 else -1)
            torch.autograd.backward([entered], [part])
            found = move(entered.detach().as_subclass(torch.Tensor), target, target.gradient(), shape)
            if not torch.allclose(found, _block(whole, target.gradient())):
                wrong.append(f"{source} -> {target} along {axes}: wrong values")
            wanted = source.gradient()
            if leaf.grad.layout is not wanted or not torch.allclose(leaf.grad.to_local(), _block(gradient, wanted)):
                wrong.append(f"{source} -> {target} along {axes}: wrong gradient")
    return wrong


def _cut_dims(layout: hp.Layout) -> set[int]:
    return {dim for dim, axes in enumerate(layout.shard_axes) if axes}


def _sets_of_whole_axes(layout: hp.Layout) -> list[tuple[int, ...]]:
    cut = {axis for axes in layout.shard_axes for axis in axes}
    whole = [axis for axis, op in enumerate(layout.partials) if op is None and axis not in cut]
    return [axes for count in range(len(whole) + 1) for axes in itertools.combinations(whole, count)]


@pytest.mark.parametrize("mesh_shape", [(2,), pytest.param((2, 2), marks=pytest.mark.sweep)], ids=str)
def test_every_way_in(worlds, mesh_shape: tuple[int, ...]) -> None:
    world = worlds(2 ** len(mesh_shape), timeout=300)
    for shape, dims in CASES:
        for wrong in world.run(check_every_way, mesh_shape, shape, dims):
            assert not wrong, f"{len(wrong)} ways of a tensor of shape {shape}:\n" + "\n".join(wrong[:10])
