"""Projections side by side: what a fused layer gives, in a form whose parts are cut each by itself.

Note [Taken apart or put in order]
A layer that computes query, key and value at once gives them behind each other, and the code behind it takes them apart
at once: by ``split``, ``chunk`` or slices. A rank has its block of each part. That is no block of the whole, in its
order, so no layout describes it; but every part by itself is an ordinary tensor, cut on its last dim. A tensor of class
:class:`FusedOutput` is both: the whole by its shape, and the parts when it is taken apart where they meet, which needs
no communication. Any other operator gets the whole as an ordinary tensor: the parts are gathered and joined. So what is
computed is right whatever the code does, and cheap where it does the usual.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.platform import get_platform

_platform = get_platform()

Interval = tuple[int, int]  # start and length along the last dim


class FusedOutput(DTensor):
    """Tensors of which each is cut on its last dim, joined there; see Note [Taken apart or put in order]."""

    _widths: tuple[int, ...]  # of the parts, of the whole tensor
    _parts: tuple[DTensor, ...] | None = None
    _in_order: DTensor | None = None

    @staticmethod
    def of_blocks(blocks: Any, widths: Sequence[int], layout: Layout, leading: tuple[int, ...]) -> FusedOutput:
        """The tensor of which ``blocks``, joined, are this rank's blocks of parts of the given ``widths``.

        ``layout`` is that of each part, sharded on the last dim; ``leading`` are the sizes of the other dims.
        """
        made = _platform.as_dtensor(FusedOutput, blocks, layout, (*leading, sum(widths)))
        made._widths = tuple(widths)
        return made

    @classmethod
    def _on_operator(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], FusedOutput):
            name = _platform.get_op_name(func)
            intervals = _intervals(name, args[0], args[1:], kwargs)
            taken = None if intervals is None else args[0].taken_apart(intervals)
            if taken is not None:
                return taken[0] if name in _ONE_RESULT else tuple(taken)
        args, kwargs = _platform.tree_map(_ordered, (args, kwargs))
        return cls._hand_on(func, types, args, kwargs)

    def taken_apart(self, intervals: Sequence[Interval]) -> list[DTensor] | None:
        """What lies in the intervals of the last dim; None unless each is made of whole parts."""
        starts = list(itertools.accumulate(self._widths, initial=0))
        ranges = []
        for start, length in intervals:
            if length == 0 or start not in starts or start + length not in starts:
                return None
            ranges.append((starts.index(start), starts.index(start + length)))
        parts = self._apart()
        return [_joined(parts[first:last], self._widths[first:last]) for first, last in ranges]

    def _apart(self) -> tuple[DTensor, ...]:
        if self._parts is None:
            leading = tuple(self._global_shape[:-1])
            shapes = [(*leading, width) for width in self._widths]
            lengths = [self._layout.local_shape(shape)[-1] for shape in shapes]
            blocks = _platform.local_alias(self).split(lengths, -1)
            self._parts = tuple(
                _platform.as_dtensor(DTensor, _platform.alias(block), self._layout, shape)
                for block, shape in zip(blocks, shapes, strict=True)
            )
        return self._parts

    def _completed(self) -> DTensor:
        """The whole as an ordinary tensor. forward: an all-gather of each part; backward: what their gradients need."""
        if self._in_order is None:
            gathered = Layout.of(self.device_mesh, (*self._layout.shard_axes[:-1], ()))
            parts = [part.redistribute(self.device_mesh, gathered) for part in self._apart()]
            joined = _platform.cat(parts, -1)
            self._in_order = joined.redistribute(self.device_mesh, self._layout)
        return self._in_order

    # What reaches the memory without passing through an operator.

    @property
    def data(self) -> Any:
        """The whole, without gradient history; a copy."""
        return self._completed().data

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self._completed().local_shape

    def register_hook(self, hook: Any) -> Any:
        raise RuntimeError(
            "register_hook: a fused projection's output has no gradient of its own; register the hook on its parts, "
            "behind split, chunk or a slice"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._completed().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._completed().__reduce_ex__(protocol)


def _joined(parts: Sequence[DTensor], widths: Sequence[int]) -> DTensor:
    if len(parts) == 1:
        return parts[0]
    blocks = _platform.cat([_platform.local_alias(part) for part in parts], -1)
    return FusedOutput.of_blocks(blocks, widths, parts[0]._layout, tuple(parts[0]._global_shape[:-1]))


def _ordered(value: Any) -> Any:
    return value._completed() if isinstance(value, FusedOutput) else value


# ---------------------------------------------------------------- which parts an operator asks for

_ONE_RESULT = ("getitem", "narrow")


def _intervals(name: str, tensor: FusedOutput, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Interval] | None:
    """What the operator takes of the last dim; None where it does something else."""
    width, last = tensor.shape[-1], (-1, tensor.ndim - 1)
    if name == "getitem":
        return _of_index(args[0], tensor.ndim, width)
    if name == "narrow":
        given = dict(zip(("dim", "start", "length"), args, strict=False)) | kwargs
        return [(given["start"] % width, given["length"])] if given.get("dim") in last and _is_int(given) else None
    if name in ("split", "split_with_sizes", "unsafe_split"):
        given = dict(zip(("sizes", "dim"), args, strict=False)) | kwargs
        sizes = next((value for key, value in given.items() if key != "dim"), None)
    elif name in ("chunk", "unsafe_chunk"):
        given = dict(zip(("chunks", "dim"), args, strict=False)) | kwargs
        sizes = -(-width // given["chunks"]) if isinstance(given.get("chunks"), int) and given["chunks"] > 0 else None
    else:
        return None
    if given.get("dim", 0) not in last:
        return None
    if isinstance(sizes, int) and sizes > 0:
        sizes = [min(sizes, width - start) for start in range(0, width, sizes)]
    if not isinstance(sizes, (list, tuple)) or sum(sizes) != width:
        return None
    starts = itertools.accumulate(sizes, initial=0)
    return list(zip(starts, sizes, strict=False))


def _is_int(given: dict[str, Any]) -> bool:
    return all(isinstance(given.get(name), int) for name in ("start", "length"))


def _of_index(index: Any, ndim: int, width: int) -> list[Interval] | None:
    """The interval of ``x[..., a:b]``, however many dims are written out."""
    entries = index if isinstance(index, tuple) else (index,)
    if any(entry is Ellipsis for entry in entries[:-1]):
        leading = [entry for entry in entries[:-1] if entry is not Ellipsis]
    elif len(entries) == ndim:
        leading = list(entries[:-1])
    else:
        return None
    whole = slice(None)
    if not isinstance(entries[-1], slice) or not all(isinstance(one, slice) and one == whole for one in leading):
        return None
    bounds = (entries[-1].start, entries[-1].stop, entries[-1].step)
    if any(bound is not None and not isinstance(bound, int) for bound in bounds):
        return None
    start, stop, step = entries[-1].indices(width)
    return [(start, max(stop - start, 0))] if step == 1 else None
