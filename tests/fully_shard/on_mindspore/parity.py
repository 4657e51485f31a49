"""Cells for the tests of fully sharded data parallelism on MindSpore, and the comparison with one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import hyper_parallel as hp
from hyper_parallel.platform import get_platform

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
SINGLE = {"rtol": 1e-5, "atol": 1e-6}  # where float32 is among it


class Norm(nn.Cell):
    """Features divided by the root of their mean square, scaled and shifted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = parameter(width), parameter(width)

    def construct(self, x: Any) -> Any:
        return x * ops.rsqrt((x * x).mean(-1, keep_dims=True) + 1e-5) * self.weight + self.bias


class Block(nn.Cell):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.up, self.down = linear(width, hidden), linear(hidden, width)

    def construct(self, x: Any) -> Any:
        return x + self.down(ops.tanh(self.up(self.norm(x))))


class Mlp(nn.Cell):
    """Blocks between two linear layers; sizes that divide by nothing, and a number."""

    def __init__(self, width: int = 5, hidden: int = 7, num_blocks: int = 3, num_in: int = 3) -> None:
        super().__init__()
        self.first = linear(num_in, width)
        self.blocks = nn.CellList([Block(width, hidden) for _ in range(num_blocks)])
        self.scale = parameter()
        self.last = linear(width, 2)

    def construct(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale


def parameter(*shape: int) -> Parameter:
    return Parameter(Tensor(np.zeros(shape)))


def linear(num_in: int, num_out: int, bias: bool = True) -> nn.Dense:
    return nn.Dense(num_in, num_out, has_bias=bias, dtype=mindspore.float64)


def filled(cell: nn.Cell, seed: int = 1) -> nn.Cell:
    """The cell with the same weights on every rank and for every caller."""
    values = np.random.RandomState(seed)
    for one in get_platform().parameters_dict(cell).values():
        drawn = Tensor(np.asarray(values.randn(*one.shape) * 0.5 + 0.1))
        get_platform().load_into_param(one, get_platform().tensor_type_cast(drawn, one.dtype))
    return cell


def batch(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).randn(*shape)


def my_part(whole: np.ndarray, mesh: hp.DeviceMesh) -> Tensor:
    """This rank's rows of a batch that the ranks of the mesh share."""
    rows = whole.shape[0] // mesh.size()
    place = mesh.rank_list.index(get_platform().get_rank())
    return Tensor(np.ascontiguousarray(whole[place * rows : (place + 1) * rows]))


def loss_of(out: Any) -> Any:
    return (ops.sin(out) * Tensor(np.arange(1.0, out.shape[-1] + 1))).mean()


def values(tensor: Any) -> np.ndarray:
    """The whole values of a tensor, distributed or not."""
    return np.array((tensor.full_tensor() if isinstance(tensor, hp.DTensor) else tensor).asnumpy())


def mean_over(loss: Any, mesh: hp.DeviceMesh) -> float:
    """The mean of what each rank of the mesh has."""
    mean = Tensor(values(loss).reshape(1))
    get_platform().all_reduce(mean, mesh.get_group(tuple(range(mesh.ndim))), op="avg")
    return float(values(mean)[0])


def mesh_of(*shape: int, names: tuple[str, ...] = ("replicate", "dp")) -> hp.DeviceMesh:
    """A mesh of all ranks, or of this shape; one axis is called dp."""
    shape = shape or (get_platform().get_world_size(),)
    return hp.init_device_mesh("cpu", shape, mesh_dim_names=names[-len(shape) :])


def pair(mesh: hp.DeviceMesh, make: Callable[[], nn.Cell] = Mlp, **options: Any) -> tuple[nn.Cell, nn.Cell]:
    """A cell on one device and the same cell sharded."""
    ours = filled(make())
    shard_blocks(mesh, **options)(ours)
    return filled(make()), ours


class AdamW:
    """The update of each parameter's part on this rank; MindSpore's own compiles a graph for seconds (see
    ``test_state.py``)."""

    def __init__(self, cell: Any, rate: float = 0.01, epsilon: float = 1e-8) -> None:
        self._parameters, self._rate, self._epsilon, self._number = cell.trainable_params(), rate, epsilon, 0
        self._moments: dict[int, list[Any]] = {}

    def step(self) -> None:
        self._number += 1
        for place, one in enumerate(self._parameters):
            gradient = hp.grad_of(one)
            if gradient is None:
                continue
            g, w = (_block(value) for value in (gradient, one))
            mean, square = self._moments.setdefault(place, [0.0 * g, 0.0 * g])
            mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g * g
            self._moments[place] = [mean, square]
            root = np.sqrt(square / (1 - 0.999**self._number)) + self._epsilon
            new = w * (1 - 0.01 * self._rate) - self._rate * mean / (1 - 0.9**self._number) / root
            get_platform().load_into_param(one, Tensor(np.asarray(new)))
        hp.zero_grad(self._parameters)


def _block(tensor: Any) -> np.ndarray:
    return np.array((tensor.to_local() if isinstance(tensor, hp.DTensor) else tensor).asnumpy())


def named(cell: nn.Cell) -> dict[str, Any]:
    return get_platform().parameters_dict(cell)


def assert_same_gradients(expected: nn.Cell, ours: nn.Cell, tolerance: dict[str, float] = TOLERANCE) -> None:
    """Every gradient, and whether there is one."""
    for (name, one), (other, mine) in zip(named(expected).items(), named(ours).items(), strict=True):
        assert name == other
        want, got = hp.grad_of(one), hp.grad_of(mine)
        assert (want is None) == (got is None), f"{name}: {want} {got}"
        if want is not None:
            _assert_close(name, got, want, tolerance)


def _assert_close(name: str, found: Any, wanted: Any, tolerance: dict[str, float]) -> None:
    if values(wanted).dtype != np.float64:
        tolerance = SINGLE
    np.testing.assert_allclose(values(found), values(wanted), **tolerance, err_msg=name)


def assert_same_weights(expected: nn.Cell, ours: nn.Cell, tolerance: dict[str, float] = TOLERANCE) -> None:
    for (name, one), mine in zip(named(expected).items(), named(ours).values(), strict=True):
        _assert_close(name, mine, one, tolerance)


def trains_as_one_device(
    make: Callable[[], nn.Cell],
    shard: Callable[[nn.Cell], Any],
    x: np.ndarray,
    mesh: hp.DeviceMesh,
    num_steps: int = 5,
    tolerance: dict[str, float] = TOLERANCE,
    loss: Callable[[Any], Any] = loss_of,
) -> nn.Cell:
    """Loss, gradients, their norm, and weights after AdamW steps equal those of one device; the sharded cell."""
    expected, ours = filled(make()), filled(make())
    names = list(named(ours))
    shard(ours)
    assert list(named(ours)) == names
    optimizers = [AdamW(cell) for cell in (expected, ours)]
    mine = my_part(x, mesh)
    for _ in range(num_steps):
        want, got = loss(expected(Tensor(x))), loss(ours(mine))
        hp.backward(want)
        hp.backward(got)
        np.testing.assert_allclose(mean_over(got, mesh), float(want), **tolerance)
        assert_same_gradients(expected, ours, tolerance)
        want_norm, got_norm = (
            hp.clip_grad_norm_([p for p in cell.trainable_params() if hp.grad_of(p) is not None], 0.1)
            for cell in (expected, ours)
        )
        np.testing.assert_allclose(values(got_norm), values(want_norm), **tolerance)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_weights(expected, ours, tolerance)
    return ours


def shard_blocks(mesh: hp.DeviceMesh, names: Sequence[str] = ("blocks",), **options: Any) -> Callable[[Any], Any]:
    """Each item of these lists a unit, and the rest one."""

    def shard(cell: nn.Cell) -> nn.Cell:
        for name in names:
            for block in getattr(cell, name):
                hp.fully_shard(block, mesh=mesh, **options)
        return hp.fully_shard(cell, mesh=mesh, **options)

    return shard


def units(cell: nn.Cell) -> list[Any]:
    from hyper_parallel.core.fully_shard.hsdp_module import units_in

    return list(units_in(cell))


def assert_all_sharded(cell: nn.Cell) -> None:
    """No whole value is left in memory, and cells see their own parameters."""
    for unit in units(cell):
        assert unit.state == "sharded", f"{unit}: {unit.state}"
        for p in unit.parameters:
            for module, name in p.places:
                assert getattr(module, name) is p.parameter
