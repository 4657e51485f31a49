"""Saves in the background: training goes on, failures come to the foreground, and slowness is never taken for death."""

import contextlib
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hyper_parallel as hp
from hyper_parallel import checkpoint as ckpt
from hyper_parallel.core.distributed_checkpoint import async_save as async_save_module
from hyper_parallel.core.distributed_checkpoint.background import writer_handle, writer_process
from tests.distributed_checkpoint.background_storage import (
    DyingWriter,
    FullDiskWriter,
    GatedWriter,
    is_alive,
    kernel_state,
    num_files,
    wait_for,
)
from tests.frameworks import dist, distribute_tensor, equal, on_mindspore, ours, write
from tests.world import run_on_ranks


def _state(mesh, value: float, size: int = 5) -> dict:
    """Cut unevenly, replicated, plain, an object; all of one value."""

    def full(*shape):
        return torch.arange(float(np.prod(shape))).reshape(shape) + value

    return {
        "cut": distribute_tensor(full(size, 3), mesh, [hp.Shard(0)]),
        "whole": distribute_tensor(full(size), mesh, [hp.Replicate()]),
        "empty": distribute_tensor(full(1, 2), mesh, [hp.Shard(0)]),
        "plain": ours(full(7).to(torch.bfloat16)),
        "step": value,
    }


def _assert_loads(folder, mesh, value: float, size: int = 5) -> None:
    blank = _state(mesh, -1.0, size)
    ckpt.load(blank, checkpoint_id=folder)
    for name, wanted in _state(mesh, value, size).items():
        found = blank[name]
        assert equal(_local(found), _local(wanted)) if name != "step" else found == wanted, name


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, hp.DTensor) else value


def _spoil(state: dict) -> None:
    for name, value in state.items():
        if name != "step":
            write(_local(value), 0.0)


def _writer_pid() -> int:
    (saves,) = [saves for key, saves in async_save_module._Background._all.items() if key != "alone"]
    return saves._process.pid


@run_on_ranks(*((4,) if on_mindspore else (1, 4)))
def test_state_is_taken_at_once_and_memory_is_kept(tmp_path: Path) -> None:
    mesh = hp.init_device_mesh("cpu", (dist.get_world_size(),))
    handles = []
    for number, size in enumerate((5, 3, 5000, 1, 5000)):
        state = _state(mesh, float(number), size)
        handles.append(ckpt.async_save(state, checkpoint_id=tmp_path / str(number)))
        _spoil(state)  # training goes on
    metadata = handles[-1].result()
    assert metadata.state_dict_metadata["cut"].size == (5000, 3)
    for number, size in enumerate((5, 3, 5000, 1, 5000)):
        assert handles[number].done() and handles[number].result() is not None
        _assert_loads(tmp_path / str(number), mesh, float(number), size)
    maps = Path(f"/proc/{_writer_pid() if mesh.size() > 1 else _alone_pid()}/maps").read_text()
    assert "hyper-parallel-checkpoint" in maps and not any(name in maps for name in ("libtorch", "libmindspore"))
    # Over one that is there.
    ckpt.async_save(_state(mesh, 9.0), checkpoint_id=tmp_path / "0").result()
    _assert_loads(tmp_path / "0", mesh, 9.0)
    # To a relative path: where it is now, and not where the writer was started.
    with contextlib.chdir(tmp_path):
        handle = ckpt.async_save(_state(mesh, 8.0), checkpoint_id="relative")
    handle.result()
    _assert_loads(tmp_path / "relative", mesh, 8.0)
    # After it a save in the foreground, and the other way round.
    ckpt.save(_state(mesh, 10.0), checkpoint_id=tmp_path / "0")
    _assert_loads(tmp_path / "0", mesh, 10.0)
    _the_plan_is_kept_while_every_rank_holds_what_it_held(tmp_path, mesh)


def _the_plan_is_kept_while_every_rank_holds_what_it_held(tmp_path: Path, mesh) -> None:
    (saves,) = async_save_module._Background._all.values()
    last = dist.get_rank() == mesh.size() - 1
    plans = []
    for number, has_more in enumerate((False, False, True, True, False, False)):
        extra = {"on_one": ours(torch.ones(2))} if last and has_more else {}
        handle = ckpt.async_save(state := _state(mesh, float(number)) | extra, checkpoint_id=tmp_path / "k")
        _spoil(state)
        plans.append(saves.known_plan)
        handle.result()
        _assert_loads(tmp_path / "k", mesh, float(number))
        if has_more:
            ckpt.load(blank := {"on_one": ours(torch.zeros(2))}, checkpoint_id=tmp_path / "k", no_dist=True)
            assert equal(blank["on_one"], torch.ones(2))
        dist.barrier()
    assert [plans[n] is plans[n + 1] for n in range(5)] == [True, False, True, False, True]


def _alone_pid() -> int:
    return async_save_module._Background._all["alone"]._process.pid


class _GatheringPlanner(ckpt.StandardSavePlanner):
    """One that does not plan by arithmetic."""

    needs_global_plan = True


@run_on_ranks(2)
def test_a_planner_with_a_global_plan(tmp_path: Path) -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    ckpt.async_save(_state(mesh, 1.0), checkpoint_id=tmp_path / "c", planner=_GatheringPlanner()).result()
    _assert_loads(tmp_path / "c", mesh, 1.0)


@run_on_ranks(4)
def test_a_second_save_waits_or_is_refused(tmp_path: Path) -> None:
    mesh = hp.init_device_mesh("cpu", (4,))
    gate = tmp_path / "gate"
    ckpt.async_save(_state(mesh, 0.0), checkpoint_id=tmp_path / "c").result()
    first = ckpt.async_save(_state(mesh, 1.0), checkpoint_id=tmp_path / "c", storage_writer=GatedWriter(gate))
    assert not first.done()
    with pytest.raises(TimeoutError, match=r"c' is still being written after 0.01 seconds"):
        first.result(0.01)
    _assert_loads(tmp_path / "c", mesh, 0.0)  # what was there stays until the new one is whole
    with pytest.raises(ckpt.CheckpointError, match=r"c' is still being written; call result\(\) of its handle first"):
        ckpt.async_save(_state(mesh, 2.0), checkpoint_id=tmp_path / "d", if_busy="refuse")
    assert not (tmp_path / "d").exists()
    dist.barrier()
    opener = threading.Timer(0.05, gate.touch)
    if dist.get_rank() == 0:
        opener.start()
    second = ckpt.async_save(_state(mesh, 3.0), checkpoint_id=tmp_path / "d")
    assert gate.exists() and first.done()
    first.result()
    second.result()
    _assert_loads(tmp_path / "c", mesh, 1.0)
    _assert_loads(tmp_path / "d", mesh, 3.0)
    ckpt.async_save(_state(mesh, 4.0), checkpoint_id=tmp_path / "d", if_busy="refuse").result()
    if dist.get_rank() == 0:
        opener.join()


@run_on_ranks(4)
def test_a_failure_in_the_background_comes_to_the_foreground(tmp_path: Path) -> None:
    mesh = hp.init_device_mesh("cpu", (4,))
    folder = tmp_path / "c"
    ckpt.async_save(_state(mesh, 0.0), checkpoint_id=folder).result()
    dist.barrier()
    before = num_files(folder)
    pid = _writer_pid()

    for rank, said in (
        (2, "saving failed on rank 2: OSError: .*no space left"),
        (None, "saving failed: OSError: .*no"),
    ):
        handle = ckpt.async_save(_state(mesh, 1.0), checkpoint_id=folder, storage_writer=FullDiskWriter(rank))
        with pytest.raises(ckpt.CheckpointError, match=said):
            handle.result()
        with pytest.raises(ckpt.CheckpointError, match=said):
            handle.result()  # again and again
        dist.barrier()
        assert num_files(folder) == before, "a save that failed leaves nothing"
        _assert_loads(folder, mesh, 0.0)

    # Nobody asked: the next call says so, on every rank, also where one has asked.
    handle = ckpt.async_save(_state(mesh, 1.0), checkpoint_id=folder, storage_writer=FullDiskWriter(1))
    if dist.get_rank() == 2:
        with pytest.raises(ckpt.CheckpointError, match="rank 1"):
            handle.result()
    with pytest.raises(ckpt.CheckpointError, match="the save before this one failed: saving failed on rank 1: OSError"):
        ckpt.async_save(_state(mesh, 2.0), checkpoint_id=folder)
    _assert_loads(folder, mesh, 0.0)

    # What goes wrong while the state is copied, on one rank, is an error of the save too.
    state = _state(mesh, 1.0)
    state["step"] = object() if dist.get_rank() == 0 else 1  # rank 0 writes it
    handle = ckpt.async_save(state, checkpoint_id=folder)
    with pytest.raises(ckpt.CheckpointError, match=r"rank 0: .*TypeError: 'step' holds a builtins.object"):
        handle.result()
    assert _writer_pid() == pid, "the writer processes have lived through all of this"
    ckpt.async_save(_state(mesh, 5.0), checkpoint_id=folder).result()
    _assert_loads(folder, mesh, 5.0)
    dist.barrier()
    assert num_files(folder) == before


@run_on_ranks(4)
def test_a_writer_that_is_killed(tmp_path: Path) -> None:
    mesh = hp.init_device_mesh("cpu", (4,))
    folder = tmp_path / "c"
    ckpt.async_save(_state(mesh, 0.0), checkpoint_id=folder).result()
    dist.barrier()
    before = num_files(folder)
    for doomed in (2, 0):
        handle = ckpt.async_save(_state(mesh, 1.0), checkpoint_id=folder, storage_writer=DyingWriter(doomed))
        said = rf"checkpoint for rank {doomed} (was ended by SIGKILL|is gone)|it is gone"
        with pytest.raises(ckpt.CheckpointError, match=said):
            handle.result()
        _assert_loads(folder, mesh, 0.0)
        dist.barrier()
    # New writers are started, and what the dead ones left is cleaned up.
    ckpt.async_save(_state(mesh, 5.0), checkpoint_id=folder).result()
    _assert_loads(folder, mesh, 5.0)
    dist.barrier()
    assert num_files(folder) == before
    # One that ends between two saves: the next one finds out, or starts another.
    pid = _writer_pid()
    if dist.get_rank() == 3:
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(pid))
    dist.barrier()
    try:
        ckpt.async_save(_state(mesh, 6.0), checkpoint_id=folder).result()
    except ckpt.CheckpointError:
        _assert_loads(folder, mesh, 5.0)
        ckpt.async_save(_state(mesh, 6.0), checkpoint_id=folder).result()
    _assert_loads(folder, mesh, 6.0)


@run_on_ranks(2)
def test_a_writer_that_cannot_be_started(tmp_path: Path) -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    folder = tmp_path / "c"
    ckpt.save(_state(mesh, 0.0), checkpoint_id=folder)

    def refuse(*args):
        raise BlockingIOError(11, "too many processes")

    for unlucky in range(2):
        async_save_module._finish_all()
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == unlucky:
                patch.setattr(writer_handle, "_start", refuse)
            handle = ckpt.async_save(_state(mesh, 1.0), checkpoint_id=folder)
        said = rf"rank {unlucky} (cannot be started: .*too many processes|is gone)|rank {unlucky}: it is gone"
        with pytest.raises(ckpt.CheckpointError, match=said):
            handle.result()
        _assert_loads(folder, mesh, 0.0)
    ckpt.async_save(_state(mesh, 2.0), checkpoint_id=folder).result()
    _assert_loads(folder, mesh, 2.0)


@run_on_ranks(2)
def test_a_rank_is_interrupted_while_it_hands_its_part_over(tmp_path: Path) -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    folder = tmp_path / "c"
    ckpt.save(_state(mesh, 0.0), checkpoint_id=folder)
    async_save_module._finish_all()
    for number in range(2):  # before the writers are started, and behind
        if dist.get_rank() == 1:
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(writer_handle.WriterProcess, "_send", _interrupted)
                ckpt.async_save(_state(mesh, -1.0), checkpoint_id=folder)
        else:
            handle = ckpt.async_save(_state(mesh, -1.0), checkpoint_id=folder)
            with pytest.raises(ckpt.CheckpointError, match=r"rank 1(: it)? is gone"):
                handle.result()
        _assert_loads(folder, mesh, float(number))
        ckpt.async_save(_state(mesh, number + 1.0), checkpoint_id=folder).result()
        _assert_loads(folder, mesh, number + 1.0)


def _interrupted(*args: Any) -> None:
    raise KeyboardInterrupt


@run_on_ranks(4)
def test_a_writer_that_stands_still_is_waited_for(tmp_path: Path) -> None:
    """A stopped process answers nothing at all, like one on a machine that is busy with something else."""
    mesh = hp.init_device_mesh("cpu", (4,))
    ckpt.async_save(_state(mesh, 0.0), checkpoint_id=tmp_path / "c").result()
    for still in (0, 2):
        pid = _writer_pid()
        if dist.get_rank() == still:
            os.kill(pid, signal.SIGSTOP)
            wait_for(lambda pid=pid: kernel_state(pid) == "T")
        dist.barrier()
        handle = ckpt.async_save(_state(mesh, 1.0 + still), checkpoint_id=tmp_path / "c")
        with pytest.raises(TimeoutError):
            handle.result(0.3)
        assert not handle.done()
        dist.barrier()
        if dist.get_rank() == still:
            os.kill(pid, signal.SIGCONT)
        handle.result()
        assert _writer_pid() == pid
        _assert_loads(tmp_path / "c", mesh, 1.0 + still)


def test_what_cannot_be_written_elsewhere(tmp_path):
    with pytest.raises(ValueError, match="whose memory:// is not this one's: 'memory://c' would be lost"):
        ckpt.async_save({"x": 1}, checkpoint_id="memory://c", no_dist=True)
    writer = ckpt.FileSystemWriter()
    writer.lock = threading.Lock()
    with pytest.raises(TypeError, match="the storage writer FileSystemWriter cannot be sent there"):
        ckpt.async_save({"x": 1}, checkpoint_id=tmp_path / "c", storage_writer=writer, no_dist=True)
    with pytest.raises(ValueError, match="if_busy is 'wait' or 'refuse', got 'skip'"):
        ckpt.async_save({"x": 1}, checkpoint_id=tmp_path / "c", if_busy="skip")
    (tmp_path / "file").touch()
    handle = ckpt.async_save({"x": 1}, checkpoint_id=tmp_path / "file", no_dist=True)
    with pytest.raises(ckpt.CheckpointError, match=r"NotADirectoryError: .*'.*file' is a file; give another name"):
        handle.result()
    with pytest.raises(TypeError, match=r"'x' holds a builtins.object"):
        ckpt.save({"x": object()}, checkpoint_id=tmp_path / "c", no_dist=True)
    async_save_module._finish_all()


def test_a_writer_ends_without_a_word_when_its_answers_are_not_read():
    mine, theirs = socket.socketpair()
    theirs.sendall(b"an answer")
    mine.close()  # resets the connection, for the answer is unread
    writer_process.serve(theirs)
    theirs.close()
