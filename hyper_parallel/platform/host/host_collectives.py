"""Collectives on numpy arrays in host memory, over the messages of ``host_transport.py``; free of any framework.

Every dtype travels as its bytes. Reductions are done here, by every rank in the order of the group's ranks, so that all
ranks get the same bits; small arrays are gathered whole, large ones part by part.

Note [How reductions round]
    16-bit and 8-bit floats are added in float32 and rounded once. NaN wins a maximum and a minimum on whatever rank it
    is. Integers wrap around. Sums of bools are "any", products are "all". An average is the sum divided once, before
    rounding.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hyper_parallel.platform.host.transport import HostTransport, channel_of

__all__ = ["REDUCE_OPS", "HostGroup", "reduce_arrays", "why_not"]

REDUCE_OPS = ("sum", "avg", "max", "min", "prod", "band", "bor", "bxor", "all", "any")
_WHOLE_BYTES = 256 * 1024  # up to here an all-reduce is one gather

_FOLDS: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "any": np.logical_or,
    "all": np.logical_and,
}
_OF_BOOLS: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("sum", "max", "any", "bor"), np.logical_or),
    **dict.fromkeys(("prod", "min", "all", "band"), np.logical_and),
    "bxor": np.logical_xor,
}


class HostGroup:
    """The ranks of a group and what this process sends to and receives from them. Making one tells nobody."""

    def __init__(self, transport: HostTransport, ranks: Sequence[int], name: str) -> None:
        self.transport = transport
        self.ranks = list(ranks)
        self.name = name
        self.place = self.ranks.index(transport.rank)
        self._collectives = channel_of(f"{name}/collectives")
        self._messages = channel_of(f"{name}/messages")
        self._number = 0

    # ---------------------------------------------------------------- collectives: started here, finished by the result

    def start_exchange(self, operation: str, parts: Sequence[np.ndarray | None]) -> Callable[..., list[Any]]:
        """Send ``parts[r]`` to rank r of the group; the function returned gives what came from each.

        A part is a vector of bytes. The part for this rank is handed over as it is; None sends nothing to that rank,
        which must know and not expect any.
        """
        self._number += 1
        number = self._number
        for place in self._others():
            part = parts[place]
            if part is not None:
                self.transport.send(self.ranks[place], self._collectives, number, operation, part)
        mine = parts[self.place]

        def finish(expected: Sequence[bool] | None = None) -> list[Any]:
            came: list[Any] = [None] * len(self.ranks)
            came[self.place] = mine
            for place in self._others():
                if expected is None or expected[place]:
                    came[place] = self.transport.receive(
                        [self.ranks[place]], self._collectives, number, operation, self.ranks
                    )[1]
            return came

        return finish

    def start_gather(self, operation: str, mine: np.ndarray) -> Callable[[], list[np.ndarray]]:
        """Every rank's bytes, by rank."""
        return self.start_exchange(operation, [mine] * len(self.ranks))

    def start_all_to_all(
        self, operation: str, parts: Sequence[np.ndarray], received_bytes: Sequence[int]
    ) -> Callable[[], list[np.ndarray]]:
        """``parts[r]`` goes to rank r; ``received_bytes[r]`` must come from it. Nothing is sent for empty parts."""
        finish = self.start_exchange(operation, [part if part.size else None for part in parts])

        def received() -> list[np.ndarray]:
            came = finish([num_bytes > 0 for num_bytes in received_bytes])
            parts_by_rank = [np.empty(0, np.uint8) if part is None else part for part in came]
            for place, (part, num_bytes) in enumerate(zip(parts_by_rank, received_bytes, strict=True)):
                self._check_size(operation, place, part, num_bytes)
            return parts_by_rank

        return received

    def start_reduction(self, operation: str, data: np.ndarray, op: str, in_flight: bool) -> Callable[[], np.ndarray]:
        """The reduction of all ranks' ``data``, which is contiguous and of one shape and dtype on all of them.

        ``in_flight``: others may be started before this one is finished, and finished in another order on other ranks.
        Then it is one gather, however large: a second step of one could wait for the second step of the other.
        """
        flat = data.reshape(-1)
        if in_flight or flat.nbytes <= _WHOLE_BYTES or len(self.ranks) == 2:
            finish = self.start_gather(operation, as_bytes(flat))

            def reduced() -> np.ndarray:
                return reduce_arrays(self._as_arrays(operation, finish(), flat), op).reshape(data.shape)

            return reduced
        bounds = [len(flat) * place // len(self.ranks) for place in range(len(self.ranks) + 1)]
        parts = [flat[start:end] for start, end in itertools.pairwise(bounds)]
        finish_parts = self.start_exchange(operation, [as_bytes(part) for part in parts])

        def reduced_in_parts() -> np.ndarray:
            mine = reduce_arrays(self._as_arrays(operation, finish_parts(), parts[self.place]), op)
            pieces = self.start_gather(operation, as_bytes(mine))()
            for place, piece in enumerate(pieces):
                self._check_size(operation, place, piece, parts[place].nbytes)
            return np.concatenate([piece.view(flat.dtype) for piece in pieces]).reshape(data.shape)

        return reduced_in_parts

    def start_reduce_scatter(self, operation: str, data: np.ndarray, op: str) -> Callable[[], np.ndarray]:
        """The reduction of all ranks' ``data``, of which this rank keeps its equal part of dim 0."""
        parts = list(data.reshape((len(self.ranks), data.shape[0] // len(self.ranks), *data.shape[1:])))
        finish = self.start_exchange(operation, [as_bytes(part) for part in parts])
        mine = parts[self.place]
        return lambda: reduce_arrays(self._as_arrays(operation, finish(), mine), op).reshape(mine.shape)

    def start_broadcast(self, operation: str, data: np.ndarray, source: int) -> Callable[[], np.ndarray]:
        """The bytes of the ``source``-th rank of the group."""
        is_source = self.place == source
        finish = self.start_exchange(operation, [data if is_source else None] * len(self.ranks))

        def received() -> np.ndarray:
            if is_source:
                return data
            came = finish([place == source for place in range(len(self.ranks))])[source]
            self._check_size(operation, source, came, data.nbytes)
            return came

        return received

    # ---------------------------------------------------------------- messages

    def send(self, operation: str, data: np.ndarray | bytes, target: int, tag: int = 0) -> None:
        """Send bytes to the ``target``-th rank of the group."""
        self.transport.send(self.ranks[target], self._messages, tag, operation, data)

    def receive(self, operation: str, source: int | None, tag: int = 0) -> tuple[int, np.ndarray]:
        """(rank of the group, bytes) of the next message of the ``source``-th rank, or of whoever sends first."""
        places = self._others() if source is None else [source]
        members = () if source is None else (self.ranks[source],)
        rank, data = self.transport.receive(
            [self.ranks[place] for place in places], self._messages, tag, operation, members
        )
        return self.ranks.index(rank), data

    def has_message(self, source: int | None, tag: int = 0) -> bool:
        places = self._others() if source is None else [source]
        return any(self.transport.has_arrived(self.ranks[place], self._messages, tag) for place in places)

    # ---------------------------------------------------------------- small things

    def _others(self) -> list[int]:
        """The other ranks of the group, starting after this one: not all ranks write to the same one at first."""
        size = len(self.ranks)
        return [(self.place + step) % size for step in range(1, size)]

    def _check_size(self, operation: str, place: int, data: np.ndarray, num_bytes: int) -> None:
        if data.nbytes != num_bytes:
            raise RuntimeError(
                f"the ranks disagree: {operation} on rank {self.ranks[self.place]} expects {num_bytes} bytes from rank "
                f"{self.ranks[place]} and got {data.nbytes}; shapes and dtypes must fit together on all ranks of the "
                "group (HYPER_PARALLEL_CHECK_COLLECTIVES=1 shows them)"
            )

    def _as_arrays(self, operation: str, came: list[np.ndarray], like: np.ndarray) -> list[np.ndarray]:
        for place, data in enumerate(came):
            self._check_size(operation, place, data, like.nbytes)
        return [data.view(like.dtype) for data in came]


def as_bytes(data: np.ndarray) -> np.ndarray:
    """The bytes of a contiguous array, not copied."""
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)


# ---------------------------------------------------------------- reductions


def _is_float(dtype: np.dtype) -> bool:
    # The types that frameworks add to numpy (bfloat16, float8) have the kind "V" or "f" and names of their own.
    return dtype.kind == "f" or "float" in dtype.name


def why_not(op: str, dtype: np.dtype, name: str) -> str | None:
    """What is wrong with reducing ``dtype``, called ``name``, by ``op``; None if nothing is."""
    if op not in REDUCE_OPS:
        return f"there is no reduction {op!r}; there are {', '.join(REDUCE_OPS)}"
    if op in ("all", "any"):
        return None if dtype == np.bool_ else f"{op} reduces bools, not {name}; write (data != 0)"
    is_number = _is_float(dtype) or dtype.kind == "c"
    if op == "avg" and not is_number:
        return f"the average of {name} is not a {name}; cast to a floating dtype, or use op='sum'"
    if op in ("band", "bor", "bxor") and is_number:
        return f"{op} reduces integers and bools, not {name}"
    if op in ("max", "min") and dtype.kind == "c":
        return f"complex numbers have no order, so there is no {op}; reduce data.abs()"
    return None


def reduce_arrays(arrays: Sequence[np.ndarray], op: str) -> np.ndarray:
    """The reduction of equally long vectors, in their order; see Note [How reductions round]."""
    dtype = arrays[0].dtype
    if dtype == np.bool_:
        return functools.reduce(_OF_BOOLS[op], arrays)
    is_narrow = _is_float(dtype) and dtype.itemsize < 4
    wide = [array.astype(np.float32) for array in arrays] if is_narrow else arrays
    with np.errstate(all="ignore"):
        result = wide[0].copy()
        for array in wide[1:]:
            _FOLDS[op](result, array, out=result)
        if op == "avg":
            result /= len(arrays)
        return result.astype(dtype) if is_narrow else result
