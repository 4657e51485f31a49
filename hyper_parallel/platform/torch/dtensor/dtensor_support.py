"""Small services that distributed tensors need from PyTorch, all on plain blocks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from hyper_parallel.platform.checks.collective_observers import observe, observe_times, observers, wait_observers
from hyper_parallel.platform.torch.base.devices import get_device_type
from hyper_parallel.platform.torch.base.dtensor_base import (
    DTensorBase,
    as_dtensor,
    local_alias,
)
from hyper_parallel.platform.torch.base.tensors import get_op_name, tensor_to_numpy, tree_map
from hyper_parallel.platform.torch.communication.groups import get_process_group_ranks
from hyper_parallel.platform.torch.private_api import NoInterception, OpOverload, OpOverloadPacket, num_storage_uses


def needs_grad(tensor: torch.Tensor) -> bool:
    """Whether autograd records what is done with ``tensor`` now."""
    return torch.is_grad_enabled() and tensor.requires_grad


def requires_grad(tensor: torch.Tensor) -> bool:
    """Whether ``tensor``, plain or distributed, has or asks for a gradient."""
    return tensor.requires_grad


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` was made by the program and not by an operator that is recorded."""
    return tensor.is_leaf


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor's values in other memory; recorded."""
    return tensor.clone()


def write_mark(tensor: torch.Tensor) -> tuple[Any, Any]:
    """(a value that changes when the plain tensor is written to, its place in the graph)."""
    with NoInterception():  # a recording of calls asks programs why they look at the graph
        return tensor._version, tensor.grad_fn


def owns_memory(tensor: torch.Tensor) -> bool:
    """Whether no other tensor shares the memory of ``tensor``."""
    with NoInterception():
        storage = torch.Tensor.untyped_storage(tensor)
    # One use by the tensor, one by the Python object that was just made. There is no public way to ask.
    return num_storage_uses(storage) <= 2


def counts_writes(tensor: torch.Tensor) -> bool:
    """Whether ``tensor``, and what is made of it now, counts how often it is written to."""
    return not (torch.is_inference_mode_enabled() or torch.Tensor.is_inference(tensor))


@contextmanager
def counting_versions() -> Iterator[None]:
    """Inside, new tensors count how often they are written to, which inference mode leaves out; no graph is recorded
    there either.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def default_dtype() -> torch.dtype:
    """The dtype of new floating tensors."""
    return torch.get_default_dtype()


def is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def from_numpy(array: np.ndarray, dtype: torch.dtype, device: Any) -> torch.Tensor:
    """A tensor with the array's values."""
    return torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape).to(device=device, dtype=dtype)


def index_tensor(rows: Sequence[Sequence[int]], device: Any) -> torch.Tensor:
    """A matrix of int64."""
    return torch.tensor([list(row) for row in rows], dtype=torch.int64, device=device)


def to_device(tensor: torch.Tensor, device_type: str) -> torch.Tensor:
    """The tensor on the current device of ``device_type``; meta tensors stay."""
    return tensor if tensor.device.type in (device_type, "meta") else tensor.to(device_type)


def digest(tensor: torch.Tensor) -> int:
    """A checksum of the values' bytes; NaNs of equal bits are equal."""
    return zlib.crc32(np.ascontiguousarray(tensor_to_numpy(tensor)).tobytes())


def as_parameter(tensor: Any, requires_grad: bool | None = None) -> torch.nn.Parameter:
    """The DTensor as a module's parameter; it needs a gradient as ``tensor`` does, unless said otherwise."""
    return torch.nn.Parameter(tensor, requires_grad=tensor.requires_grad if requires_grad is None else requires_grad)


def fill_block(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy ``values`` into the DTensor's own block; like any in-place write it is recorded unless under no_grad."""
    with NoInterception(), torch.inference_mode() if torch.Tensor.is_inference(tensor) else nullcontext():
        torch.Tensor.copy_(tensor, values)


def replace_block(tensor: torch.Tensor, block: torch.Tensor) -> None:
    """Let the DTensor have ``block``, of the same shape, for its memory; its place in the graph stays."""
    with NoInterception():
        torch.Tensor.data.__set__(tensor, block)  # type: ignore[attr-defined]


def convert(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.to`` on the block; the layout stays, but a reduction that the conversion would change is done before."""
    with NoInterception():
        converted = torch.Tensor.to(tensor, *args, **kwargs)
    if converted is tensor:
        return tensor
    layout = tensor._layout
    if any(op and not _passes(op, tensor.dtype, converted.dtype) for op in layout.partials):
        return convert(tensor.reduce_partial(), *args, **kwargs)
    return as_dtensor(type(tensor), converted, layout, tensor._global_shape)


_UNSIGNED = frozenset({torch.uint8, torch.uint16, torch.uint32, torch.uint64})


def _passes(op: str, source: torch.dtype, target: torch.dtype) -> bool:
    """Whether the reduction of converted summands is the conversion of the reduction, up to rounding."""
    if source is target:
        return True
    if target is torch.bool or op in ("all", "any"):
        return False
    if op in ("sum", "avg"):
        if source in _UNSIGNED:  # the parts count around: 5 may be the sum of 10 and 251
            return False
        is_exact = source is not torch.bool and not source.is_floating_point and not source.is_complex
        return is_exact or target.is_floating_point or target.is_complex
    return source.is_floating_point and target.is_floating_point


def replicate_plain_tensors(module: torch.nn.Module, distribute: Callable[[torch.Tensor], Any]) -> None:
    """Replace every plain parameter and buffer by ``distribute`` of it; a tensor that appears twice stays one."""
    made: dict[int, Any] = {}

    def once(tensor: torch.Tensor) -> Any:
        if id(tensor) not in made:
            made[id(tensor)] = distribute(tensor)
        return made[id(tensor)]

    for submodule in module.modules():
        for name, parameter in list(submodule._parameters.items()):
            if parameter is not None and not isinstance(parameter, DTensorBase):
                submodule.register_parameter(name, once(parameter))
        for name, buffer in list(submodule._buffers.items()):
            if buffer is not None and not isinstance(buffer, DTensorBase):
                submodule._buffers[name] = once(buffer)


def register_forward_hook(
    module: torch.nn.Module, hook: Callable[..., Any], prepend: bool = False, always_call: bool = False
) -> Any:
    """Call ``hook(module, inputs, outputs)`` after forward, with ``always_call`` also when it raised."""
    return module.register_forward_hook(hook, prepend=prepend, always_call=always_call)


def call_on_blocks(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``func`` on the blocks of all DTensors among its arguments, as if they were plain tensors."""

    def block(value: Any) -> Any:
        return local_alias(value) if isinstance(value, DTensorBase) else value

    return func(*tree_map(block, args), **tree_map(block, kwargs))


def observe_collectives(tell: Callable[[str, list[int], Any, str, int, bool], None]) -> Callable[[], None]:
    """Call ``tell(op, ranks, shape, dtype, num_bytes, async_op)`` before every collective; returns how to stop."""
    return observe(observers, tell, get_process_group_ranks, dtype_name)


def observe_waits(tell: Callable[[str, list[int], Any, str, int, bool], None]) -> Callable[[], None]:
    """Call ``tell`` with the same arguments when a wait for an operation has ended; returns how to stop."""
    return observe(wait_observers, tell, get_process_group_ranks, dtype_name)


def time_collectives(tell: Callable[[str, list[int], Any, str, int, bool, float, float], None]) -> Callable[[], None]:
    """Call ``tell`` with the same arguments, begin and end when a collective on tensors is complete; how to stop."""
    return observe_times(tell, get_process_group_ranks, dtype_name)


@contextmanager
def seeded(seed: int, number: int) -> Iterator[None]:
    """Inside, PyTorch's own generator starts from a state that the two numbers give, the same on every rank."""
    kind = get_device_type()
    devices = [] if kind == "cpu" else [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(devices, device_type="cuda" if kind == "cpu" else kind):
        torch.manual_seed((seed * 0x9E3779B97F4A7C15 + number) % 2**63)
        yield


def is_dense_tensor(value: Any) -> bool:
    """Whether ``value`` is a tensor with one memory cell per element."""
    if not isinstance(value, torch.Tensor) or value.is_nested:
        return False
    return torch.Tensor.layout.__get__(value) is torch.strided  # type: ignore[attr-defined]


def is_intercepted(func: Callable[..., Any]) -> bool:
    """Whether calling ``func`` with DTensors leads to the dispatcher by itself, as for operators of a library."""
    return isinstance(func, (OpOverload, OpOverloadPacket))  # these types have no public name


# Bookkeeping that means the same for a block as for a plain tensor.
_SERVICES = frozenset(
    {
        *("requires_grad_", "retain_grad", "register_post_accumulate_grad_hook", "data_ptr", "is_contiguous", "stride"),
        *("storage_offset", "element_size", "is_pinned", "is_shared", "share_memory_", "untyped_storage", "storage"),
        *("is_complex", "is_floating_point"),
        *("is_inference", "_is_view", "is_set_to", "get_device", "is_conj", "is_neg", "is_signed"),
        "_has_compatible_shallow_copy_type",  # asked by Module.to
        *("_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad", "output_nr", "names", "has_names"),
        *("is_quantized", "is_nested", "is_mkldnn", "is_mps", "is_xla", "is_xpu", "is_vulkan", "is_ipu", "is_maia"),
        *("is_mtia", "is_sparse_csr", "itemsize", "__hash__", "__dir__", "name", "volatile", "is_distributed"),
    }
)


def is_framework_service(func: Callable[..., Any]) -> bool:
    """Whether ``func`` asks about, or marks, the tensor object and not its values."""
    return get_op_name(func) in _SERVICES


__all__ = [
    "as_parameter",
    "call_on_blocks",
    "convert",
    "default_dtype",
    "digest",
    "dtype_name",
    "fill_block",
    "from_numpy",
    "index_tensor",
    "is_dense_tensor",
    "is_dtype",
    "is_framework_service",
    "is_intercepted",
    "needs_grad",
    "observe_collectives",
    "observe_waits",
    "register_forward_hook",
    "replace_block",
    "replicate_plain_tensors",
    "seeded",
    "time_collectives",
    "to_device",
]
