"""The parameters of a unit that have one dtype and lie on the same axes: their shards side by side, and their whole
values in memory that comes and goes.

Note [Straight into place]
A large matrix that is cut on dim 0 is gathered by itself, which writes the gathered parts where the whole value is:
rows of padding, if any, come last and lie behind it. Small parameters, and those cut on other dims, are gathered in one
piece and copied to their places. All of them go in one call of the platform's collective for lists: one launch where
the backend coalesces (gathers on gloo and NCCL, reductions on NCCL), one operation for each tensor where that is as
fast (reductions on gloo, which are exchanges; large tensors on MindSpore). A unit without large ones has one
tensor to gather and one to reduce, and takes the plain collective, which asks fewer questions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.fully_shard.sharded_parameter import ShardedParameter
from hyper_parallel.platform import get_platform

_platform = get_platform()

LARGE = 1 << 16  # elements from which a parameter is gathered and reduced by itself
_ALIGNED = 16  # elements; whole values begin at multiples


class FlatBuffer:
    """Gathers the whole values of some parameters; see Note [Straight into place]."""

    def __init__(self, parameters: Sequence[ShardedParameter], dtype: Any, pinned: bool | None) -> None:
        self.parameters = list(parameters)  # those that are sharded
        self.axes = self.parameters[0].axes
        self.param_dtype = dtype
        self._pinned = pinned  # None: on the device; else in host memory
        ranks = self.axes.num_shards
        large = [p for p in self.parameters if p.lies_straight and p.segment * ranks >= LARGE]
        straight = [p for p in self.parameters if p.lies_straight and p not in large]
        other = [p for p in self.parameters if not p.lies_straight]
        ordered = [*large, *straight, *other]
        starts = [0, *itertools.accumulate(p.segment for p in ordered)]
        self.offsets = dict(zip(ordered, starts, strict=False))  # in the shards
        self._num_shard_elements = starts[-1]
        self.whole_offsets: dict[ShardedParameter, int] = {}
        end = 0
        for p in ordered:
            self.whole_offsets[p] = end
            size = p.segment * ranks if p.lies_straight else p.layouts.whole.num_elements
            end = -(-(end + size) // _ALIGNED) * _ALIGNED
        self._large = [(self.offsets[p], p.segment, self.whole_offsets[p], p.segment * ranks) for p in large]
        self._packed_start = starts[len(large)]
        self._packed_size = starts[-1] - self._packed_start
        self._columns = [(self.offsets[p] - self._packed_start, p.segment, self.whole_offsets[p]) for p in straight]
        self._boxed = [(p, self.offsets[p] - self._packed_start, self.whole_offsets[p]) for p in other]
        self._num_whole_elements = -(-end // ranks) * ranks  # any divisor of the number of ranks divides it
        self._in_flight: tuple[Any, ...] | None = None
        self._kept: tuple[Any, Any] | None = None
        self._starts = list(self.offsets.values())
        self._wholes = [(self.whole_offsets[p], p.whole_shape) for p in self.parameters]
        self._tensors: list[Any] = []
        self.shards: Any = None
        self.memory: Any = None

    # ---------------------------------------------------------------- between steps

    def holds(self) -> bool:
        """Whether the parameters still lie side by side; a program may have given them other memory."""
        return self.shards.holds(self._tensors, self._starts)

    def pack(self) -> None:
        """Let the parameters lie side by side."""
        self._tensors = [p.parameter for p in self.offsets]
        first = _platform.detached(self._tensors[0])
        here = _platform.get_device_type()
        if _platform.has_no_memory(first) or str(first.device).lower().startswith(here):
            here = first.device
        self.dtype = first.dtype if self.param_dtype is None else self.param_dtype
        on_host = self._pinned is not None and not _platform.has_no_memory(first)
        self.shards = _platform.shard_memory(
            self._num_shard_elements, first.dtype, "cpu" if on_host else here, bool(self._pinned)
        )
        for p, offset in self.offsets.items():
            self.shards.adopt(p.parameter, offset)
        self.memory = _platform.returnable_memory(self._num_whole_elements, self.dtype, here)

    # ---------------------------------------------------------------- whole values

    @property
    def num_bytes(self) -> int:
        return self.memory.num_bytes

    def launch(self) -> None:
        """Start to gather. forward: all ranks' shards -> whole values; their gradients are reduced by the edge."""
        self.memory.renew()
        if self._kept is not None:
            kept, group = self._kept
            out = self.memory.part(0, self._num_whole_elements)
            self._in_flight = (_platform.all_gather_into_tensor(kept, group, True, out=out)[1], None, kept)
            self._kept = None
            return
        group = self.axes.shard_group
        source = self.shards.part(0, self._num_shard_elements)
        if self._pinned is not None:
            source = _platform.to_device(source, _platform.get_device_type())
        if source.dtype != self.dtype:
            source = _platform.tensor_type_cast(source, self.dtype)
        if not self._large:
            packed, handle = _platform.all_gather_into_tensor(source, group, True)
            self._in_flight = (handle, packed, source)
            return
        sent = [source[offset : offset + length] for offset, length, _, _ in self._large]
        outs = [self.memory.part(offset, length) for _, _, offset, length in self._large]
        packed = None
        if self._packed_size:
            sent.append(source[self._packed_start :])
            packed = _platform.new_tensor((self._packed_size * self.axes.num_shards,), self.dtype, source.device)
            outs.append(packed)
        self._in_flight = (_platform.all_gather_into_tensors(sent, group, True, out=outs)[1], packed, source)

    def wait(self) -> None:
        """Finish what :meth:`launch` has started."""
        assert self._in_flight is not None
        handle, packed, _ = self._in_flight
        handle.wait()
        self._in_flight = None
        self.memory.settle()
        if packed is None:
            return
        rows = packed.reshape(self.axes.num_shards, self._packed_size)
        if self._columns:
            self.memory.fill_columns(rows, self._columns)
        for p, start, offset in self._boxed:
            self.memory.fill_boxes(rows, start, offset, p.whole_shape, p.layouts.boxes)

    def release(self) -> None:
        self.memory.release()

    # Note [A part of the gathered bytes]
    # ``reshard_after_forward=n`` keeps on each of n neighbours one n-th of the whole values as they lie in memory,
    # without regard to where parameters begin: so it works for every shape, cut and dtype. They are gathered again
    # among the neighbours, who may be on one host, instead of among all ranks.

    def keep_part(self, num_ranks: int) -> None:
        """Keep this rank's part, for the next gather; see Note [A part of the gathered bytes]."""
        group = self.axes.inner_group(num_ranks)
        length = self._num_whole_elements // num_ranks
        mine = _platform.get_group_local_rank(group) * length
        self._kept = (_platform.copied(self.memory.part(mine, length)), group)

    def drop_part(self) -> None:
        """Forget what :meth:`keep_part` has kept."""
        self._kept = None

    def tensors(self) -> list[Any]:
        """A tensor over each parameter's whole value; call it inside ``forward`` of the edge."""
        return self.memory.tensors(self._wholes)
