"""Clipping by the norm over ranks that hold different parameters, against all of them on one device, to the bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.dtensor.comm_recorder import CommRecorder
from hyper_parallel.core.pipeline_parallel.stages.grad_norm import clip_grad_norm_of_stages
from hyper_parallel.platform import get_platform
from tests.frameworks import assert_close, distribute_tensor, dtype_of, equal, grad_of, leaf, ours, theirs
from tests.world import run_on_ranks

SHAPES = {"embed": (11, 5), "a": (5, 7), "b": (7,), "c": (3, 3, 2), "norm": (1,), "d": (13, 2), "e": (4, 4), "f": (6,)}
# Rank 0 holds the first and, as in a V, a later stage; "embed" is tied to the head of the last.
HELD = {
    2: [["embed", "a", "e", "f"], ["b", "c", "norm", "d", "embed"]],
    4: [["embed", "a"], ["b", "c"], ["norm"], ["d", "e", "f", "embed"]],
}


def _gradient(name: str, dtype: torch.dtype) -> torch.Tensor:
    place = list(SHAPES).index(name)
    generator = torch.Generator().manual_seed(place)
    return (torch.randn(SHAPES[name], generator=generator, dtype=torch.float64) * 3**place).to(dtype)


def _parameters(names: Any, dtypes: dict[str, torch.dtype]) -> dict[str, Any]:
    made = {}
    for name in names:
        made[name] = leaf(torch.zeros(SHAPES[name], dtype=dtypes[name]))
        get_platform().set_grad(made[name], ours(_gradient(name, dtypes[name])))
    return made


def _group() -> Any:
    size = get_platform().get_world_size()
    return hp.init_device_mesh("cpu", (size,), mesh_dim_names=("pp",))


@run_on_ranks(2, 4)
def test_the_bits_of_one_device() -> None:
    platform = get_platform()
    mesh = _group()
    held = HELD[platform.get_world_size()]
    wide, narrow = torch.float64, torch.float32
    mixed = {name: wide if name in ("b", "e") else narrow for name in SHAPES}
    for dtypes in (dict.fromkeys(SHAPES, narrow), dict.fromkeys(SHAPES, wide), mixed):
        for norm_type in (2.0, 1.0, 3.0, 0.0, math.inf, -math.inf):
            whole = _parameters(SHAPES, dtypes)
            expected = platform.clip_grad_norm_(list(whole.values()), 2.0, norm_type)
            mine = _parameters(held[platform.get_rank()], dtypes)
            order = {name: ours(dtype) for name, dtype in dtypes.items()}
            found = clip_grad_norm_of_stages(mine, 2.0, norm_type, order=order, stages=mesh)
            assert dtype_of(found) == dtype_of(expected)
            assert equal(found, expected), (norm_type, found, expected)
            for name, parameter in mine.items():
                assert equal(grad_of(parameter), grad_of(whole[name])), (name, norm_type)


@run_on_ranks(2)
def test_one_reduction_and_parameters_without_gradient() -> None:
    platform = get_platform()
    dtypes = dict.fromkeys(SHAPES, torch.float64)
    mine = _parameters(HELD[2][platform.get_rank()], dtypes)
    for name in ("f", "d"):
        if name in mine:
            platform.set_grad(mine[name], None)
    mesh = _group()
    with CommRecorder() as recorder:
        found = clip_grad_norm_of_stages(
            mine, 1.0, order={n: ours(d) for n, d in dtypes.items()}, stages=mesh.get_group()
        )
    assert recorder.counts == {"all_reduce": 1}
    rest = [_gradient(name, torch.float64) for name in SHAPES if name not in ("f", "d")]
    assert_close(found, torch.nn.utils.get_total_norm(rest))
    nothing = clip_grad_norm_of_stages({}, 1.0, order={}, stages=mesh)
    assert theirs(nothing).item() == 0.0


@run_on_ranks(4)
def test_sharded_parameters_of_stages() -> None:
    platform = get_platform()
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    dtypes = dict.fromkeys(SHAPES, torch.float64)
    mine = {}
    for name in HELD[2][platform.get_rank() // 2]:
        placed = [hp.Shard(0) if len(SHAPES[name]) > 1 else hp.Replicate()]
        mine[name] = platform.as_parameter(
            distribute_tensor(torch.zeros(SHAPES[name], dtype=torch.float64), mesh["tp"], placed), True
        )
        mine[name].grad = distribute_tensor(_gradient(name, torch.float64), mesh["tp"], placed)
    order = {name: ours(dtype) for name, dtype in dtypes.items()}
    found = clip_grad_norm_of_stages(mine, 1.5, order=order, stages=mesh["pp"])
    whole = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES.values()]
    for name, parameter in zip(SHAPES, whole, strict=True):
        parameter.grad = _gradient(name, torch.float64)
    assert_close(found, torch.nn.utils.clip_grad_norm_(whole, 1.5))
    wanted = dict(zip(SHAPES, whole, strict=True))
    for name, parameter in mine.items():
        assert_close(parameter.grad.full_tensor(), wanted[name].grad)


@run_on_ranks(2)
def test_a_norm_that_is_not_finite_on_one_stage() -> None:
    platform = get_platform()
    mesh = _group()
    for bad in (math.nan, math.inf):
        for norm_type in (2.0, math.inf):
            parameter = leaf(torch.zeros(3))
            value = bad if platform.get_rank() == 1 else 1.0
            platform.set_grad(parameter, ours(torch.tensor([1.0, value, 1.0])))
            order = dict.fromkeys(("x0", "x1"), ours(torch.float32))
            mine = {f"x{platform.get_rank()}": parameter}
            found = theirs(clip_grad_norm_of_stages(mine, 1.0, norm_type, order=order, stages=mesh)).item()
            assert math.isnan(found) if math.isnan(bad) else math.isinf(found)
            platform.set_grad(parameter, ours(torch.tensor([1.0, value, 1.0])))
            said = rf"the total norm of order {norm_type} of the gradients of 2 parameters on all stages is {bad}"
            with pytest.raises(RuntimeError, match=said):
                clip_grad_norm_of_stages(mine, 1.0, norm_type, True, order=order, stages=mesh)


def test_mistakes_are_named() -> None:
    parameter = leaf(torch.zeros(3))
    get_platform().set_grad(parameter, ours(torch.ones(3)))
    order = {"head.weight": ours(torch.float32)}
    with pytest.raises(ValueError, match=r"'weight' is not in order=; give parameters the names of the whole model"):
        clip_grad_norm_of_stages({"weight": parameter}, 1.0, order=order, stages=None)
    with pytest.raises(ValueError, match=r"max_norm must be 0 or more, got -1\.0"):
        clip_grad_norm_of_stages({"head.weight": parameter}, -1, order=order, stages=None)
    with pytest.raises(ValueError, match="norm_type is nan; give the order"):
        clip_grad_norm_of_stages({"head.weight": parameter}, 1, math.nan, order=order, stages=None)
