"""What a load has read and not put into place yet: ``load(..., whole=True)`` changes nothing before all is checked.
And what it has put into place already, when it fails.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.distributed_checkpoint.base.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.base.metadata import dtype_size
from hyper_parallel.core.distributed_checkpoint.base.shown_text import listed
from hyper_parallel.core.distributed_checkpoint.format.index_file import CheckpointIndex
from hyper_parallel.core.distributed_checkpoint.planning.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from hyper_parallel.core.distributed_checkpoint.planning.standard_planner import StandardLoadPlanner
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.host.shared_segment import available_memory


class WrittenEntries:
    """Which entries of a state a load has written to, for the word on it when the load fails."""

    def __init__(self) -> None:
        self.num_wanted = 0
        self._names: dict[str, None] = {}

    def add(self, name: str) -> None:
        self._names[name] = None

    @contextlib.contextmanager
    def explained(self, call: str, whole: bool) -> Iterator[None]:
        """Errors of a load say what the state holds now; ``call`` is the function."""
        try:
            yield
        except (CheckpointError, OSError) as error:
            is_ours = isinstance(error, CheckpointError)
            if not self._names and not (is_ours and whole):
                raise
            note = self._note(call, whole) if self._names else "Nothing was changed"
            raise (type(error) if is_ours else CheckpointError)(f"{error}. {note}") from error

    def _note(self, call: str, whole: bool) -> str:
        advice = "" if whole else f". {call}(..., whole=True) changes nothing before everything is read"
        return (
            f"The state is now part old, part new: on this rank {len(self._names)} of {self.num_wanted} entries were "
            f"written to ({listed(self._names, 5)}). Load another checkpoint before going on{advice}"
        )


class _HeldBox(NamedTuple):
    item: ReadItem
    place: Any  # what the planner gave
    target: np.ndarray[Any, Any]  # its bits
    data: np.ndarray[Any, Any]


class HeldState:
    """The boxes and objects of one load on one rank, in memory of their own."""

    def __init__(self, planner: LoadPlanner, written: WrittenEntries) -> None:
        self._planner = planner
        self._written = written
        self._boxes: list[_HeldBox] = []
        self._objects: list[tuple[ReadItem, Any]] = []
        # A planner that takes bytes in a way of its own gets them at the end, and may refuse them only then.
        self._decodes = isinstance(planner, StandardLoadPlanner) and (
            type(planner).apply_bytes is StandardLoadPlanner.apply_bytes
        )

    def expect(self, plan: LoadPlan, index: CheckpointIndex) -> None:
        """Raise where what a plan reads does not fit into memory."""
        require_memory(
            sum(
                index.objects[item.storage_index.fqn].length
                if item.type is LoadItemType.BYTE_IO
                else math.prod(item.lengths) * dtype_size(index.tensors[item.storage_index.fqn].dtype)
                for item in plan.items
            )
        )

    def place_for(self, item: ReadItem) -> np.ndarray[Any, Any]:
        """An array to read a box into."""
        place = self._planner.acquire_tensor(item)
        target = place if isinstance(place, np.ndarray) else get_platform().raw_array(place)
        self._boxes.append(_HeldBox(item, place, target, np.empty(target.shape, target.dtype)))
        return self._boxes[-1].data

    def keep_bytes(self, item: ReadItem, data: memoryview) -> None:
        """Keep an object; one that cannot be decoded is an error now."""
        self._objects.append((item, self._planner.decoded(item, data) if self._decodes else data))  # type: ignore[attr-defined]

    def apply(self) -> None:
        """Put everything into place."""
        put: Any = self._planner.put_object if self._decodes else self._planner.apply_bytes  # type: ignore[attr-defined]
        for item, value in self._objects:
            self._written.add(item.dest_index.fqn)
            put(item, value)
        while self._boxes:
            item, place, target, data = self._boxes.pop()
            self._written.add(item.dest_index.fqn)
            target[...] = data
            if place is not target:
                get_platform().set_raw(place, target)
            self._planner.apply_tensor(item, place)


def require_memory(num_bytes: int) -> None:
    """Raise if this host has not as many bytes of memory left as ``whole=True`` takes."""
    available = available_memory()
    if available is not None and num_bytes > available:
        raise MemoryError(
            f"load(..., whole=True) needs {num_bytes} bytes of memory on this rank, and its host has {available} left; "
            "load without whole=True"
        )
