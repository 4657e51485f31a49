"""Agreement through files in a directory that all ranks see, for ranks without a process group to talk over.

Note [Rounds in files]
Every rank draws a number of its own and says hello with it; the coordinator draws one too, and writes an opening that
lists the hellos, again whenever one changes. A rank goes on once an opening lists its own hello: what older runs left
is thus never taken for this one. Reports and verdicts then carry the coordinator's number in their names. Each file
appears at once, by a rename. Files cannot tell that a rank died, so every wait ends after ``timeout`` seconds. The
messages are pickles, as those of a process group are: the directory must be one that only the job writes to.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyper_parallel.core.distributed_checkpoint.agreement import Agreement, AloneAgreement, GroupAgreement, Report
from hyper_parallel.core.distributed_checkpoint.errors import LostRankError
from hyper_parallel.core.distributed_checkpoint.filesystem import local_path
from hyper_parallel.core.distributed_checkpoint.storage import CheckpointId, storage_for
from hyper_parallel.platform import get_platform

_PAUSE = 0.01
DEFAULT_TIMEOUT = 1800.0


class FileAgreement(Agreement):
    """Ranks that meet in ``directory``; all must be given the same one, and no two saves at once."""

    def __init__(
        self, directory: str | os.PathLike[str], rank: int, world_size: int, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._directory = Path(directory)
        self._timeout = timeout
        self._round = 0
        self._own = secrets.token_hex(8)
        self._meeting: str | None = None
        self._is_broken = False

    def _gather(self, report: Report) -> list[Report] | None:
        self._round += 1
        if self._meeting is None:
            self._meet()
        if not self.is_coordinator:
            self._put(f"report-{self._meeting}-{self._round}-{self.rank}", report)
            return None
        reports = [report]
        for rank in range(1, self.world_size):
            name = f"report-{self._meeting}-{self._round}-{rank}"
            try:
                reports.append(self._wait(f"rank {rank}", lambda name=name: self._get(name)))  # type: ignore[misc]
            except LostRankError as error:
                self._is_broken = True
                reports.append(Report(None, f"it is gone ({error})"))
        return reports

    def _answer(self, verdicts: list[Report] | None) -> Report:
        if verdicts is None:
            name = f"verdict-{self._meeting}-{self._round}-{self.rank}"
            return self._wait("the coordinator, rank 0,", lambda: self._get(name))
        for rank in range(1, self.world_size):
            self._put(f"verdict-{self._meeting}-{self._round}-{rank}", verdicts[rank])
        return verdicts[0]

    def close(self) -> None:
        """The last verdict has been given: the coordinator removes the files once everyone has read theirs."""
        if self._meeting is None:
            return
        if not self.is_coordinator:
            self._put(f"report-{self._meeting}-bye-{self.rank}", Report(None))
            return
        with contextlib.suppress(LostRankError):
            for rank in range(1, 1 if self._is_broken else self.world_size):
                name = f"report-{self._meeting}-bye-{rank}"
                self._wait(f"rank {rank}", lambda name=name: self._get(name))  # type: ignore[misc]
        shutil.rmtree(self._directory, ignore_errors=True)

    def _meet(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        if self.is_coordinator:
            self._meeting = self._own
            hellos: dict[int, str] = {}

            def everyone() -> Any:
                changed = False
                for rank in range(1, self.world_size):
                    hello = self._get(f"hello-{rank}")
                    if hello is not None and hellos.get(rank) != hello:
                        hellos[rank] = hello
                        changed = True
                if changed:
                    self._put("opening", (self._own, hellos))
                # Its first report says that a rank has seen this opening.
                names = [f"report-{self._own}-1-{rank}" for rank in range(1, self.world_size)]
                return True if all((self._directory / name).exists() for name in names) else None

            with contextlib.suppress(LostRankError):  # Those who did not come are found missing in the round.
                self._wait("the other ranks", everyone)
            return

        def opening() -> Any:
            if not (self._directory / f"hello-{self.rank}").exists():
                self._put(f"hello-{self.rank}", self._own)  # The end of an older run may have removed it.
            found = self._get("opening")
            return found[0] if found is not None and found[1].get(self.rank) == self._own else None

        self._put(f"hello-{self.rank}", self._own)
        self._meeting = self._wait("the coordinator, rank 0,", opening)

    def _wait(self, whom: str, look: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + self._timeout
        while True:
            found = look()
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise LostRankError(f"rank {self.rank} waited {self._timeout:.0f} s for {whom} in '{self._directory}'")
            time.sleep(_PAUSE)

    def _put(self, name: str, value: Any) -> None:
        aside = self._directory / f".{name}.{self._own}"
        for attempt in range(100):
            try:
                aside.write_bytes(pickle.dumps(value))
                os.replace(aside, self._directory / name)
                return
            except FileNotFoundError:  # The end of an older run removes the directory.
                if attempt == 99:
                    raise
                self._directory.mkdir(parents=True, exist_ok=True)

    def _get(self, name: str) -> Any:
        try:
            return pickle.loads((self._directory / name).read_bytes())
        except (FileNotFoundError, EOFError):
            return None


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
    directory = path.parent / f".{path.name}.{what}-agreement"
    return FileAgreement(directory, platform.get_rank(), platform.get_world_size())
