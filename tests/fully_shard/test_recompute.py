"""Recomputed activations and sharded parameters, in either order; activations that are kept on the host; compiling."""

import copy
from functools import partial

import pytest
import torch.utils.checkpoint as tuc
from torch import nn

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.fully_shard.parity import (
    Block,
    Mlp,
    assert_all_sharded,
    assert_same_gradients,
    batch,
    double,
    loss_of,
    mesh_of,
    my_part,
    pair,
    shard_blocks,
    trains_as_one_device,
)
from tests.world import run_on_ranks, small_or_sweep

only_on = "torch"  # modules of PyTorch


class Recomputing(Mlp):
    """Blocks whose activations are recomputed, one by one or two together."""

    def __init__(self, together: int = 1, **options) -> None:
        super().__init__(num_blocks=4)
        self.together, self.options = together, options

    def forward(self, x):
        x = self.first(x)
        for start in range(0, len(self.blocks), self.together):

            def run(x, start=start):
                for block in self.blocks[start : start + self.together]:
                    x = block(x)
                return x

            x = tuc.checkpoint(run, x, **self.options)
        return self.last(x) * self.scale


class InnerRecomputing(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.block, self.options = Block(5, 7), options

    def forward(self, x):
        return tuc.checkpoint(self.block, x, **self.options)


class WithInner(Mlp):
    def __init__(self, **options) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InnerRecomputing(**options) for _ in range(3))


def _keep_matmuls(ctx, op, *args, **kwargs):
    del ctx, args, kwargs
    return tuc.CheckpointPolicy.MUST_SAVE if "mm" in str(op) else tuc.CheckpointPolicy.PREFER_RECOMPUTE


_SELECTIVE = partial(tuc.create_selective_checkpoint_contexts, _keep_matmuls)


@run_on_ranks(2)
@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "reentrant", "selective"])
@pytest.mark.parametrize("reshard", [True, False])
def test_recompute_outside(together, kind, reshard) -> None:
    """B13. checkpoint(unit): the gather is part of what is run again, and is made once in backward all the same."""
    mesh = mesh_of()
    options = {"use_reentrant": kind == "reentrant"}
    if kind == "selective":
        options["context_fn"] = _SELECTIVE
    shard = shard_blocks(mesh, reshard_after_forward=reshard)
    ours = trains_as_one_device(double(Recomputing, together, **options), shard, batch(8, 3), mesh, num_steps=2)
    assert_all_sharded(ours)
    with hp.CommRecorder() as recorder:
        loss_of(ours(my_part(batch(8, 3), mesh))).backward()
    gathers = sum(record.op == "all_gather_into_tensor" for record in recorder.records)
    reductions = sum(record.op == "reduce_scatter_tensor" for record in recorder.records)
    assert reductions == 5
    # Five units in forward. In backward once more, but for the root and the last block, which backward comes to first;
    # a reentrant recompute has nothing of a graph that could say so.
    assert gathers == (5 if not reshard else 9 if kind == "reentrant" else 8)


@run_on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_inside(reentrant) -> None:
    """B13. The unit is around the checkpoint."""
    mesh = mesh_of()
    ours = trains_as_one_device(double(WithInner, use_reentrant=reentrant), shard_blocks(mesh), batch(8, 3), mesh)
    assert_all_sharded(ours)


@run_on_ranks(2)
def test_wrappers() -> None:
    """B13. The wrappers of the platform, outside and inside, and activations kept on the host."""
    mesh = mesh_of()
    platform = get_platform()
    for wrap in (platform.ckpt_wrapper, platform.swap_wrapper):
        for outside in (False, True):
            model = double(Mlp)
            ours = copy.deepcopy(model)
            for number, block in enumerate(ours.blocks):
                if outside:
                    hp.fully_shard(block, mesh=mesh)
                    ours.blocks[number] = wrap(block)
                else:
                    ours.blocks[number] = hp.fully_shard(wrap(block), mesh=mesh)
            hp.fully_shard(ours, mesh=mesh)
            x = batch(8, 3)
            for _ in range(2):
                loss_of(model(x)).backward()
                loss_of(ours(my_part(x, mesh))).backward()
            assert_same_gradients(model, ours)
            assert_all_sharded(ours)


@run_on_ranks(2)
@pytest.mark.processes("torch.compile keeps one state per process")
@pytest.mark.parametrize("backend", small_or_sweep(["eager", "aot_eager", "inductor"], ["aot_eager"]))
def test_compiled_blocks(backend) -> None:
    """``block.compile()`` compiles the forward inside, and its backward; whole values come and go around it."""
    mesh = mesh_of()
    model, ours = pair(mesh)
    for block in ours.blocks:
        block.compile(backend=backend)
    x = batch(8, 3)
    for _ in range(2):
        loss_of(model(x)).backward()
        loss_of(ours(my_part(x, mesh))).backward()
    assert_same_gradients(model, ours)
    assert_all_sharded(ours)
