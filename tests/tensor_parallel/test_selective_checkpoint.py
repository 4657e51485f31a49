"""Selective checkpoints under tensor and sequence parallelism: right gradients whatever a policy keeps."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

import hyper_parallel as hp
from hyper_parallel.platform.torch.modules.activation import CheckpointPolicy
from tests.world import run_on_ranks

only_on = "torch"  # policies name PyTorch's operators; MindSpore's: tests/platform/test_activation.py


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 13), nn.Linear(13, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def _keep(is_kept):
    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if is_kept(str(op)) else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


POLICIES = {
    "everything": _keep(lambda op: True),
    "collectives": _keep(lambda op: "c10d" in op),
    "products": _keep(lambda op: "mm" in op),
    "a list": [torch.ops.aten.addmm.default, torch.ops.aten.mm.default, torch.ops.c10d.allreduce_.default],
}


def _losses_and_gradients(blocks, x, run):
    """Of three steps: the first one plans its operators, the others know them."""
    steps = []
    for _ in range(3):
        y = x
        for block in blocks:
            y = run(block, y)
        loss = (y * y).sum()
        blocks.zero_grad()
        loss.backward()
        whole = [p.grad.full_tensor() if isinstance(p.grad, hp.DTensor) else p.grad for p in blocks.parameters()]
        steps.append([loss.detach(), *whole])
    return steps


def _plan(sequence_parallel):
    if not sequence_parallel:
        return {"*.up": hp.ColwiseParallel(), "*.down": hp.RowwiseParallel()}
    return {
        "*.norm": hp.SequenceParallel(),
        "*.up": hp.ColwiseParallel(input_layouts=hp.Shard(1)),
        "*.down": hp.RowwiseParallel(output_layouts=hp.Shard(1), use_local_output=False),
    }


@run_on_ranks(2, sweep=(3,))
@pytest.mark.parametrize(
    ("whose", "policy"),
    # PyTorch's own contexts with a policy that keeps everything refuse buffers that are written to, by an error.
    [*(("ours", policy) for policy in POLICIES), *(("torch", policy) for policy in POLICIES if policy != "everything")],
)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_are_those_of_one_device(policy, sequence_parallel, whose):
    platform = hp.get_platform()
    mesh = hp.init_device_mesh("cpu", (platform.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    alone = nn.ModuleList([Block(), Block()]).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    expected = _losses_and_gradients(alone, x, lambda block, y: block(y))[0]
    sharded = hp.parallelize_module(copy.deepcopy(alone), mesh, _plan(sequence_parallel))
    make = platform if whose == "ours" else torch_checkpoint
    contexts = functools.partial(make.create_selective_checkpoint_contexts, POLICIES[policy])
    run = functools.partial(platform.checkpoint, context_fn=contexts)
    start = hp.distribute_tensor(x, mesh, [hp.Shard(1)]) if sequence_parallel else x
    for step in _losses_and_gradients(sharded, start, run):
        for got, wanted in zip(step, expected, strict=True):
            got = got.full_tensor() if isinstance(got, hp.DTensor) else got
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
