"""Rounds of agreement: every rank does its part, one rank hears how all fared and decides, everybody learns it.

Note [A dead rank is heard of]
Ranks talk to the coordinator only, one message each way. A rank that died closes its connections, so the coordinator
hears of it while it waits for that rank and tells the others; and if the coordinator dies, all others hear of that. In
a ring or a tree only the neighbours of a dead rank would know, and the rest would wait until the group's time is over.

Note [Short messages in one piece]
A list of objects goes through a process group as several messages, its length first, and for each of them both sides
wait for the other. Nearly all that ranks say here is short. So a message starts with a piece of fixed size, which has
the length in front, and a second one follows only if that was not enough. It takes less than half the time. Groups of
devices other than the host send lists of objects, since they cannot send the host's memory.
"""

from __future__ import annotations

import pickle
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.distributed_checkpoint.base.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LostRankError,
)
from hyper_parallel.platform import get_platform

COORDINATOR = 0
_LENGTH = struct.Struct("<Q")
_PIECE = 1024  # bytes of the first piece of a message


class Report(NamedTuple):
    """How a rank fared: its value, or the text of its error."""

    value: Any
    error: str | None = None
    is_corruption: bool = False


class Agreement(ABC):
    """The ranks that save or load together."""

    rank: int
    world_size: int

    @property
    def is_coordinator(self) -> bool:
        return self.rank == COORDINATOR

    @abstractmethod
    def _gather(self, report: Report) -> list[Report] | None:
        """All ranks' reports on the coordinator; a rank that cannot be heard counts as one that failed."""

    @abstractmethod
    def _answer(self, verdicts: list[Report] | None) -> Report:
        """Send each rank the coordinator's verdict; this rank's own."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Nothing more is to be agreed upon."""

    def round(
        self,
        what: str,
        work: Callable[[], Any],
        decide: Callable[[list[Any]], Any] = lambda values: None,
        one_each: bool = False,
    ) -> Any:
        """``decide`` of all ranks' results of ``work``; with ``one_each`` it gives a list, one value for each rank.

        An error in ``work`` on any rank, or in ``decide``, is an error on every rank.
        """
        own_error: Exception | None = None
        try:
            report = Report(work())
        except Exception as error:
            own_error = error
            report = failure(error)
        reports = self._gather(report)
        verdicts = None
        if reports is not None:
            verdict, decide_error = self._judge(what, reports, decide)
            own_error = own_error or decide_error
            spread = one_each and verdict.error is None
            verdicts = [Report(v) for v in verdict.value] if spread else [verdict] * self.world_size
        verdict = self._answer(verdicts)
        if verdict.error is not None:
            if own_error is not None and self.world_size == 1:
                raise own_error
            kind = CorruptCheckpointError if verdict.is_corruption else CheckpointError
            raise kind(verdict.error) from own_error
        return verdict.value

    def _judge(
        self, what: str, reports: list[Report], decide: Callable[[list[Any]], Any]
    ) -> tuple[Report, Exception | None]:
        failed = {rank: report for rank, report in enumerate(reports) if report.error is not None}
        if not failed:
            try:
                return Report(decide([report.value for report in reports])), None
            except Exception as error:
                report = failure(error)
                return report._replace(error=f"{what} failed: {report.error}"), error
        by_text: dict[str, list[int]] = {}
        for rank, report in failed.items():
            by_text.setdefault(report.error or "", []).append(rank)
        texts = [f"{_name_ranks(ranks, self.world_size)}: {text}" for text, ranks in by_text.items()]
        is_corruption = any(report.is_corruption for report in failed.values())
        return Report(None, f"{what} failed on {'; '.join(texts)}", is_corruption), None


class AloneAgreement(Agreement):
    """One process that saves or loads by itself."""

    rank = 0
    world_size = 1

    def _gather(self, report: Report) -> list[Report]:
        return [report]

    def _answer(self, verdicts: list[Report] | None) -> Report:
        assert verdicts is not None
        return verdicts[0]


class GroupAgreement(Agreement):
    """The ranks of a process group (None: the world); see Note [A dead rank is heard of]."""

    def __init__(self, group: Any = None) -> None:
        self._platform = get_platform()
        self._group = group
        self._ranks = self._platform.get_process_group_ranks(group)
        self.rank = self._ranks.index(self._platform.get_rank())
        self.world_size = len(self._ranks)
        self._dead: set[int] = set()
        self._in_pieces = self._platform.get_device_type() == "cpu"

    def _gather(self, report: Report) -> list[Report] | None:
        if not self.is_coordinator:
            self._send(report, COORDINATOR)
            return None
        reports = [report]
        for rank in range(1, self.world_size):
            try:
                reports.append(self._receive(rank))
            except RuntimeError as error:
                self._dead.add(rank)
                reports.append(Report(None, f"it is gone ({_first_line(error)})"))
        return reports

    def _answer(self, verdicts: list[Report] | None) -> Report:
        if verdicts is None:
            return self._receive(COORDINATOR)
        for rank in range(1, self.world_size):
            if rank not in self._dead:
                try:
                    self._send(verdicts[rank], rank)
                except RuntimeError:
                    self._dead.add(rank)
        return verdicts[0]

    def _send(self, report: Report, rank: int) -> None:
        try:
            if not self._in_pieces:
                return self._platform.send_object_list([report], self._ranks[rank], self._group)
            data = pickle.dumps(report)
            message = _LENGTH.pack(len(data)) + data
            self._send_piece(message[:_PIECE].ljust(_PIECE, b"\0"), rank)
            if len(message) > _PIECE:
                self._send_piece(message[_PIECE:], rank)
        except RuntimeError as error:
            raise self._loss(rank, error) from error

    def _receive(self, rank: int) -> Report:
        try:
            if not self._in_pieces:
                box: list[Any] = [None]
                self._platform.recv_object_list(box, self._ranks[rank], self._group)
                return box[0]
            message = self._receive_piece(_PIECE, rank)
            end = _LENGTH.size + _LENGTH.unpack_from(message)[0]
            if end > _PIECE:
                message += self._receive_piece(end - _PIECE, rank)
            return pickle.loads(message[_LENGTH.size : end])
        except RuntimeError as error:
            raise self._loss(rank, error) from error

    def _send_piece(self, data: bytes, rank: int) -> None:
        piece = self._platform.new_tensor((len(data),), "uint8", "cpu")
        self._platform.set_raw(piece, np.frombuffer(data, np.uint8))
        self._platform.isend(piece, self._ranks[rank], self._group).wait()

    def _receive_piece(self, num_bytes: int, rank: int) -> bytes:
        piece = self._platform.new_tensor((num_bytes,), "uint8", "cpu")
        self._platform.irecv(piece, self._ranks[rank], self._group).wait()
        return self._platform.raw_array(piece).tobytes()

    def _loss(self, rank: int, error: Exception) -> LostRankError:
        return LostRankError(f"rank {self.rank} lost rank {rank} while saving or loading: {_first_line(error)}")


def failure(error: Exception) -> Report:
    """The report of a rank in which an error was raised."""
    return Report(None, f"{type(error).__name__}: {error}", isinstance(error, CorruptCheckpointError))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _name_ranks(ranks: list[int], world_size: int) -> str:
    if len(ranks) == world_size and world_size > 1:
        return "all ranks"
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
