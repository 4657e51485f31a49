"""Attention over a sharded sequence without devices: one process as any rank of a silent world, without memory."""

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.membership import Member, as_member
from tests.world import run_on_ranks

only_on = "torch"  # tensors without memory that follow a whole step are PyTorch's

SCHEMES = ["ring", "ulysses", "gather", "hybrid"]


def _traffic(mesh: hp.DeviceMesh, device: str, scheme: str, documents: torch.Tensor) -> list[tuple[str, int]]:
    tensors = [
        hp.distribute_tensor(torch.zeros(1, heads, 24, 8, device=device), mesh, [hp.Shard(2)]).requires_grad_()
        for heads in (4, 2, 2)
    ]
    sinks = hp.distribute_tensor(torch.zeros(4, device=device), mesh, [hp.Replicate()]).requires_grad_()
    with hp.CommRecorder() as recorder:
        for visible in (hp.Visibility(causal=True, window=9), hp.Visibility(causal=True, documents=documents)):
            output = hp.attention(*tensors, visible=visible, sinks=sinks, scheme=scheme, dropout=0.1)
            assert output.shape == (1, 4, 24, 8)
            output.to_local().sum().backward()
    assert all(tensor.grad.shape == tensor.shape for tensor in (*tensors, sinks))
    return [(record.op, record.sent_bytes) for record in recorder.records]


def _told(scheme: str) -> list[tuple[str, int]]:
    mesh = hp.init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    return _traffic(mesh, "cpu", scheme, torch.arange(24) // 10)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_rank_alone_sends_what_it_sends_among_the_others(worlds, scheme: str) -> None:
    together = worlds(4).run(_told, scheme)
    for rank in range(4):
        with as_member(Member(rank, 4, get_platform().silent_group)):
            mesh = hp.init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
            assert _traffic(mesh, "meta", scheme, torch.arange(24) // 10) == together[rank]


@run_on_ranks(2)
def test_coordinates_without_memory_hide_nothing() -> None:
    visible = hp.Visibility(causal=True, documents=torch.zeros(8, dtype=torch.int64, device="meta"))
    assert visible.relation((0, 4), (4, 8)) == "none"  # later keys are hidden whatever the documents are
    assert visible.relation((4, 8), (0, 4)) == "some"
    query = torch.zeros(1, 2, 8, 4, device="meta")
    assert hp.attention(query, query, query, visible=visible).shape == query.shape
