"""A unit: parameters that are gathered together when a module runs, and whose gradients are reduced together.

``sharded -> launched -> whole -> sharded``. The memory of the whole values is the same for ever, given back and filled
again, so that several forwards share it and what backward has saved sees the values again.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.comm_recorder import attributed
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.fully_shard.flat_buffer import FlatBuffer
from hyper_parallel.core.fully_shard.output_tensors import attributes_with_graph
from hyper_parallel.core.fully_shard.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from hyper_parallel.core.fully_shard.sharded_parameter import Place, ShardedParameter
from hyper_parallel.platform import get_platform

if TYPE_CHECKING:
    from hyper_parallel.core.fully_shard.root import Root
    from hyper_parallel.core.fully_shard.unit_gradients import UnitGradients

_platform = get_platform()

SHARDED, LAUNCHED, WHOLE = "sharded", "launched", "whole"


class Unit:
    """Parameters that come and go together."""

    root: Root
    gradients: UnitGradients

    def __init__(
        self,
        modules: Sequence[Any],
        parameters: Sequence[ShardedParameter],
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
    ) -> None:
        self.modules = list(modules)
        self._kind = type(modules[0]).__name__
        self.set_name("")
        self._gathering = _Naming(self, "gather of the parameters")
        self.reducing = _Naming(self, "reduction of the gradients")
        self.reducing_replicas = _Naming(self, "reduction of the gradients between replicas")
        self.parameters = list(parameters)
        self._places = [place for p in self.parameters for place in p.places]
        self.tensors = [p.parameter for p in self.parameters]  # as of the last look at them
        self._first_places = [p.places[0] for p in self.parameters]
        self._has_distributed = any(p.layouts.inside is not None for p in self.parameters)
        self.mp_policy, self.offload_policy = mp_policy, offload_policy
        #: Units whose parameters modules of this one have too, with their places here.
        self.lenders: dict[Unit, list[tuple[ShardedParameter, list[Place]]]] = {}
        self.reshard_after_forward: bool | int = True
        self.reshard_after_backward = True
        self.is_unsharded = False  # by the user, until reshard()
        #: Until the end of backward: what could say that it begins was not found on this rank. The unit is gathered
        #: and given back as on the other ranks, but its memory stays.
        self.stays_readable = False
        self.outlives_backward = False  # a graph of gradients will use the values once more
        self.was_warned = False
        self.forward_prefetch: list[Unit] | None = None
        self.backward_prefetch: list[Unit] | None = None
        self.depth = 0  # of calls of its modules that are running
        self.called: set[int] = set()  # which of its modules ran in the pass, if it has several
        self.num_users = 0  # units that are running and see its values: itself, and those that borrow from it
        self.state = SHARDED
        self._num_looks = 0
        self._num_noted = 0
        self._noted: list[tuple[Any, Any]] = []
        self._side_outputs: list[tuple[Any, str]] = []
        self.keeps_part = False  # of the whole values; see `FlatBuffer.keep_part`
        self.runs_backward = False
        self._leaves: list[Any] | None = None
        self._leaves_for: Any = None
        self._addresses: tuple[int, ...] | None = None
        #: What :meth:`writes` gave when the whole values were gathered: those that forward has seen.
        self.gathered_writes: tuple[int, ...] = ()
        self.num_bytes = 0  # of the whole values
        self.needs_grad: tuple[bool, ...] = ()
        self.buffers: list[FlatBuffer] = []
        self._gathered: list[int] = []  # which parameters the buffers have, one buffer after the other
        self._kept_whole: list[tuple[int, Any]] = []  # the others, which are not sharded, and in which dtype they run
        self._is_packed = False

    def _make_buffers(self) -> list[FlatBuffer]:
        alike: dict[Any, list[ShardedParameter]] = {}
        for p in self.parameters:
            if p.is_sharded:
                alike.setdefault((p.axes.key(), p.parameter.dtype), []).append(p)
        policy = self.offload_policy
        pinned = policy.pin_memory if isinstance(policy, CPUOffloadPolicy) else None
        return [FlatBuffer(group, self.compute_dtype(group[0]), pinned) for group in alike.values()]

    def compute_dtype(self, parameter: ShardedParameter) -> Any:
        """The dtype of the whole value, where it is not the parameter's own."""
        dtype = self.mp_policy.param_dtype
        if dtype is None or "float" not in _platform.dtype_name(parameter.parameter.dtype):
            return None
        return dtype

    def set_name(self, name: str) -> None:
        """Its path in the root, for messages and for who asks what was communicated."""
        self.name = name
        self.gather_reason, self.reduce_reason = f"gather {self}", f"reduce {self}"

    def __repr__(self) -> str:
        return f"unit {self.name!r}" if self.name else f"the unit of {self._kind}"

    @property
    def _num_shards(self) -> int:
        return min((buffer.axes.num_shards for buffer in self.buffers), default=1)

    @property
    def is_frozen(self) -> bool:
        return True not in self.needs_grad

    # ---------------------------------------------------------------- between steps

    def refresh(self) -> None:
        """Follow what the program has done to the parameters since the last pass: replaced them, or their memory."""
        found = _platform.parameters_at(self._first_places)
        changed = not all(map(operator.is_, found, self.tensors))
        if changed:
            for p, one in zip(self.parameters, found, strict=True):
                if one is not p.parameter:
                    p.take(one)
            self.tensors = [p.parameter for p in self.parameters]
        self.needs_grad = _platform.which_need_grad(self.tensors)
        if changed or not self._is_packed or not all(buffer.holds() for buffer in self.buffers):
            self.free(by_force=True)
            self.buffers = self._make_buffers()
            for buffer in self.buffers:
                buffer.pack()
            self.num_bytes = sum(buffer.num_bytes for buffer in self.buffers)
            numbers = {p: number for number, p in enumerate(self.parameters)}
            self._gathered = [numbers[p] for buffer in self.buffers for p in buffer.parameters]
            self._kept_whole = [
                (number, self.compute_dtype(p)) for p, number in numbers.items() if number not in set(self._gathered)
            ]
            self._is_packed = True

    def writes(self) -> tuple[int, ...]:
        """What differs after any of the parameters was written to."""
        return _platform.writes_into(self.tensors)

    # ---------------------------------------------------------------- whole values

    def launch(self) -> None:
        """Start to gather, unless the values are there or on their way."""
        if self.state != SHARDED or not self.buffers:
            return
        self.gathered_writes = self.writes()
        with self._gathering:
            for buffer in self.buffers:
                attributed(self.gather_reason, buffer.launch)
        self.state = LAUNCHED

    def bring(self) -> None:
        """Have the whole values."""
        self.launch()
        if self.state == LAUNCHED:
            with self._gathering:
                for buffer in self.buffers:
                    buffer.wait()
            self.state = WHOLE

    def free(self, by_force: bool = False) -> None:
        """Give the memory of the whole values back."""
        if self.is_unsharded and not by_force:
            return
        if self.state == LAUNCHED:
            self.bring()
        self.state, self.keeps_part = SHARDED, False
        for buffer in self.buffers:
            buffer.drop_part()
            if by_force or not self.stays_readable:
                buffer.release()

    def abandon(self) -> None:
        """Give the memory back after an error, also if a gather cannot be completed any more."""
        self.depth, self.num_users = 0, 0
        self.called.clear()
        self.stays_readable = self.runs_backward = False
        self.unshadow()
        try:
            self.free()
        except RuntimeError:
            self.state = SHARDED  # the ranks have lost each other; what is in flight keeps its memory itself

    def free_between(self) -> None:
        """Give the memory back between forward and backward, or most of it."""
        if self.state == WHOLE and not self.is_unsharded and 1 < self.reshard_after_forward < self._num_shards:
            for buffer in self.buffers:
                buffer.keep_part(self.reshard_after_forward)
                if not self.stays_readable:
                    buffer.release()
            self.state, self.keeps_part = SHARDED, True
        elif self.reshard_after_forward is not False:
            self.free()

    def drop_stale(self) -> None:
        """Give back values that were gathered before the parameters were written to."""
        if (self.state == WHOLE or self.keeps_part) and self.gathered_writes != self.writes():
            self.free(by_force=True)

    def whole_tensors(self) -> list[Any]:
        """A tensor for each parameter: over the gathered values, or its own memory where it is not sharded."""
        if not self.buffers and not any(dtype for _, dtype in self._kept_whole):
            return _platform.all_seen_as_parameters(_platform.all_detached(self.tensors))
        made: list[Any] = [None] * len(self.parameters)
        for number, tensor in zip(self._gathered, chain(*(one.tensors() for one in self.buffers)), strict=True):
            made[number] = tensor
        for number, dtype in self._kept_whole:
            block = _platform.detached(self.tensors[number])
            value = block if dtype is None else _platform.tensor_type_cast(block, dtype)
            (made[number],) = _platform.all_seen_as_parameters([value])
        return made

    def values(self, tensors: Sequence[Any]) -> list[Any]:
        """What forward sees of :meth:`whole_tensors`."""
        if not self._has_distributed:
            return list(tensors)
        return [p.value(tensor) for p, tensor in zip(self.parameters, tensors, strict=True)]

    @property
    def plain_tensors(self) -> list[Any]:
        """The parameters that forward sees as plain tensors; None in the places of the others."""
        if not self._has_distributed:
            return self.tensors
        return [
            tensor if p.layouts.inside is None else None
            for p, tensor in zip(self.parameters, self.tensors, strict=True)
        ]

    def find_side_outputs(self) -> list[tuple[Any, str]]:
        """Where its modules leave computed tensors besides what they return; found in the first passes."""
        if self._num_looks < 2:
            self._num_looks += 1
            self._side_outputs = attributes_with_graph(self.modules)
        return self._side_outputs

    def check_unwritten(self, writes: tuple[int, ...]) -> None:
        """Raise if a parameter was written to since ``writes`` was asked for."""
        if not self.buffers:
            return  # whole values are the parameters' own memory, which the framework looks after
        now = self.writes()
        if now == writes:
            return
        written = [
            self.root.name_of(p)
            for p, before, after in zip(self.parameters, writes, now, strict=True)
            if before != after and p.is_sharded
        ]
        if written:
            raise RuntimeError(
                f"fully_shard: {', '.join(map(repr, written))} of {self} changed between forward and backward (an "
                "optimizer's step, or a copy into it): backward would compute with other values than forward did. Call "
                "backward first"
            )

    def note_writes(self, values: Sequence[Any]) -> None:
        """Note how often the whole values were written to, in the first passes: a forward that writes does so there."""
        if self.buffers and self._num_noted < 2:
            self._num_noted += 1
            self._noted = [(value, _writes_to(value)) for value in values]

    def refuse_writes(self) -> None:
        """Raise if forward wrote into one of the whole values, which are given back: the shards do not know of it."""
        noted, self._noted = self._noted, []
        for parameter, (value, before) in zip(self.parameters, noted, strict=False):
            if _writes_to(value) != before and parameter.is_sharded:
                raise RuntimeError(
                    f"fully_shard: forward wrote into {self.root.name_of(parameter)!r}, whose whole value is there "
                    "during the call alone: the write would be lost. Compute with a new value (weight / weight.norm()) "
                    "or write into the parameter between steps"
                )

    # ---------------------------------------------------------------- precision at the boundary

    @property
    def casts_inputs(self) -> bool:
        return self.mp_policy.param_dtype is not None and self.mp_policy.cast_forward_inputs

    def cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = self.mp_policy.param_dtype
        return _platform.apply_to_tensors(lambda value: _platform.cast_fp_tensor(dtype, value), (args, kwargs))

    def cast_outputs(self, outputs: Any) -> Any:
        dtype = self.mp_policy.output_dtype
        return _platform.apply_to_tensors(lambda value: _platform.cast_fp_tensor(dtype, value), outputs)

    # ---------------------------------------------------------------- shadows

    def shadow(self, values: dict[Unit, list[Any]]) -> None:
        """Let the modules see whole values in place of the parameters: of this unit and of those it borrows from."""
        own = values[self]
        if len(self._places) != len(own):
            own = [value for p, value in zip(self.parameters, own, strict=True) for _ in p.places]
        _platform.shadow_all(self._places, own)
        for lender, lent in self.lenders.items():
            of_parameter = dict(zip(lender.parameters, values[lender], strict=True))
            for p, places in lent:
                _platform.shadow_all(places, [of_parameter[p]] * len(places))

    def unshadow(self) -> None:
        """Let the modules see their own parameters; while backward runs through them, :meth:`leaves`."""
        if self.runs_backward:
            self.shadow({one: one.leaves() for one in (self, *self.lenders)})
            return
        _platform.unshadow_all(self._places)
        for lent in self.lenders.values():
            for _, places in lent:
                _platform.unshadow_all(places)

    # Note [Recompute inside of a unit]
    # What is recomputed inside of a unit calls modules of it, and not the unit: so these see whole values while the
    # unit's backward runs. They are leaves, for the gradients of the graph that a reentrant recompute makes: its
    # backward, which runs inside of ours, leaves them there, and they are reduced with the others.

    def leaves(self) -> list[Any]:
        """Whole values with a gradient of their own, the same objects each time."""
        wanted = self.needs_grad
        if self._leaves is None or self._leaves_for != (wanted, self.buffers, self._addresses):
            with _platform.counting_versions(), _platform.no_grad():
                tensors = self.whole_tensors()
            self._leaves = [
                p.value(_platform.set_tensor_requires_grad(tensor) if needs_grad else tensor)
                for p, tensor, needs_grad in zip(self.parameters, tensors, wanted, strict=True)
            ]
            self._leaves_for = (wanted, self.buffers, self._addresses)
        return self._leaves

    def begin_backward(self) -> None:
        """Let recomputed code see whole values; see Note [Recompute inside of a unit]."""
        if not self.runs_backward:
            self.runs_backward = True
            if self._kept_whole:  # they may have been given other memory
                self._addresses = _platform.addresses_of(self.tensors)
                if self._addresses is None or any(dtype for _, dtype in self._kept_whole):
                    self._leaves = None
            if self.depth == 0:
                self.unshadow()

    def end_backward(self) -> list[Any]:
        """Take the values away again; the gradients that were left there."""
        if not self.runs_backward:
            return []
        self.runs_backward = False
        if self.depth == 0:
            self.unshadow()
        return _platform.take_grads(self.leaves())


def _writes_to(value: Any) -> Any:
    return _platform.write_mark(_platform.local_alias(value) if isinstance(value, DTensor) else value)[0]


class _Naming:
    """What fails inside in communication is raised with the unit's name."""

    def __init__(self, unit: Unit, doing: str) -> None:
        self._unit, self._doing = unit, doing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            text = f"fully_shard, {self._doing} of {self._unit} over {self._unit.parameters[0].axes}: {error}"
            raise type(error)(text) from error
