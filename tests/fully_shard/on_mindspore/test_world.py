"""On MindSpore: ranks that are killed in the middle of a step, and a step of any rank of a silent world."""

import os
import signal
from typing import Any

import mindspore
import pytest
from mindspore import Parameter, mint, nn

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.membership import Member, as_member
from tests.fully_shard.on_mindspore.parity import Mlp, assert_all_sharded, batch, filled, mesh_of, my_part, shard_blocks
from tests.world import RanksFailed, small_or_sweep

MOMENTS = ("forward", "gather", "reduction", "end of backward")


def _die() -> None:
    if get_platform().get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _lose_rank_1(moment: str) -> None:
    mesh = mesh_of()
    cell = filled(Mlp())
    shard_blocks(mesh)(cell)
    x = my_part(batch(12, 3), mesh)
    for _ in range(2):
        hp.backward(cell(x).sum())
    pids: list[Any] = [None] * 2
    get_platform().all_gather_object(pids, os.getpid())

    def in_backward(module: Any, args: Any, out: Any) -> None:
        out.register_hook(lambda gradient: _die())

    if moment == "forward":
        cell.blocks[1].register_forward_pre_hook(lambda module, args: _die())
    elif moment == "gather":
        cell.blocks[0].up.register_forward_hook(lambda module, args, out: _die())  # that of block 1 is in flight
    else:
        (cell.blocks[1] if moment == "reduction" else cell.first).register_forward_hook(in_backward)
    text = (
        r"fully_shard, (gather|reduction) of the \w+ of (unit 'blocks\.\d'|the unit of \w*Mlp) over shard over dp=2: "
    )
    with pytest.raises(RuntimeError, match=text + rf"\w+ on rank 0 cannot end: rank 1 \(process {pids[1]} on .*\) has"):
        for _ in range(3):
            hp.backward(cell(x).sum())


@pytest.mark.parametrize("moment", small_or_sweep(MOMENTS, []))
def test_a_rank_that_is_killed_is_named(worlds, moment) -> None:
    with pytest.raises(RanksFailed) as caught:
        worlds(2).run(_lose_rank_1, moment)
    outcome = caught.value.outcome
    assert outcome.died == {1: -signal.SIGKILL} and not outcome.raised and not outcome.silent, str(caught.value)


class Product(nn.Cell):
    """A matrix and a vector; MindSpore has few operators without memory."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            Parameter(mint.empty(shape, dtype=mindspore.float32)) for shape in ((num_in, num_out), (num_out,))
        )

    def construct(self, x: Any) -> Any:
        return mint.matmul(x, self.weight) + self.bias


class Products(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.CellList([Product(3, 32), Product(32, 300), Product(300, 300)])

    def construct(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(("rank", "shape"), [(0, (8,)), (7, (8,)), (3, (2, 4))])
def test_a_step_of_any_rank(rank, shape) -> None:
    """Shapes and collectives of a step are known before anything runs."""
    with as_member(Member(rank, 8, get_platform().silent_group)), mindspore.DeviceCtx("meta"):
        mesh = hp.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "dp")[-len(shape) :])
        cell = Products()
        shard_blocks(mesh, shard_placement_fn=lambda p: hp.Shard(1 if p.shape == (3, 32) else 0))(cell)
        with hp.CommRecorder() as recorder:
            out = cell(mint.empty((4, 3), dtype=mindspore.float32))
            hp.backward(out, mint.empty((4, 300), dtype=mindspore.float32))
        assert recorder.counts["all_gather_into_tensor"] > 3 and recorder.counts["reduce_scatter_tensor"] == 4
        gradient = hp.grad_of(cell.blocks[0].weight)
        assert gradient.is_meta and tuple(gradient.to_local().shape) == (3, 32 // shape[-1])
        assert_all_sharded(cell)
