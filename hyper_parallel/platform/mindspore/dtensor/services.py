"""Small services that distributed tensors need from MindSpore, all on plain blocks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn

from hyper_parallel.platform.checks.collective_observers import observe, observe_times, observers, wait_observers
from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base.memory import from_array
from hyper_parallel.platform.mindspore.base.tensors import dtype_name, str_to_dtype, tensor_to_numpy
from hyper_parallel.platform.mindspore.communication.groups import get_process_group_ranks
from hyper_parallel.platform.mindspore.dtensor.tensor_type import DTensorBase, as_dtensor, local_alias
from hyper_parallel.platform.mindspore.mends import same_bits
from hyper_parallel.platform.mindspore.operators import reductions as reductions
from hyper_parallel.platform.mindspore.operators.writes import copy_


def owns_memory(tensor: Any) -> bool:
    """Whether no other tensor shares the memory; MindSpore does not say, so never."""
    return False


def counting_versions() -> Any:
    """MindSpore has no mode in which writes go uncounted."""
    return nullcontext()


def counts_writes(tensor: Any) -> bool:
    """MindSpore has no mode in which writes go uncounted."""
    return True


def default_dtype() -> Any:
    """The dtype of new floating tensors."""
    return ms.float32


def index_tensor(rows: Sequence[Sequence[int]], device: Any) -> Any:
    """A matrix of int64; real also where other tensors are made without memory."""
    return from_array(np.asarray([list(row) for row in rows], dtype=np.int64))


def to_device(tensor: Any, device_type: str) -> Any:
    """The tensor itself: a process of MindSpore computes on one device, where its tensors are."""
    return tensor


def digest(tensor: Any) -> int:
    """A checksum of the values' bytes; NaNs of equal bits are equal."""
    return zlib.crc32(np.ascontiguousarray(tensor_to_numpy(tensor)).tobytes())


def as_parameter(tensor: Any, requires_grad: bool | None = None) -> Any:
    """The DTensor as a module's parameter; it needs a gradient as ``tensor`` does, unless said otherwise."""
    wanted = tensor.requires_grad if requires_grad is None else requires_grad
    return Parameter(tensor, requires_grad=bool(wanted))


def fill_block(tensor: Any, values: Any) -> None:
    """Copy ``values`` into the DTensor's own block; like any in-place write it is recorded unless under no_grad."""
    copy_(local_alias(tensor), local_alias(values))
    if isinstance(tensor, DTensorBase):
        tensor.written()


def replace_block(tensor: Any, block: Any) -> None:
    """Let the DTensor have ``block``, of the same shape, for its memory; its place in the graph stays."""
    with private_api.no_grad():
        copy_(tensor._local, local_alias(block))
    tensor.written()


def convert(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Another dtype on the block; the layout stays, but a reduction that the conversion would change is done before.

    Devices among the arguments change nothing: a process of MindSpore has one.
    """
    dtype = next((value for value in (*args, *kwargs.values()) if _is_dtype(value)), None)
    other = next((value for value in args if isinstance(value, Tensor)), None)
    dtype = other.dtype if dtype is None and other is not None else dtype
    if dtype is None or dtype == tensor.dtype:
        return tensor
    layout = tensor._layout
    if any(op and not _passes(op, tensor.dtype, dtype) for op in layout.partials):
        return convert(tensor.reduce_partial(), dtype)
    return as_dtensor(type(tensor.data), local_alias(tensor).to(dtype), layout, tensor._global_shape)


def _is_dtype(value: Any) -> bool:
    return isinstance(value, type(ms.float32).__mro__[1]) or (isinstance(value, str) and _names_dtype(value))


def _names_dtype(name: str) -> bool:
    try:
        str_to_dtype(name)
    except ValueError:
        return False
    return True


def _passes(op: str, source: Any, target: Any) -> bool:
    """Whether the reduction of converted summands is the conversion of the reduction, up to rounding."""
    names = dtype_name(source), dtype_name(target)
    floats = [name.startswith(("float", "bfloat", "complex")) for name in names]
    if names[0] == names[1]:
        return True
    if names[1] == "bool" or op in ("all", "any"):
        return False
    if op in ("sum", "avg"):
        return (names[0] != "bool" and not floats[0]) or floats[1]
    return floats[0] and floats[1]


def replicate_plain_tensors(module: nn.Cell, distribute: Callable[[Any], Any]) -> None:
    """Replace every plain parameter and buffer by ``distribute`` of it; a tensor that appears twice stays one."""
    made: dict[int, Any] = {}

    def once(tensor: Any) -> Any:
        if id(tensor) not in made:
            made[id(tensor)] = distribute(tensor)
            if isinstance(tensor, Parameter):
                made[id(tensor)].name = tensor.name
        return made[id(tensor)]

    for _, cell in module.cells_and_names():
        for name, parameter in list(private_api.parameters_of(cell).items()):
            if parameter is not None and not isinstance(parameter, DTensorBase):
                private_api.parameters_of(cell)[name] = once(parameter)
        for name, buffer in list(private_api.buffers_of(cell).items()):
            if buffer is not None and not isinstance(buffer, DTensorBase):
                private_api.buffers_of(cell)[name] = once(buffer)


def register_forward_hook(
    module: nn.Cell, hook: Callable[..., Any], prepend: bool = False, always_call: bool = False
) -> Any:
    """Call ``hook(module, inputs, outputs)`` after forward, with ``always_call`` also when it raised; a handle with
    ``remove()``."""
    return module.register_forward_hook(hook, prepend=prepend, always_call=always_call)


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
    """Inside, MindSpore's own generator starts from a state that the two numbers give, the same on every rank."""
    before = ms.get_seed()
    ms.set_seed((seed * 0x9E3779B1 + number) % 2**31)
    try:
        yield
    finally:
        ms.set_seed(before if before is not None else 0)


def is_dense_tensor(value: Any) -> bool:
    """Whether ``value`` is a tensor with one memory cell per element."""
    return isinstance(value, Tensor)


def is_intercepted(func: Callable[..., Any]) -> bool:
    """No operator of a library is intercepted otherwise than as the function that it is."""
    return False


def is_framework_service(func: Callable[..., Any]) -> bool:
    """What asks about the tensor object is a method of DTensor here and does not come to the dispatcher."""
    return False


def body_of(func: Callable[..., Any]) -> None:
    """Functions of MindSpore that are written in Python run as they are; only their operators are intercepted."""
    return None


def graph_function(func: Callable[..., Any]) -> None:
    """Backward passes are started by the library's own functions, which know DTensors."""
    return None


def carry_random_state(get_state: Callable[[], Any], set_state: Callable[[Any], None]) -> None:
    """Recomputation restores the library's own state; see ``activation.py``."""
    random_state.get, random_state.set = get_state, set_state


class _RandomState:
    """How to save and restore the state of the library's random numbers, once it is loaded."""

    get: Callable[[], Any] = staticmethod(lambda: None)
    set: Callable[[Any], None] = staticmethod(lambda state: None)


random_state = _RandomState()


# ---------------------------------------------------------------- what the rules need besides methods of tensors


def extreme_identity(dtype: Any, op: str) -> float | int | bool:
    """The value that every other one beats in a maximum (``op`` "max") or a minimum ("min")."""
    name = dtype_name(dtype)
    if name.startswith(("float", "bfloat")):
        return -float("inf") if op == "max" else float("inf")
    if name == "bool":
        return op == "min"
    limits = np.iinfo(name)
    return int(limits.min if op == "max" else limits.max)


def number_like(number: float, tensor: Any) -> Any:
    """``number`` as it meets ``tensor`` without being rounded: MindSpore rounds Python's numbers to float32."""
    return Tensor(number, ms.float64) if tensor.dtype == ms.float64 else number


def machine_epsilon(dtype: Any) -> float:
    """The distance from 1 to the next larger number of a floating-point dtype."""
    return 2.0**-7 if dtype == ms.bfloat16 else float(np.finfo(dtype_name(dtype)).eps)


def vector_norm(tensor: Any, p: float, dims: Sequence[int], keepdim: bool) -> Any:
    """The p-norm over ``dims``."""
    dims = tuple(dims)
    magnitudes = mint.abs(tensor)
    if not dims:
        return magnitudes if p else (magnitudes != 0).to(tensor.dtype)
    if p == float("inf"):
        return mint.amax(magnitudes, dims, keepdim)
    if p == -float("inf"):
        return mint.amin(magnitudes, dims, keepdim)
    if p == 0:
        return reductions.sum((magnitudes != 0).to(tensor.dtype), dims, keepdim)
    if p == 1:
        return reductions.sum(magnitudes, dims, keepdim)
    if p == 2:
        return mint.sqrt(reductions.sum(tensor * tensor, dims, keepdim))
    return same_bits.power(reductions.sum(same_bits.power(magnitudes, p), dims, keepdim), 1.0 / p)


def result_like(func: Callable[..., Any], results: Sequence[Any]) -> Any:
    """The results in the tuple that ``func`` gives."""
    return tuple(results)
