"""`models.Mixture` with sharded experts, on both frameworks: losses, norms, the experts' bias and weights are those of
PyTorch on one device."""

import pytest

from tests.frameworks import on_mindspore
from tests.models.test_mixture import check, on_one_device, train
from tests.world import run_on_ranks, small_or_sweep

LAYOUTS = {
    2: ("dp_shard=2, ep=2", "tp=2, ep=2", "cp=2, ep=2"),
    4: (
        "dp_shard=4, ep=2",
        "dp_shard=4, ep=4",
        "dp_shard=2, tp=2, ep=2",
        "dp_shard=2, tp=2, ep=4",
        "dp_shard=2, cp=2, ep=2",
    ),
}
SMALL = ["dp_shard=2, ep=2"] if on_mindspore else ["dp_shard=2, ep=2", "tp=2, ep=2", "dp_shard=4, ep=2"]
CASES = ("softmax", "sigmoid with groups", "before experts")


@pytest.mark.sweep("mindspore")
@pytest.mark.parametrize("case", small_or_sweep(CASES, CASES[1:2]))
@pytest.mark.parametrize("degrees", small_or_sweep(LAYOUTS[2], SMALL))
@run_on_ranks(2)
def test_on_two_ranks(degrees, case):
    check(train(case, degrees, 1), on_one_device(case))


@pytest.mark.parametrize("case", small_or_sweep(CASES, CASES[1:2]))
@pytest.mark.parametrize("degrees", small_or_sweep(LAYOUTS[4], SMALL))
@run_on_ranks(4)
def test_on_four_ranks(degrees, case):
    check(train(case, degrees, 1), on_one_device(case))


@pytest.mark.sweep("mindspore")
@run_on_ranks(2)
def test_blocks_that_are_computed_again():
    check(train("softmax", "dp_shard=2, ep=2", 2, recompute="full"), on_one_device("softmax", 2, 2))
