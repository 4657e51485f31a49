"""Agreement through files in a directory that all ranks see, for ranks without a process group to talk over.

Note [Rounds in files]
Every rank draws a number of its own and says hello with it; the coordinator draws one too, and writes an opening that
lists the hellos, again whenever one changes. A rank goes on once an opening lists its own hello: what older runs left
is thus never taken for this one. Reports and verdicts then carry the coordinator's number in their names. Each file
appears at once, by a rename. Who may write such files, and what is read of them, is in ``agreement_folder.py``. A hello
or an opening that cannot be read is passed over: an older version has left it, and the one that is waited for takes its
place. A report or verdict of this meeting that cannot be read is an error of its rank.

Note [Who has ended]
A file cannot tell that its writer died, but a lock can: each rank holds a file locked as long as it lives, and the
kernel drops the lock with the process. On one host that is certain and at once. A rank on another host, or one that
never said hello, is missed only when ``timeout`` seconds are over; the error then names the file it did not write.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hyper_parallel.core.distributed_checkpoint.agreement.agreement import (
    COORDINATOR,
    Agreement,
    AloneAgreement,
    GroupAgreement,
    Report,
    failure,
)
from hyper_parallel.core.distributed_checkpoint.agreement.agreement_folder import AgreementFolder
from hyper_parallel.core.distributed_checkpoint.agreement.messages import MessageError, encode_message
from hyper_parallel.core.distributed_checkpoint.base.errors import LostRankError
from hyper_parallel.core.distributed_checkpoint.storage.file_locks import hold_lock, is_held
from hyper_parallel.core.distributed_checkpoint.storage.file_names import ALIVE, agreement_name
from hyper_parallel.core.distributed_checkpoint.storage.storage import CheckpointId, local_path, storage_for
from hyper_parallel.platform import get_platform

_PAUSE = 0.01
_NUMBER = re.compile(r"[0-9a-f]{16}")
DEFAULT_TIMEOUT = 1800.0


class Hello(NamedTuple):
    """Who takes part: a number of its own, the host it runs on, and whether it holds a file locked."""

    number: str
    host: str
    is_locked: bool

    def lock_of(self, rank: int) -> str:
        """The name of the file that this one holds locked as a rank."""
        return f"{ALIVE}{rank}-{self.number}"


class Opening(NamedTuple):
    """The coordinator's hello, and the hellos that it has heard, by rank."""

    coordinator: Hello
    others: dict[int, Hello]


class FileAgreement(Agreement):
    """Ranks that meet in ``directory``; all must be given the same one, and no two saves at once."""

    def __init__(
        self, directory: str | os.PathLike[str], rank: int, world_size: int, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._timeout = timeout
        self._round = 0
        self._number = secrets.token_hex(8)
        self._folder = AgreementFolder(Path(directory), self._number)
        self._meeting: str | None = None
        self._lock: int | None = None
        self._hellos: dict[int, Hello] = {}
        self._lost: dict[int, LostRankError] = {}
        # At once, before any work: whoever ends from now on is missed, and who has ended before is of an older run.
        self._older = {rank: hello for rank, hello in self._heard().items() if self._is_over(rank, hello)}
        self._own = self._hello()
        self._greet()

    def _gather(self, report: Report) -> list[Report] | None:
        self._round += 1
        if self._meeting is None:
            self._meet()
        if not self.is_coordinator:
            self._folder.put_encoded(f"report-{self._meeting}-{self._round}-{self.rank}", _encoded(report))
            return None
        found = self._collect(f"report-{self._meeting}-{self._round}")
        absent = {rank: Report(None, f"it is gone ({error})") for rank, error in self._lost.items()}
        return [report, *({**found, **absent}[rank] for rank in range(1, self.world_size))]

    def _answer(self, verdicts: list[Report] | None) -> Report:
        if verdicts is None:
            return self._wait_for(COORDINATOR, f"verdict-{self._meeting}-{self._round}-{self.rank}")
        try:
            encoded = list(map(encode_message, verdicts))
        except TypeError as error:  # It is then the verdict for all.
            verdicts = [failure(error)] * self.world_size
            encoded = list(map(encode_message, verdicts))
        for rank in range(1, self.world_size):
            self._folder.put_encoded(f"verdict-{self._meeting}-{self._round}-{rank}", encoded[rank])
        return verdicts[0]

    def close(self) -> None:
        """The last verdict has been given: the coordinator removes the files once everyone has read theirs."""
        if self._meeting is not None and self.is_coordinator:
            self._collect(f"report-{self._meeting}-bye")
            self._clear()
        elif self._meeting is not None:
            self._folder.put(f"report-{self._meeting}-bye-{self.rank}", Report(None))
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _clear(self) -> None:
        """Remove what this meeting has written, and all else, unless somebody has come for the next one already."""
        for rank, hello in self._hellos.items():
            if self._get(f"hello-{rank}", Hello) == hello:
                self._folder.remove(f"hello-{rank}")
        everyone = {COORDINATOR: self._own, **self._hellos}
        self._folder.remove("opening", *(hello.lock_of(rank) for rank, hello in everyone.items()))
        self._folder.remove(*(name for name in self._folder.names() if f"-{self._meeting}-" in name))
        if not any(is_held(self._path(name)) for name in self._folder.names() if name.startswith(ALIVE)):
            self._folder.remove_all()

    # ---------------------------------------------------------------- meeting

    def _meet(self) -> None:
        if not self.is_coordinator:
            self._meeting = self._await_opening()
            return
        own = self._own
        self._meeting = own.number
        deadline = time.monotonic() + self._timeout
        while True:
            if [rank for rank, hello in self._heard().items() if self._has_come(rank, hello)]:
                self._folder.put("opening", Opening(own, self._hellos))
            # Its first report says that a rank has seen this opening.
            waiting = {
                rank: f"report-{own.number}-1-{rank}"
                for rank in range(1, self.world_size)
                if not self._has_ended(rank) and not self._folder.holds(f"report-{own.number}-1-{rank}")
            }
            if not waiting:
                return
            if time.monotonic() > deadline:
                self._miss({rank: name if rank in self._hellos else f"hello-{rank}" for rank, name in waiting.items()})
                return
            time.sleep(_PAUSE)

    def _await_opening(self) -> str:
        hello = self._own
        deadline = time.monotonic() + self._timeout
        while True:
            if not self._folder.holds(f"hello-{self.rank}"):
                self._greet()  # The end of an older run has removed it.
            has_ended = self._has_ended(COORDINATOR)
            opening = self._get("opening", Opening)
            if opening is not None:
                self._has_come(COORDINATOR, opening.coordinator)
                if opening.others.get(self.rank) == hello:
                    return opening.coordinator.number
                if has_ended and opening.coordinator == self._hellos[COORDINATOR]:
                    raise self._ended(COORDINATOR, "opening")
            if time.monotonic() > deadline:
                raise self._missing(COORDINATOR, "opening")
            time.sleep(_PAUSE)

    def _heard(self) -> dict[int, Hello]:
        """The hellos that are there for this rank to read: the coordinator's, or all but the coordinator's."""
        if not self.is_coordinator:
            opening = self._get("opening", Opening)
            return {} if opening is None else {COORDINATOR: opening.coordinator}
        found = {rank: self._get(f"hello-{rank}", Hello) for rank in range(1, self.world_size)}
        return {rank: hello for rank, hello in found.items() if hello is not None}

    def _has_come(self, rank: int, hello: Hello) -> bool:
        """Take note of a hello that is new and not one that an older run has left."""
        if hello in (self._hellos.get(rank), self._older.get(rank)):
            return False
        self._hellos[rank] = hello
        return True

    def _hello(self) -> Hello:
        """This rank, with a lock that ends when it does; see Note [Who has ended]."""
        hello = Hello(self._number, _host(), True)
        while True:
            self._folder.make()
            self._folder.names()  # refuses a folder that is not this user's alone
            with contextlib.suppress(FileNotFoundError):  # The end of an older run removes the directory.
                self._lock = hold_lock(self._path(hello.lock_of(self.rank)))
                return hello._replace(is_locked=self._lock is not None)

    def _greet(self) -> None:
        """Write the first file of this rank."""
        if self.is_coordinator:
            self._folder.put("opening", Opening(self._own, {}))
        else:
            self._folder.put(f"hello-{self.rank}", self._own)

    # ---------------------------------------------------------------- waiting

    def _collect(self, stem: str) -> dict[int, Report]:
        """What each other rank puts under ``<stem>-<rank>``; those that never will are lost from now on."""
        waiting = {rank: f"{stem}-{rank}" for rank in range(1, self.world_size) if rank not in self._lost}
        found: dict[int, Report] = {}
        deadline = time.monotonic() + self._timeout
        while waiting:
            for rank, name in list(waiting.items()):
                has_ended = self._has_ended(rank)  # asked first: what it wrote before its end counts
                value = self._report(name)
                if value is not None:
                    found[rank] = value
                elif has_ended:
                    self._lost[rank] = self._ended(rank, name)
                else:
                    continue
                del waiting[rank]
            if waiting and time.monotonic() > deadline:
                self._miss(waiting)
                break
            if waiting:
                time.sleep(_PAUSE)
        return found

    def _wait_for(self, rank: int, name: str) -> Report:
        deadline = time.monotonic() + self._timeout
        while True:
            has_ended = self._has_ended(rank)
            value = self._report(name)
            if value is not None:
                return value
            if has_ended:
                raise self._ended(rank, name)
            if time.monotonic() > deadline:
                raise self._missing(rank, name)
            time.sleep(_PAUSE)

    def _has_ended(self, rank: int) -> bool:
        """Whether a rank is known to have ended after it said hello."""
        return rank in self._hellos and self._is_over(rank, self._hellos[rank])

    def _is_over(self, rank: int, hello: Hello) -> bool:
        if not hello.is_locked or hello.host != _host():
            return False
        path = self._path(hello.lock_of(rank))
        return path.exists() and not is_held(path)

    def _miss(self, names: Mapping[int, str]) -> None:
        self._lost |= {rank: self._missing(rank, name) for rank, name in names.items()}

    def _ended(self, rank: int, name: str) -> LostRankError:
        return LostRankError(f"the process of rank {rank} has ended without writing '{self._path(name)}'")

    def _missing(self, rank: int, name: str) -> LostRankError:
        return LostRankError(
            f"rank {self.rank} waited {self._timeout:.0f} s for rank {rank}, which has not written "
            f"'{self._path(name)}': it is on another host and has ended there, or was never started, or does not "
            "see this directory"
        )

    # ---------------------------------------------------------------- files

    def _path(self, name: str) -> Path:
        return self._folder.path / name

    def _get(self, name: str, kind: type) -> Any:
        """A hello or an opening; None also for one that cannot be read, see Note [Rounds in files]."""
        with contextlib.suppress(MessageError):
            found = self._folder.get(name, kind)
            hellos = [found] if kind is Hello else [found.coordinator, *found.others.values()] if found else []
            if all(hello is None or _NUMBER.fullmatch(hello.number) for hello in hellos):
                return found
        return None

    def _report(self, name: str) -> Report | None:
        """A report or a verdict, if it is there; one that cannot be read is one of a failure."""
        try:
            return self._folder.get(name, Report)
        except MessageError as error:
            return failure(error)


def _encoded(report: Report) -> bytes:
    """The bytes of a report; where it holds what cannot be sent, of one that says so."""
    try:
        return encode_message(report)
    except TypeError as error:
        return encode_message(failure(error))


def _host() -> str:
    """The same for all processes of one running host, and for no other."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def make_agreement(no_dist: bool, use_collectives: bool, checkpoint_id: CheckpointId, what: str) -> Agreement:
    """The ranks of the world, over their process group or through files; or this process alone (``no_dist``)."""
    platform = get_platform()
    if no_dist or platform.get_world_size() == 1:
        return AloneAgreement()
    if use_collectives:
        return GroupAgreement()
    if storage_for(checkpoint_id) != "filesystem":
        raise ValueError(
            f"use_collectives=False lets the ranks agree through files beside the checkpoint, and "
            f"'{os.fspath(checkpoint_id)}' is not in a file system; leave it at True"
        )
    path = local_path(checkpoint_id)
    return FileAgreement(path.parent / agreement_name(path.name, what), platform.get_rank(), platform.get_world_size())
