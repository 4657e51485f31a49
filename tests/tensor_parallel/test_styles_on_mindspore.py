"""The parallel styles on MindSpore's cells: outputs, the gradients of inputs and of all parameters, and the parameters
after a step of AdamW are those of the plain cell in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.experimental import optim

import hyper_parallel as hp
from hyper_parallel import ColwiseParallel, Replicate, RowwiseParallel, SequenceParallel, Shard
from hyper_parallel.platform import get_platform
from tests.world import run_on_ranks

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


class Mlp(nn.Cell):
    def __init__(self, linear: Any, width: int, hidden: int) -> None:
        super().__init__()
        self.up = linear(width, hidden)
        self.down = linear(hidden, width)

    def construct(self, x: Any) -> Any:
        return self.down(ops.gelu(self.up(x)))


class Attention(nn.Cell):
    """Plain attention that reads the number of heads from its projections, so that it runs on a part of them."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int | None = None) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.q = nn.Dense(width, width)
        # No bias for the keys: it changes nothing, and AdamW makes a step of any gradient that is not exactly zero.
        self.k = nn.Dense(width, self.head_width * (num_kv_heads or num_heads), has_bias=False)
        self.v = nn.Dense(width, self.head_width * (num_kv_heads or num_heads))
        self.o = nn.Dense(width, width)

    def construct(self, x: Any) -> Any:
        def heads(y: Any) -> Any:
            return y.reshape(y.shape[0], y.shape[1], -1, self.head_width).transpose(0, 2, 1, 3)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        if q.shape[1] != k.shape[1]:
            k, v = (ops.repeat_interleave(part, q.shape[1] // k.shape[1], 1) for part in (k, v))
        weights = ops.softmax(ops.matmul(q, k.transpose(0, 1, 3, 2)) * self.head_width**-0.5, -1)
        mixed = ops.matmul(weights, v).transpose(0, 2, 1, 3)
        return self.o(mixed.reshape(mixed.shape[0], mixed.shape[1], -1))


class Decoder(nn.Cell):
    def __init__(self, vocabulary: int, width: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norm1, self.norm2 = nn.LayerNorm((width,)), nn.LayerNorm((width,))
        self.attention = Attention(width, num_heads)
        self.mlp = Mlp(mint.nn.Linear, width, hidden)
        self.head = nn.Dense(width, vocabulary, has_bias=False)

    def construct(self, ids: Any) -> Any:
        x = self.embed(ids)
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return self.head(x)


def fill(cell: nn.Cell, seed: int = 0) -> nn.Cell:
    """The cell with the same weights on every rank and for every caller."""
    random = np.random.RandomState(seed)
    for parameter in get_platform().parameters_dict(cell).values():
        parameter.set_data(Tensor((random.randn(*parameter.shape) * 0.4).astype(np.float32)))
    return cell


def values_of(shape: tuple[int, ...], seed: int = 1) -> np.ndarray:
    return np.random.RandomState(seed).randn(*shape).astype(np.float32)


def whole(value: Any) -> np.ndarray:
    return (value.full_tensor() if isinstance(value, hp.DTensor) else value).asnumpy()


def step(cell: nn.Cell, array: np.ndarray, loss_of: Callable[[Any], Any], optimize: bool) -> dict[str, np.ndarray]:
    """Loss, gradients and, with ``optimize``, the parameters after a step of AdamW, by name and whole."""
    is_index = array.dtype.kind == "i"
    x = Tensor(array) if is_index else Parameter(Tensor(array), name="x")
    parameters = get_platform().parameters_dict(cell)
    wanted = [one for one in parameters.values() if one.requires_grad]
    names = [name for name, one in parameters.items() if one.requires_grad]
    loss, gradients = hp.value_and_grad(lambda: loss_of(cell(x)), [*wanted, *([] if is_index else [x])])()
    found = {"loss": whole(loss)}
    if not is_index:
        found["gradient of the input"] = whole(gradients[-1])
    found |= {f"gradient of {name}": whole(one) for name, one in zip(names, gradients, strict=False)}
    if not optimize:
        return found
    optim.AdamW(wanted, lr=0.05, weight_decay=0.1)(tuple(gradients[: len(wanted)]))
    return found | {f"{name} after a step": whole(one) for name, one in zip(names, wanted, strict=True)}


def product(y: Any) -> Any:
    return (y * Tensor(values_of(tuple(y.shape), 2))).sum()


def same(
    make: Callable[[], nn.Cell],
    cut: Callable[[nn.Cell], Any],
    array: np.ndarray,
    loss_of: Callable[[Any], Any] = product,
    optimize: bool = False,  # off where one step of AdamW has been compared already: MindSpore compiles each optimizer
) -> nn.Cell:
    """Check that the cut cell does what the plain one does; the cut cell."""
    expected = step(fill(make()), array, loss_of, optimize)
    cell = fill(make())
    cut(cell)
    found = step(cell, array, loss_of, optimize)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, **TOLERANCE, err_msg=name)
    return cell


def tp_mesh() -> Any:
    return hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


@run_on_ranks(2)
def test_linear_layers():
    mesh = tp_mesh()
    pair = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for linear in (nn.Dense, mint.nn.Linear):
        for hidden in (6, 7, 1):
            cell = same(
                lambda linear=linear, hidden=hidden: Mlp(linear, 4, hidden),
                lambda cell: hp.parallelize_module(cell, mesh, pair),
                values_of((2, 3, 4)),
                optimize=linear is nn.Dense and hidden in (7, 1),
            )
            assert cell.up.weight.placements == (Shard(0),) and cell.down.weight.placements == (Shard(1),)
            assert cell.down.bias.placements == (Replicate(),)
            assert cell.up.weight.to_local().shape[0] == ((hidden + 1) // 2 if mesh.get_rank() == 0 else hidden // 2)
            assert [one.name for one in cell.trainable_params()] == ["up.weight", "up.bias", "down.weight", "down.bias"]
    for make in (lambda: nn.Dense(5, 7, activation="relu"), lambda: nn.Dense(5, 7, has_bias=False)):
        for style in (ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())):
            same(make, lambda cell, style=style: hp.parallelize_module(cell, mesh, style), values_of((3, 5)))


@run_on_ranks(2)
def test_embeddings():
    mesh = tp_mesh()
    ids = np.array([[0, 3, 10], [10, 5, 6]], np.int32)
    for make in (
        lambda: nn.Embedding(11, 5),
        lambda: nn.Embedding(11, 5, padding_idx=3),
        lambda: nn.Embedding(11, 5, use_one_hot=True),
    ):  # mint.nn.Embedding has no kernel on a CPU
        for style in (RowwiseParallel(), ColwiseParallel(output_layouts=Replicate())):
            same(make, lambda cell, style=style: hp.parallelize_module(cell, mesh, style), ids)


def decoder_plan(sequence_parallel: bool) -> dict[str, Any]:
    between = Shard(1) if sequence_parallel else Replicate()
    colwise = ColwiseParallel(input_layouts=between)
    rowwise = RowwiseParallel(output_layouts=between)
    plan = {"attention.q": colwise, "attention.k": colwise, "attention.v": colwise, "attention.o": rowwise}
    plan |= {"mlp.up": colwise, "mlp.down": rowwise, "embed": rowwise}
    plan["head"] = ColwiseParallel(input_layouts=between, use_local_output=False)
    if sequence_parallel:
        plan |= {"norm*": SequenceParallel(use_local_output=True)}
    return plan


@run_on_ranks(2)
def test_decoder():
    mesh = tp_mesh()
    ids = np.random.RandomState(3).randint(0, 11, (2, 6)).astype(np.int32)
    targets = np.roll(ids, -1, 1).reshape(-1)

    def loss_of(logits: Any) -> Any:
        with hp.loss_parallel():
            return ops.cross_entropy(logits.reshape(-1, logits.shape[-1]), Tensor(targets))

    for sequence_parallel in (False, True):
        plan = decoder_plan(sequence_parallel)
        cell = same(
            lambda: Decoder(11, 8, 4, 9),
            lambda cell, plan=plan: hp.parallelize_module(cell, mesh, plan),
            ids,
            loss_of,
            optimize=sequence_parallel,
        )
        assert isinstance(cell.norm1.gamma, hp.DTensor) == sequence_parallel
