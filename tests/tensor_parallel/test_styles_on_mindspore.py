"""The parallel styles on MindSpore's cells: outputs, the gradients of inputs and of all parameters, and the parameters
after a step of AdamW are those of the plain cell in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.experimental import optim

import hyper_parallel as hp
from hyper_parallel import ColwiseParallel, NoParallel, Replicate, RowwiseParallel, SequenceParallel, Shard
from hyper_parallel.core.dtensor.layout import Layout
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
    return hp.init_device_mesh("cpu", (get_platform().get_world_size(),), mesh_dim_names=("tp",))


@run_on_ranks(2, timeout=300)
def test_linear_layers():
    mesh = tp_mesh()
    pair = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for linear in (nn.Dense, mint.nn.Linear):
        for hidden in (6, 7, 1):
            cell = same(
                lambda linear=linear, hidden=hidden: Mlp(linear, 4, hidden),
                lambda cell: hp.parallelize_module(cell, mesh, pair),
                values_of((2, 3, 4)),
                optimize=linear is nn.Dense and hidden == 1,  # the second rank's block is empty
            )
            assert cell.up.weight.placements == (Shard(0),) and cell.down.weight.placements == (Shard(1),)
            assert cell.down.bias.placements == (Replicate(),)
            assert cell.up.weight.to_local().shape[0] == ((hidden + 1) // 2 if mesh.get_rank() == 0 else hidden // 2)
            assert [one.name for one in cell.trainable_params()] == ["up.weight", "up.bias", "down.weight", "down.bias"]
    for make in (lambda: nn.Dense(5, 7, activation="relu"), lambda: nn.Dense(5, 7, has_bias=False)):
        for style in (ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())):
            same(make, lambda cell, style=style: hp.parallelize_module(cell, mesh, style), values_of((3, 5)))


@run_on_ranks(2, timeout=300)
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


@pytest.mark.sweep("mindspore")
@run_on_ranks(4, timeout=300)
def test_decoder(sweep):
    mesh = tp_mesh()
    ids = np.random.RandomState(3).randint(0, 11, (2, 8)).astype(np.int32)
    targets = np.roll(ids, -1, 1).reshape(-1)

    def loss_of(logits: Any) -> Any:
        with hp.loss_parallel():
            return ops.cross_entropy(logits.reshape(-1, logits.shape[-1]), Tensor(targets))

    for sequence_parallel in (False, True) if sweep else (True,):
        plan = decoder_plan(sequence_parallel)
        cell = same(
            lambda: Decoder(11, 8, 4, 9),
            lambda cell, plan=plan: hp.parallelize_module(cell, mesh, plan),
            ids,
            loss_of,
            optimize=sequence_parallel,
        )
        assert isinstance(cell.norm1.gamma, hp.DTensor) == sequence_parallel


class Tied(nn.Cell):
    """An embedding whose table is the last layer's weight too, and a norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm((4,))
        self.head = nn.Dense(4, 7, has_bias=False)
        self.head.weight = self.embed.embedding_table

    def construct(self, ids: Any) -> Any:
        return self.head(self.norm(self.embed(ids)))


class NormOverHeads(Mlp):
    def __init__(self) -> None:
        super().__init__(nn.Dense, 4, 6)
        self.norm = nn.LayerNorm((3,))

    def construct(self, x: Any) -> Any:
        y = self.up(x)
        return self.down(self.norm(y.reshape(y.shape[0], -1, 3)).reshape(y.shape[0], -1))


class Two(nn.Cell):
    """Two inputs and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp(nn.Dense, 4, 6)

    def construct(self, x: Any, scale: Any = 1.0) -> Any:
        return self.inner(x) * scale, x


@run_on_ranks(2, timeout=300)
def test_other_styles():
    mesh = tp_mesh()
    ids = np.array([[0, 3, 6], [5, 1, 6]], np.int32)
    plan = {"embed": RowwiseParallel(), "norm": NoParallel(), "head": ColwiseParallel(output_layouts=Replicate())}
    cell = same(Tied, lambda cell: hp.parallelize_module(cell, mesh, plan), ids)
    assert cell.head.weight is cell.embed.embedding_table

    pair = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    cell = hp.parallelize_module(fill(NormOverHeads()), mesh, pair)
    with pytest.raises(
        RuntimeError, match=r"computed with the plain parameter 'norm.gamma' of shape \(3,\), 'norm.beta'"
    ):
        cell(Parameter(Tensor(values_of((2, 4)))))
    heads = NoParallel(input_layouts=Shard(1), output_layouts=Shard(1))
    same(NormOverHeads, lambda cell: hp.parallelize_module(cell, mesh, pair | {"norm": heads}), values_of((2, 4)))

    prepared = {
        "": hp.PrepareModuleInputOutput(
            input_layouts=(Replicate(),),
            desired_input_layouts=(Shard(0),),
            output_layouts=(Shard(0), Shard(0)),
            desired_output_layouts=(Replicate(), Replicate()),
        ),
        "inner.up": ColwiseParallel(input_layouts=Shard(0)),
        "inner.down": RowwiseParallel(output_layouts=Shard(0)),
    }
    same(
        Two,
        lambda cell: hp.parallelize_module(cell, mesh, prepared),
        values_of((4, 4)),
        lambda y: product(y[0]) + y[1].sum(),
    )

    with pytest.raises(
        NotImplementedError, match="ColwiseParallel shards linear layers and embeddings, not a LayerNorm"
    ):
        hp.parallelize_module(nn.LayerNorm((4,)), mesh, ColwiseParallel())


@run_on_ranks(2, 4, timeout=300)
def test_heads_that_do_not_divide_and_fused_projections():
    mesh = tp_mesh()
    for num_heads, num_kv_heads in ((3, 3), (3, 1), (4, 2)):  # on 4 ranks the last has none of 3 heads
        query, key, output = (
            hp.HeadParallel(role, num_heads=num_heads, num_kv_heads=num_kv_heads)
            for role in ("query", "key_value", "output")
        )
        plan = {"q": query, "k": key, "v": key, "o": output}
        same(
            lambda num_heads=num_heads, num_kv_heads=num_kv_heads: Attention(2 * num_heads, num_heads, num_kv_heads),
            lambda cell, plan=plan: hp.parallelize_module(cell, mesh, plan),
            values_of((2, 3, 2 * num_heads)),
        )

    class Gated(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Dense(4, 14)
            self.down = nn.Dense(7, 4)

        def construct(self, x: Any) -> Any:
            y = self.both(x)
            half = y.shape[-1] // 2
            return self.down(ops.silu(y[..., :half]) * y[..., half:])

    array = values_of((3, 4))
    fused = {"both": hp.FusedColwiseParallel({"gate": 7, "up": 7}), "down": RowwiseParallel()}
    expected = step(fill(Gated()), array, product, False)
    cell = hp.parallelize_module(fill(Gated()), mesh, fused)
    assert [one.name for one in cell.both.trainable_params()] == [
        *("both.weight_gate", "both.weight_up", "both.bias_gate", "both.bias_up"),
    ]
    found = step(cell, array, product, False)
    for kind in ("weight", "bias"):
        pieces = [found.pop(f"gradient of both.{kind}_{part}") for part in ("gate", "up")]
        found[f"gradient of both.{kind}"] = np.concatenate(pieces)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, **TOLERANCE, err_msg=name)


@run_on_ranks(4, timeout=300)
def test_a_mesh_of_two_axes():
    """One collective over both axes, or a weight that is cut on both dims, one per axis."""
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    both = {"weight_layouts": (Shard(0), Shard(1)), "output_layouts": Replicate(), "input_layouts": Replicate()}
    for plan in (
        {"up": ColwiseParallel(), "down": RowwiseParallel()},
        {"up": ColwiseParallel(**both), "down": RowwiseParallel(**both)},
    ):
        cell = same(
            lambda: Mlp(nn.Dense, 4, 7),
            lambda cell, plan=plan: hp.parallelize_module(cell, mesh, plan),
            values_of((2, 3, 4)),
        )
    assert cell.up.weight.placements == cell.down.weight.placements == (Shard(0), Shard(1))
    inner = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    cell = same(
        lambda: Mlp(nn.Dense, 4, 7), lambda cell: hp.parallelize_module(cell, mesh["b"], inner), values_of((2, 3, 4))
    )
    assert cell.up.weight.device_mesh.size() == 2


@run_on_ranks(2, timeout=300)
def test_shard_module():
    mesh = tp_mesh()
    plan = hp.ShardingPlan(
        plan={"up.weight": [Shard(0)], "up.bias": [Shard(0)], "down.weight": [Shard(1)]},
        input_plan={"input": [Replicate()]},
        output_plan={"output": [Replicate()]},
        return_local_tensor=["output"],
    )
    cell = same(lambda: Mlp(nn.Dense, 4, 7), lambda cell: hp.shard_module(cell, mesh, plan), values_of((2, 3, 4)))
    assert cell.up.weight.placements == (Shard(0),) and cell.down.bias.placements == (Replicate(),)


@run_on_ranks(2, timeout=300)
def test_clipping():
    mesh = tp_mesh()
    pair = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    x = Tensor(values_of((2, 4)))
    for order in (2.0, float("inf")):
        clipped = []
        for plan in (None, pair):
            cell = fill(Mlp(nn.Dense, 4, 7))
            if plan is not None:
                hp.parallelize_module(cell, mesh, plan)
            hp.backward(product(cell(x)))
            norm = get_platform().clip_grad_norm_(cell.trainable_params(), 0.5, order)
            gradients = [whole(hp.grad_of(one)) for one in cell.trainable_params()]
            clipped.append([whole(norm), *gradients])
        assert clipped[0][0] > 0.5
        for expected, found in zip(*clipped, strict=True):
            np.testing.assert_allclose(found, expected, **TOLERANCE)


class ScaledProduct(hp.DFunction):
    _op_name = "scaled_product_of_cells"

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, scale: float = 1.0) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return ops.matmul(x, weight) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight = ctx.saved_tensors
        return ops.matmul(gradient, weight.T) * ctx.scale, ops.matmul(x.T, gradient) * ctx.scale, None


class ProductLayout(hp.DistributedOp):
    def infer_layout(self, layouts: Any, extra_args: Any) -> Layout:
        x, weight = layouts[:2]
        return Layout.of(x.mesh, (x.shard_axes[0], weight.shard_axes[1]))


@run_on_ranks(2, timeout=300)
def test_functions_of_blocks():
    mesh = tp_mesh()
    ProductLayout("scaled_product_of_cells")
    arrays = [values_of((5, 4)), values_of((4, 3), 4)]

    def leaves(cuts: Any = None) -> list[Any]:
        plain = [Parameter(Tensor(array), name=f"leaf{place}") for place, array in enumerate(arrays)]
        if cuts is None:
            return plain
        return [hp.distribute_tensor(leaf, mesh, [cut]) for leaf, cut in zip(plain, cuts, strict=True)]

    def results(function: Any, tensors: list[Any]) -> list[np.ndarray]:
        value, gradients = hp.value_and_grad(lambda: (function(*tensors, 3.0) ** 2).sum(), tensors)()
        return [whole(value), *map(whole, gradients)]

    expected = results(lambda x, weight, scale: ops.matmul(x, weight) * scale, leaves())
    rows = (Shard(0), Replicate())
    on_blocks = hp.custom_shard(
        lambda x, weight, scale: ops.matmul(x, weight) * scale, mesh, [Shard(0)], ([Shard(0)], [Replicate()], None)
    )
    for function, cuts in (
        (ScaledProduct.apply, None),
        (ScaledProduct.apply, rows),
        (ScaledProduct.apply, (Replicate(), Shard(1))),
        (on_blocks, rows),
    ):
        for found, value in zip(results(function, leaves(cuts)), expected, strict=True):
            np.testing.assert_allclose(found, value, **TOLERANCE)
