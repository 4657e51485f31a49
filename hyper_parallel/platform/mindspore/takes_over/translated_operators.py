"""Operators of MindSpore whose arguments are put into the rules' words one by one; see ``translation.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import ops

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base.start import on_ascend
from hyper_parallel.platform.mindspore.operators.all_operators import NEUTRAL
from hyper_parallel.platform.mindspore.takes_over import translation
from hyper_parallel.platform.mindspore.takes_over.translation import (
    COMPOSED,
    TRANSLATED,
    Call,
    composes,
    passed_on,
    reads_attributes,
    renamed,
    translates,
)

__all__ = ["RANDOM"]

# ---------------------------------------------------------------- reductions


@translates("ReduceSum")
def _reduce_sum(input: Any, axis: Any = (), keep_dims: bool = False, skip_mode: bool = False) -> Call:
    if skip_mode and isinstance(axis, (tuple, list)) and not axis:
        return NEUTRAL["clone"], (input,), {}
    return TRANSLATED["SumExt"](input, axis, keep_dims)


def _extreme_with_place(neutral: str) -> Callable[..., Any]:
    """These give the places first."""

    def find(input: Any, axis: int = 0, keep_dims: bool = False) -> Any:
        values, places = translation.dispatch(NEUTRAL[neutral], (input, axis, keep_dims), {})
        return places, values

    return find


@composes("ArgMinExt", "DeprecatedArgmin")
def _argmin_method(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """``x.argmin``, whose places are 32-bit numbers on a CPU."""
    places = translation.dispatch(NEUTRAL["argmin"], (input, dim, keepdim), {})
    return places if on_ascend() else places.to(ms.int32)


def _place_of_extreme(neutral: str) -> Callable[..., Any]:
    def find(input: Any, axis: int = -1, output_type: Any = ms.int32) -> Any:
        dtype = private_api.dtype_of_id(output_type) if isinstance(output_type, int) else output_type
        return translation.dispatch(NEUTRAL[neutral], (input, axis), {}).to(dtype)

    return find


COMPOSED.update(
    {
        "ArgMaxWithValue": _extreme_with_place("max"),
        "ArgMinWithValue": _extreme_with_place("min"),
        "Argmax": _place_of_extreme("argmax"),
        "Argmin": _place_of_extreme("argmin"),
    }
)


@translates("ReduceStd")
def _reduce_std(input: Any, axis: Any = (), unbiased: bool = True, keep_dims: bool = False) -> Call:
    return NEUTRAL["std_mean"], (input, tuple(axis) or None, unbiased, keep_dims), {}


_DEFAULT_CORRECTION = 1 if on_ascend() else 0  # of the methods; the functions always say it


@translates("Std", "DeprecatedStd")
def _std(
    input: Any, dim: Any = None, correction: Any = _DEFAULT_CORRECTION, keepdim: bool = False, **kwargs: Any
) -> Call:
    given = {"dim": dim, "keepdim": keepdim} | renamed(kwargs)
    unbiased = bool(given.pop("unbiased", given.pop("ddof", correction)))
    return NEUTRAL["std"], (input, given["dim"], unbiased, given["keepdim"]), {}


@translates("Var")
def _var(
    input: Any, dim: Any = None, correction: Any = _DEFAULT_CORRECTION, keepdim: bool = False, **kwargs: Any
) -> Call:
    _, args, _ = _std(input, dim, correction, keepdim, **kwargs)
    return NEUTRAL["var"], args, {}


@translates("DeprecatedVar")
def _var_of_all(input: Any, axis: Any = None, ddof: int = 0, keepdims: bool = False) -> Call:
    return NEUTRAL["var"], (input, axis, bool(ddof), keepdims), {}


@translates("CumsumExt", "CumSum")
def _cumsum(input: Any, axis: int, exclusive: Any = False, reverse: Any = False) -> Call:
    if exclusive is True or reverse is True:
        return passed_on("CumSum", lambda x, *rest: ops.CumSum(bool(exclusive), bool(reverse))(x, axis)), (input,), {}
    return NEUTRAL["cumsum"], (input, axis), {}


# ---------------------------------------------------------------- softmax, products


@translates("Softmax")
def _softmax(input: Any, axis: Any = -1) -> Call:
    axis = axis[0] if isinstance(axis, (tuple, list)) and len(axis) == 1 else axis
    return NEUTRAL["softmax"], (input, axis), {}


@translates("LogSoftmax", "LogSoftmaxExt")
def _log_softmax(input: Any, axis: Any = -1, dtype: Any = None) -> Call:
    given = renamed({"dtype": dtype}) if dtype is not None else {}
    return NEUTRAL["log_softmax"], (input, axis), given


@composes("MatMul")
def _matmul(first: Any, second: Any, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    return ops.matmul(
        first.swapaxes(-1, -2) if transpose_a else first, second.swapaxes(-1, -2) if transpose_b else second
    )


COMPOSED["BatchMatMul"] = _matmul


@composes("BiasAdd")
def _bias_add(input: Any, bias: Any, data_format: Any = 0) -> Any:
    return input + bias.reshape((1, -1, *(1,) * (input.ndim - 2)))


# ---------------------------------------------------------------- shapes


@composes("TExt")
def _t(input: Any) -> Any:
    return ops.transpose(input, (1, 0)) if input.ndim == 2 else input


@composes("Flatten")
def _flatten(input: Any) -> Any:
    return input.reshape((input.shape[0], -1))


@translates("Split")
def _split(input: Any, axis: int = 0, output_num: int = 1) -> Call:
    return NEUTRAL["split"], (input, input.shape[axis] // output_num, axis), {}


@composes("ExpandAs")
def _expand_as(input: Any, other: Any) -> Any:
    return ops.broadcast_to(input, tuple(other.shape))


@composes("DeprecatedRepeatInterleave", "RepeatInterleaveInt")
def _repeat_interleave(input: Any, repeats: int, dim: Any = None, output_size: Any = None) -> Any:
    return ops.repeat_interleave(input.reshape(-1) if dim is None else input, repeats, 0 if dim is None else dim)


# ---------------------------------------------------------------- positions


@composes("Gather")
def _gather(input: Any, indices: Any, axis: int = 0, batch_dims: int = 0) -> Any:
    if batch_dims == 0 and input.ndim == 2 and axis == 0:
        return translation.dispatch(NEUTRAL["embedding"], (input, indices), {})
    if batch_dims == 0 and indices.ndim == 1:
        return translation.dispatch(NEUTRAL["index_select"], (input, axis, indices), {})
    return translation.dispatch(
        passed_on("Gather", lambda x, i: ops.gather(x, i, axis, batch_dims)), (input, indices), {}
    )


@translates("Embedding")
def _embedding(indices: Any, weight: Any, padding_idx: Any = None, *rest: Any) -> Call:
    return NEUTRAL["embedding"], (weight, indices), {} if padding_idx is None else {"padding_idx": padding_idx}


@translates("TopK")
def _topk(input: Any, k: int) -> Call:
    return NEUTRAL["topk"], (input, k), {}


@translates("OneHot", "OneHotExt")
def _one_hot(input: Any, depth: int, on: Any = None, off: Any = None, axis: int = -1) -> Call:
    if axis not in (-1, input.ndim):
        return passed_on("OneHot", lambda x: ops.one_hot(x, depth, on, off, axis)), (input,), {}
    return passed_on("one_hot", lambda x: ops.one_hot(x, depth, on, off, axis)), (input,), {}


@composes("Slice")
def _slice(input: Any, begin: Any, size: Any) -> Any:
    ranges = zip(begin, size, input.shape, strict=True)
    return input[tuple(slice(start, end if length == -1 else start + length) for start, length, end in ranges)]


@composes("StridedSlice")
def _strided_slice(input: Any, begin: Any, end: Any, strides: Any, *masks: int) -> Any:
    begin_mask, end_mask, ellipsis_mask, new_mask, shrink_mask = (*masks, 0, 0, 0, 0, 0)[:5]
    index: list[Any] = []
    for place, (start, stop, step) in enumerate(zip(begin, end, strides, strict=True)):
        bit = 1 << place
        if ellipsis_mask & bit:
            index.append(Ellipsis)
        elif new_mask & bit:
            index.append(None)
        elif shrink_mask & bit:
            index.append(start)
        else:
            index.append(slice(None if begin_mask & bit else start, None if end_mask & bit else stop, step))
    return input[tuple(index)]


# ---------------------------------------------------------------- layers


@composes("LayerNorm")
def _layer_norm(
    input: Any, weight: Any, bias: Any, begin_norm: int = 1, begin_params: int = 1, eps: float = 1e-7
) -> Any:
    """MindSpore's own gives mean and variance as well, which its layers drop."""
    first = begin_norm % input.ndim
    shape = tuple(input.shape[first:])
    normalised = translation.dispatch(NEUTRAL["layer_norm"], (input, shape, weight, bias, eps), {})
    return normalised, _Unused("LayerNorm", "mean"), _Unused("LayerNorm", "variance")


@composes("BatchNorm")
def _batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    is_training: bool = False,
    eps: float = 1e-5,
    momentum: float = 0.1,
    data_format: Any = 0,
) -> Any:
    """MindSpore's own gives the statistics as well, which its layers drop."""
    given = (input, weight, bias, mean, variance, is_training, momentum, eps, False)
    normalised = translation.dispatch(NEUTRAL["batch_norm"], given, {})
    return normalised, *(_Unused("BatchNorm", "statistics") for _ in range(4))


class _Unused:
    """A result that MindSpore's operator has and nobody uses; an error for those who do."""

    def __init__(self, op: str, name: str) -> None:
        self._what = f"the {name} that {op} returns"

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{self._what} is not there for distributed tensors; compute it with mean() and var()")


@composes("Dropout")
def _dropout(input: Any, keep_prob: float = 0.5, seed0: int = 0, seed1: int = 0) -> Any:
    return translation.dispatch(RANDOM["dropout"], (input, 1.0 - keep_prob), {}), _Unused("Dropout", "mask")


@composes("DropoutExt", "FuncDropoutExt")
def _dropout_ext(input: Any, p: float = 0.5, training: Any = True, *rest: Any) -> Any:
    return translation.dispatch(RANDOM["dropout"], (input, p, training is not False), {})


@composes("InplaceNormal")
def _normal_(input: Any, mean: float = 0.0, std: float = 1.0, *state: Any) -> Any:
    return translation.dispatch(RANDOM["normal_"], (input, mean, std), {})


@composes("InplaceUniform")
def _uniform_(input: Any, low: float = 0.0, high: float = 1.0, *state: Any) -> Any:
    return translation.dispatch(RANDOM["uniform_"], (input, low, high), {})


def _random(name: str) -> Callable[..., Any]:
    def draw(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"{name} is answered by the library")

    draw.__name__ = name
    return draw


RANDOM = {name: _random(name) for name in ("dropout", "normal_", "uniform_", "rand_like", "randn_like", "bernoulli_")}


# ---------------------------------------------------------------- dtypes, copies, writing


@composes("ToDtype", "Cast")
def _cast(input: Any, dtype: Any, *rest: Any) -> Any:
    return input.to(private_api.dtype_of_id(dtype) if isinstance(dtype, int) else dtype)


def _assign(name: str) -> Callable[..., Any]:
    """MindSpore's optimizers write by these; they are never recorded."""

    def write(tensor: Any, value: Any) -> Any:
        with private_api.no_grad():
            return translation.dispatch(NEUTRAL[name], (tensor, value), {})

    return write


COMPOSED.update({"Assign": _assign("copy_"), "AssignAdd": _assign("add_"), "AssignSub": _assign("sub_")})


@translates("NewZeros")
def _new_zeros(input: Any, size: Any, dtype: Any = None) -> Call:
    return NEUTRAL["new_zeros"], (input, size), renamed({"dtype": dtype}) if dtype is not None else {}


@translates("NewOnes")
def _new_ones(input: Any, size: Any, dtype: Any = None) -> Call:
    return NEUTRAL["new_ones"], (input, size), renamed({"dtype": dtype}) if dtype is not None else {}


@composes("typeof")
def _typeof(input: Any) -> Any:
    return ops.typeof(input._local) if hasattr(ops, "typeof") else ms.TensorType(input.dtype)


# ---------------------------------------------------------------- old primitives whose attributes matter


@reads_attributes("Tril", "Triu")
def _tril(primitive: Any, run: Callable[..., Any], input: Any) -> Call:
    return NEUTRAL["tril" if primitive.name == "Tril" else "triu"], (input, primitive.diagonal), {}


@reads_attributes("Sort")
def _sort(primitive: Any, run: Callable[..., Any], input: Any) -> Call:
    return NEUTRAL["sort"], (input, primitive.axis, primitive.descending), {}


@reads_attributes("Conv2D")
def _conv2d(primitive: Any, run: Callable[..., Any], input: Any, weight: Any) -> Call:
    if primitive.format != "NCHW":
        return passed_on("Conv2D", run), (input, weight), {}
    settings = (primitive.stride, primitive.padding, primitive.dilation, primitive.group, primitive.pad_mode)
    return NEUTRAL["conv2d"], (input, weight, None, *settings), {}


@reads_attributes("Conv2DBackpropInput", "Conv2DTranspose")
def _conv_transpose2d(primitive: Any, run: Callable[..., Any], input: Any, weight: Any, shape: Any) -> Call:
    if primitive.format != "NCHW":
        return passed_on("Conv2DTranspose", run), (input, weight, shape), {}
    settings = (primitive.stride, primitive.padding, 0, primitive.group, primitive.dilation, primitive.pad_mode)
    return NEUTRAL["conv_transpose2d"], (input, weight, None, *settings, tuple(shape)[2:]), {}


@reads_attributes("Conv3DTranspose")
def _conv_transpose3d(primitive: Any, run: Callable[..., Any], input: Any, weight: Any) -> Call:
    spatial = [tuple(sizes[2:]) for sizes in (primitive.stride, primitive.output_padding, primitive.dilation)]
    settings = (spatial[0], primitive.pad_list, spatial[1], primitive.group, spatial[2], primitive.pad_mode)
    return NEUTRAL["conv_transpose3d"], (input, weight, None, *settings), {}


@reads_attributes("MaxPool")
def _max_pool(primitive: Any, run: Callable[..., Any], input: Any) -> Call:
    if primitive.format != "NCHW":
        return passed_on("MaxPool", run), (input,), {}
    settings = (primitive.kernel_size, primitive.strides, primitive.pad_mode)
    return passed_on("max_pool2d", lambda block, *settings: run(block)), (input, *settings), {}
