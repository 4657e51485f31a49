"""Plain tensors: making, cutting, casting and describing them, mapping over containers, and naming operators.

New tensors come from numpy memory: on a CPU MindSpore has no kernels for most of its functions that make tensors, and
on Ascend the copy is one transfer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, ops

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base import start
from hyper_parallel.platform.mindspore.base.memory import copy_into, from_array, memory_of, numpy_type
from hyper_parallel.platform.shared.op_names import canonical_name
from hyper_parallel.platform.shared.tensor_arguments import chunk_bounds, find_dtype, require_tensor, upward_slices
from hyper_parallel.platform.shared.trees import map_leaves

Device = str | int | None


# ---------------------------------------------------------------- types

_DTYPES = {
    name: getattr(ms, name)
    for name in (
        *("float16", "float32", "float64", "bfloat16", "int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "hifloat8"),
    )
    if hasattr(ms, name)
} | {"bool": ms.bool_}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ABBREVIATIONS = {
    **{"bf16": ms.bfloat16, "fp16": ms.float16, "half": ms.float16, "fp32": ms.float32, "float": ms.float32},
    **{"fp64": ms.float64, "double": ms.float64, "i8": ms.int8, "i16": ms.int16, "short": ms.int16, "i32": ms.int32},
    **{"int": ms.int32, "i64": ms.int64, "long": ms.int64, "u8": ms.uint8, "bool_": ms.bool_, "cfloat": ms.complex64},
    **{"cdouble": ms.complex128},
}
_FLOATS = tuple(_DTYPES[name] for name in _DTYPES if "float" in name)
_COMPLEX = (ms.complex64, ms.complex128)


def str_to_dtype(dtype_str: Any) -> Any:
    """The dtype named "float32", "torch.float32", "Float32" (as MindSpore prints it) or "fp32"; a dtype is returned."""
    if isinstance(dtype_str, ms.Type):
        return dtype_str
    return find_dtype(dtype_str, _DTYPES, _ABBREVIATIONS)


def is_dtype(value: Any) -> bool:
    """Whether ``value`` is a dtype; each has a class of its own."""
    return isinstance(value, ms.Type) and value in _NAMES


def dtype_name(dtype: Any) -> str:
    """``"float32"`` for ``mindspore.float32``."""
    return _NAMES[dtype]


def is_floating(tensor: Tensor) -> bool:
    return tensor.dtype in _FLOATS


def is_differentiable(tensor: Tensor) -> bool:
    """Whether tensors of this dtype can have a gradient."""
    return tensor.dtype in _FLOATS or tensor.dtype in _COMPLEX


def _dtype_or(dtype: Any, default: Any) -> Any:
    return default if dtype is None else str_to_dtype(dtype)


_require_tensor = functools.partial(require_tensor, Tensor)


def is_tensor(obj: object) -> bool:
    return isinstance(obj, Tensor)


def cross_entropy_sum(logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
    if logits.dtype in (ms.float16, ms.bfloat16):
        logits = ops.cast(logits, ms.float32)
    return ops.cross_entropy(logits, targets, ignore_index=ignored, reduction="sum")


def tensor_type_cast(input_data: Tensor, cast_type: Any) -> Tensor:
    """``input_data`` in another dtype, given as a dtype or by its name."""
    _require_tensor("tensor_type_cast", input_data)
    dtype = str_to_dtype(cast_type)
    return input_data if input_data.dtype == dtype else ops.cast(input_data, dtype)


def cast_fp_tensor(dtype: Any, x: Any) -> Any:
    """A floating-point tensor in ``dtype``; every other tensor and every other object is returned as it is."""
    return tensor_type_cast(x, dtype) if isinstance(x, Tensor) and is_floating(x) else x


def get_element_size(tensor: Tensor) -> int:
    """Bytes of one element."""
    _require_tensor("get_element_size", tensor)
    return tensor.itemsize


def get_tensor_storage_size(tensor: Tensor) -> int:
    """Bytes of the tensor's own elements, also when it is a view of a larger (or, expanded, a smaller) storage."""
    _require_tensor("get_tensor_storage_size", tensor)
    return tensor.numel() * tensor.itemsize


def why_no_computation_in(dtype: Any) -> str | None:
    """Why models cannot compute in this dtype here; None where they can."""
    if dtype != ms.bfloat16 or start.on_ascend():
        return None
    return "MindSpore has no kernels on a CPU for look-ups, products and sums in it; use float16, or Ascend"


def is_meta(tensor: Tensor) -> bool:
    """Whether the tensor has a shape and no memory."""
    return tensor.is_meta


def tensor_to_numpy(tensor: Tensor) -> np.ndarray:
    """The values as a numpy array, from any device, with or without gradient; bfloat16, which numpy lacks, as float32.

    Other CPU tensors share their memory with the array.
    """
    _require_tensor("tensor_to_numpy", tensor)
    if is_meta(tensor):
        raise ValueError(
            f"tensor_to_numpy: a tensor of shape {tuple(tensor.shape)} on the meta device has no values; "
            "materialise it first, for instance with init_parameters"
        )
    array = tensor.asnumpy() if start.on_ascend() else memory_of(tensor)
    return array.astype(np.float32) if tensor.dtype == ms.bfloat16 else array


# ---------------------------------------------------------------- new tensors


def _shape(size: int | Sequence[int]) -> tuple[int, ...]:
    return (int(size),) if isinstance(size, int | np.integer) else tuple(int(length) for length in size)


def _on(array: np.ndarray, dtype: Any, device: Device) -> Tensor:
    if device is not None and str(device).lower().startswith("meta"):
        return mint.empty(array.shape, dtype=dtype, device="meta")
    return from_array(array)


def arange(start: float, end: float | None = None, step: float = 1, dtype: Any = None, device: Device = None) -> Tensor:
    """``arange(end)`` or ``arange(start, end, step)``."""
    if end is None:
        start, end = 0, start
    floats = any(isinstance(number, float) for number in (start, end, step))
    dtype = _dtype_or(dtype, ms.float32 if floats else ms.int64)
    return _on(np.arange(start, end, step).astype(numpy_type(dtype)), dtype, device)


def zeros(size: int | Sequence[int], dtype: Any = None, device: Device = None) -> Tensor:
    return full(size, 0.0, dtype, device)


def ones(size: int | Sequence[int], dtype: Any = None, device: Device = None) -> Tensor:
    return full(size, 1.0, dtype, device)


def full(size: int | Sequence[int], fill_value: Any, dtype: Any = None, device: Device = None) -> Tensor:
    """A constant tensor; without ``dtype`` bools give bools, integers int64, complex numbers complex64 and others
    float32.
    """
    kinds = ((bool, ms.bool_), (int, ms.int64), (complex, ms.complex64))
    dtype = _dtype_or(dtype, next((found for kind, found in kinds if isinstance(fill_value, kind)), ms.float32))
    return _on(np.full(_shape(size), fill_value, numpy_type(dtype)), dtype, device)


def empty(size: int | Sequence[int], dtype: Any = None, device: Device = None) -> Tensor:
    dtype = _dtype_or(dtype, ms.float32)
    return _on(np.empty(_shape(size), numpy_type(dtype)), dtype, device)


def full_like(tensor: Tensor, fill_value: float, dtype: Any = None) -> Tensor:
    return full(tensor.shape, fill_value, _dtype_or(dtype, tensor.dtype), tensor.device)


def empty_like(tensor: Tensor, *, dtype: Any = None, device: Device = None, pin_memory: bool = False) -> Tensor:
    """A tensor of the same shape, not initialised; memory that MindSpore allocates on the host is pinned by itself."""
    return empty(tensor.shape, _dtype_or(dtype, tensor.dtype), device or tensor.device)


def new_tensor(tensor_shape: Sequence[int], tensor_type: Any, device: Device) -> Tensor:
    """A tensor that is not initialised."""
    return empty(tensor_shape, str_to_dtype(tensor_type), device)


def new_zero_parameter(param_shape: Sequence[int], param_type: Any, requires_grad: bool, device: Device) -> Parameter:
    return Parameter(zeros(param_shape, str_to_dtype(param_type), device), requires_grad=requires_grad)


def list_to_size(size_list: Sequence[int]) -> tuple[int, ...]:
    return tuple(size_list)


def from_numpy(array: np.ndarray, dtype: Any, device: Any = None) -> Tensor:
    """A tensor with the array's values."""
    return _on(np.array(array).astype(numpy_type(dtype)), dtype, device)


def own_copy(tensor: Tensor) -> Tensor:
    """The values in contiguous memory of their own, without gradient history; of a meta tensor, another one."""
    if tensor.is_meta:
        return mint.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if start.on_ascend():
        return ops.stop_gradient(tensor).contiguous() * 1 if is_differentiable(tensor) else mint.clone(tensor)
    return from_array(np.array(memory_of(tensor), order="C"))


def overwrite(target: Tensor, values: Tensor) -> None:
    """Copy ``values`` into the memory of ``target``; nothing is recorded."""
    if target.is_meta:
        return
    if start.on_ascend():
        target.copy_(values)
    else:
        copy_into(target, memory_of(values))


def detached(tensor: Tensor) -> Tensor:
    """The same memory without gradient history."""
    return tensor.data


# ---------------------------------------------------------------- cutting and joining


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    tensors = tuple(tensors)
    return tensors[0] * 1 if len(tensors) == 1 else mint.cat(tensors, dim)


def chunk(data: Tensor, split_dim: int, split_size: int, index: int) -> Tensor:
    """Part ``index`` of ``split_size`` parts along ``split_dim``, a view.

    Parts have ceil(size / split_size) rows, and all of them exist: the later ones may be short or empty.
    """
    _require_tensor("chunk", data)
    return narrow(data, split_dim, *chunk_bounds(data.shape, split_dim, split_size, index))


def narrow(data: Tensor, dim: int, begin: int, length: int) -> Tensor:
    """``length`` rows of ``dim`` from ``begin`` on, a view; of no rows, a new empty tensor."""
    if length == 0 or 0 in data.shape:
        shape = list(data.shape)
        shape[dim] = length
        return empty(shape, data.dtype)
    return mint.narrow(data, dim, begin, length)


def construct_strided_slice(x: Tensor, begin: Sequence[int], end: Sequence[int], stride: Sequence[int]) -> Tensor:
    """``x[begin[0]:end[0]:stride[0], begin[1]:end[1]:stride[1], ...]`` by Python's rules, negative strides included."""
    _require_tensor("construct_strided_slice", x)
    slices, reversed_dims = upward_slices(x.shape, begin, end, stride)
    shape = [len(range(*one.indices(size))) for one, size in zip(slices, x.shape, strict=False)]
    if 0 in shape or 0 in x.shape:
        return empty([*shape, *x.shape[len(shape) :]], x.dtype)
    x = x[slices]
    return ops.flip(x, tuple(reversed_dims)) if reversed_dims else x


# ---------------------------------------------------------------- gradients


def no_grad() -> Any:
    """A context in which no graph is recorded."""
    return private_api.no_grad()


def set_tensor_requires_grad(input_tensor: Tensor) -> Tensor:
    """Switch gradients on for the tensor, in place, and return it."""
    _require_tensor("set_tensor_requires_grad", input_tensor)
    if not is_differentiable(input_tensor):
        raise TypeError(
            f"set_tensor_requires_grad: a tensor of dtype {dtype_name(input_tensor.dtype)} and shape "
            f"{tuple(input_tensor.shape)} cannot have a gradient, only floating-point and complex tensors can"
        )
    input_tensor.requires_grad_()
    return input_tensor


# ---------------------------------------------------------------- containers and names


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """A copy of ``tree`` with ``fn`` applied to every leaf.

    Dicts, lists, tuples, named tuples, sets and dataclass instances are containers and keep their class; everything
    else, ``None`` included, is a leaf.
    """
    return map_leaves(fn, tree)


def apply_to_tensors(fn: Callable[[Tensor], Any], container: Any) -> Any:
    """A copy of ``container`` (see ``tree_map``) with ``fn`` applied to every tensor; all else is kept as it is."""
    return map_leaves(lambda leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf, container)


def get_op_name(func: Callable | str) -> str:
    """The canonical name of an operator, one for all spellings of the same computation; see
    ``platform/shared/op_names.py``.
    """
    if isinstance(func, str):
        return canonical_name(func)
    if isinstance(func, functools.partial):
        return get_op_name(func.func)
    if not callable(func):
        raise TypeError(f"get_op_name takes an operator, got {func!r} of type {type(func).__name__}")
    name = getattr(func, "__name__", None) or getattr(func, "name", None) or type(func).__name__
    owner = getattr(func, "__self__", None)
    if name == "apply" and isinstance(owner, type) and issubclass(owner, private_api.Function):
        return getattr(owner, "_op_name", None) or owner.__name__
    if getattr(func, "__module__", None) == "_operator":
        name = f"__{name.strip('_')}__"
    return canonical_name(name)
