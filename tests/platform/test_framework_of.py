"""Objects of the other framework are named, with the way to choose it."""

import pytest

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.frameworks import on_mindspore

USED, OTHER = ("mindspore", "torch") if on_mindspore else ("torch", "mindspore")
SAID = f"of {OTHER}, but this process runs on {USED}; set HYPER_PARALLEL_PLATFORM={OTHER} before it starts"


@pytest.fixture(scope="module")
def stranger():
    """An object whose class derives from one of the other framework's."""
    base = type("Tensor", (), {"__module__": f"{OTHER}.somewhere"})
    return type("Mine", (base,), {"__module__": "program"})()


def test_it_is_named_where_a_tensor_or_a_module_is_expected(stranger):
    platform, mesh = get_platform(), hp.init_device_mesh("cpu", (1,), rank_list=(0,), init_backend=False)
    calls = {
        "chunk takes a tensor, got Mine": lambda: platform.chunk(stranger, 0, 1, 0),
        "distribute_tensor takes a tensor, got Mine": lambda: hp.distribute_tensor(stranger, mesh),
        "as a plain tensor, got Mine": lambda: hp.DTensor.from_local(stranger, mesh),
        "distribute_module takes a module, got Mine": lambda: hp.distribute_module(stranger, mesh),
        "parallelize_module takes a module, got Mine": lambda: hp.parallelize_module(
            stranger, mesh, hp.ColwiseParallel()
        ),
        "shard_module takes a module, got Mine": lambda: hp.shard_module(stranger, mesh, hp.ShardingPlan()),
        "for_model takes a model, got Mine": lambda: hp.plans.for_model(stranger),
    }
    for said, call in calls.items():
        with pytest.raises(TypeError, match=f"{said} {SAID}"):
            call()


def test_other_objects_are_named_by_their_class():
    with pytest.raises(TypeError, match=r"parallelize_module takes a module, got list$"):
        hp.parallelize_module([], hp.init_device_mesh("cpu", (1,), rank_list=(0,), init_backend=False))
