"""Calls of MindSpore's operators that between them use every rule which MindSpore's kernels on a CPU can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import mindspore.mint.nn.functional as F
import numpy as np
from mindspore import Tensor, mint, nn, ops

from tests.shard.mindspore_function_samples import FAMILIES, SINGLE


@dataclass(frozen=True)
class Sample:
    """``call`` on tensors of these values; ``tolerance`` is wide where MindSpore's kernel computes in float32."""

    label: str
    call: Callable[..., Any]
    arrays: tuple[np.ndarray, ...]
    tolerance: float = 1e-9
    rule: str = ""  # the rule that it is for; MindSpore may have no kernel for such a one
    has_gradient: bool = True


def array(*shape: int, low: float = -2.0, high: float = 2.0, dtype: Any = np.float64) -> np.ndarray:
    """Random values, the same on every rank."""
    seed = sum((place + 1) * size for place, size in enumerate(shape))
    return (np.random.RandomState(seed).rand(*shape) * (high - low) + low).astype(dtype)


def _samples() -> list[Sample]:
    found: list[Sample] = []

    def add(label: str, call: Callable[..., Any], *arrays: np.ndarray, tolerance: float = 1e-9) -> None:
        found.append(Sample(label, call, arrays, tolerance))

    x, y, row, unit = array(5, 3), array(3, 5).T.copy(), array(3), array(5, 3, low=0.1, high=0.9)
    whole = np.arange(15).reshape(5, 3) % 7 + 1
    truth = whole % 2 == 0
    single = {"dtype": np.float32}

    # one tensor, element by element
    for name in (
        *(
            "abs",
            "ceil",
            "cos",
            "cosh",
            "erf",
            "erfc",
            "exp",
            "expm1",
            "floor",
            "isfinite",
            "isinf",
            "neg",
            "reciprocal",
        ),
        *("round", "sigmoid", "sign", "sin", "sinh", "square", "tan", "tanh", "trunc", "isnan"),
    ):
        add(name, getattr(mint, name), x)
    for name in ("sqrt", "rsqrt", "log", "log1p", "atanh", "erfinv"):
        add(name, getattr(mint, name), unit, tolerance=1e-5)
    for name in ("acos", "asin", "atan", "asinh", "digamma", "lgamma"):
        add(name, getattr(ops, name), unit, tolerance=1e-5)
    add("acosh", ops.acosh, unit + 1)
    for name in ("relu", "relu6", "silu", "hardsigmoid", "hardswish", "hardshrink", "selu", "gelu", "softshrink"):
        add(name, getattr(ops, name), x.astype(np.float32), tolerance=1e-5)
    for name in ("elu", "celu", "mish", "logit"):
        add(name, getattr(ops, name), array(5, 3, low=0.1, high=0.9, **single), tolerance=1e-4)
    add("leaky_relu", ops.leaky_relu, x.astype(np.float32), tolerance=1e-5)
    add("softplus", lambda a: ops.Softplus()(a), x.astype(np.float32), tolerance=1e-5)
    add("i0", ops.i0, x, tolerance=1e-6)
    add("logical_not", mint.logical_not, truth)
    add("clamp", lambda a: mint.clamp(a, -0.5, 0.7), x)
    add("nan_to_num", lambda a: ops.nan_to_num(a, 0.0, 1.0, -1.0), x.astype(np.float32), tolerance=1e-6)
    add("log10", ops.log10, unit)
    add("log_sigmoid", ops.logsigmoid, x.astype(np.float32), tolerance=1e-5)

    # two tensors, stretched or not
    for name in ("add", "sub", "mul", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge"):
        add(name, getattr(mint, name), x, y)
        add(f"{name}, stretched", getattr(mint, name), x, row)
    add("div", mint.div, x, unit + 1)
    add("div, stretched", mint.div, x, array(3, low=1, high=2))
    add("pow", mint.pow, unit, array(5, 3, low=1, high=2), tolerance=1e-7)
    add("atan2", ops.atan2, x, unit)
    for name in ("floor_divide", "remainder", "fmod"):
        add(name, lambda a, b, name=name: getattr(mint, name)(a, b), x, unit + 0.3)
    for name in ("logical_and", "logical_or", "logical_xor"):
        add(name, getattr(mint, name), truth, ~truth)
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        add(name, getattr(ops, name), whole.astype(np.int32), whole[::-1].astype(np.int32).copy())
    add("xlogy", mint.xlogy, unit, unit[::-1].copy())
    add("hypot", ops.hypot, x, y, tolerance=1e-6)
    add("nextafter", ops.nextafter, x, y)
    add("fmax", ops.fmax, x, y)
    add("lcm", ops.lcm, whole.astype(np.int32), whole[::-1].astype(np.int32).copy())
    add("gcd", ops.gcd, whole.astype(np.int32), whole[::-1].astype(np.int32).copy())
    add("lerp", lambda a, b: ops.lerp(a, b, 0.3), x.astype(np.float32), y.astype(np.float32), tolerance=1e-5)
    add("addcmul", lambda a, b, c: ops.addcmul(a, b, c, Tensor(0.5, ms.float64)), x, y, unit)
    add("addcdiv", lambda a, b, c: ops.addcdiv(a, b, c, Tensor(0.5, ms.float64)), x, y, unit + 1, tolerance=1e-6)
    add("where", lambda a, b: mint.where(a > 0, a, b), x, y)
    add("masked_fill", lambda a, b: a.masked_fill(b > 0, 3.0), x, y)
    add("numbers", lambda a: 2 / (a * a + 1.5) - a / 3 + (1 - a) ** 2, x)

    # sums and their like
    for label, dims in (("all", {}), ("one dim", {"dim": 0}), ("kept", {"dim": (0, 1), "keepdim": True})):
        add(f"sum, {label}", lambda a, dims=dims: mint.sum(a, **dims), x)
        add(f"mean, {label}", lambda a, dims=dims: mint.mean(a, **dims), x)
    add("sum by axis", lambda a: a.sum(axis=1, keepdims=True), x)
    add("prod", lambda a: mint.prod(a, 1), unit)
    add("max", lambda a: a.max(), x)
    add("min", lambda a: a.min(), x)
    add("max of a dim", lambda a: mint.max(a, 1), x)
    add("min of a dim", lambda a: mint.min(a, 0), x)
    add("amax", lambda a: ops.amax(a, 0), x)
    add("amin", lambda a: ops.amin(a, 1), x)
    add("argmax", lambda a: ops.argmax(a, dim=1), x)
    add("any", lambda a: ops.any(a, 0), truth)
    add("all", lambda a: ops.all(a, 1), truth)
    add("std", lambda a: a.std(), x, tolerance=1e-7)
    add("std_mean", lambda a: ops.std(a, 0), x.astype(np.float32), tolerance=1e-4)
    add("var", lambda a: a.var(0), x)
    add("norm", lambda a: a.norm(), x)
    add("logsumexp", lambda a: ops.logsumexp(a, 1), x)
    add("softmax", lambda a: ops.softmax(a, -1), x)
    add("softmax of rows", lambda a: ops.softmax(a, 0), x)
    add("log_softmax", lambda a: ops.log_softmax(a, -1), x, tolerance=1e-4)
    add("cumsum", lambda a: ops.cumsum(a, 0), x)
    add("topk", lambda a: ops.topk(a, 2)[0], x.astype(np.float32), tolerance=1e-6)
    add("sort", lambda a: ops.sort(a, 0)[0], x.astype(np.float32), tolerance=1e-6)

    # products
    add("matmul", lambda a, b: a @ b, x, array(3, 4))
    add("matmul of batches", mint.matmul, array(2, 5, 3), array(3, 4))
    add("bmm", mint.bmm, array(2, 5, 3), array(2, 3, 4))
    add("linear", lambda a, w, b: F.linear(a, w, b), x, array(4, 3), array(4))
    add("linear of batches", lambda a, w: F.linear(a, w), array(2, 3, 5), array(4, 5))
    add("MatMul transposed", lambda a, b: ops.MatMul(transpose_b=True)(a, b), x, array(4, 3))
    add("bias_add", ops.bias_add, x.astype(np.float32), row.astype(np.float32), tolerance=1e-6)

    # shapes
    add("reshape", lambda a: a.reshape(3, 5), x)
    add("reshape into three", lambda a: a.reshape(2, 2, 3), array(4, 3))
    add("flatten", lambda a: mint.flatten(a, 0, 1), array(2, 3, 4))
    add("permute", lambda a: ops.transpose(a, (2, 0, 1)), array(2, 5, 3))
    add("transpose", lambda a: mint.transpose(a, 0, 1), x)
    add("unsqueeze", lambda a: a.unsqueeze(1), x)
    add("squeeze", lambda a: a.squeeze(1), array(5, 1))
    add("expand", lambda a: a.broadcast_to((2, 5, 3)), x)
    add("tile", lambda a: ops.tile(a, (2, 1)), x)
    add("cat", lambda a, b: mint.cat([a, b], 0), x, array(2, 3))
    add("stack", lambda a, b: ops.stack([a, b], 1), x, y)
    add("split", lambda a: mint.split(a, 2, 0), x)
    add("chunk", lambda a: mint.chunk(a, 2, 1), array(5, 4))
    add("narrow", lambda a: mint.narrow(a, 0, 1, 2), x)
    add("flip", lambda a: mint.flip(a, (0,)), x)
    add("tril", ops.tril, x)
    add("triu", lambda a: mint.triu(a, 1), x)
    add("diagonal", lambda a: ops.diagonal(a), x)
    add("iteration", lambda a: list(a)[1] * 2, array(2, 3))

    # positions
    ids = np.array([[0, 4, 1], [2, 2, 3]], np.int32)
    add("one row", lambda a: a[1], x)
    add("ranges", lambda a: a[1:3, :2], x)
    add("the last column", lambda a: a[..., -1], x)
    add("a new dim", lambda a: a[:, None], x)
    add("rows by a tensor", lambda a, i: a[i], x, ids[0])
    add("embedding", lambda i, w: ops.gather(w, i, 0), ids, array(5, 4))
    add("index_select", lambda a, i: a.index_select(1, i), array(2, 5), ids[0])
    add("gather", lambda a, i: mint.gather(a, 1, i), array(2, 5), ids.astype(np.int64))
    add("one_hot", lambda i: ops.one_hot(i, 5), ids)

    # layers and losses
    norm = ops.LayerNorm(-1, -1, 1e-5)
    add("layer_norm", lambda a, w, b: norm(a, w, b)[0], array(5, 4), array(4), array(4, low=0), tolerance=1e-4)
    add("cross_entropy", ops.cross_entropy, array(3, 5), ids[0])
    add("mse", ops.mse_loss, x, y, tolerance=1e-6)
    add("l1", ops.l1_loss, x, y, tolerance=1e-6)
    add("casts", lambda a: a.to(ms.float32).to(ms.float64) * 2, x, tolerance=1e-6)

    # cells that are made of several operators
    add("MaxPool1d", nn.MaxPool1d(2, 2), array(3, 4, 6, **single), tolerance=1e-5)
    add(
        "PoissonNLLLoss",
        lambda a, b: nn.PoissonNLLLoss()(a, b),
        x.astype(np.float32),
        unit.astype(np.float32),
        tolerance=1e-4,
    )
    add("Unflatten", nn.Unflatten(1, (3, 2)), array(5, 6))

    # writing in place, into a tensor that was computed
    add("add_", lambda a, b: (a * 1).add_(b), x, y)
    add("mul_", lambda a: (a * 1).mul_(2.0), x)
    add("copy_", lambda a, b: (a * 1).copy_(b), x, y)

    # blocks without elements
    add("empty: add", mint.add, array(1, 3), row)
    add("empty: linear", lambda a, w, b: F.linear(a, w, b), array(1, 3), array(4, 3), array(4))
    add("empty: inner dim", lambda a, w, b: F.linear(a, w, b), array(2, 1), array(4, 1), array(4))
    add("empty: sum", lambda a: a.sum(), array(1, 3))
    add("empty: mean", lambda a: a.mean(), array(1, 3))
    add("empty: max", lambda a: mint.max(a, 0), array(1, 3))
    add("empty: softmax", lambda a: ops.softmax(a, -1), array(3, 1))
    add("empty: layer_norm", lambda a, w, b: norm(a, w, b)[0], array(1, 4), array(4), array(4, low=0), tolerance=1e-4)
    add("empty: cat", lambda a, b: mint.cat([a, b], 0), array(1, 3), array(2, 3))
    add("empty: tile", lambda a: ops.tile(a, (2, 1)), array(1, 3))
    add("empty: embedding", lambda i, w: ops.gather(w, i, 0), ids[0, :1], array(1, 4))

    def add_function(
        rule: str, call: Callable[..., Any], *arrays: np.ndarray, tolerance: float = SINGLE, has_gradient: bool = True
    ) -> None:
        number = sum(1 for sample in found if sample.rule == rule)
        label = f"{rule} {number}" if number else rule
        found.append(Sample(label, call, arrays, tolerance, rule, has_gradient))

    for add_family in FAMILIES:
        add_family(add_function)
    return found


SAMPLES = _samples()
