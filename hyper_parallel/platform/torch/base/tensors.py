"""Plain tensors: making, cutting, casting and describing them, mapping over containers, and naming operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hyper_parallel.platform.shared.op_names import canonical_name
from hyper_parallel.platform.shared.tensor_arguments import chunk_bounds, find_dtype, require_tensor, upward_slices
from hyper_parallel.platform.shared.trees import map_leaves
from hyper_parallel.platform.torch.base.devices import get_device_type
from hyper_parallel.platform.torch.private_api import OpOverload

__all__ = [
    "apply_to_tensors",
    "arange",
    "cast_fp_tensor",
    "cat",
    "chunk",
    "construct_strided_slice",
    "cross_entropy_sum",
    "empty_like",
    "full_like",
    "get_element_size",
    "get_op_name",
    "get_tensor_storage_size",
    "is_tensor",
    "list_to_size",
    "new_tensor",
    "new_zero_parameter",
    "no_grad",
    "set_tensor_requires_grad",
    "str_to_dtype",
    "tensor_to_numpy",
    "tensor_type_cast",
    "tree_map",
    "zeros",
]

DType = torch.dtype | str
Device = torch.device | str | int | None


# ---------------------------------------------------------------------------------------------------------------------
# Types
# ---------------------------------------------------------------------------------------------------------------------

_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_DTYPE_ABBREVIATIONS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
}


def str_to_dtype(dtype_str: DType) -> torch.dtype:
    """The dtype named "torch.float32", "float32", "Float32" (as MindSpore prints it) or "fp32"; a dtype is returned."""
    if isinstance(dtype_str, torch.dtype):
        return dtype_str
    return find_dtype(dtype_str, _DTYPES, _DTYPE_ABBREVIATIONS)


def _optional_dtype(dtype: DType | None) -> torch.dtype | None:
    return None if dtype is None else str_to_dtype(dtype)


_require_tensor = functools.partial(require_tensor, torch.Tensor)


def is_tensor(obj: object) -> bool:
    return isinstance(obj, torch.Tensor)


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor, ignored: int) -> torch.Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=ignored, reduction="sum")


def tensor_type_cast(input_data: torch.Tensor, cast_type: DType) -> torch.Tensor:
    """``input_data`` in another dtype, given as a dtype or by its name."""
    _require_tensor("tensor_type_cast", input_data)
    return input_data.to(str_to_dtype(cast_type))


def cast_fp_tensor(dtype: DType, x: Any) -> Any:
    """A floating-point tensor in ``dtype``; every other tensor and every other object is returned as it is."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        return x
    return x.to(str_to_dtype(dtype))


def get_element_size(tensor: torch.Tensor) -> int:
    """Bytes of one element."""
    _require_tensor("get_element_size", tensor)
    return tensor.element_size()


def get_tensor_storage_size(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's own elements, also when it is a view of a larger (or, expanded, a smaller) storage."""
    _require_tensor("get_tensor_storage_size", tensor)
    return tensor.numel() * tensor.element_size()


_NUMPY_STAND_INS = {torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def tensor_to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The values as a numpy array, from any device, with or without gradient.

    Types that numpy lacks come in the smallest numpy type that holds them exactly: bfloat16 and float8 as float32,
    complex32 as complex64. Other CPU tensors share their memory with the array, as ``Tensor.numpy`` does.
    """
    _require_tensor("tensor_to_numpy", tensor)
    if tensor.is_meta:
        raise ValueError(
            f"tensor_to_numpy: a tensor of shape {tuple(tensor.shape)} on the meta device has no values; "
            "materialise it first, for instance with init_parameters"
        )
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    stand_in = _NUMPY_STAND_INS.get(tensor.dtype)
    if stand_in is None and tensor.is_floating_point() and tensor.element_size() == 1:
        stand_in = torch.float32
    if stand_in is not None:
        tensor = tensor.to(stand_in)
    return tensor.cpu().resolve_conj().resolve_neg().numpy()


# ---------------------------------------------------------------------------------------------------------------------
# New tensors
# ---------------------------------------------------------------------------------------------------------------------


def arange(
    start: float, end: float | None = None, step: float = 1, dtype: DType | None = None, device: Device = None
) -> torch.Tensor:
    """``arange(end)`` or ``arange(start, end, step)``."""
    if end is None:
        start, end = 0, start
    return torch.arange(start, end, step, dtype=_optional_dtype(dtype), device=device)


def zeros(size: int | Sequence[int], dtype: DType | None = None, device: Device = None) -> torch.Tensor:
    return torch.zeros(size, dtype=_optional_dtype(dtype), device=device)


def full_like(tensor: torch.Tensor, fill_value: float, dtype: DType | None = None) -> torch.Tensor:
    return torch.full_like(tensor, fill_value, dtype=_optional_dtype(dtype))


def empty_like(
    tensor: torch.Tensor, *, dtype: DType | None = None, device: Device = None, pin_memory: bool = False
) -> torch.Tensor:
    """A tensor of the same shape, not initialised. Without an accelerator there is nothing to pin memory for."""
    pin_memory = pin_memory and get_device_type() != "cpu"
    return torch.empty_like(tensor, dtype=_optional_dtype(dtype), device=device, pin_memory=pin_memory)


def new_tensor(tensor_shape: Sequence[int], tensor_type: DType, device: Device) -> torch.Tensor:
    """A tensor that is not initialised."""
    return torch.empty(tensor_shape, dtype=str_to_dtype(tensor_type), device=device)


def new_zero_parameter(
    param_shape: Sequence[int], param_type: DType, requires_grad: bool, device: Device
) -> torch.nn.Parameter:
    data = torch.zeros(param_shape, dtype=str_to_dtype(param_type), device=device)
    return torch.nn.Parameter(data, requires_grad=requires_grad)


def list_to_size(size_list: Sequence[int]) -> torch.Size:
    return torch.Size(size_list)


# ---------------------------------------------------------------------------------------------------------------------
# Cutting and joining
# ---------------------------------------------------------------------------------------------------------------------


def cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return torch.cat(tuple(tensors), dim=dim)


def chunk(data: torch.Tensor, split_dim: int, split_size: int, index: int) -> torch.Tensor:
    """Part ``index`` of ``split_size`` parts along ``split_dim``, a view.

    Parts have ceil(size / split_size) rows like those of ``torch.chunk``, but all of them exist: the later ones may be
    short or empty.
    """
    _require_tensor("chunk", data)
    return data.narrow(split_dim, *chunk_bounds(data.shape, split_dim, split_size, index))


def construct_strided_slice(
    x: torch.Tensor, begin: Sequence[int], end: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """``x[begin[0]:end[0]:stride[0], begin[1]:end[1]:stride[1], ...]`` by Python's rules, negative strides included."""
    _require_tensor("construct_strided_slice", x)
    slices, reversed_dims = upward_slices(x.shape, begin, end, stride)
    x = x[slices]
    return x.flip(reversed_dims) if reversed_dims else x


# ---------------------------------------------------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------------------------------------------------


def no_grad() -> torch.no_grad:
    """A context (or decorator) in which no graph is recorded."""
    return torch.no_grad()


def set_tensor_requires_grad(input_tensor: torch.Tensor) -> torch.Tensor:
    """Switch gradients on for the tensor, in place, and return it."""
    _require_tensor("set_tensor_requires_grad", input_tensor)
    if not (input_tensor.is_floating_point() or input_tensor.is_complex()):
        raise TypeError(
            f"set_tensor_requires_grad: a tensor of dtype {input_tensor.dtype} and shape {tuple(input_tensor.shape)} "
            "cannot have a gradient, only floating-point and complex tensors can"
        )
    return input_tensor.requires_grad_(True)


# ---------------------------------------------------------------------------------------------------------------------
# Nested containers
# ---------------------------------------------------------------------------------------------------------------------


def as_bytes(data: torch.Tensor) -> torch.Tensor:
    """The memory of a plain tensor that is contiguous, as bytes in one dim."""
    flat = data.reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element is contiguous whatever its stride


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """A copy of ``tree`` with ``fn`` applied to every leaf.

    Dicts, lists, tuples, named tuples, sets and dataclass instances are containers and keep their class; everything
    else, ``None`` and ``torch.Size`` included, is a leaf.
    """
    return map_leaves(fn, tree, (torch.Size,))


def apply_to_tensors(fn: Callable[[torch.Tensor], Any], container: Any) -> Any:
    """A copy of ``container`` (see ``tree_map``) with ``fn`` applied to every tensor; all else is kept as it is."""
    return tree_map(lambda leaf: fn(leaf) if isinstance(leaf, torch.Tensor) else leaf, container)


# ---------------------------------------------------------------------------------------------------------------------
# Names of operators
# ---------------------------------------------------------------------------------------------------------------------


def get_op_name(func: Callable | str) -> str:
    """The canonical name of an operator, one for all spellings of the same computation.

    ``torch.add``, ``Tensor.add``, ``Tensor.__add__``, ``operator.add`` and ``torch.ops.aten.add.Tensor`` are all "add";
    ``torch.multiply`` is "mul". In-place forms end in an underscore ("add_"), reversed operators that do not commute
    begin with r ("rsub"). Reading a property is its name ("T"), writing one is "requires_grad.__set__". An autograd
    function is named by its ``_op_name``, else by its class.
    """
    if isinstance(func, str):
        return canonical_name(func)
    if isinstance(func, functools.partial):
        return get_op_name(func.func)
    if not callable(func):
        raise TypeError(f"get_op_name takes an operator, got {func!r} of type {type(func).__name__}")
    if isinstance(func, OpOverload):  # no public name for the type of torch.ops.aten.add.Tensor
        return canonical_name(func.overloadpacket.__name__)
    name = getattr(func, "__name__", None) or type(func).__name__
    owner = getattr(func, "__self__", None)
    if name in ("__get__", "__set__", "__delete__"):
        accessed = getattr(owner, "__name__", None) or owner.fget.__name__
        return accessed if name == "__get__" else f"{accessed}.{name}"
    if name == "apply" and isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return getattr(owner, "_op_name", None) or owner.__name__
    if getattr(func, "__module__", None) == "_operator":
        name = f"__{name.strip('_')}__"
    return canonical_name(name)
