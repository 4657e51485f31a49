"""Groups of a pretend world, with the calls of a process group: silent ones, and ones whose members are threads.

Note [Groups that nobody answers]
---------------------------------
In a silent world there is one rank. A collective on tensors without memory has nothing to do: the result was allocated
by the caller, as for a real group. Tensors with memory (sizes, positions, counts) come back as if every rank had given
what this one gave, computed in their own memory: what is measured in such a world is what a rank of a real one
needs. What only another rank can know, an object that it sends, is an error.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.platform.checks.call_site import call_site
from hyper_parallel.platform.checks.collective_checks import disagreement_text
from hyper_parallel.platform.checks.group_checks import DONE, nobody_sends_first, nobody_sends_objects
from hyper_parallel.platform.pretend.meeting import MeetingPlace
from hyper_parallel.platform.shared.membership import Member, current_member

__all__ = ["meeting_group_maker", "silent_group"]

_OPS = {getattr(dist.ReduceOp, name): name for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR")}
_ARGUMENTS = {"all_reduce": "op", "reduce_scatter_tensor": "op", "reduce_scatter_tensors": "op", "broadcast": "src"}


class PretendGroup:
    """Ascending ranks of a pretend world, of which the member is one."""

    def __init__(self, member: Member, ranks: tuple[int, ...]) -> None:
        self.ranks, self.place = ranks, ranks.index(member.rank)
        self.ledger: Any = None

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.place

    def __repr__(self) -> str:
        return f"{type(self).__name__}(ranks={list(self.ranks)}, rank={self.ranks[self.place]})"


class SilentGroup(PretendGroup):
    """A group in a world in which nobody else is; see Note [Groups that nobody answers]."""

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        for tensor in tensors:
            if not tensor.is_meta:
                _reduce_with_equals(tensor, options.reduceOp, self.size())
        return DONE

    def all_gather_single(self, output: torch.Tensor, data: torch.Tensor, options: Any = None) -> Any:
        if not data.is_meta:
            output.view(self.size(), -1).copy_(data.reshape(1, -1).expand(self.size(), -1))
        return DONE

    def allgather_into_tensor_coalesced(self, outputs: Any, data: Any, options: Any = None) -> Any:
        for output, one in zip(outputs, data, strict=True):
            self.all_gather_single(output, one)
        return DONE

    def all_to_all_single(
        self, output: torch.Tensor, data: torch.Tensor, received: Any, sent: Any, options: Any = None
    ) -> Any:
        if not data.is_meta:
            mine = _parts(data, sent, self.size())[self.place]
            for part in _parts(output, received, self.size()):
                _fill_with_rows(part, mine)
        return DONE

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        return DONE

    def send(self, tensors: list[torch.Tensor], place: int, tag: int = 0) -> Any:
        return DONE

    def recv(self, tensors: list[torch.Tensor], place: int, tag: int = 0) -> Any:
        for tensor in tensors:
            if not tensor.is_meta:
                tensor.zero_()
        return DONE

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Any:
        raise nobody_sends_first()

    def barrier(self) -> Any:
        return DONE

    def gather_objects(self, pickled: bytes) -> list[bytes]:
        return [pickled] * self.size()

    def send_objects(self, pickled: list[bytes], place: int) -> None:
        pass

    def receive_objects(self, num_objects: int, place: int | None) -> tuple[int, list[bytes]]:
        raise nobody_sends_objects(None if place is None else self.ranks[place])


class MeetingGroup(PretendGroup):
    """A group whose members are threads of this process, each with an object of its own."""

    def __init__(self, member: Member, ranks: tuple[int, ...], meeting: MeetingPlace, number: int) -> None:
        super().__init__(member, ranks)
        self._meeting, self._key = meeting, (ranks, number)
        self._num_begun = 0
        self.ledger = _Announcements(self)
        self.announced: dict[str, dict[str, Any]] = {}  # what is about to begin: a collective, a send, a receive

    def _meet(self, given: Any, finish: Callable[[list[Any], dict[str, Any]], None]) -> _MeetingWork:
        call = self.announced["collective"]
        self._num_begun += 1
        slot = self._meeting.come(self._key, self._num_begun, self.place, call, given)
        return _MeetingWork(self, self._num_begun, slot, finish)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        (tensor,) = tensors

        def finish(given: list[torch.Tensor], results: dict[str, Any]) -> None:
            if "reduced" not in results:
                results["reduced"] = _reduced(given, options.reduceOp)
            tensor.copy_(results["reduced"])

        return self._meet(tensor.detach().clone(), finish)

    def all_gather_single(self, output: torch.Tensor, data: torch.Tensor, options: Any = None) -> Any:
        flat = output.view(-1)
        return self._meet(data.detach().reshape(-1).clone(), lambda given, _: torch.cat(given, out=flat))

    def allgather_into_tensor_coalesced(self, outputs: Any, data: Any, options: Any = None) -> Any:
        def finish(given: list[list[torch.Tensor]], _: dict[str, Any]) -> None:
            for output, parts in zip(outputs, zip(*given, strict=True), strict=True):
                torch.cat(parts, out=output.view(-1))

        return self._meet([one.detach().reshape(-1).clone() for one in data], finish)

    def all_to_all_single(
        self, output: torch.Tensor, data: torch.Tensor, received: Any, sent: Any, options: Any = None
    ) -> Any:
        parts = [part.reshape(-1) for part in _parts(data.detach().clone(), sent, self.size())]
        flat = output.view(-1)
        return self._meet(parts, lambda given, _: torch.cat([one[self.place] for one in given], out=flat))

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        (tensor,), root = tensors, options.rootRank
        given = tensor.detach().clone() if root == self.place else None

        def finish(given: list[Any], _: dict[str, Any]) -> None:
            if root != self.place:
                tensor.copy_(given[root])

        return self._meet(given, finish)

    def barrier(self) -> Any:
        return self._meet(None, lambda given, _: None)

    def gather_objects(self, pickled: bytes) -> list[bytes]:
        gathered: list[bytes] = []
        self._meet(pickled, lambda given, _: gathered.extend(given)).wait()
        return gathered

    # ---------------------------------------------------------------- messages

    def send(self, tensors: list[torch.Tensor], place: int, tag: int = 0) -> Any:
        call = self.announced["send"]
        self._meeting.post(self._key, self.place, place, tag, call, tensors[0].detach().clone())
        return DONE

    def recv(self, tensors: list[torch.Tensor], place: int | None, tag: int = 0) -> Any:
        return _Receipt(self, tensors[0], place, tag, self.announced["receive"])

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Any:
        return self.recv(tensors, None, tag)

    def send_objects(self, pickled: list[bytes], place: int) -> None:
        self._meeting.post(self._key, self.place, place, -1, self.announced["send"], pickled)

    def receive_objects(self, num_objects: int, place: int | None) -> tuple[int, list[bytes]]:
        mine = self.announced["receive"]
        found, call, pickled = self._meeting.receive(self._key, place, self.place, -1, mine, False)
        self._check_message(found, call, mine, len(pickled) == num_objects, "number of objects")
        return found, pickled

    def receive(self, place: int | None, tag: int, call: dict[str, Any], has_limit: bool) -> tuple[int, torch.Tensor]:
        found, sent, given = self._meeting.receive(self._key, place, self.place, tag, call, has_limit)
        fits = all(sent.get(name) == call.get(name) for name in ("elements", "dtype"))
        self._check_message(found, sent, call, fits, "size")
        return found, given

    def _check_message(self, source: int, sent: dict[str, Any], mine: dict[str, Any], fits: bool, what: str) -> None:
        if not fits:
            sides = {self.ranks[source]: sent, self.ranks[self.place]: mine}
            raise RuntimeError(disagreement_text(f"not the same {what}", sides, self.ranks))

    def has_message(self, place: int | None, tag: int) -> bool:
        return self._meeting.sender(self._key, place, self.place, tag) is not None

    def wait_for(self, number: int, slot: Any, has_limit: bool) -> None:
        self._meeting.wait(self._key, number, self.place, slot, has_limit)

    def leave(self, number: int, slot: Any) -> None:
        self._meeting.leave(self._key, number, slot)

    def looks_complete(self, is_complete: Callable[[], bool]) -> bool:
        return self._meeting.let_others_run(self.ranks[self.place], is_complete)

    def is_met(self, slot: Any) -> bool:
        return self._meeting.is_complete(self._key, slot)


def silent_group(member: Member, ranks: tuple[int, ...]) -> SilentGroup:
    """A group of a world in which nobody else is."""
    return SilentGroup(member, ranks)


def is_silent() -> bool:
    """Whether this thread is a rank of a world in which nobody else is."""
    member = current_member()
    return member is not None and isinstance(member.world_group, SilentGroup)


def meeting_group_maker(meeting: MeetingPlace) -> Callable[[Member, tuple[int, ...]], MeetingGroup]:
    """What makes the groups of one member; members that make groups of the same ranks in turn get the same ones."""
    num_made: dict[tuple[int, ...], int] = {}

    def make(member: Member, ranks: tuple[int, ...]) -> MeetingGroup:
        number = num_made[ranks] = num_made.get(ranks, 0) + 1
        return MeetingGroup(member, ranks, meeting, number)

    return make


class _Announcements:
    """What collectives tell before they begin, as they tell the ledger of a real group (``ledgers.py``)."""

    def __init__(self, group: MeetingGroup) -> None:
        self._group = group

    def enter(self, function: str, shape: Any = None, dtype: Any = None, argument: Any = None) -> None:
        call: dict[str, Any] = {"function": function}
        if dtype is not None:
            call |= {"shape": tuple(shape), "dtype": str(dtype)}
        if argument is not None:
            call[_ARGUMENTS[function]] = argument
        self._announce("collective", call)

    def exchange(self, shape: Any, dtype: Any, received: Sequence[int], sent: Sequence[int]) -> None:
        call = {"function": "all_to_all_single", "shape": tuple(shape), "dtype": str(dtype)}
        rows = {"output_shape": (sum(received), *shape[1:])}
        splits = {"input_splits": list(sent), "output_splits": list(received)}
        self._announce("collective", call | rows | splits)

    def send(self, place: int, tag: int, elements: int, dtype: Any = None) -> None:
        function = "isend" if dtype is not None else "send_object_list"
        self._announce("send", self._message(function, "dst", place, tag, elements, dtype))

    def receive(self, place: int | None, tag: int, elements: int, dtype: Any = None) -> None:
        function = "irecv" if dtype is not None else "recv_object_list"
        self._announce("receive", self._message(function, "src", place, tag, elements, dtype))

    def _message(
        self, function: str, role: str, place: int | None, tag: int, elements: int, dtype: Any
    ) -> dict[str, Any]:
        peer = None if place is None else self._group.ranks[place]
        what = {"elements": elements, "dtype": str(dtype)} if dtype is not None else {"objects": elements}
        return {"function": function, role: peer, "tag": tag, **what}

    def _announce(self, kind: str, call: dict[str, Any]) -> None:
        self._group.announced[kind] = call | {"at": call_site()}

    def refuse(self, why: str) -> None:
        raise RuntimeError(why)

    def close(self) -> None:
        pass


class _MeetingWork:
    """A collective in flight."""

    def __init__(self, group: MeetingGroup, number: int, slot: Any, finish: Callable[[list[Any], Any], None]) -> None:
        self._group, self._number, self._slot = group, number, slot
        self._finish: Callable[[list[Any], Any], None] | None = finish

    @torch.no_grad()
    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._finish is not None:
            self._group.wait_for(self._number, self._slot, timeout is not None)
            given = [self._slot.given[place] for place in range(self._group.size())]
            self._finish(given, self._slot.results)
            self._finish = None
            self._group.leave(self._number, self._slot)
        return True

    def is_completed(self) -> bool:
        if self._finish is not None and self._group.looks_complete(lambda: self._group.is_met(self._slot)):
            self.wait()
        return self._finish is None


class _Receipt:
    """A message to come."""

    def __init__(
        self, group: MeetingGroup, tensor: torch.Tensor, place: int | None, tag: int, call: dict[str, Any]
    ) -> None:
        self._group, self._tensor, self._place, self._tag, self._call = group, tensor, place, tag, call
        self._is_done = False

    @torch.no_grad()
    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._is_done:
            self._place, given = self._group.receive(self._place, self._tag, self._call, timeout is not None)
            self._tensor.copy_(given.view(self._tensor.shape))
            self._is_done = True
        return True

    def is_completed(self) -> bool:
        has_come = self._group.looks_complete(lambda: self._group.has_message(self._place, self._tag))
        if not self._is_done and has_come:
            self.wait()
        return self._is_done

    def _source_rank(self) -> int | None:
        return self._place


# ---------------------------------------------------------------- arithmetic


def _parts(data: torch.Tensor, rows: Sequence[int], size: int) -> list[torch.Tensor]:
    """What goes to or comes from each rank: the given numbers of rows, or equal parts."""
    return list(data.split(list(rows) if len(rows) else [data.shape[0] // size] * size))


def _fill_with_rows(part: torch.Tensor, rows: torch.Tensor) -> None:
    """``rows`` again and again; zeros where there are none."""
    if not rows.shape[0]:
        part.zero_()
        return
    for piece in part.split(rows.shape[0]):
        piece.copy_(rows[: piece.shape[0]])


def _reduce_with_equals(tensor: torch.Tensor, reduce_op: Any, size: int) -> None:
    """The reduction of ``size`` tensors that are all equal to this one, in place."""
    op = _name_of(reduce_op)
    if op == "SUM":
        tensor.mul_(size)
    elif op == "PRODUCT":
        tensor.pow_(size)
    elif op == "BXOR" and size % 2 == 0:
        tensor.zero_()


_FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MAX": torch.maximum,
    "MIN": torch.minimum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def _name_of(reduce_op: Any) -> str:
    return next(name for known, name in _OPS.items() if reduce_op == known)


def _reduced(parts: Sequence[torch.Tensor], reduce_op: Any) -> torch.Tensor:
    """The reduction in the order of the ranks."""
    op = _name_of(reduce_op)
    result = parts[0].clone()
    for part in parts[1:]:
        result = _FOLDS[op](result, part)
    return result / len(parts) if op == "AVG" else result


def unpickled(pickled: Sequence[bytes]) -> list[Any]:
    """Each rank gets its own copy of an object."""
    return [pickle.loads(one) for one in pickled]
