"""Convolutions, pooling and resampling under every layout."""

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.dtensor.comm_recorder import CommRecorder
from hyper_parallel.core.shard.dispatching.strict_mode import strict
from tests.shard.validator import Sample, assert_valid, tensor
from tests.world import run_on_ranks

only_on = "torch"  # calls PyTorch's operators one by one; MindSpore's own: test_mindspore_rules.py

F = "nn.functional"
CONVOLUTIONS = [
    Sample(f"{F}.conv1d", (tensor(3, 4, 5), tensor(2, 4, 3, seed=1), tensor(2, seed=2))),
    Sample(f"{F}.conv2d", (tensor(3, 1, 4, 4), tensor(5, 1, 3, 3, seed=1)), {"padding": 1}),
    Sample(f"{F}.conv2d", (tensor(2, 3, 4, 4), tensor(4, 3, 2, 2, seed=1), tensor(4, seed=2)), {"stride": 2}),
    Sample(f"{F}.conv2d", (tensor(3, 4, 4), tensor(2, 3, 3, 3, seed=1), tensor(2, seed=2)), {"padding": "same"}),
    Sample(f"{F}.conv2d", (tensor(2, 4, 3, 3), tensor(8, 2, 2, 2, seed=1), tensor(8, seed=2)), {"groups": 2}),
    Sample(f"{F}.conv2d", (tensor(2, 6, 3, 3), tensor(6, 1, 2, 2, seed=1), tensor(6, seed=2)), {"groups": 6}),
    Sample(f"{F}.conv3d", (tensor(1, 2, 3, 3, 3), tensor(3, 2, 2, 2, 2, seed=1), tensor(3, seed=2))),
    Sample(f"{F}.conv_transpose1d", (tensor(3, 4, 5), tensor(4, 2, 3, seed=1), tensor(2, seed=2))),
    Sample(f"{F}.conv_transpose2d", (tensor(2, 4, 3, 3), tensor(4, 1, 2, 2, seed=1), tensor(2, seed=2)), {"groups": 2}),
]
POOLS = [
    Sample(f"{F}.max_pool1d", (tensor(3, 2, 6), 2)),
    Sample(f"{F}.max_pool2d", (tensor(3, 5, 4, 4), 2)),
    Sample(f"{F}.max_pool2d", (tensor(3, 2, 4, 4), 2), {"return_indices": True}),
    Sample(f"{F}.max_pool3d", (tensor(1, 3, 2, 2, 2), 2)),
    Sample(f"{F}.avg_pool1d", (tensor(3, 2, 6), 2)),
    Sample(f"{F}.avg_pool2d", (tensor(5, 4, 4), 2)),
    Sample(f"{F}.avg_pool3d", (tensor(1, 3, 2, 2, 2), 2)),
    Sample(f"{F}.adaptive_avg_pool1d", (tensor(3, 2, 6), 2)),
    Sample(f"{F}.adaptive_avg_pool2d", (tensor(3, 5, 4, 4), (1, 1))),
    Sample(f"{F}.adaptive_avg_pool2d", (tensor(3, 5, 4, 4), (None, 2))),
    Sample(f"{F}.adaptive_max_pool2d", (tensor(3, 5, 4, 4), 2)),
    Sample(f"{F}.adaptive_max_pool2d", (tensor(3, 5, 4, 4), 2), {"return_indices": True}),
    Sample(f"{F}.lp_pool2d", (tensor(2, 3, 4, 4), 2.0, 2)),
]
RESAMPLING = [
    Sample(f"{F}.interpolate", (tensor(3, 2, 4),), {"scale_factor": 2}),
    Sample(f"{F}.interpolate", (tensor(3, 1, 2, 2),), {"size": (4, 3), "mode": "bilinear"}),
    Sample(f"{F}.interpolate", (tensor(2, 3, 4, 4),), {"scale_factor": 0.5, "mode": "bicubic", "antialias": True}),
    Sample(f"{F}.interpolate", (tensor(3, 1, 4, 4),), {"size": 2, "mode": "area"}),
    Sample(f"{F}.upsample_nearest", (tensor(3, 1, 2, 2),), {"scale_factor": 2}),
    Sample(f"{F}.pixel_shuffle", (tensor(2, 8, 3, 2), 2)),
    Sample(f"{F}.pixel_shuffle", (tensor(4, 4, 2), 2)),
    Sample(f"{F}.pixel_unshuffle", (tensor(2, 2, 4, 6), 2)),
    Sample(f"{F}.channel_shuffle", (tensor(3, 4, 2, 3), 2)),
    Sample(f"{F}.unfold", (tensor(3, 2, 4, 4), 2)),
    Sample(f"{F}.unfold", (tensor(2, 4, 4), (2, 3)), {"padding": 1}),
    Sample(f"{F}.fold", (tensor(3, 8, 9), (4, 4), 2)),
    Sample(f"{F}.grid_sample", (tensor(2, 3, 4, 4), tensor(2, 3, 5, 2, seed=1, low=-0.9, high=0.9))),
    Sample(f"{F}.affine_grid", (tensor(3, 2, 3), (3, 1, 2, 2))),
    Sample(f"{F}.local_response_norm", (tensor(2, 3, 4), 2)),
]


@pytest.mark.parametrize(
    "samples",
    [CONVOLUTIONS[::2], CONVOLUTIONS[1::2], POOLS, RESAMPLING],
    ids=["convolutions", "more_convolutions", "pools", "resampling"],
)
def test_same_as_one_device(worlds, samples: list[Sample]) -> None:
    assert_valid(worlds, samples)


@run_on_ranks(2)
def test_channels_are_cut_without_communication() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = hp.distribute_tensor(tensor(2, 3, 4, 4), mesh, [hp.Replicate()])
    wide = hp.distribute_tensor(tensor(6, 3, 3, 3), mesh, [hp.Shard(0)])
    narrow = hp.distribute_tensor(tensor(2, 6, 1, 1), mesh, [hp.Shard(1)])
    depthwise = hp.distribute_tensor(tensor(6, 1, 2, 2), mesh, [hp.Shard(0)])
    with strict(implicit_redistribution=True), CommRecorder() as recorder:
        hidden = torch.nn.functional.conv2d(x, wide)
        assert hidden.placements == (hp.Shard(1),)
        assert torch.nn.functional.conv2d(hidden, depthwise, groups=6).placements == (hp.Shard(1),)
        assert torch.nn.functional.max_pool2d(hidden, 2).placements == (hp.Shard(1),)
        assert torch.nn.functional.conv2d(hidden, narrow).placements == (hp.Partial(),)
    assert not recorder.records


@run_on_ranks(2)
def test_sizes_that_are_refused_are_refused_on_every_rank() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    x = hp.distribute_tensor(tensor(1, 1, 4, 4), mesh, [hp.Shard(1)])  # the second rank has nothing
    weight = hp.distribute_tensor(tensor(1, 1, 2, 2), mesh, [hp.Shard(1)])
    for options in ({"padding": -1}, {"padding": (0, -1)}, {"dilation": 0}, {"stride": 0}, {"groups": 0}):
        with pytest.raises(RuntimeError, match=r"conv2d|not supported|greater than zero"):
            torch.nn.functional.conv2d(x, weight, **options)


@run_on_ranks(2)
def test_a_pending_sum_of_whole_numbers_is_done_before_they_are_averaged() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    value = torch.arange(12).reshape(1, 2, 6)
    block = value // 2 if mesh.get_local_rank() == 0 else value - value // 2
    pending = hp.DTensor.from_local(block, mesh, [hp.Partial()])
    pool = torch.nn.functional.avg_pool1d
    assert torch.equal(pool(pending, 3).full_tensor(), pool(value, 3))
