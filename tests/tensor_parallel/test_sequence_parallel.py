"""What tensor and sequence parallelism send, block by block, and the trap of a norm over each head."""

import gc

import pytest
import torch
import torch.utils.checkpoint

import hyper_parallel as hp
from tests.tensor_parallel.small_modules import tp_plan
from tests.tensor_parallel.toy import Attention, Block, same_as_one_device, sp_plan
from tests.world import run_on_ranks

only_on = "torch"  # blocks of PyTorch's modules; cells: test_styles_on_mindspore.py


def _mesh() -> hp.DeviceMesh:
    return hp.init_device_mesh("cpu", (hp.get_platform().get_world_size(),), mesh_dim_names=("tp",))


def _block_plan(plan: dict) -> dict:
    """The part of a decoder's plan that is about one block."""
    return {path.removeprefix("blocks.*."): style for path, style in plan.items() if path.startswith("blocks.*.")}


def _x(length: int = 8) -> torch.Tensor:
    return torch.randn(2, length, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _counts(records) -> dict[str, int]:
    """Collectives on activations; the gradients of whole parameters are summed besides."""
    found: dict[str, int] = {}
    for record in records:
        if len(record.shape) >= 3:
            found[record.op] = found.get(record.op, 0) + 1
    return found


@run_on_ranks(2, 4)
@pytest.mark.parametrize("kind", ["tp", "sp", "sp_local"])
def test_collectives_per_half_block_and_pass(kind: str) -> None:
    mesh = _mesh()
    torch.manual_seed(0)
    plan = tp_plan() if kind == "tp" else sp_plan(local=kind == "sp_local")
    block = hp.parallelize_module(Block(8, 4, 12).double(), mesh, _block_plan(plan))
    for length in (8, 5) if kind != "sp_local" else (8, 4):
        x = hp.distribute_tensor(_x(length), mesh, [hp.Replicate() if kind == "tp" else hp.Shard(1)]).requires_grad_()
        start = x * 1  # a block in the middle of a model: its input is computed
        if kind != "sp":
            from hyper_parallel.core.modules.boundary import to_plain_local

            start = to_plain_local(start)
        with hp.CommRecorder() as forward:
            out = block(start)
        with hp.CommRecorder() as backward:
            out.backward(torch.ones_like(out))
        one_each = {"all_reduce": 2} if kind == "tp" else {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
        assert _counts(forward.records) == one_each, forward.table()
        assert _counts(backward.records) == one_each, backward.table()
        others = [record.asked_by for record in forward.records if len(record.shape) < 3]
        compared = 0 if kind != "sp_local" else 1  # the block behind the first sum: nothing tells its length
        assert others == ["from_local compares sizes"] * compared, forward.table()
        sums = [record for record in backward.records if len(record.shape) < 3]
        assert len(sums) == (0 if kind == "tp" else 6), backward.table()  # of two norms, and two biases


@run_on_ranks(2, 4)
def test_norm_over_each_head() -> None:
    mesh = _mesh()
    base = _block_plan(tp_plan())
    base = {path.removeprefix("attention."): style for path, style in base.items() if path.startswith("attention")}
    heads = hp.Shard(1)

    def built() -> Attention:
        torch.manual_seed(0)
        attention = Attention(8, 4, qk_norm=True).double()
        with torch.no_grad():
            attention.q_norm.weight.copy_(torch.tensor([0.5, 2.0]))
        return attention

    x = _x()
    # Plain and local: every rank would get the gradient of its own heads. Refused by name.
    ours = hp.parallelize_module(built(), mesh, base)
    with pytest.raises(RuntimeError, match=r"RowwiseParallel on Linear.*'q_norm.weight' of shape \(2,\)"):
        ours(x)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), built()(x))
    # With a style it is right, on plain blocks and on distributed activations.
    local = base | {"q_norm": hp.NoParallel(input_layouts=heads, output_layouts=heads)}
    cut = hp.ColwiseParallel(use_local_output=False)
    distributed = base | {"[qkv]": cut, "q_norm": hp.NoParallel(use_local_output=False)}
    sequence = base | {"[qkv]": cut, "q_norm": hp.SequenceParallel(sequence_dim=1)}
    for plan in (local, distributed, sequence):
        same_as_one_device(built(), lambda m, p=plan: hp.parallelize_module(m, mesh, p), (x,))


@pytest.mark.processes("counts the objects of one process")
@run_on_ranks(2)
def test_nothing_is_kept_between_steps_and_checkpoints_recompute() -> None:
    """Edges that tensors remember die with them, without the garbage collector."""
    mesh = _mesh()
    kinds = (torch.Tensor, hp.DTensor)
    for kind, plan in (("tp", tp_plan()), ("sp", sp_plan()), ("sp_local", sp_plan(local=True))):
        torch.manual_seed(0)
        block = hp.parallelize_module(Block(8, 4, 12).double(), mesh, _block_plan(plan))

        def step(recompute: bool, block=block, kind=kind) -> list[torch.Tensor]:
            block.zero_grad()
            x = hp.distribute_tensor(_x(), mesh, [hp.Replicate() if kind == "tp" else hp.Shard(1)])
            start = (x if kind == "sp" else x.to_local()).requires_grad_() * 1
            if recompute:
                out = torch.utils.checkpoint.checkpoint(block, start, use_reentrant=False)
            else:
                out = block(start)
            (out.to_local() if isinstance(out, hp.DTensor) else out).square().sum().backward()
            return [parameter.grad.clone() for parameter in block.parameters()]

        wanted = step(False)
        for mine, want in zip(step(True), wanted, strict=True):
            torch.testing.assert_close(mine, want)
        del wanted, mine, want
        gc.collect()
        gc.disable()
        try:
            counts = []
            for number in range(12):
                step(recompute=number % 2 == 1)
                counts.append(sum(type(value) in kinds for value in gc.get_objects()))
        finally:
            gc.enable()
        # A tensor more or less may be in the hands of a communication that is just ending; one per step is a leak.
        assert counts[-1] - counts[1] < 8, counts
