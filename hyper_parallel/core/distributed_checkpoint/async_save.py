"""Saving in the background: copy the state to shared memory, let a separate process write it, and go on training."""

from __future__ import annotations

import atexit
import itertools
import os
import pickle
import sys
import threading
from collections.abc import Iterable
from typing import Any, ClassVar

from hyper_parallel.core.distributed_checkpoint.agreement.agreement import Agreement
from hyper_parallel.core.distributed_checkpoint.agreement.file_agreement import make_agreement
from hyper_parallel.core.distributed_checkpoint.background.staging import copy_to_shared_memory
from hyper_parallel.core.distributed_checkpoint.background.writer_handle import WriterProcess
from hyper_parallel.core.distributed_checkpoint.base.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LostRankError,
)
from hyper_parallel.core.distributed_checkpoint.base.metadata import Metadata
from hyper_parallel.core.distributed_checkpoint.format.index_file import CheckpointIndex, decode_index
from hyper_parallel.core.distributed_checkpoint.format.shard_file import RankReport, WrittenItem
from hyper_parallel.core.distributed_checkpoint.planning.chunks import plan_chunks
from hyper_parallel.core.distributed_checkpoint.planning.make_index import index_by_arithmetic, index_of_plans
from hyper_parallel.core.distributed_checkpoint.planning.planner import SavePlanner
from hyper_parallel.core.distributed_checkpoint.save import KnownPlan, PreparedSave, Question, prepare_save, stage
from hyper_parallel.core.distributed_checkpoint.storage.filesystem import FileSystemWriter
from hyper_parallel.core.distributed_checkpoint.storage.storage import (
    METADATA_FILE,
    Buffer,
    CheckpointId,
    StorageWriter,
    absolute_path,
    default_writer,
    storage_for,
)
from hyper_parallel.platform import get_platform

__all__ = ["AsyncSave", "async_save"]

_KINDS = {"lost": LostRankError, "corrupt": CorruptCheckpointError}


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    if_busy: str = "wait",
) -> AsyncSave:
    """Write a checkpoint in the background, as :func:`save` does; every rank calls it with its own part of the state.

    Training may go on and change the state as soon as this returns: it is copied to memory of the host by then. A
    process beside each rank writes it from there, agrees with the others, and commits. If that fails on any rank, the
    previous checkpoint stays, and the error is raised on every rank by ``result()`` of the handle, or, where nobody
    asked, by the next ``async_save``. While a save is running, another one waits for it, or is refused with
    ``if_busy="refuse"``.

    The memory is kept for the next save. A program that ends waits for its last save; what one that is killed had
    handed over when this returned is written all the same.
    """
    if if_busy not in ("wait", "refuse"):
        raise ValueError(f"if_busy is 'wait' or 'refuse', got {if_busy!r}")
    agreement = make_agreement(no_dist, use_collectives, checkpoint_id, "save")
    try:
        background = _Background.of(agreement)
        storage_writer = storage_writer if storage_writer is not None else default_writer(checkpoint_id)
        real_writer = _packed_writer(storage_writer)
        place = absolute_path(checkpoint_id) if isinstance(storage_writer, FileSystemWriter) else checkpoint_id
        with background.turn:
            if if_busy == "wait":
                background.wait_for_last()
            prepared = prepare_save(
                state_dict,
                checkpoint_id,
                _NoWriter(),
                planner,
                agreement,
                background.readiness(),
                background.known_plan,
            )
            background.make_ready(agreement, *prepared.decision)
            handle = AsyncSave(background, prepared, checkpoint_id)
            background.start(handle, prepared, real_writer, place)
            return handle
    finally:
        agreement.close()


class AsyncSave:
    """A save in the background."""

    def __init__(self, background: _Background, prepared: PreparedSave, checkpoint_id: CheckpointId) -> None:
        self._background = background
        self._specs = prepared.specs
        self._world_size = prepared.agreement.world_size
        self.checkpoint_id = checkpoint_id
        self._outcome: tuple[str, Any] | None = None
        self.was_raised = False

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._settle(0)

    def result(self, timeout: float | None = None) -> Metadata:
        """Wait for the end: what the checkpoint holds, or the error. TimeoutError after ``timeout`` seconds."""
        if not self._settle(timeout):
            raise TimeoutError(f"the checkpoint '{self.checkpoint_id}' is still being written after {timeout} seconds")
        if (error := self.error()) is not None:
            self.was_raised = True
            raise error
        assert self._outcome is not None
        if self._outcome[1] is not None:
            return decode_index(self._outcome[1], f"{self.checkpoint_id}/{METADATA_FILE}").metadata()
        if self._specs is None:
            return Metadata(world_size=self._world_size)
        return index_by_arithmetic(self._specs, None, self._world_size).metadata()

    def error(self) -> CheckpointError | None:
        """The error of a save that has failed, None while it runs and when it went well."""
        if self._outcome is None or self._outcome[0] != "failed":
            return None
        kind, text = self._outcome[1]
        return _KINDS.get(kind, CheckpointError)(text)

    def _settle(self, timeout: float | None) -> bool:
        return self._outcome is not None or self._background.wait(self, timeout)

    def end(self, outcome: tuple[str, Any]) -> None:
        """The writer's answer has come."""
        self._outcome = outcome


# ---------------------------------------------------------------------------------------------------------------------
# The writer process of this rank, and the save that it is at
# ---------------------------------------------------------------------------------------------------------------------


class _Background:
    """Saves of one group of ranks, one after the other; one thread starts a save at a time (:attr:`turn`)."""

    _all: ClassVar[dict[Any, _Background]] = {}
    _looking: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self._process: WriterProcess | None = None
        self._handle: AsyncSave | None = None
        self.known_plan: KnownPlan | None = None
        self._index: tuple[str, bytes] | None = None

    @classmethod
    def of(cls, agreement: Agreement) -> _Background:
        with cls._looking:
            return cls._of(agreement)

    @classmethod
    def _of(cls, agreement: Agreement) -> _Background:
        alone = agreement.world_size == 1
        key = "alone" if alone else (agreement.rank, agreement.world_size, get_platform().world_generation())
        if key not in cls._all:
            if not cls._all:
                atexit.register(_finish_all)
            if not alone:  # Groups of an earlier world: their last saves end by themselves.
                for old in [old for old in cls._all if old != "alone"]:
                    cls._all.pop(old).finish()
            cls._all[key] = cls()
        return cls._all[key]

    def wait_for_last(self) -> None:
        """Wait for the save before, if there is one."""
        if self._handle is not None:
            self.wait(self._handle, None)

    def readiness(self) -> Question:
        """What the ranks must hear of each other: a save that still runs, an error that nobody raised, dead writers."""

        def look() -> tuple[str | None, tuple[str, str] | None, bool]:
            handle = self._handle
            if handle is not None and not handle.done():
                return str(handle.checkpoint_id), None, True
            error = None if handle is None or handle.was_raised else handle.error()
            kind = next((kind for kind, cls in _KINDS.items() if isinstance(error, cls)), "")
            alive = self._process is not None and not self._process.is_broken
            return None, None if error is None else (kind, str(error)), alive

        def decide(seen: list[Any]) -> tuple[str | None, tuple[str, str] | None, bool]:
            running = next((name for name, _, _ in seen if name is not None), None)
            error = next((error for _, error, _ in seen if error is not None), None)
            return running, error, all(alive for *_, alive in seen)

        return Question(look, decide)

    def make_ready(self, agreement: Agreement, running: str | None, error: tuple[str, str] | None, alive: bool) -> None:
        """Every rank: refuse if a save is running; raise the error of the one before; see that writers live."""
        if running is not None:
            raise CheckpointError(
                f"the checkpoint '{running}' is still being written; call result() of its handle first, or pass "
                "if_busy='wait'"
            )
        if not alive:
            self.close()
        if error is not None:
            if self._handle is not None:
                self._handle.was_raised = True
            kind, text = error
            raise _KINDS.get(kind, CheckpointError)(f"the save before this one failed: {text}")
        if self._process is None:
            self._process = WriterProcess(agreement)

    def start(self, handle: AsyncSave, prepared: PreparedSave, writer: bytes, place: CheckpointId) -> None:
        """Copy the bytes and hand them to the writer. An error here is one of the save: all ranks hear it."""
        process = self._process
        assert process is not None
        with process.ends_writer_if_interrupted():
            process.start_job(self._job(process, prepared, writer, place))
            self._handle = handle

    def _job(
        self, process: WriterProcess, prepared: PreparedSave, writer: bytes, place: CheckpointId
    ) -> dict[str, Any]:
        job: dict[str, Any] = {"save_name": prepared.save_name, "checkpoint_id": place, "writer": writer}
        self.known_plan = prepared.known
        try:
            staged = stage(prepared.planner, prepared.plan, copy=False)
            job["items"] = copy_to_shared_memory(staged, process.memory)
            if prepared.agreement.is_coordinator:
                job["index"] = self._index_of(prepared)
        except Exception as error:
            job["failure"] = f"{type(error).__name__}: {error}"
        return job

    def _index_of(self, prepared: PreparedSave) -> bytes:
        """What :func:`_index_in_advance` gives, packed; that of the last save where the plan is the same."""
        name = prepared.save_name if prepared.known is None else prepared.known.save_name
        if self._index is None or self._index[0] != name:
            self._index = name, pickle.dumps(_index_in_advance(prepared))
        return self._index[1]

    def wait(self, handle: AsyncSave, timeout: float | None) -> bool:
        """Wait for a save, which has ended before if it is not the one at hand."""
        process = self._process
        if handle is self._handle and process is not None and handle._outcome is None:
            if not process.wait(timeout):
                return False
            handle.end(process.answer)
        return handle._outcome is not None

    def finish(self) -> None:
        """Wait for the last save, say so if it failed, and end the writer process."""
        handle = self._handle
        if handle is not None:
            self.wait(handle, None)
            if handle.error() is not None and not handle.was_raised:
                print(f"hyper-parallel: the checkpoint '{handle.checkpoint_id}': {handle.error()}", file=sys.stderr)
        self.close()

    def close(self) -> None:
        """End the writer process."""
        if self._process is not None:
            self._process.close()
            self._process = None


# A forked child has its own writers, if it needs some; those of its parent answer to the parent.
os.register_at_fork(after_in_child=_Background._all.clear)


def _finish_all() -> None:
    for background in list(_Background._all.values()):
        background.finish()
    _Background._all.clear()


# ---------------------------------------------------------------------------------------------------------------------
# What a job is made of
# ---------------------------------------------------------------------------------------------------------------------


def _index_in_advance(prepared: PreparedSave) -> tuple[CheckpointIndex, list[tuple[str, int]] | None]:
    """The index without places, and in which order the ranks' reports fill it: the writer process cannot plan.

    For a planner's own global plan there is no such order. There each place is the number of the item in the plans of
    all ranks put together.
    """
    world_size = prepared.agreement.world_size
    if prepared.specs is not None:
        owners = [(chunk.key, chunk.owner) for chunk in plan_chunks(prepared.specs, world_size)]
        return index_by_arithmetic(prepared.specs, None, world_size), owners
    assert prepared.all_plans is not None and prepared.metadata is not None
    numbers = itertools.count()
    reports = [
        RankReport([], [WrittenItem(0, next(numbers), 0, 0, None) for _ in plan.items]) for plan in prepared.all_plans
    ]
    return index_of_plans(prepared.all_plans, prepared.metadata, reports), None


def _packed_writer(writer: StorageWriter) -> bytes:
    try:
        return pickle.dumps(writer)
    except Exception as error:
        raise TypeError(
            f"async_save writes in another process, and the storage writer {type(writer).__name__} cannot be sent "
            f"there: {error}"
        ) from error


class _NoWriter(StorageWriter):
    """Stands in for the real writer while a save is planned: that one is opened by the writer process."""

    def open(self, checkpoint_id: CheckpointId) -> None:
        if storage_for(checkpoint_id) == "fsspec" and str(checkpoint_id).startswith("memory://"):
            raise ValueError(
                f"async_save writes in another process, whose memory:// is not this one's: '{checkpoint_id}' would be "
                "lost; use save(), or another place"
            )

    def begin(self, save_name: str) -> None:
        pass

    def write_file(self, name: str, buffers: Iterable[Buffer]) -> None:
        raise AssertionError("planning writes nothing")

    def flush(self) -> None:
        pass

    def commit(self, metadata: bytes, files: Iterable[str]) -> None:
        raise AssertionError("planning commits nothing")

    def discard(self, names: Iterable[str]) -> None:
        pass

    def end(self) -> None:
        pass
