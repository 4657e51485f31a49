"""Snapshots by guarded pages: what is written right after a background save began is not in it, whoever writes."""

import ctypes
import mmap
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from hyper_parallel import checkpoint as ckpt
from hyper_parallel.core.distributed_checkpoint import async_save as async_save_module
from hyper_parallel.core.distributed_checkpoint import background, staging
from hyper_parallel.core.distributed_checkpoint.page_guard import (
    Part,
    PrivateMemory,
    Span,
    _blocks,
    can_copy_from,
    has_pinned_memory,
)
from hyper_parallel.core.distributed_checkpoint.writer_process import hand_over, receive_message
from tests.distributed_checkpoint.background_storage import is_alive, kernel_state, wait_for

only_on = "torch"  # memory of the operating system; guarded tensors of both frameworks: test_async_save.py

pytestmark = pytest.mark.skipif(
    not can_copy_from(os.getpid(), id(None)),
    reason="this kernel guards no pages: it takes Linux 6.4 and the right to trace processes",
)

_PAGE = mmap.PAGESIZE
_SIZE = 40 * _PAGE


@pytest.fixture
def saver(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_GUARDED_BYTES", 2 * _PAGE)
    monkeypatch.setattr(staging, "_GUARDED_BYTES_IN_ALL", 2 * _PAGE)
    saver = _Saver(tmp_path / "c", monkeypatch)
    yield saver
    if is_alive(saver.pid):
        saver.go_on().wait()
    async_save_module._finish_all()


class _Saver:
    """Saves while the writer stands still, so that nothing is copied yet when ``async_save`` returns."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self.folder = folder
        self.guards: list[bool] = []
        finish = staging.Copying.finish

        def noted(copying):
            self.guards.append(copying.is_guarded)
            return finish(copying)

        monkeypatch.setattr(staging.Copying, "finish", noted)
        self.save({"first": 1}).result()  # The writer is there now, and has said what it can do.
        self.pid = async_save_module._Background._all["alone"]._process.pid

    def save(self, state, **options):
        return ckpt.async_save(_tensors(state), checkpoint_id=self.folder, no_dist=True, **options)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        wait_for(lambda: kernel_state(self.pid) == "T")

    def go_on(self, after: float = 0.0) -> subprocess.Popen:
        """Another process does it: whoever waits for the writer may hold the interpreter's lock."""
        return subprocess.Popen(["sh", "-c", f"sleep {after}; kill -CONT {self.pid}"])

    def saved(self, state) -> dict:
        loaded = {name: np.zeros_like(value) for name, value in state.items()}
        ckpt.load(_tensors(loaded), checkpoint_id=self.folder, no_dist=True)
        return loaded


def _tensors(state) -> dict:
    """The same memory as tensors, which are not encoded as arrays are."""
    return {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in state.items()}


def _bytes(size: int = _SIZE, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def _by_numpy(array: np.ndarray) -> None:
    array[...] += 1


def _byte_by_byte(array: np.ndarray) -> None:
    view = memoryview(array)  # with the interpreter's lock
    for at in range(0, len(view), 1000):
        view[at] ^= 255


def _by_the_kernel(array: np.ndarray) -> None:
    with open("/dev/urandom", "rb", buffering=0) as file:
        assert file.readinto(memoryview(array)) == len(array)


def _in_another_thread(array: np.ndarray) -> None:
    thread = threading.Thread(target=_by_numpy, args=(array,))
    thread.start()
    thread.join()


@pytest.mark.parametrize("write", [_by_numpy, _byte_by_byte, _by_the_kernel, _in_another_thread])
def test_who_writes_waits_for_the_copy(saver, write):
    untouched = np.zeros(_SIZE, np.uint8)  # pages that nobody has written to yet
    base = _bytes()
    state = {
        "odd": base[5 : 30 * _PAGE + 7],
        "again": base[3 * _PAGE + 1 :],
        "untouched": untouched,
        "small": _bytes(9),
    }
    wanted = {name: value.copy() for name, value in state.items()} | {"untouched": np.zeros(_SIZE, np.uint8)}
    state["untouched"] = untouched
    saver.stop()
    handle = saver.save(state)
    assert saver.guards[-1]
    _by_numpy(state["small"])  # copied first, so this does not wait
    assert kernel_state(saver.pid) == "T"
    going_on = saver.go_on(after=0.1)
    write(untouched)
    assert kernel_state(saver.pid) != "T", "the write came before the copy"
    write(base)
    going_on.wait()
    handle.result()
    for name, found in saver.saved(state).items():
        assert np.array_equal(found, wanted[name]), name
    assert not np.array_equal(base[5 : 30 * _PAGE + 7], wanted["odd"])


def test_the_writer_is_killed_while_somebody_waits_for_it(saver):
    state = {"x": _bytes()}
    saver.save(state).result()
    saver.stop()
    handle = saver.save(state)
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.1; kill -KILL {saver.pid}"])
    before = state["x"].copy()
    state["x"][...] += 1  # goes on: the kernel lifts the protection
    killer.wait()
    with pytest.raises(ckpt.CheckpointError, match="was ended by SIGKILL; the previous checkpoint is untouched"):
        handle.result()
    assert np.array_equal(saver.saved(state)["x"], before)
    saver.save(state).result()  # with a new writer
    assert np.array_equal(saver.saved(state)["x"], state["x"])


def test_memory_that_goes_away_meanwhile_fails_the_save(saver):
    size = 64 << 20  # such that the C library gives it back to the system at once

    class Kept:
        """Memory that is gone although somebody holds it, as after resizing a storage."""

        def __init__(self) -> None:
            self.mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            address = np.frombuffer(self.mapped, np.uint8).ctypes.data
            self.__array_interface__ = {"version": 3, "data": (address, False), "shape": (size,), "typestr": "|u1"}

    kept = Kept()
    array = np.asarray(kept)
    saver.stop()
    handle = saver.save({"x": array})
    assert saver.guards[-1]
    going_on = saver.go_on(after=0.1)
    kept.mapped.close()
    going_on.wait()
    with pytest.raises(ckpt.CheckpointError, match=r"memory of the state was lost .*pass copy_first=True"):
        handle.result()
    assert ckpt.load({"first": None}, checkpoint_id=saver.folder, no_dist=True) is None, "the one before is there"


def test_the_memory_is_kept_until_it_is_copied_and_no_longer(saver):
    array = _bytes()
    wanted, gone = array.copy(), weakref.ref(array)
    saver.stop()
    handle = saver.save({"x": array})
    del array
    assert gone() is not None
    saver.go_on().wait()
    handle.result()
    wait_for(lambda: gone() is None)
    assert np.array_equal(saver.saved({"x": wanted})["x"], wanted)


def test_memory_that_others_can_write_to_is_copied_first(saver, tmp_path):
    shared = mmap.mmap(-1, _SIZE)
    (tmp_path / "file").write_bytes(_bytes().tobytes())
    with open(tmp_path / "file", "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
    state = {"shared": np.frombuffer(shared, np.uint8), "mapped": np.frombuffer(mapped, np.uint8)}
    private = PrivateMemory()
    assert Span(_bytes().ctypes.data, 1) in private
    assert not any(Span(value.ctypes.data, len(value)) in private for value in state.values())
    assert private.can_be_cut(5000)
    assert not private.can_be_cut(1 << 31), "the kernel refuses memory to a process with too many mappings"
    saver.stop()
    handle = saver.save(state | {"private": _bytes(seed=1)})
    assert saver.guards[-1]
    pid = os.fork()
    if pid == 0:
        shared[:] = b"\1" * _SIZE
        os._exit(0)
    os.waitpid(pid, 0)
    saver.go_on().wait()
    handle.result()
    assert not saver.saved({"shared": state["shared"]})["shared"].any()
    assert state["shared"].all()


def test_memory_that_is_pinned_is_copied_first(saver):
    """The kernel writes to buffers of an io_uring, as a network card does for RDMA, without looking at their pages."""
    system = ctypes.CDLL(None).syscall
    ring = system(425, 1, ctypes.create_string_buffer(120))
    if ring < 0:
        pytest.skip("no io_uring")
    state = {"x": _bytes()}
    where = (ctypes.c_uint64 * 2)(state["x"].ctypes.data, _SIZE)
    try:
        assert system(427, ring, 0, where, 1) == 0
        assert has_pinned_memory()
        saver.save(state).result()
        assert not saver.guards[-1]
        assert system(427, ring, 1, None, 0) == 0
    finally:
        os.close(ring)
    wait_for(lambda: not has_pinned_memory())
    saver.save(state).result()
    assert saver.guards[-1]


def test_it_can_be_copied_first(saver, monkeypatch):
    for refuse in (False, True):
        if refuse:

            def refused(guard):
                raise PermissionError

            monkeypatch.setattr(background.Guard, "protect", refused)
        state = {"x": _bytes()}
        wanted = state["x"].copy()
        saver.stop()
        going_on = saver.go_on(after=0.1) if refuse else None  # A guard that failed is given back by the writer.
        handle = saver.save(state, copy_first=not refuse)
        assert not saver.guards[-1]
        state["x"][...] = 0  # does not wait
        assert (kernel_state(saver.pid) == "T") != refuse
        (going_on or saver.go_on()).wait()
        handle.result()
        assert np.array_equal(saver.saved(state)["x"], wanted)


def test_blocks_cover_every_byte_of_every_part_once():
    random = np.random.default_rng(0)
    for _ in range(50):
        parts = [
            Part(int(random.integers(0, 1280)) * _PAGE, int(random.integers(1, 768)) * _PAGE, number << 30)
            for number in range(random.integers(1, 6))
        ]
        blocks = _blocks(parts)
        found = sorted((part.place, part.address, part.length) for block in blocks for part in block.parts)
        for block, after in zip(blocks, [*blocks[1:], None], strict=True):
            assert block.start % _PAGE == block.end % _PAGE == 0 and (after is None or block.end <= after.start)
            assert after is None or block.end < after.start or block.end % (2 << 20) == 0, "huge pages stay whole"
            assert all(block.start <= p.address and p.address + p.length <= block.end for p in block.parts)
        for part in parts:
            mine = [piece for piece in found if piece[0] >> 30 == part.place >> 30]
            at = 0
            for place, address, length in mine:
                assert (place, address) == (part.place + at, part.address + at)
                at += length
            assert at == part.length


def _fork_and_sleep(seconds: float = 60.0) -> tuple[int, bool]:
    """A child's process number, and whether it has a guard."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        files = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        os.write(writing, b"1" if any("userfaultfd" in file for file in files) else b"0")
        time.sleep(seconds)
        os._exit(0)
    has_guard = os.read(reading, 1) == b"1"
    os.close(reading)
    os.close(writing)
    return pid, has_guard


def test_nothing_waits_for_children_that_were_forked_meanwhile(saver, monkeypatch):
    """Not even for those that another thread forks while pages are being guarded."""
    children = []
    thread = threading.Thread(target=lambda: children.append(_fork_and_sleep()))
    protect = background.Guard.protect

    def fork_too(guard):
        thread.start()
        thread.join(0.2)
        protect(guard)

    monkeypatch.setattr(background.Guard, "protect", fork_too)
    state = {"x": _bytes()}
    wanted = state["x"].copy()
    saver.stop()
    handle = saver.save(state)
    thread.join()
    children.append(_fork_and_sleep())
    going_on = saver.go_on(after=0.1)
    state["x"][...] += 1
    going_on.wait()
    handle.result()
    assert np.array_equal(saver.saved(state)["x"], wanted)
    async_save_module._finish_all()
    assert all(is_alive(pid) for pid, _ in children), "waited for"
    assert not any(has_guard for _, has_guard in children), "would keep the protection when the writer ends"
    for pid, _ in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_writer_that_copies_need_not_listen_to_what_comes_next():
    here, there = socket.socketpair()
    with here, there, open(os.devnull, "rb") as null:
        sent = [("short", 1), ("long", "x" * (1 << 24)), ("short", 2)]
        for message in sent:
            hand_over(here, message, (null.fileno(),))
        for message in sent:
            got, (file,) = receive_message(there)
            assert got == message and os.path.sameopenfile(file, null.fileno())
            os.close(file)
