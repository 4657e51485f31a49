"""Cells built without memory, cut, and initialised block by block: the same bits under every layout."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common import initializer as inits
from mindspore.common.initializer import initializer
from mindspore.experimental import optim

import hyper_parallel as hp
from hyper_parallel import ColwiseParallel, Replicate, RowwiseParallel, SequenceParallel, Shard
from hyper_parallel.core.dtensor.random import random_values
from hyper_parallel.core.dtensor.random.draw import Draw
from hyper_parallel.core.dtensor.random.random_stream import GlobalRegion
from hyper_parallel.platform import get_platform
from tests.world import run_on_ranks

SEED = 7


class Ramp(inits.Initializer):
    """Of one's own: every element depends on its place and on one random number."""

    def _initialize(self, arr: Any) -> None:
        arr[...] = np.arange(arr.size).reshape(arr.shape) + np.random.rand()


class Odds(nn.Cell):
    """Parameters of all kinds that no layer of MindSpore makes."""

    def __init__(self) -> None:
        super().__init__()
        self.threes = Parameter(Tensor(np.full((3, 2), 3.0, np.float32)))
        self.square = Parameter(initializer(inits.Orthogonal(), (5, 5), mindspore.float32))
        self.ramp = Parameter(initializer(Ramp(), (7, 3), mindspore.float32))
        self.half = Parameter(initializer(inits.Normal(2.0, 1.0), (5, 3), mindspore.float16))
        self.fixed = Parameter(initializer("ones", (2,), mindspore.int32), requires_grad=False)


class Model(nn.Cell):
    """A small decoder without attention, with sizes that divide by neither 2 nor 4, and a head that may be tied."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm((6,))
        self.up, self.down = nn.Dense(6, 9), mint.nn.Linear(9, 6)
        self.head = nn.Dense(6, 11, has_bias=False)
        self.odds = Odds()
        if tied:
            self.head.weight = self.embed.embedding_table

    def construct(self, ids: Any) -> Any:
        x = self.embed(ids)
        x = x + self.down(ops.gelu(self.up(self.norm(x))))
        return self.head(x)


def _plan(sequence_parallel: bool) -> dict[str, Any]:
    between = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(output_layouts=between),
        "up": ColwiseParallel(input_layouts=between),
        "down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence_parallel:
        plan["norm"] = SequenceParallel(use_local_output=True)
    return plan


def _deferred(make: Any) -> Any:
    with hp.deferred_init():
        return make()


def _values(cell: nn.Cell) -> dict[str, np.ndarray]:
    return {
        name: (one.full_tensor() if isinstance(one, hp.DTensor) else one).asnumpy()
        for name, one in get_platform().parameters_dict(cell).items()
    }


def _materialized(cell: nn.Cell) -> nn.Cell:
    hp.manual_seed(SEED)
    return hp.materialize(cell)


def _by_index(number: int, shape: tuple[int, ...], limit: float) -> np.ndarray:
    return random_values.uniform(Draw(SEED, number), GlobalRegion(shape), -limit, limit)


def _cuts(world_size: int, cell: nn.Cell) -> Any:
    """The cell cut in one way after another."""
    line = hp.init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    for plan in (_plan(sequence_parallel=False), _plan(sequence_parallel=True)):
        yield lambda cell, plan=plan: hp.parallelize_module(cell, line, plan)
    layouts = {
        name: [Shard(place % parameter.ndim)]
        for place, (name, parameter) in enumerate(get_platform().parameters_dict(cell).items())
    }
    yield lambda cell: hp.shard_module(cell, line, hp.ShardingPlan(plan=layouts))
    if world_size == 4:
        square = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        both = ColwiseParallel(weight_layouts=(Shard(0), Shard(1)), output_layouts=Replicate())
        yield lambda cell: hp.parallelize_module(cell, square, {"up": both, "head": both})


@run_on_ranks(2, 4, timeout=300)
def test_same_bits_under_every_layout():
    world_size = get_platform().get_world_size()
    for tied in (False, True)[world_size == 4 :]:
        want = _values(_materialized(_deferred(lambda tied=tied: Model(tied))))
        place = [one.name for one in Model(tied).get_parameters()].index  # all count, also those of one number
        bound = math.sqrt(3.0) * math.sqrt(1 / 3) / math.sqrt(6)
        assert np.array_equal(want["up.weight"], _by_index(place("up.weight"), (9, 6), bound))
        assert np.array_equal(want["up.bias"], _by_index(place("up.bias"), (9,), 1 / math.sqrt(6)))
        assert (want["norm.gamma"] == 1).all() and (want["norm.beta"] == 0).all() and (want["odds.fixed"] == 1).all()
        assert (want["odds.threes"] == 3).all() and want["odds.half"].dtype == np.float16
        np.testing.assert_allclose(want["odds.square"] @ want["odds.square"].T, np.eye(5), atol=1e-5)
        assert np.allclose(np.diff(want["odds.ramp"].reshape(-1)), 1) and 0 < want["odds.ramp"][0, 0] < 1
        for cut in _cuts(world_size, Model(tied)):
            cell = _deferred(lambda tied=tied: Model(tied))
            names = [one.name for one in cell.get_parameters()]
            assert all(map(get_platform().has_no_memory, cell.get_parameters()))
            with hp.CommRecorder() as recorder:
                cell = cut(cell)
                assert all(map(get_platform().has_no_memory, cell.get_parameters()))
                _materialized(cell)
            assert not recorder.records
            assert (cell.head.weight is cell.embed.embedding_table) == tied
            assert isinstance(cell.up.weight, hp.DTensor) and cell.up.weight.requires_grad
            assert not cell.odds.fixed.requires_grad
            assert (
                [one.name for one in cell.get_parameters()]
                == names
                == [one.name for one in Model(tied).get_parameters()]
            )
            got = _values(cell)
            assert got.keys() == want.keys()
            for name, value in want.items():
                assert got[name].dtype == value.dtype and np.array_equal(got[name], value), name


@pytest.mark.sweep("mindspore")
@run_on_ranks(2, timeout=300)
def test_trains_afterwards_like_one_device():
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ids = Tensor(np.arange(12).reshape(2, 6) % 11, mindspore.int32)

    def losses_of(cell: nn.Cell) -> list[float]:
        weights = [one for one in cell.trainable_params() if not one.name.startswith("odds.")]
        step = hp.value_and_grad(lambda: ops.cross_entropy(cell(ids).reshape(12, 11), ids.reshape(-1)), weights)
        optimizer, losses = optim.AdamW(weights, lr=0.05), []
        for _ in range(4):
            loss, gradients = step()
            optimizer(gradients)
            losses.append(float(loss))
        return losses

    alone = losses_of(_materialized(_deferred(Model)))
    cut = losses_of(_materialized(hp.parallelize_module(_deferred(Model), mesh, _plan(True))))
    np.testing.assert_allclose(cut, alone, rtol=1e-5)
    assert alone[-1] < alone[0]


@pytest.mark.parametrize(
    "made_by",
    [
        inits.Uniform(0.3),
        inits.Normal(0.2, 1.5),
        inits.TruncatedNormal(0.1, 0.5),
        inits.TruncatedNormal(1.0, 0.5, -1.0, 1.5),
        inits.XavierUniform(2.0),
        inits.XavierNormal(2.0),
        inits.HeUniform(math.sqrt(5)),
        inits.HeUniform(mode="fan_out", nonlinearity="relu"),
        inits.HeNormal(nonlinearity="tanh"),
        inits.HeNormal(nonlinearity="sigmoid"),
        inits.VarianceScaling(3.0, "fan_avg", "uniform"),
        inits.VarianceScaling(3.0, "fan_out", "untruncated_normal"),
        inits.VarianceScaling(),
    ],
    ids=lambda made_by: type(made_by).__name__,
)
@pytest.mark.parametrize("shape", [(120, 250), (40, 15, 10, 5)], ids=["matrix", "kernel"])
def test_the_distribution_is_that_of_mindspore(made_by, shape):
    """Mean, spread and tails of 30,000 numbers, next to those that MindSpore fills an array with."""

    class One(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Parameter(initializer(made_by, shape, mindspore.float32))

    found = _materialized(_deferred(One)).weight.asnumpy().astype(np.float64)
    np.random.seed(0)
    expected = np.zeros(shape, np.float32)
    made_by(expected)
    spread = expected.std()
    assert abs(found.mean() - expected.mean()) < 0.03 * spread
    assert abs(found.std() / spread - 1) < 0.02
    for share in (0.001, 0.02, 0.25, 0.75, 0.98, 0.999):
        assert abs(np.quantile(found, share) - np.quantile(expected, share)) < 0.25 * spread, share
    for share in (0.02, 0.25, 0.75, 0.98):
        assert abs(np.quantile(found, share) - np.quantile(expected, share)) < 0.06 * spread, share


def _peak_bytes() -> int:
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1)) * 1024


def test_peak_memory_is_that_of_the_blocks():
    """4 GiB over 1024 ranks: this process makes the part of the first."""
    mesh = hp.init_device_mesh("cpu", (1024,), mesh_dim_names=("tp",), rank_list=range(1024), init_backend=False)
    small = hp.parallelize_module(_deferred(lambda: nn.Dense(8, 2048)), mesh, ColwiseParallel())
    _materialized(small)  # what is allocated once is allocated now
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _peak_bytes()
    cell = _deferred(lambda: nn.SequentialCell(nn.Dense(32768, 16384), nn.Dense(16384, 32768)))
    cell = hp.parallelize_module(cell, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    _materialized(cell)
    assert [cell[place].weight.to_local().shape for place in range(2)] == [(16, 32768), (32768, 16)]
    assert _peak_bytes() - before < 64 * 2**20


def test_an_own_init_and_what_nobody_fills():
    class Unfilled(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.weight = Parameter(Tensor(np.arange(6, dtype=np.float32)))

    class Reset(Unfilled):
        def reset_parameters(self) -> None:
            self.weight.uniform_(2.0, 3.0)

    with pytest.raises(RuntimeError, match=r"nothing gave a value to 'weight'; .* make the parameter with an init"):
        _materialized(_deferred(Unfilled))

    hp.manual_seed(SEED)
    filled = hp.materialize(_deferred(Unfilled), init=lambda cell: cell.weight.normal_(0.0, 2.0)).weight
    assert not isinstance(filled, hp.DTensor) and isinstance(filled, Parameter) and filled.name == "weight"
    assert np.array_equal(filled.asnumpy(), random_values.normal(Draw(SEED, 0), GlobalRegion((6,)), 0.0, 2.0))
    between = random_values.uniform(Draw(SEED, 0), GlobalRegion((6,)), 2.0, 3.0)
    assert np.array_equal(_materialized(_deferred(Reset)).weight.asnumpy(), between)

    plain = nn.Dense(2, 2)
    before = plain.weight.asnumpy().copy()
    assert np.array_equal(_materialized(plain).weight.asnumpy(), before)
    with pytest.raises(ValueError, match=r"'bias', made with XavierUniform: a parameter of shape \(4,\) has no"):
        _materialized(_deferred(lambda: nn.Dense(3, 4, bias_init="xavier_uniform")))
