"""The neutral operators: what the rules call an operator, with the rules' names and order of arguments, on blocks.

Every function here is one operator of the rule table, spelled as the rules read it (``dim``, ``keepdim``), and computed
by functions of MindSpore that have a kernel on a CPU as well as on Ascend. MindSpore's own operators whose arguments
agree with the rules' already are not repeated here: they are passed on as they came (:mod:`dtensor_names`).

Some look for blocks without elements. The most frequent of them name what can be called where there are none
(``on_elements``), so that a plan looks once and not at every call.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import mint, ops

from hyper_parallel.platform.mindspore import memory, private_api, steady, tensors
from hyper_parallel.platform.mindspore.dtensor_empty import zeros_of
from hyper_parallel.platform.mindspore.start import on_ascend

NEUTRAL: dict[str, Callable[..., Any]] = {}

# As MindSpore has them: its modules give replacements later (:mod:`dtensor_whole`), which look for DTensors first.
_linear, _matmul, _sum = mint.nn.functional.linear, mint.matmul, mint.sum
_reshape, _softmax = ops.reshape, ops.softmax


def _neutral(function: Callable[..., Any]) -> Callable[..., Any]:
    NEUTRAL[function.__name__] = function
    return function


def _dims(dim: Any) -> Any:
    return None if dim is None or (isinstance(dim, (tuple, list)) and not dim) else dim


# ---------------------------------------------------------------- reductions


@_neutral
def sum(input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    if 0 in input.shape:
        return _sum_of_nothing(input, _dims(dim), keepdim, dtype)
    return _sum(input, _dims(dim), keepdim, dtype=dtype)


def _reduced_shape(input: Any, dim: Any, keepdim: bool) -> list[int]:
    listed = range(input.ndim) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
    dims = {one % input.ndim for one in listed}
    return [1 if one in dims else size for one, size in enumerate(input.shape) if keepdim or one not in dims]


def _sum_of_nothing(input: Any, dim: Any, keepdim: bool, dtype: Any) -> Any:
    """See Note [Sums over nothing] in ``dtensor_empty.py``."""
    if dtype is None:
        dtype = input.dtype if "Float" in str(input.dtype) or "Complex" in str(input.dtype) else ms.int64
    return zeros_of(_reduced_shape(input, dim, keepdim), dtype, input)


@_neutral
def mean(input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return mint.mean(input, _dims(dim), keepdim, dtype=dtype)


@_neutral
def nanmean(input: Any, axis: Any = None, keepdims: bool = False, *, dtype: Any = None) -> Any:
    """The mean of the elements that are numbers."""
    if input.dtype not in (ms.float16, ms.bfloat16, ms.float32, ms.float64):
        raise TypeError(f"For 'nanmean', input should be floating point dtype, but got {input.dtype}.")
    are_none = mint.isnan(input)
    total = sum(input.masked_fill(are_none, 0), axis, keepdims, dtype)
    return total / sum(mint.logical_not(are_none), axis, keepdims).to(total.dtype)


@_neutral
def take(input: Any, index: Any) -> Any:
    """By position among all elements."""
    return _nothing_of(input, tuple(index.shape)) if 0 in index.shape else input.take(index)


@_neutral
def prod(input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    if 0 in input.shape:
        return _sum_of_nothing(input, _dims(dim), keepdim, dtype) + 1
    return mint.prod(input, dim, keepdim, dtype=dtype) if dim is not None else mint.prod(input, dtype=dtype)


@_neutral
def max(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return mint.max(input) if dim is None else mint.max(input, dim, keepdim)


@_neutral
def min(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return mint.min(input) if dim is None else mint.min(input, dim, keepdim)


@_neutral
def amax(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return mint.amax(input, () if dim is None else dim, keepdim)


@_neutral
def amin(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return mint.amin(input, () if dim is None else dim, keepdim)


@_neutral
def argmax(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return ops.argmax(input, dim, keepdim)


@_neutral
def argmin(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return ops.argmin(input, dim, keepdim)


@_neutral
def any(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    if 0 in input.shape:
        return tensors.zeros(tuple(_reduced_shape(input, _dims(dim), keepdim)), dtype=ms.bool_)
    return ops.any(input, dim, keepdim)


@_neutral
def all(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    if 0 in input.shape:
        return tensors.ones(tuple(_reduced_shape(input, _dims(dim), keepdim)), dtype=ms.bool_)
    return ops.all(input, dim, keepdim)


@_neutral
def std(input: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False) -> Any:
    return std_mean(input, dim, unbiased, keepdim)[0]


@_neutral
def var(input: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False) -> Any:
    dims = tuple(range(input.ndim)) if _dims(dim) is None else dim
    deviations = input - mint.mean(input, dims, True)
    count = input.numel() // builtins.max(1, mint.sum(input, dims).numel())
    return mint.sum(deviations * deviations, dims, keepdim) / (count - int(unbiased))


@_neutral
def std_mean(input: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False) -> Any:
    dims = tuple(range(input.ndim)) if _dims(dim) is None else dim
    return mint.sqrt(var(input, dims, unbiased, keepdim)), mint.mean(input, dims, keepdim)


@_neutral
def logsumexp(input: Any, dim: Any, keepdim: bool = False) -> Any:
    """Of logarithms that are the same on every rank; see ``steady.py``."""
    highest = mint.amax(input, dim, True).data
    highest = highest.masked_fill(ops.isinf(highest), 0)
    result = steady.log(_sum(mint.exp(input - highest), dim, keepdim))
    return result + (highest if keepdim else highest.reshape(result.shape))


@_neutral
def softmax(input: Any, dim: Any, dtype: Any = None) -> Any:
    return _softmax(input if dtype is None else input.to(dtype), dim)


@_neutral
def log_softmax(input: Any, dim: Any, dtype: Any = None) -> Any:
    return ops.log_softmax(input if dtype is None else input.to(dtype), dim)


@_neutral
def cumsum(input: Any, dim: int, dtype: Any = None) -> Any:
    if 0 in input.shape:
        return input * 1
    result = ops.cumsum(input, dim)
    return result if dtype is None else result.to(dtype)


@_neutral
def cumprod(input: Any, dim: int) -> Any:
    return ops.cumprod(input, dim)


@_neutral
def sort(input: Any, dim: int = -1, descending: bool = False) -> Any:
    return ops.sort(input, dim, descending)


@_neutral
def argsort(input: Any, dim: int = -1, descending: bool = False) -> Any:
    return ops.argsort(input, dim, descending)


@_neutral
def topk(input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    return ops.topk(input, k, dim, largest, sorted)


# ---------------------------------------------------------------- products


@_neutral
def matmul(input: Any, other: Any) -> Any:
    if 0 in input.shape or 0 in other.shape:
        return _product_of_nothing(input, other)
    return _matmul(input, other)


def _product_of_nothing(input: Any, other: Any) -> Any:
    """The same, with an empty dim somewhere."""
    left, right = tuple(input.shape), tuple(other.shape)
    batch = [builtins.max(sizes) if 0 not in sizes else 0 for sizes in _aligned(left[:-2], right[:-2])]
    rows = left[-2:-1] if len(left) > 1 else ()
    columns = right[-1:] if len(right) > 1 else ()
    return zeros_of((*batch, *rows, *columns), input.dtype, input, other)


def _aligned(first: Sequence[int], second: Sequence[int]) -> list[tuple[int, int]]:
    longest = builtins.max(len(first), len(second))
    padded = [(1,) * (longest - len(shape)) + tuple(shape) for shape in (first, second)]
    return list(zip(*padded, strict=True))


@_neutral
def bmm(input: Any, other: Any) -> Any:
    return matmul(input, other) if 0 in input.shape or 0 in other.shape else mint.bmm(input, other)


@_neutral
def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    if 0 in input.shape or 0 in weight.shape:
        product = zeros_of((*input.shape[:-1], *weight.shape[:-1]), input.dtype, input, weight)
        if bias is None:
            return product
        return zeros_of(product.shape, input.dtype, input, weight, bias) if 0 in product.shape else product + bias
    return _linear(input, weight, bias)


matmul.on_elements, linear.on_elements = _matmul, _linear


# ---------------------------------------------------------------- shapes


@_neutral
def reshape(input: Any, *shape: Any) -> Any:
    return _reshape(input, tuple(shape[0]) if isinstance(shape[0], (tuple, list)) else shape)


@_neutral
def flatten(input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    return mint.flatten(input, start_dim, end_dim)


@_neutral
def permute(input: Any, *dims: Any) -> Any:
    return ops.transpose(input, tuple(dims[0]) if isinstance(dims[0], (tuple, list)) else dims)


@_neutral
def transpose(input: Any, dim0: int, dim1: int) -> Any:
    order = list(range(input.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return ops.transpose(input, tuple(order))


@_neutral
def unsqueeze(input: Any, dim: int) -> Any:
    return ops.expand_dims(input, dim)


@_neutral
def squeeze(input: Any, *dim: Any) -> Any:
    return ops.squeeze(input, *dim)


@_neutral
def expand(input: Any, *sizes: Any) -> Any:
    wanted = tuple(sizes[0]) if isinstance(sizes[0], (tuple, list)) else sizes
    return ops.broadcast_to(input, wanted)


@_neutral
def broadcast_to(input: Any, *shape: Any) -> Any:
    return expand(input, *shape)


@_neutral
def view(input: Any, *shape: Any) -> Any:
    return reshape(input, *shape)


@_neutral
def tile(input: Any, repeats: Sequence[int]) -> Any:
    if 0 not in input.shape:
        return ops.tile(input, tuple(repeats))
    sizes = _aligned(input.shape, tuple(repeats))
    return zeros_of([size * times for size, times in sizes], input.dtype, input)


@_neutral
def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    return mint.cat(list(tensors), dim)


@_neutral
def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    return ops.stack(list(tensors), dim)


@_neutral
def split(input: Any, sections: Any, dim: int = 0) -> Any:
    return tuple(mint.split(input, sections, dim))


@_neutral
def split_with_sizes(input: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    return tuple(mint.split(input, tuple(sizes), dim))


@_neutral
def chunk(input: Any, chunks: int, dim: int = 0) -> Any:
    return tuple(mint.chunk(input, chunks, dim))


@_neutral
def unbind(input: Any, dim: int = 0) -> Any:
    dim %= input.ndim
    shape = (*input.shape[:dim], *input.shape[dim + 1 :])
    return tuple(ops.reshape(one, shape) for one in mint.split(input, 1, dim))


@_neutral
def narrow(input: Any, dim: int, start: int, length: int) -> Any:
    if start == 0 and length == input.shape[dim]:
        return input
    index = [slice(None)] * input.ndim
    index[dim] = slice(start, start + length)
    return getitem(input, tuple(index))


@_neutral
def flip(input: Any, *dims: Any) -> Any:
    return mint.flip(input, tuple(dims[0]) if isinstance(dims[0], (tuple, list)) else dims)


@_neutral
def tril(input: Any, diagonal: int = 0) -> Any:
    return input if 0 in input.shape else ops.tril(input, diagonal)


@_neutral
def triu(input: Any, diagonal: int = 0) -> Any:
    return input if 0 in input.shape else ops.triu(input, diagonal)


@_neutral
def diagonal(input: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return ops.diagonal(input, offset, dim1, dim2)


@_neutral
def pad(input: Any, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    return ops.pad(input, tuple(pad), mode, value)


# ---------------------------------------------------------------- reading and writing by position


@_neutral
def getitem(input: Any, index: Any) -> Any:
    """``input[index]``. Ranges without elements are made of zeros: their gradient has no kernel on a CPU."""
    if takes_nothing(input.shape, index):
        with private_api.no_grad():
            shape = tuple(input[index].shape)
        return zeros_of(shape, input.dtype, input)
    return input[index]


def _dim_of(shape: Sequence[int], entries: tuple[Any, ...], place: int) -> int:
    taken = [entry for entry in entries if entry is not None and entry is not Ellipsis]
    dim = builtins.sum(1 for entry in entries[:place] if entry is not None and entry is not Ellipsis)
    if builtins.any(entry is Ellipsis for entry in entries[:place]):
        dim += len(shape) - len(taken)
    return dim


def takes_nothing(shape: Sequence[int], index: Any) -> bool:
    """Whether a range of the index has no elements."""
    entries = index if isinstance(index, tuple) else (index,)
    return builtins.any(
        isinstance(entry, slice) and not len(range(*entry.indices(shape[_dim_of(shape, entries, place)])))
        for place, entry in enumerate(entries)
    )


def _nothing_of(tensor: Any, shape: tuple[int, ...]) -> Any:
    """A tensor without elements that keeps ``tensor`` in the graph."""
    return zeros_of(shape, tensor.dtype, tensor)


@_neutral
def index_select(input: Any, dim: int, index: Any) -> Any:
    if 0 in index.shape:
        dim %= input.ndim
        return _nothing_of(input, (*input.shape[:dim], 0, *input.shape[dim + 1 :]))
    return ops.gather(input, index, dim)


@_neutral
def embedding(weight: Any, indices: Any, padding_idx: int | None = None) -> Any:
    if 0 in indices.shape or 0 in weight.shape:
        return zeros_of((*indices.shape, weight.shape[1]), weight.dtype, weight)
    return ops.gather(weight, indices, 0)


@_neutral
def gather(input: Any, dim: int, index: Any) -> Any:
    return mint.gather(input, dim, index)


@_neutral
def one_hot(input: Any, num_classes: int = -1) -> Any:
    return ops.one_hot(input, num_classes)


# ---------------------------------------------------------------- Fourier transforms
# Of a signal with a real spectrum, by those of a real signal; MindSpore's own are right at every second call only.

_REVERSED = {None: "forward", "backward": "forward", "forward": "backward", "ortho": "ortho"}


def _hermitian(dims: str) -> None:
    """``hfft`` and ``ihfft`` along one dim, two or several, as ``dims`` says."""
    names = ("s" if dims else "n", "dim", "norm")
    irfft, rfft = getattr(ops, f"irfft{dims}"), getattr(ops, f"rfft{dims}")

    def reversed_norm(given: tuple[Any, ...], more: dict[str, Any]) -> dict[str, Any]:
        settings = dict(zip(names, given, strict=False)) | more
        return settings | {"norm": _REVERSED[settings.get("norm")]}

    def hfft(input: Any, *given: Any, **more: Any) -> Any:
        return irfft(ops.conj(input) if input.is_complex() else input, **reversed_norm(given, more))

    def ihfft(input: Any, *given: Any, **more: Any) -> Any:
        return ops.conj(rfft(input, **reversed_norm(given, more)))

    for transform in (hfft, ihfft):
        transform.__name__ = f"fft_{transform.__name__}{dims}"
        _neutral(transform)


for _dims_name in ("", "2", "n"):
    _hermitian(_dims_name)


# ---------------------------------------------------------------- writing in place
# MindSpore's own in-place operators do not change a tensor on a CPU. ``copy_`` does and is recorded, but a leaf that is
# written by it without being recorded is a leaf no longer; so such a write goes into the memory itself.


@_neutral
def copy_(input: Any, src: Any) -> Any:
    if on_ascend():
        return input.copy_(src)
    if private_api.is_recording():
        return input.copy_(clone(src))  # of a view MindSpore takes the whole memory
    values = src if src.dtype == input.dtype else src.to(input.dtype)
    if tuple(values.shape) != tuple(input.shape):
        values = ops.broadcast_to(values, tuple(input.shape))
    memory.copy_into(input, memory.memory_of(values))
    return input


@_neutral
def zero_(input: Any) -> Any:
    return copy_(input, ops.zeros_like(input))


@_neutral
def fill_(input: Any, value: Any) -> Any:
    return copy_(input, ops.zeros_like(input) + value)


def in_place(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The form of an operator that writes its result into its first argument."""

    def write(input: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(input, *args, **kwargs)
        return copy_(input, result if result.dtype == input.dtype else result.to(input.dtype))

    write.__name__ = name
    return write


for _name, _function in {
    "add_": lambda x, y, alpha=1: x + (y if alpha == 1 else y * alpha),
    "sub_": lambda x, y, alpha=1: x - (y if alpha == 1 else y * alpha),
    "mul_": lambda x, y: x * y,
    "div_": lambda x, y: x / y,
    "exp_": mint.exp,
    "sqrt_": mint.sqrt,
    "neg_": mint.neg,
    "relu_": mint.nn.functional.relu,
    "clamp_": mint.clamp,
    "masked_fill_": lambda x, mask, value: x.masked_fill(mask, value),
}.items():
    NEUTRAL[_name] = in_place(_name, _function)


# ---------------------------------------------------------------- the same bits on every rank

for _function in map(steady.__dict__.__getitem__, steady.__all__):
    NEUTRAL[_function.__name__] = _function


# ---------------------------------------------------------------- layers


@_neutral
def layer_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """The normalised values only; MindSpore's kernel refuses tensors without elements."""
    first = input.ndim - len(normalized_shape)
    if 0 in input.shape:
        return zeros_of(input.shape, input.dtype, input, weight, bias)
    shape = tuple(normalized_shape)
    weight = ops.ones(shape, input.dtype) if weight is None else weight
    bias = ops.zeros(shape, input.dtype) if bias is None else bias
    return ops.LayerNorm(first, first, eps)(input, weight, bias)[0]


@_neutral
def batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = False,
) -> Any:
    """The normalised values only; in training the running statistics are moved."""
    return ops.BatchNorm(training, eps, momentum)(input, weight, bias, running_mean, running_var)[0]


@_neutral
def conv2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    pad_mode: str = "valid",
) -> Any:
    size = tuple(weight.shape[2:])
    result = ops.Conv2D(weight.shape[0], size, 1, pad_mode, padding, stride, dilation, groups)(input, weight)
    return result if bias is None else ops.bias_add(result, bias)


@_neutral
def conv_transpose2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
    pad_mode: str = "valid",
    space: Sequence[int] = (),
) -> Any:
    """``space``: height and width of the result; MindSpore asks for its whole shape."""
    shape = (input.shape[0], weight.shape[1] * groups, *space)
    size = tuple(weight.shape[2:])
    convolve = ops.Conv2DTranspose(weight.shape[0], size, pad_mode, padding, None, 1, stride, dilation, groups)
    return convolve(input, weight, shape)


@_neutral
def conv_transpose3d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
    pad_mode: str = "valid",
) -> Any:
    channels, size = (weight.shape[0], weight.shape[1] * groups), tuple(weight.shape[2:])
    settings = (pad_mode, padding, stride, dilation, groups, output_padding)
    return ops.Conv3DTranspose(*channels, size, 1, *settings)(input, weight)


@_neutral
def contiguous(input: Any) -> Any:
    return input.contiguous()


@_neutral
def clone(input: Any) -> Any:
    return ops.logical_or(input, input) if input.dtype == ms.bool_ else input * 1


@_neutral
def zeros_like(input: Any, dtype: Any = None) -> Any:
    return tensors.zeros(tuple(input.shape), dtype=dtype or input.dtype)


@_neutral
def ones_like(input: Any, dtype: Any = None) -> Any:
    return tensors.ones(tuple(input.shape), dtype=dtype or input.dtype)


@_neutral
def full_like(input: Any, fill_value: Any, dtype: Any = None) -> Any:
    return ops.full(tuple(input.shape), fill_value, dtype=dtype or input.dtype)


@_neutral
def new_zeros(input: Any, size: Any, dtype: Any = None) -> Any:
    return tensors.zeros(tuple(size), dtype=dtype or input.dtype)


@_neutral
def new_ones(input: Any, size: Any, dtype: Any = None) -> Any:
    return tensors.ones(tuple(size), dtype=dtype or input.dtype)


@_neutral
def detach(input: Any) -> Any:
    return input.data
