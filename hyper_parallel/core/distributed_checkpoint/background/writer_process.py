"""The process that writes checkpoints in the background, one beside every rank. It never imports a framework.

It gets connections and jobs from its rank (the *parent*) over a socket, with the bytes in shared memory. It agrees with
the writer processes of the other ranks over these connections, a star around that of rank 0, so that training is not
disturbed. It listens to nobody. See the notes in ``background.py`` and ``writer_links.py``.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import pickle
import resource
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from hyper_parallel.core.distributed_checkpoint.agreement.agreement import (
    Agreement,
    AloneAgreement,
    GroupAgreement,
    Report,
)
from hyper_parallel.core.distributed_checkpoint.agreement.messages import (
    MAX_MESSAGE_BYTES,
    MessageError,
    decode_message,
    encode_message,
)
from hyper_parallel.core.distributed_checkpoint.base.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LostRankError,
)
from hyper_parallel.core.distributed_checkpoint.base.metadata import MetadataIndex
from hyper_parallel.core.distributed_checkpoint.format.index_file import CheckpointIndex, StoredObject, encode_index
from hyper_parallel.core.distributed_checkpoint.format.shard_file import RankReport, StagedItem, write_shards

_LENGTH = struct.Struct("<Q")
MAX_FILES = 64  # that go with one message
_NICENESS = 10


class ParentGone(Exception):
    """The rank that this process writes for has ended."""


# ---------------------------------------------------------------------------------------------------------------------
# Messages between a rank and its own writer: pickles, see Note [How a writer is started] in ``background.py``
# ---------------------------------------------------------------------------------------------------------------------


def hand_over(connection: socket.socket, value: Any, files: tuple[int, ...] = ()) -> None:
    """A value and open files to a process of this host, which may be busy: a long value goes as a file too."""
    data = pickle.dumps(value)
    if len(data) < 1 << 14:
        socket.send_fds(connection, [_LENGTH.pack(len(data)) + data], files)
        return
    with open(os.memfd_create("hyper-parallel-message", os.MFD_CLOEXEC), "w+b") as file:
        file.write(data)
        file.seek(0)
        socket.send_fds(connection, [_LENGTH.pack(0)], (file.fileno(), *files))


def receive_message(connection: socket.socket, parent: int | None = None) -> tuple[Any, list[int]]:
    """The next value and files; EOFError when the other side has closed, ParentGone when ``parent`` has ended."""
    files: list[int] = []
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size, parent, files))
    if length == 0:
        with open(files.pop(0), "rb") as file:
            return pickle.load(file), files
    return pickle.loads(_receive_exactly(connection, length, parent)), files


def _receive_exactly(
    connection: socket.socket, length: int, parent: int | None, files: list[int] | None = None
) -> bytearray:
    data = bytearray()
    while len(data) < length:
        if parent is not None:
            ready = wait([connection, parent])
            # When the parent has ended, what it said before is still there to be read.
            if connection not in ready and not wait([connection], 0):
                raise ParentGone
        if files is not None:
            part, found, _, _ = socket.recv_fds(connection, length - len(data), MAX_FILES + 1)
            files += found
        else:
            part = connection.recv(min(length - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return data


# ---------------------------------------------------------------------------------------------------------------------
# Messages between writers: plain data, see ``messages.py``
# ---------------------------------------------------------------------------------------------------------------------


def _send_plain(connection: socket.socket, value: Any) -> None:
    data = encode_message(value)
    head = _LENGTH.pack(len(data))
    connection.sendall(head + data if len(data) < 1 << 16 else head)
    if len(data) >= 1 << 16:
        connection.sendall(data)


def _receive_plain(connection: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size, None))
    if length > MAX_MESSAGE_BYTES:
        raise MessageError(f"a message of {length} bytes is refused: {MAX_MESSAGE_BYTES} are the most")
    return decode_message(_receive_exactly(connection, length, None))


class WriterAgreement(GroupAgreement):
    """The writer processes of all ranks, over connections of their own. Only an ended connection is a lost rank."""

    def __init__(self, rank: int, links: dict[int, socket.socket], world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._links = links
        self._dead = set()

    def _send(self, report: Report, rank: int) -> None:
        try:
            _send_plain(self._links[rank], report)
        except (OSError, TypeError) as error:  # A report that cannot be sent must not be waited for either.
            raise self._loss(rank, error) from error

    def _receive(self, rank: int) -> Report:
        try:
            report = _receive_plain(self._links[rank])
            if not isinstance(report, Report):
                raise MessageError(f"a {type(report).__name__} is no report")
            return report
        except (OSError, EOFError, MessageError) as error:
            raise self._loss(rank, error) from error

    def _loss(self, rank: int, error: Exception) -> LostRankError:
        self._links[rank].close()  # Who says nonsense is not listened to any more.
        how = f"says what nobody can follow ({error})" if isinstance(error, MessageError) else "is gone"
        return LostRankError(
            f"the process that writes the checkpoint for rank {rank} {how}, as rank {self.rank} learns"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Jobs
# ---------------------------------------------------------------------------------------------------------------------


class Memory:
    """The shared memory that holds the staged bytes."""

    def __init__(self, file: int, size: int) -> None:
        self._mapped = mmap.mmap(file, size)
        self.array = np.frombuffer(self._mapped, np.uint8)
        os.close(file)


def staged_items(job: dict[str, Any], memory: Memory | None) -> list[StagedItem]:
    """The items of a job; their bytes stay in the shared memory."""
    items = []
    for fqn, offset, dtype, shape, start, length, encoding in job["items"]:
        data = memory.array[start : start + length] if memory is not None else np.empty(0, np.uint8)
        items.append(StagedItem(MetadataIndex(fqn, offset), dtype, shape, data, encoding))
    return items


def run_job(job: dict[str, Any], memory: Memory | None, agreement: Agreement) -> bytes | None:
    """Write this rank's part, agree, and commit; the metadata file's content on the coordinator."""
    names: list[str] = []
    committed: list[bytes] = []
    writer: Any = None

    def open_storage() -> None:
        nonlocal writer
        if job.get("failure"):
            raise CheckpointError(job["failure"])
        writer = pickle.loads(job["writer"])
        writer.open(job["checkpoint_id"])

    def write() -> RankReport:
        return write_shards(writer, job["save_name"], agreement.rank, staged_items(job, memory), names)

    def commit(reports: list[RankReport]) -> None:
        planned, owners = pickle.loads(job["index"])
        index = complete_index(planned, owners, reports)
        data = encode_index(index)
        writer.commit(data, [file.name for file in index.files])
        committed.append(data)

    try:
        agreement.round("saving", open_storage, lambda _: writer.begin(job["save_name"]))
        agreement.round("saving", write, commit)
    except LostRankError:
        raise  # It may have committed before it went: leave the files, the next save cleans up.
    except BaseException:
        if writer is not None:
            writer.discard(names)
        raise
    finally:
        if writer is not None:
            writer.end()
    return committed[0] if committed else None


def complete_index(
    index: CheckpointIndex, owners: list[tuple[str, int]] | None, reports: list[RankReport]
) -> CheckpointIndex:
    """The index, made in advance without places, with the places that the ranks report.

    ``owners`` has the (name, rank) of each chunk and object in the order in which the ranks wrote them; None: the index
    has the item's number among those of all ranks for its place.
    """
    first_file = [0, *itertools.accumulate(len(report.files) for report in reports)]
    index.files = [file for report in reports for file in report.files]
    moved = [
        [item._replace(file=first_file[rank] + item.file) for item in report.items]
        for rank, report in enumerate(reports)
    ]
    if owners is None:
        flat = [item for items in moved for item in items]
        by_key = {key: [flat[number] for number in tensor.start] for key, tensor in index.tensors.items()}
        by_key |= {key: [flat[stored.start]] for key, stored in index.objects.items()}
    else:
        cursors = [iter(items) for items in moved]
        by_key = {key: [] for key in [*index.tensors, *index.objects]}
        for key, owner in owners:
            by_key[key].append(next(cursors[owner]))
    for key, tensor in index.tensors.items():
        items = by_key[key]
        tensor.file, tensor.start = [item.file for item in items], [item.start for item in items]
        tensor.crc32c = [item.crc32c for item in items]
    for key in index.objects:
        (item,) = by_key[key]
        index.objects[key] = StoredObject(item.file, item.start, item.length, item.crc32c, item.encoding or "json")
    return index


# ---------------------------------------------------------------------------------------------------------------------
# The process
# ---------------------------------------------------------------------------------------------------------------------


def main(control: int) -> None:
    """The program. ``control`` is the file of the socket from which the parent is heard."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # There are as many connections as ranks.
    serve(socket.socket(fileno=control))


def serve(control: socket.socket) -> None:
    """Do one job after the other until the parent closes the connection or ends; a job that has begun is finished."""
    parent: int | None = None  # a file that is readable when the parent has ended
    rank, world_size = 0, 1
    links: dict[int, socket.socket] = {}
    memory: Memory | None = None
    try:
        while True:
            (kind, value), files = receive_message(control, parent)
            if kind == "rank":
                rank, world_size = value
                (parent,) = files
            elif kind == "links":
                links |= {rank: socket.socket(fileno=file) for rank, file in zip(value, files, strict=True)}
            elif kind == "memory":
                memory = None  # before the new one: only one of them at a time
                memory = Memory(files[0], value)
            else:
                agreement = WriterAgreement(rank, links, world_size) if world_size > 1 else AloneAgreement()
                _say(control, _gently(_answer, value, memory, agreement))
    except (EOFError, ConnectionResetError, ParentGone):  # reset: it was closed before all answers were read
        pass


def _say(control: socket.socket, message: Any) -> None:
    with contextlib.suppress(OSError):  # The parent may have ended meanwhile.
        hand_over(control, message)


def _gently(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function at a low priority: the training comes first. In a thread, since what is lowered stays low.

    This process leads a session of its own, and where Linux divides the processors among sessions first, the priority
    of a thread counts within its session only. So that of the session is lowered too.
    """
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:  # If not now, before the next job.
        group.write(str(_NICENESS))
    with ThreadPoolExecutor(1, initializer=os.nice, initargs=(_NICENESS,)) as pool:
        return pool.submit(function, *args).result()


def _answer(job: dict[str, Any], memory: Memory | None, agreement: Agreement) -> Any:
    try:
        return "done", run_job(job, memory, agreement)
    except Exception as error:
        kind = "corrupt" if isinstance(error, CorruptCheckpointError) else ""
        kind = "lost" if isinstance(error, LostRankError) else kind
        text = str(error) if isinstance(error, CheckpointError) else f"saving failed: {type(error).__name__}: {error}"
        return "failed", (kind, text)
