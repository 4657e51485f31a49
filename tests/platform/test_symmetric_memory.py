"""Symmetric memory: one-sided reads and writes, signals and barriers on real ranks, and nothing left after a crash."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from unittest import mock

import pytest
import torch

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.host import group_memory, shared_segment
from hyper_parallel.platform.shared.symmetric_memory import SymmetricBuffer
from tests.frameworks import (
    dist,
    equal,
    known_names,
    leaf,
    ours,
    same_bits,
    theirs,
    write,
)
from tests.world import RanksFailed, run_on_ranks

DTYPES = known_names(
    [
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16"),
        *("int8", "uint8", "bool", "complex64", "complex128"),
    ]
)


def get_symmetric_memory_handler():
    return get_platform().get_symmetric_memory_handler()


def allocate(shape=4, dtype=torch.float32, **kwargs) -> SymmetricBuffer:
    return get_symmetric_memory_handler().allocate(shape, ours(dtype), **kwargs)


def some_values(shape, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2 if dtype == torch.bool else 8, shape, generator=generator).to(dtype)


def mappings_of_this_process(label: str) -> int:
    return Path("/proc/self/maps").read_text().count(label)


@run_on_ranks(2, 4)
@pytest.mark.parametrize("shape", [(3, 5), (1,), (0,), (2, 0, 3), ()])
def test_every_rank_reads_and_writes_every_other(shape):
    for dtype in (getattr(torch, name) for name in DTYPES):
        with allocate(shape, dtype) as buffer:
            assert same_bits(buffer.local, torch.zeros(shape, dtype=dtype))
            buffer.barrier()
            right = (buffer.rank + 1) % buffer.num_ranks
            write(buffer.peer(right), some_values(shape, dtype, seed=buffer.rank))
            buffer.barrier()
            for rank in range(buffer.num_ranks):
                expected = some_values(shape, dtype, seed=(rank - 1) % buffer.num_ranks)
                assert same_bits(buffer.peer(rank), expected)
                assert same_bits(buffer.get(rank), expected)
            assert same_bits(buffer.local, buffer.peer(buffer.rank))
            buffer.barrier()


@run_on_ranks(2, 4)
def test_put_and_get_at_offsets():
    with allocate((4, 6)) as buffer:
        write(buffer.local, -1.0)
        buffer.barrier()
        # Rank r writes row r of everybody, from a tensor that is neither contiguous nor free of gradients.
        source = leaf(torch.arange(12.0).view(6, 2)).T[:1] * (buffer.rank + 1)
        for peer in range(buffer.num_ranks):
            buffer.put(source, peer, offset=6 * buffer.rank)
        buffer.barrier()
        row = torch.arange(0.0, 12.0, 2.0)
        expected = torch.full((4, 6), -1.0)
        for rank in range(buffer.num_ranks):
            expected[rank] = row * (rank + 1)
        for peer in range(buffer.num_ranks):
            assert equal(buffer.get(peer), expected)
            assert equal(buffer.get(peer, shape=(2, 3), offset=6), expected[1].view(2, 3))
            out = ours(torch.empty(2, 6))
            assert buffer.get(peer, out=out, offset=6) is out
            assert equal(out, expected[1:3])
            assert buffer.get(peer, shape=(0,), offset=24).shape == (0,)
        copy = buffer.get(0)
        buffer.barrier()
        write(buffer.local, 0.0)
        assert equal(copy, expected), "get must copy"
        buffer.barrier()


@run_on_ranks(2, 4)
def test_data_is_there_when_its_signal_is():
    with allocate(4096, torch.int64) as buffer:
        right, left = (buffer.rank + 1) % buffer.num_ranks, (buffer.rank - 1) % buffer.num_ranks
        for step in range(1, 101):
            buffer.put(ours(torch.full((4096,), step)), right)
            buffer.signal(right, slot=0)
            assert buffer.wait_signal(slot=0, value=step, source=left) == step
            assert bool((theirs(buffer.local) == step).all())
            buffer.signal(left, slot=1, value=step, op="set")  # you may write again
            buffer.wait_signal(slot=1, value=step)
        assert buffer.read_signal(0) == buffer.read_signal(1) == 100


@run_on_ranks(4)
def test_concurrent_signals_are_counted_exactly():
    num_signals, num_threads = 300, 3
    with allocate(1, num_slots=2) as buffer:

        def send():
            for _ in range(num_signals):
                for peer in range(buffer.num_ranks):
                    buffer.signal(peer, slot=1)

        threads = [threading.Thread(target=send) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        total = num_signals * num_threads * buffer.num_ranks
        assert buffer.wait_signal(slot=1, value=total, timeout=100) == total
        for thread in threads:
            thread.join()
        buffer.barrier()
        assert buffer.read_signal(1) == total
        assert buffer.read_signal(0) == 0
        assert [buffer.read_signal(1, source) for source in range(4)] == [num_signals * num_threads] * 4
        buffer.signal(buffer.rank, slot=0, value=-7)
        assert buffer.read_signal(0) == -7
        buffer.barrier()


@run_on_ranks(2, 4)
def test_nobody_passes_a_barrier_early():
    with allocate(1, torch.int64) as buffer:
        for step in range(1, 31):
            write(buffer.local, step)
            if step % buffer.num_ranks == buffer.rank:
                time.sleep(0.002)
            buffer.barrier()
            assert all(theirs(buffer.peer(rank)).item() >= step for rank in range(buffer.num_ranks))
        buffer.barrier()


@run_on_ranks(4)
def test_subgroups_have_memory_of_their_own():
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # None for the one that this rank is not in
    mine = groups[rank % 2]
    with allocate(2, torch.int64, group=mine, name=f"half {rank % 2}") as buffer:
        assert (buffer.rank, buffer.num_ranks) == (rank // 2, 2)
        assert buffer.world_ranks == ((0, 2), (1, 3))[rank % 2]
        buffer.put(ours(torch.full((2,), rank)), 1 - buffer.rank)
        buffer.barrier()
        assert theirs(buffer.local).tolist() == [(rank + 2) % 4] * 2
        with pytest.raises(ValueError, match=rf"peer 2 is outside the group of half {rank % 2}: use 0..1"):
            buffer.peer(2)
        with pytest.raises(TimeoutError, match=r"rank \d \(world rank [0-3]\)"):
            buffer.wait_signal(timeout=0.05)
        buffer.barrier()
    dist.barrier()


@run_on_ranks(2)
def test_free_returns_memory_and_descriptors():
    labels = [""] * 2
    dist.all_gather_object(labels, f"leak-{uuid.uuid4().hex}")
    label = labels[0]
    allocate(8).free()  # whatever the first use opens once
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        buffer = allocate(1 << 16, name=label)
        assert mappings_of_this_process(label) == 2
        kept = buffer.local
        write(kept, 3.0)
        buffer.barrier()
        buffer.free()
        buffer.free()
        assert buffer.is_freed
        assert bool((theirs(kept) == 3.0).all()), "a tensor that is still referenced stays valid"
        del kept
        assert mappings_of_this_process(label) == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors
    dropped = allocate(8, name=label)
    dropped.barrier()
    del dropped
    assert mappings_of_this_process(label) == 0
    assert get_symmetric_memory_handler().buffers == []


@run_on_ranks(2)
def test_handler_is_one_and_frees_all():
    handler = get_symmetric_memory_handler()
    assert get_symmetric_memory_handler() is handler
    buffers = [handler.allocate(2), handler.allocate(3)]
    assert set(handler.buffers) == set(buffers)
    assert f"shape=(2,), dtype={ours(torch.float32)}, rank=" in repr(buffers[0])
    buffers[0].barrier()
    handler.free_all()
    assert handler.buffers == []
    assert repr(buffers[0]).endswith("freed)")


@run_on_ranks(2)
@pytest.mark.parametrize("way", ["without memfd", "with a name"])
def test_other_ways_to_share(way):
    with contextlib.ExitStack() as stack:
        if way == "without memfd":
            stack.enter_context(mock.patch.object(os, "memfd_create"))
            del os.memfd_create
        else:
            stack.enter_context(mock.patch.object(shared_segment, "_nameless_file", return_value=None))
        descriptors = len(os.listdir("/proc/self/fd"))
        buffer = allocate(1000, torch.int32)
        buffer.put(ours(torch.full((1000,), 7 + buffer.rank, dtype=torch.int32)), 1 - buffer.rank)
        buffer.barrier()
        assert bool((theirs(buffer.local) == 8 - buffer.rank).all())
        buffer.free()
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert not left_in_file_systems(f"hyper_parallel-{os.getpid()}-")


@run_on_ranks(2, 4)
def test_ranks_that_ask_differently_all_learn_of_it():
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"alike.*world rank 0: shape=\(0, 3\).*world rank 1: shape=\(1, 3\)"):
        allocate((rank, 3))
    one, other = ours((torch.int8, torch.uint8))
    with pytest.raises(ValueError, match=rf"world rank 0: .*dtype={one}.*world rank 1: .*dtype={other}"):
        allocate(3, torch.uint8 if rank else torch.int8)
    with pytest.raises(ValueError, match=r"name=a, .*name=b"):
        allocate(3, name="b" if rank == 1 else "a")
    with pytest.raises(ValueError, match=r"num_slots=16; world rank 1: .*num_slots=2"):
        allocate(3, num_slots=2 if rank == 1 else 16)
    # A mistake on one rank only does not leave the others waiting.
    with pytest.raises(ValueError, match=r"world rank 1: shape must not be negative, got \(-1,\)"):
        allocate(-1 if rank == 1 else 1)
    with pytest.raises(TypeError, match=r"world rank 0: dtype must be a \w+.dtype such as \w+.float32, got 'float'"):
        allocate(3, "float" if rank == 0 else torch.float32)
    with pytest.raises(TypeError, match="shape must be ints, got 'ab'"):
        allocate("ab")
    with pytest.raises(ValueError, match="num_slots must be a positive int, got 0"):
        allocate(1, num_slots=0)
    with pytest.raises(RuntimeError, match=r"are more than the .* bytes of memory that the host has left"):
        allocate(1 << 50)
    full = mock.patch.object(shared_segment, "_reserve", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(RuntimeError, match=r"world rank 0: cannot reserve .* No space left on device"):
        allocate(3)
    allocate(3).free()  # and nothing is out of step afterwards


@run_on_ranks(2)
def test_ranks_on_several_hosts_are_named():
    real = shared_segment.ProcessIdentity.current
    rank = dist.get_rank()

    def elsewhere(**changes):
        changed = dataclasses.replace(real(), **(changes if rank == 1 else {}))
        return mock.patch.object(shared_segment.ProcessIdentity, "current", return_value=changed)

    here = real().hostname
    message = rf"on one host, but they are on {here} \(world ranks \[0\]\), far-away \(world ranks \[1\]\)"
    with elsewhere(hostname="far-away", boot_id="other"), pytest.raises(RuntimeError, match=message):
        allocate(3)
    message = r"one container.*box \(world ranks \[1\]\).*shared PID namespace"
    with elsewhere(hostname="box", pid_namespace="pid:[1]"), pytest.raises(RuntimeError, match=message):
        allocate(3)
    with elsewhere(hostname="box"):  # same host under two names
        allocate(3).free()


@run_on_ranks(2)
def test_memory_that_is_not_the_offered_one_is_refused():
    real = group_memory._open_offered

    def swapped(offer):
        return real(dataclasses.replace(offer, token=offer.token + 1))

    opening = mock.patch.object(group_memory, "_open_offered", swapped if dist.get_rank() == 1 else real)
    message = r"world rank 1: cannot map the segment of world rank 0.*is not the memory"
    with opening, pytest.raises(RuntimeError, match=message):
        allocate(3)


@run_on_ranks(2)
def test_wrong_use_is_an_error_on_the_caller():
    with allocate((2, 3), name="weights") as buffer:
        with pytest.raises(ValueError, match=r"put: peer 2 is outside the group of weights: use 0..1.*\[0, 1\]"):
            buffer.put(ours(torch.ones(6)), 2)
        with pytest.raises(ValueError, match="peer: peer -1 is outside"):
            buffer.peer(-1)
        with pytest.raises(TypeError, match="get: peer must be a rank of the group"):
            buffer.get("0")
        with pytest.raises(
            ValueError, match=r"put: elements 1 to 7 \(offset 1, shape \(6,\)\) are not inside weights.* 6"
        ):
            buffer.put(ours(torch.ones(6)), 0, offset=1)
        with pytest.raises(ValueError, match="get: elements -1 to 1"):
            buffer.get(0, shape=(2,), offset=-1)
        with pytest.raises(ValueError, match="get: elements 0 to 6"):
            buffer.get(0, shape=(-2, -3))
        with pytest.raises(TypeError, match=r"put: offset must be an int, got 1.0"):
            buffer.put(ours(torch.ones(2)), 0, offset=1.0)
        held, wide, whole = ours((torch.float32, torch.float64, torch.int64))
        with pytest.raises(ValueError, match=rf"put: source is {wide} but weights holds {held}.*source.to\("):
            buffer.put(ours(torch.ones(6, dtype=torch.float64)), 0)
        with pytest.raises(ValueError, match=rf"get: out is {whole} but weights holds {held}"):
            buffer.get(0, out=ours(torch.ones(6, dtype=torch.int64)))
        with pytest.raises(ValueError, match=r"get: shape \(2,\) differs from that of out, \(6,\)"):
            buffer.get(0, shape=(2,), out=ours(torch.ones(6)))
        with pytest.raises(TypeError, match="put: source must be a tensor, got list"):
            buffer.put([1.0], 0)
        with pytest.raises(ValueError, match=r"signal: slot 16 is outside 0..15; allocate weights with more num_slots"):
            buffer.signal(0, slot=16)
        with pytest.raises(TypeError, match="wait_signal: slot must be an int, got None"):
            buffer.wait_signal(slot=None)
        with pytest.raises(ValueError, match="signal: op must be 'add' or 'set', got 'max'"):
            buffer.signal(0, op="max")
        with pytest.raises(TypeError, match=r"signal: value must be an int, got 0.5"):
            buffer.signal(0, value=0.5)
        with pytest.raises(ValueError, match="does not fit in a 64-bit slot"):
            buffer.signal(0, value=2**63, op="set")
        assert buffer.read_signal() == 0
        buffer.barrier()
    for operation, call in {
        "peer": lambda: buffer.local,
        "put": lambda: buffer.put(ours(torch.ones(1)), 0),
        "get": lambda: buffer.get(0),
        "signal": lambda: buffer.signal(0),
        "wait_signal": lambda: buffer.wait_signal(),
        "read_signal": lambda: buffer.read_signal(),
        "barrier": lambda: buffer.barrier(),
    }.items():
        with pytest.raises(RuntimeError, match=rf"^{operation}: weights was freed on rank {buffer.rank}"):
            call()


@run_on_ranks(4)
def test_waiting_for_ranks_that_do_not_come():
    buffer = allocate(1, name="meeting")
    if buffer.rank in (0, 3):
        with pytest.raises(
            TimeoutError, match=r"barrier of meeting on rank [03] gave up after 0.2 s: rank 1, rank 2 did not"
        ):
            buffer.barrier(timeout=0.2)
        if buffer.rank == 0:
            with pytest.raises(TimeoutError, match=r"slot 2 has 0 of 5 \(0 from rank 1\)"):
                buffer.wait_signal(2, value=5, source=1, timeout=0.05)
    dist.barrier()
    buffer.barrier(timeout=100)  # the barrier that timed out can still be met
    buffer.barrier(timeout=100)

    if buffer.rank == 1:
        buffer.free()
    else:
        with pytest.raises(
            RuntimeError, match=r"barrier of meeting on rank . cannot end: rank 1 has freed it; rank 1 did not"
        ):
            buffer.barrier(timeout=100)
        with pytest.raises(RuntimeError, match=r"wait_signal of meeting .* rank 1 has freed it"):
            buffer.wait_signal(source=1, timeout=100)
    dist.barrier()
    if buffer.rank == 2:
        buffer.signal(0)
    if buffer.rank == 0:
        assert buffer.wait_signal(timeout=100) == 1, "rank 1 being gone does not matter to a signal of rank 2"
    dist.barrier()
    if buffer.rank != 0:
        buffer.free()
    else:
        with pytest.raises(RuntimeError, match="rank 1 has freed it, rank 2 has freed it, rank 3 has freed it"):
            buffer.wait_signal(value=2, timeout=100)
    dist.barrier()


@run_on_ranks(2)
def test_a_forked_child_cannot_speak_for_its_parent():
    buffer = allocate(1, name="parents")
    handler = get_symmetric_memory_handler()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            buffer.barrier()
        except RuntimeError as error:
            if "cannot be used in its forked child" in str(error) and get_symmetric_memory_handler() is not handler:
                code = 0
        buffer._memory.free()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    buffer.barrier(timeout=100)
    buffer.free()


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        allocate(3)


def test_a_process_that_has_ended_is_not_alive_although_nobody_has_waited_for_it():
    """As the ranks of a busy launcher, which stay zombies for a while."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        _, started = shared_segment._state_and_start_time(process.pid)
        identity = dataclasses.replace(shared_segment.ProcessIdentity.current(), pid=process.pid, start_time=started)
        assert identity.is_alive()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended and stays a zombie
        assert not identity.is_alive()
    finally:
        process.kill()
        process.communicate()
    assert not identity.is_alive()


# ---------------------------------------------------------------------------------------------------------------------
# Worlds to be killed
# ---------------------------------------------------------------------------------------------------------------------


def left_in_file_systems(label: str) -> list[str]:
    folders = ["/dev/shm", os.environ.get("TMPDIR", "/tmp")]
    return [name for folder in folders for name in os.listdir(folder) if label in name]


def processes_that_map(label: str) -> list[int]:
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            if label in Path(f"/proc/{pid}/maps").read_text(errors="replace"):
                found.append(pid)
    return found


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_the_dead(label: str, seen: Path) -> None:
    """Rank 1 is killed; rank 0 writes down what it sees and ends without ``free``."""
    buffer = allocate(1 << 20, name=label)
    buffer.barrier()
    assert sorted(processes_that_map(label)) == sorted(process.pid for process in buffer._memory._processes)
    buffer.barrier()
    if dist.get_rank() == 1:
        kill_myself()
    for wait in (buffer.barrier, buffer.wait_signal):
        with pytest.raises(RuntimeError) as error:
            wait(timeout=100)
        with seen.open("a") as file:
            file.write(f"{error.value}\n")
    write(buffer.local, 1.0)
    kill_myself()


def allocate_until_killed(label: str) -> None:
    buffer = allocate(1 << 20, name=label)
    buffer.barrier()
    assert processes_that_map(label)
    threading.Timer(0.2, kill_myself).start()
    while True:
        with contextlib.suppress(Exception):  # the other rank may be killed a moment before
            buffer = allocate(1 << 12, name=label)


def run_and_be_killed(worlds, function, label, *args) -> list[int]:
    """Run the function on two ranks, which must all be killed and leave nothing; gives their process numbers."""
    pids = worlds(2).run(os.getpid)
    with pytest.raises(RanksFailed, match=r"rank \d was killed by SIGKILL; rank \d was killed by SIGKILL"):
        worlds(2).run(function, label, *args)
    assert processes_that_map(label) == []
    for trace in (label, *(f"hyper_parallel-{pid}-" for pid in pids)):
        assert left_in_file_systems(trace) == []
    return pids


def test_one_rank_is_killed_and_the_other_ends_without_free(worlds, tmp_path):
    label = f"killed-{uuid.uuid4().hex}"
    _, victim = run_and_be_killed(worlds, wait_for_the_dead, label, tmp_path / "seen")
    messages = (tmp_path / "seen").read_text().splitlines()
    for operation, message in zip(("barrier", "wait_signal"), messages, strict=True):
        assert message.startswith(f"{operation} of {label} on rank 0 cannot end: ")
        assert f"rank 1 (process {victim}) has died" in message


@pytest.mark.sweep("mindspore")
def test_all_ranks_are_killed_while_they_allocate(worlds):
    run_and_be_killed(worlds, allocate_until_killed, f"killed-{uuid.uuid4().hex}")
