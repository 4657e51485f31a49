"""Seeing communication: what CommRecorder writes down, and that ``explain`` foretells it."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from hyper_parallel import (
    CommRecorder,
    Layout,
    Partial,
    Replicate,
    Shard,
    explain,
    get_platform,
)
from hyper_parallel.core.dtensor.comm_recorder import CommRecord, asked_by, is_recording
from hyper_parallel.core.dtensor.device_mesh import init_device_mesh
from tests.core.layout_cases import every_layout
from tests.frameworks import backward, dist, distribute_tensor, from_local, ours
from tests.world import run_on_ranks


def make_mesh(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


# ---------------------------------------------------------------- the recorder


@run_on_ranks(4)
def test_every_collective_is_written_down():
    mesh, rank = make_mesh(2, 2), dist.get_rank()
    pair = (0, 1) if rank < 2 else (2, 3)
    cut = distribute_tensor(torch.zeros(4, 6), mesh, [Replicate(), Shard(0)])
    pending = distribute_tensor(torch.zeros(4, 6, dtype=torch.float64), mesh, [Partial(), Partial()])
    assert not is_recording()
    with CommRecorder() as recorder:
        assert is_recording()
        cut.redistribute(placements=[Replicate(), Replicate()])
        cut.redistribute(placements=[Replicate(), Shard(1)], async_op=True).wait()
        pending.reduce_partial()
    assert not is_recording()
    assert recorder.records == [
        CommRecord("all_gather_into_tensor", pair, (1, 2, 6), "float32", 48, 48, True, "explicit"),
        CommRecord("all_to_all_single", pair, (6,), "float32", 24, 24, True, "explicit"),
        CommRecord("all_reduce", (0, 1, 2, 3), (4, 6), "float64", 192, 288, True, "explicit"),
    ]
    assert recorder.total_bytes == 48 + 24 + 288
    assert recorder.counts == {"all_gather_into_tensor": 1, "all_to_all_single": 1, "all_reduce": 1}
    assert recorder.as_data()[1] == {
        "op": "all_to_all_single",
        "ranks": pair,
        "shape": (6,),
        "dtype": "float32",
        "num_bytes": 24,
        "sent_bytes": 24,
        "async_op": True,
        "asked_by": "explicit",
        "chosen": "",
    }
    names = ",".join(map(str, pair))
    assert (
        str(recorder)
        == recorder.table()
        == (
            "op                      ranks    shape  dtype    bytes sent  asked by\n"
            f"all_gather_into_tensor  {names}      1x2x6  float32  48          explicit\n"
            f"all_to_all_single       {names}      6      float32  24          explicit\n"
            "all_reduce              0,1,2,3  4x6    float64  288         explicit\n"
            "3 collectives, 360 bytes sent by this rank"
        )
    )


@run_on_ranks(2)
def test_who_asked():
    mesh = make_mesh(2)
    leaf = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]).requires_grad_()
    other = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
    with CommRecorder() as recorder:
        moved = leaf.redistribute(placements=[Shard(1)])
        result = leaf + other
        moved.sum().backward()
        backward(result.to_local(grad_placements=[Shard(result.placements[0].dim)]).sum())
        with asked_by("my pipeline"):
            get_platform().all_reduce(ours(torch.ones(2)), None)
    reasons = [record.asked_by for record in recorder.records]
    assert reasons[0] == "explicit"
    assert reasons[1] == "implicit for add"
    chosen = recorder.records[1].chosen
    assert re.fullmatch(
        r"argument (0 from \[dp, -\] to \[-, dp\]|1 from \[-, dp\] to \[dp, -\]); cheapest of 3, modelled cost [\d.]+",
        chosen,
    ), chosen
    assert f"implicit for add: {chosen}" in recorder.table()
    assert "backward of redistribute" in reasons[2:-1]
    assert reasons[-1] == "my pipeline"


@run_on_ranks(2)
def test_recorders_nest_and_hear_plain_collectives_too():
    platform = get_platform()
    with CommRecorder() as outer:
        platform.all_reduce(ours(torch.ones(3)), None)
        with CommRecorder() as inner:
            platform.broadcast(ours(torch.ones(2)), 0, None)
            with pytest.raises(RuntimeError, match="recording already; use another one for a nested block"):
                inner.__enter__()
        platform.all_reduce(ours(torch.ones(3)), None)
    assert [record.op for record in outer.records] == ["all_reduce", "broadcast", "all_reduce"]
    assert [record.op for record in inner.records] == ["broadcast"]
    platform.all_reduce(ours(torch.ones(3)), None)
    assert len(outer.records) == 3
    with pytest.raises(KeyError), CommRecorder() as broken:
        raise KeyError
    assert not is_recording()
    with broken:  # a recorder goes on where it stopped
        platform.all_reduce(ours(torch.ones(3)), None)
    assert len(broken.records) == 1


# ---------------------------------------------------------------- explain


def explained(shape, before, after, mesh_shape=(2, 2), **options):
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"), init_backend=False)
    return explain(
        *(Layout.resolve(mesh, either, len(shape)) for either in (before, after)), shape, **options
    ).splitlines()


WHOLE = [Replicate(), Replicate()]
NOTHING_SENT = "(no communication)"


@pytest.mark.parametrize(
    ("before", "after", "step", "num_ranks", "sent"),
    [
        (("dp", "tp"), ("dp", "tp"), None, 0, 0),
        (("dp", "None"), ("None", "dp"), "all-to-all over dp: gather dim 0, shard dim 1", 2, 128),
        ((("dp", "tp"), "None"), ("None", "None"), "all-gather dim 0 over dp*tp", 4, 384),
        (("None", "None"), ("dp", "None"), f"slice dim 0 over dp {NOTHING_SENT}", 0, 0),
        ([Partial(), Partial()], WHOLE, "all-reduce (sum) over dp*tp", 4, 768),
        ([Partial(), Replicate()], [Shard(1), Replicate()], "reduce-scatter (sum) over dp into dim 1", 2, 256),
        (
            WHOLE,
            [Replicate(), Partial()],
            f"keep the value on the first rank of tp, neutral elsewhere {NOTHING_SENT}",
            0,
            0,
        ),
        (
            [Shard(0), Replicate()],
            [Partial(), Replicate()],
            f"put the shard of dim 0 into zeros over dp {NOTHING_SENT}",
            0,
            0,
        ),
        ((("dp", "tp"), "None"), (("tp", "dp"), "None"), "exchange shards over dp*tp", 4, 128),
    ],
    ids=str,
)
def test_a_plan_in_words(before, after, step, num_ranks, sent):
    lines = explained((16, 8), before, after)
    assert re.fullmatch(r"Layout\(mesh \(dp=2, tp=2\), .*\) -> Layout\(.*\), shape \(16, 8\)", lines[0])
    group = f": groups of {num_ranks} ranks, {sent} bytes sent per rank" if num_ranks else ""
    assert lines[1:-1] == ["  nothing to do" if step is None else f"  1. {step}{group}"]
    assert re.fullmatch(rf"total: {sent} bytes sent per rank, modelled .*", lines[-1])


def test_a_plan_in_words_for_other_item_sizes():
    assert "96 bytes sent per rank" in explained((16, 3), ("dp", "None"), ("None", "None"))[1]
    assert "192 bytes sent per rank" in explained((16, 3), ("dp", "None"), ("None", "None"), item_size=8)[1]


def test_a_plan_between_meshes_in_words():
    first, second = (init_device_mesh("cpu", (2,), rank_list=ranks, init_backend=False) for ranks in ([0, 1], [1, 2]))
    text = explain(Layout.of(first, ((0,),)), Layout.of(second, ((),)), (8,))
    with pytest.raises(TypeError, match="explain takes two layouts"):
        explain(first, Layout.of(second, ((),)), (8,))
    assert text.splitlines()[1] == "  1. exchange shards between the meshes: one group of 3 ranks, 48 bytes in all"


def bytes_of_every_pair(mesh_shape, shape):
    mesh = make_mesh(*mesh_shape)
    layouts = [Layout.of(mesh, *spec) for spec in every_layout(len(mesh_shape), len(shape))]
    recorded, foretold = [], []
    for source, target in itertools.product(layouts, repeat=2):
        start = from_local(torch.zeros(source.local_shape(shape)), mesh, source, shape=shape)
        with CommRecorder() as recorder:
            start.redistribute(mesh, target)
        recorded.append(recorder.total_bytes)
        foretold.append(explain(source, target, shape).splitlines()[-1])
    return recorded, [int(re.search(r"total: (\d+) bytes", line)[1]) for line in foretold]


def test_what_is_explained_is_what_is_sent(worlds):
    results = worlds(4).run(bytes_of_every_pair, (2, 2), (8, 4))
    foretold = results[0][1]
    assert all(result[1] == foretold for result in results)
    assert [max(sent) for sent in zip(*(result[0] for result in results), strict=True)] == foretold
    assert max(foretold) == 2 * 4 * 32 * 3 // 4  # no pair costs more than one all-reduce of the whole
