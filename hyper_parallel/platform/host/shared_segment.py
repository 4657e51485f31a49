"""Memory that several processes of one host map, and the identity of a process; no framework is imported here.

Note [Nothing is left behind]
    A name in /dev/shm outlives a process that is killed between creating and removing it. So there is no name: a
    segment is an anonymous file (``memfd_create``, or ``O_TMPFILE`` where Python was built without it), which peers
    open through /proc/<pid>/fd/<number> while its owner waits for them. Afterwards the owner closes the descriptor,
    only the mappings hold the memory, and the kernel takes it back when the last of them goes, in whatever way that
    process ends. Without /proc (not Linux) the file has a name from its creation until all ranks have mapped it, a few
    milliseconds. The resource tracker of ``multiprocessing`` is not involved: it would also remove segments that other
    processes still use.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from dataclasses import dataclass

import numpy as np

__all__ = ["ProcessIdentity", "SegmentAddress", "SharedSegment", "available_memory"]


def _read_text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def available_memory() -> int | None:
    """Bytes that can still be reserved on this host and in this container; ``None`` when the system does not say.

    Anonymous shared memory has no limit of its own: who reserves more meets the kernel's out-of-memory killer.
    """
    limits = []
    for line in (_read_text("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    container_limit = (_read_text("/sys/fs/cgroup/memory.max") or "").strip()
    container_use = (_read_text("/sys/fs/cgroup/memory.current") or "").strip()
    if container_limit.isdigit() and container_use.isdigit():
        limits.append(int(container_limit) - int(container_use))
    return min(limits, default=None)


# ---------------------------------------------------------------------------------------------------------------------
# One segment
# ---------------------------------------------------------------------------------------------------------------------


def _printable(label: str) -> str:
    """A label that the kernel takes as the name of an anonymous file: short, no zero byte."""
    return "hyper_parallel:" + "".join(c if c.isascii() and c.isprintable() else "?" for c in label[:100])


def _nameless_file(label: str) -> tuple[int, str] | None:
    """Descriptor and path (for other processes) of a file without a name; ``None`` where that does not exist."""
    if not os.path.isdir("/proc/self/fd"):
        return None
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(_printable(label), os.MFD_CLOEXEC)
    elif hasattr(os, "O_TMPFILE") and os.path.isdir("/dev/shm"):
        descriptor = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    else:
        return None
    return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Give the file its size now: a full memory is an error here and not a SIGBUS at the first write."""
    os.ftruncate(descriptor, num_bytes)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)


@dataclass(frozen=True)
class SegmentAddress:
    """Where a process of the same host finds a segment, as long as its owner shares it."""

    path: str
    num_bytes: int


class SharedSegment:
    """Bytes that several processes map. The owner creates, others open, then the owner calls ``stop_sharing``."""

    def __init__(self, mapping: mmap.mmap, address: SegmentAddress, descriptor: int | None = None, named: bool = False):
        self._mapping = mapping
        self._descriptor = descriptor
        self._named = named
        self.address = address

    @classmethod
    def create(cls, num_bytes: int, label: str = "") -> SharedSegment:
        """A new segment of ``num_bytes`` zeros."""
        nameless = _nameless_file(label)
        descriptor, path = nameless or tempfile.mkstemp(prefix=f"hyper_parallel-{os.getpid()}-")
        try:
            _reserve(descriptor, num_bytes)
            mapping = mmap.mmap(descriptor, num_bytes)
        except BaseException as error:
            os.close(descriptor)
            if nameless is None:
                os.unlink(path)
            if isinstance(error, OSError):
                raise RuntimeError(
                    f"cannot reserve {num_bytes} bytes of shared memory for {label!r} ({error}); "
                    "ask for less or give the host or container more memory"
                ) from error
            raise
        return cls(mapping, SegmentAddress(path, num_bytes), descriptor, named=nameless is None)

    @classmethod
    def open(cls, address: SegmentAddress, writable: bool = True) -> SharedSegment:
        """Map the segment of another process; its owner must not have called ``stop_sharing`` yet."""
        descriptor = os.open(address.path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            return cls(mmap.mmap(descriptor, address.num_bytes, access=access), address)
        finally:
            os.close(descriptor)

    def stop_sharing(self) -> None:
        """From now on nobody else can open it. Mappings stay."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            if self._named:
                os.unlink(self.address.path)

    def array(self, offset: int, num_bytes: int) -> np.ndarray:
        """Bytes of the segment as uint8, not copied.

        The memory stays mapped as long as the segment or any such array is referenced, so nobody reads unmapped memory.
        """
        return np.frombuffer(self._mapping, dtype=np.uint8, count=num_bytes, offset=offset)


# ---------------------------------------------------------------------------------------------------------------------
# One process
# ---------------------------------------------------------------------------------------------------------------------


def _state_and_start_time(pid: int) -> tuple[str, str] | None:
    """The scheduler's state letter and the start time of a process from /proc; ``None`` when it does not exist."""
    status = _read_text(f"/proc/{pid}/stat")
    if status is None:
        return None
    # The second field is the program's name in parentheses, which may itself hold spaces and parentheses.
    fields = status.rpartition(")")[2].split()
    return fields[0], fields[19]


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


@dataclass(frozen=True)
class ProcessIdentity:
    """Which process on which host, safe against a process number that is used again."""

    hostname: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_time: str

    @classmethod
    def current(cls) -> ProcessIdentity:
        pid = os.getpid()
        boot_id = (_read_text("/proc/sys/kernel/random/boot_id") or "").strip()
        found = _state_and_start_time(pid)
        return cls(socket.gethostname(), boot_id, _pid_namespace(), pid, found[1] if found else "")

    @property
    def host_key(self) -> str:
        """Equal for processes of one running system: containers of one host differ in hostname, not in boot id."""
        return self.boot_id or self.hostname

    def is_alive(self) -> bool:
        """Whether it still runs; a process that ended but was not yet waited for by its parent is not alive."""
        if self.start_time:
            found = _state_and_start_time(self.pid)
            return found is not None and found[0] not in "ZX" and found[1] == self.start_time
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
