"""Storage that waits or fails on purpose, and how writer processes are watched. They import this file, so it must not
need a framework."""

import errno
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hyper_parallel.core.distributed_checkpoint.storage.filesystem import FileSystemWriter


class GatedWriter(FileSystemWriter):
    """Writes no data file before the file ``gate`` exists; says that it waits by a file ``waiting-<pid>`` beside it."""

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self._gate = gate

    def write_file(self, name: str, buffers: Sequence) -> None:
        (self._gate.parent / f"waiting-{os.getpid()}").touch()
        while not self._gate.exists() and self._gate.parent.exists():  # A test that failed leaves nobody waiting.
            time.sleep(0.01)
        super().write_file(name, buffers)


class FullDiskWriter(FileSystemWriter):
    """Has no room for the data of one rank, or for the metadata."""

    def __init__(self, rank: int | None) -> None:
        super().__init__()
        self._part = f"-r{rank:05d}-" if rank is not None else ".metadata"

    def write_file(self, name: str, buffers: Sequence) -> None:
        if self._part in name:
            raise OSError(errno.ENOSPC, f"cannot write the checkpoint file '{name}': no space left")
        super().write_file(name, buffers)


class DyingWriter(FileSystemWriter):
    """Ends its process, as the kernel does when memory runs out, when it is to write the data of one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._part = f"-r{rank:05d}-"

    def write_file(self, name: str, buffers: Sequence) -> None:
        super().write_file(name, buffers)
        if self._part in name:
            os.kill(os.getpid(), 9)


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def kernel_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_alive(pid: int) -> bool:
    try:
        return kernel_state(pid) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def num_files(folder: Path) -> int:
    return len([name for name in os.listdir(folder) if name != "metadata.json"])
