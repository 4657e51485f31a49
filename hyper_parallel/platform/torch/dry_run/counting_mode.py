"""The mode under which a run is counted: it sees each operator that reaches a kernel, with or without memory.

It counts the bytes of each storage when it is first seen and discounts them when the storage is freed, so that whatever
keeps memory (saved tensors, gradients, buffers of collectives, an optimizer's temporaries) is right because the program
itself runs. See Note [Integers are real] for what is computed and what is not.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from hyper_parallel.platform.torch.dry_run.attention_kernels import FLOPS_OF, RESULTS_OF
from hyper_parallel.platform.torch.dry_run.remembered_shapes import RememberedShapes
from hyper_parallel.platform.torch.dry_run.user_lines import user_line
from hyper_parallel.platform.torch.dry_run.value_reads import READ_BY, refuse_read
from hyper_parallel.platform.torch.private_api import DispatchMode, NoInterception, OpOverload

aten = torch.ops.aten

_MOST_REAL_ELEMENTS = 2**26  # an integer tensor that is larger has no memory either
_META = torch.device("meta")
_HOST = torch.device("cpu")
_ALLOCATION_UNIT = {"cpu": 1, "cuda": 512, "npu": 512}  # device allocators round up


class _Freed(weakref.ref):
    """Tells when a storage is gone."""

    __slots__ = ("allocation", "key")


class _Facts:
    """What is known of an operator."""

    __slots__ = ("flops", "is_view", "packet", "reads", "result")

    def __init__(self, operator: OpOverload) -> None:
        self.packet = operator._overloadpacket
        self.is_view = operator.is_view
        self.reads = self.packet in READ_BY
        self.flops: Callable[..., int] | None = FLOPS_OF.get(self.packet)
        formula = flop_registry.get(self.packet)
        if self.flops is None and formula is not None:
            self.flops = lambda *args, result, **kwargs: formula(*args, **kwargs, out_val=result)
        elif self.flops is not None:
            own = self.flops
            self.flops = lambda *args, result, **kwargs: own(*args, **kwargs)
        self.result = RESULTS_OF.get(operator, operator)


class CountingMode(DispatchMode):
    """``log`` is told of every allocation, see :class:`hyper_parallel.analysis.memory_log.MemoryLog`."""

    def __init__(self, log: Any, device: str) -> None:
        super().__init__()
        self.log = log
        self._device = device
        self._unit = _ALLOCATION_UNIT[device]
        self._facts: dict[Any, _Facts] = {}
        self._shapes = RememberedShapes()
        self._seen: dict[int, _Freed] = {}  # by id of the storage's Python object, which lives as long as the storage
        self._on_device: set[int] = set()  # real storages that stand for memory of the device
        self._unknown: set[int] = set()  # real storages that were written to with values that nobody knows
        self._on_host: set[int] = set()  # storages without memory that stand for memory of the host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Saved DTensors come in backward: their blocks are meant.
        with NoInterception():
            return self._run(func, args, kwargs or {})

    # ---------------------------------------------------------------- operators

    def _run(self, operator: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        facts = self._facts.get(operator)
        if facts is None:
            facts = self._facts[operator] = _Facts(operator)
        has_meta, real = _tensors_in(args, kwargs)
        if not has_meta:
            return self._run_real(operator, facts, args, kwargs, real)
        if facts.reads:
            refuse_read(facts.packet)
        if real:
            if operator._schema.is_mutable and isinstance(args[0], torch.Tensor) and not args[0].is_meta:
                self._unknown.add(id(args[0].untyped_storage()))
                return args[0]
            args, kwargs = _without_memory(operator, args, kwargs)
        on_device = not self._on_host or not self._are_on_host(args, kwargs)
        if facts.is_view:
            result = operator(*args, **kwargs)
            self._look_at(result, on_device)
            return result
        if operator is aten._to_copy.default and self._device != "cpu" and _device_in(kwargs) not in (None, _META):
            result = self._ask(operator, facts, args, kwargs)  # to the host, and not memory of the device
            self._look_at(result, on_device=False)
            return result
        key = self._shapes.key_of(operator, args, kwargs)
        known = None if key is None else self._shapes.find(key)
        if known is not None:
            result = known.make(args)
            self.log.flops += known.flops
        else:
            result = self._ask(operator, facts, args, kwargs)
            flops = 0 if facts.flops is None else facts.flops(*args, result=result, **kwargs)
            self.log.flops += flops
            if key is not None and not self._shares(result, args):
                self._shapes.remember(key, args, result, flops)
        self._look_at(result, on_device)
        return result

    def _ask(self, operator: OpOverload, facts: _Facts, args: Any, kwargs: dict[str, Any]) -> Any:
        if operator is aten._to_copy.default and _device_in(kwargs) not in (None, _META):
            kwargs = {**kwargs, "device": _META}  # a copy to the host
        try:
            return facts.result(*args, **kwargs)
        except NotImplementedError:
            refuse_read(facts.packet)

    def _run_real(
        self, operator: OpOverload, facts: _Facts, args: Any, kwargs: dict[str, Any], real: list[torch.Tensor]
    ) -> Any:
        """Integers and what is made of them; see Note [Integers are real]."""
        storages = {id(tensor.untyped_storage()) for tensor in real}
        on_device = not storages.isdisjoint(self._on_device)
        is_unknown = not storages.isdisjoint(self._unknown)
        if is_unknown and facts.reads:
            refuse_read(facts.packet)
        if _device_in(kwargs) == _META:
            on_device = True
            result = operator(*args, **kwargs)
            if isinstance(result, torch.Tensor) and _stays_real(result):
                result = operator(*args, **{**kwargs, "device": _HOST})
        else:
            result = operator(*args, **kwargs)
        self._look_at(result, on_device or self._device == "cpu")
        if is_unknown and isinstance(result, torch.Tensor):
            self._unknown.add(id(result.untyped_storage()))
        return result

    def _shares(self, result: Any, args: Any) -> bool:
        """Whether memory of the result was there before, and the result is not simply an argument."""
        if any(result is given for given in args):
            return False
        items = result if isinstance(result, (tuple, list)) else (result,)
        return any(isinstance(item, torch.Tensor) and self.allocation_of(item) is not None for item in items)

    # ---------------------------------------------------------------- memory

    def _look_at(self, result: Any, on_device: bool = True) -> None:
        if isinstance(result, torch.Tensor):
            self._look_at_one(result, on_device)
        elif isinstance(result, (tuple, list)):
            for item in result:
                if isinstance(item, torch.Tensor):
                    self._look_at_one(item, on_device)

    def _look_at_one(self, tensor: torch.Tensor, on_device: bool) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._seen:
            return
        seen = _Freed(storage, self._free)
        seen.key = key
        num_bytes = storage.nbytes()
        seen.allocation = None
        if on_device:
            if not tensor.is_meta:
                self._on_device.add(key)
            seen.allocation = self.log.allocate(-(-num_bytes // self._unit) * self._unit, user_line)
        elif tensor.is_meta:
            self._on_host.add(key)
        self._seen[key] = seen

    def _are_on_host(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether an operator runs on the host: all that it takes is there."""
        values = itertools.chain.from_iterable(
            value if isinstance(value, (list, tuple)) else (value,) for value in (*args, *kwargs.values())
        )
        tensors = [value for value in values if isinstance(value, torch.Tensor) and value.is_meta]
        return all(id(tensor.untyped_storage()) in self._on_host for tensor in tensors)

    def to_host(self, tensors: Iterable[torch.Tensor]) -> None:
        """The memory of ``tensors``, and of all that is computed from it alone, is the host's from here on."""
        for tensor in tensors:
            with NoInterception():
                seen = self._seen.get(id(tensor.untyped_storage()))
            if seen is not None:
                self._on_host.add(seen.key)
                if seen.allocation is not None:
                    self.log.free(seen.allocation)
                    seen.allocation = None

    def _free(self, seen: _Freed) -> None:
        self._seen.pop(seen.key, None)
        self._on_host.discard(seen.key)
        self._on_device.discard(seen.key)
        self._unknown.discard(seen.key)
        if seen.allocation is not None:
            self.log.free(seen.allocation)

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Memory that is given back while tensors over it stay, and had again: whole parameters of a sharded unit."""
        seen = self._seen.get(id(storage))
        if seen is None:
            return
        if seen.allocation is not None:
            self.log.free(seen.allocation)
        seen.allocation = None
        if num_bytes:
            seen.allocation = self.log.allocate(-(-num_bytes // self._unit) * self._unit, user_line)
            seen.allocation.kind = "gathered parameters"

    def allocation_of(self, tensor: torch.Tensor) -> Any:
        """What the log knows of the memory of ``tensor``; None for memory that was not seen, or that is the host's."""
        with NoInterception():
            seen = self._seen.get(id(tensor.untyped_storage()))
        return None if seen is None else seen.allocation


def _tensors_in(args: Any, kwargs: dict[str, Any]) -> tuple[bool, list[torch.Tensor]]:
    """Whether there are tensors without memory, and the others."""
    has_meta, real = False, []
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                if item.is_meta:
                    has_meta = True
                else:
                    real.append(item)
    return has_meta, real


def _device_in(kwargs: dict[str, Any]) -> torch.device | None:
    device = kwargs.get("device")
    return torch.device(device) if device is not None else None


def _stays_real(result: torch.Tensor) -> bool:
    is_exact = not (result.dtype.is_floating_point or result.dtype.is_complex)
    return is_exact and result.numel() <= _MOST_REAL_ELEMENTS


_INDEXING = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)


def _without_memory(operator: OpOverload, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The arguments with what is real as shapes."""
    if operator in _INDEXING:
        args = (args[0], _expanded(args[1]), *args[2:])
    return _map_real(args), _map_real(kwargs)


def _map_real(values: Any) -> Any:
    """The same with shapes in place of real tensors; those without dims stay, for operators treat them as numbers."""
    if isinstance(values, dict):
        return {name: _map_real(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(map(_map_real, values))
    if isinstance(values, torch.Tensor) and not values.is_meta and values.ndim:
        return torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device="meta")
    return values


def _expanded(indices: Any) -> list[Any]:
    """Real masks among indices as the positions that they choose."""
    positions: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and not index.is_meta and index.dtype in (torch.bool, torch.uint8):
            positions += index.nonzero(as_tuple=True)
        else:
            positions.append(index)
    return positions
