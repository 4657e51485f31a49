"""Saves in the background: training goes on, failures come to the foreground, and slowness is never taken for death."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import hyper_parallel as hp
from hyper_parallel import checkpoint as ckpt
from hyper_parallel.core.distributed_checkpoint import async_save as async_save_module
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.torch import host_copies
from tests.distributed_checkpoint.background_storage import DyingWriter, FullDiskWriter, GatedWriter
from tests.world import run_on_ranks


def _barrier() -> None:
    torch.distributed.barrier()


def _rank() -> int:
    return torch.distributed.get_rank()


def _state(mesh, value: float, size: int = 5) -> dict:
    """Cut unevenly, replicated, plain, an object; all of one value."""

    def full(*shape):
        return torch.arange(float(np.prod(shape))).reshape(shape) + value

    return {
        "cut": hp.distribute_tensor(full(size, 3), mesh, [hp.Shard(0)]),
        "whole": hp.distribute_tensor(full(size), mesh, [hp.Replicate()]),
        "empty": hp.distribute_tensor(full(1, 2), mesh, [hp.Shard(0)]),
        "plain": full(7).to(torch.bfloat16),
        "step": value,
    }


def _assert_loads(folder, mesh, value: float, size: int = 5) -> None:
    blank = _state(mesh, -1.0, size)
    ckpt.load(blank, checkpoint_id=folder)
    for name, wanted in _state(mesh, value, size).items():
        equal = torch.equal(_local(blank[name]), _local(wanted)) if torch.is_tensor(wanted) else blank[name] == wanted
        assert equal, name


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, hp.DTensor) else value


def _spoil(state: dict) -> None:
    for value in state.values():
        if torch.is_tensor(value):
            _local(value).zero_()


def _writer_pid() -> int:
    (background,) = [b for key, b in async_save_module._Background._all.items() if key != "alone"]
    return background._process.pid


def _wait_for(condition) -> None:
    while not condition():
        time.sleep(0.005)


def _kernel_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _is_alive(pid: int) -> bool:
    try:
        return _kernel_state(pid) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _num_files(folder: Path) -> int:
    return len([name for name in os.listdir(folder) if name != "metadata.json"])


@run_on_ranks(1, 4)
def test_state_is_taken_at_once_and_memory_is_kept(tmp_path: Path) -> None:
    mesh = hp.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
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
    assert "hyper-parallel-checkpoint" in maps and "libtorch" not in maps
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
    (background,) = async_save_module._Background._all.values()
    last = _rank() == mesh.size() - 1
    plans = []
    for number, has_more in enumerate((False, False, True, True, False, False)):
        extra = {"on_one": torch.ones(2)} if last and has_more else {}
        handle = ckpt.async_save(state := _state(mesh, float(number)) | extra, checkpoint_id=tmp_path / "k")
        _spoil(state)
        plans.append(background.known_plan)
        handle.result()
        _assert_loads(tmp_path / "k", mesh, float(number))
        if has_more:
            ckpt.load(blank := {"on_one": torch.zeros(2)}, checkpoint_id=tmp_path / "k", no_dist=True)
            assert torch.equal(blank["on_one"], torch.ones(2))
        _barrier()
    assert [plans[n] is plans[n + 1] for n in range(5)] == [True, False, True, False, True]
    # The copy was begun with the plan that another rank finds to be no longer the right one.
    copies = []
    begin = background.begin_copy
    background.begin_copy = lambda planner, plan: copies.append(begin(planner, plan))
    extra = {"on_one": torch.ones(2)} if last else {}
    ckpt.async_save(_state(mesh, 1.0) | extra, checkpoint_id=tmp_path / "k").result()
    _assert_loads(tmp_path / "k", mesh, 1.0)
    assert len(copies) == (not last)
    del background.begin_copy


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
    _barrier()
    opener = threading.Timer(0.05, gate.touch)
    if _rank() == 0:
        opener.start()
    second = ckpt.async_save(_state(mesh, 3.0), checkpoint_id=tmp_path / "d")
    assert gate.exists() and first.done()
    first.result()
    second.result()
    _assert_loads(tmp_path / "c", mesh, 1.0)
    _assert_loads(tmp_path / "d", mesh, 3.0)
    ckpt.async_save(_state(mesh, 4.0), checkpoint_id=tmp_path / "d", if_busy="refuse").result()
    if _rank() == 0:
        opener.join()


@run_on_ranks(4)
def test_a_failure_in_the_background_comes_to_the_foreground(tmp_path: Path) -> None:
    mesh = hp.init_device_mesh("cpu", (4,))
    folder = tmp_path / "c"
    ckpt.async_save(_state(mesh, 0.0), checkpoint_id=folder).result()
    _barrier()
    before = _num_files(folder)
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
        _barrier()
        assert _num_files(folder) == before, "a save that failed leaves nothing"
        _assert_loads(folder, mesh, 0.0)

    # Nobody asked: the next call says so, on every rank, also where one has asked.
    handle = ckpt.async_save(_state(mesh, 1.0), checkpoint_id=folder, storage_writer=FullDiskWriter(1))
    if _rank() == 2:
        with pytest.raises(ckpt.CheckpointError, match="rank 1"):
            handle.result()
    with pytest.raises(ckpt.CheckpointError, match="the save before this one failed: saving failed on rank 1: OSError"):
        ckpt.async_save(_state(mesh, 2.0), checkpoint_id=folder)
    _assert_loads(folder, mesh, 0.0)

    # What goes wrong while the state is copied, on one rank, is an error of the save too.
    state = _state(mesh, 1.0)
    state["step"] = object() if _rank() == 0 else 1  # rank 0 writes it
    handle = ckpt.async_save(state, checkpoint_id=folder)
    with pytest.raises(ckpt.CheckpointError, match=r"rank 0: .*TypeError: 'step' holds a builtins.object"):
        handle.result()
    assert _writer_pid() == pid, "the writer processes have lived through all of this"
    ckpt.async_save(_state(mesh, 5.0), checkpoint_id=folder).result()
    _assert_loads(folder, mesh, 5.0)
    _barrier()
    assert _num_files(folder) == before


@run_on_ranks(4)
def test_a_writer_that_is_killed(tmp_path: Path) -> None:
    mesh = hp.init_device_mesh("cpu", (4,))
    folder = tmp_path / "c"
    ckpt.async_save(_state(mesh, 0.0), checkpoint_id=folder).result()
    _barrier()
    before = _num_files(folder)
    for doomed in (2, 0):
        handle = ckpt.async_save(_state(mesh, 1.0), checkpoint_id=folder, storage_writer=DyingWriter(doomed))
        said = rf"checkpoint for rank {doomed} (was ended by SIGKILL|is gone)|it is gone"
        with pytest.raises(ckpt.CheckpointError, match=said):
            handle.result()
        _assert_loads(folder, mesh, 0.0)
        _barrier()
    # New writers are started, and what the dead ones left is cleaned up.
    ckpt.async_save(_state(mesh, 5.0), checkpoint_id=folder).result()
    _assert_loads(folder, mesh, 5.0)
    _barrier()
    assert _num_files(folder) == before
    # One that ends between two saves: the next one finds out, or starts another.
    pid = _writer_pid()
    if _rank() == 3:
        os.kill(pid, signal.SIGKILL)
        _wait_for(lambda: not _is_alive(pid))
    _barrier()
    try:
        ckpt.async_save(_state(mesh, 6.0), checkpoint_id=folder).result()
    except ckpt.CheckpointError:
        _assert_loads(folder, mesh, 5.0)
        ckpt.async_save(_state(mesh, 6.0), checkpoint_id=folder).result()
    _assert_loads(folder, mesh, 6.0)


@run_on_ranks(4)
def test_a_writer_that_stands_still_is_waited_for(tmp_path: Path) -> None:
    """A stopped process answers nothing at all, like one on a machine that is busy with something else."""
    mesh = hp.init_device_mesh("cpu", (4,))
    ckpt.async_save(_state(mesh, 0.0), checkpoint_id=tmp_path / "c").result()
    for still in (0, 2):
        pid = _writer_pid()
        if _rank() == still:
            os.kill(pid, signal.SIGSTOP)
            _wait_for(lambda pid=pid: _kernel_state(pid) == "T")
        _barrier()
        handle = ckpt.async_save(_state(mesh, 1.0 + still), checkpoint_id=tmp_path / "c")
        with pytest.raises(TimeoutError):
            handle.result(0.3)
        assert not handle.done()
        _barrier()
        if _rank() == still:
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


# ---- Programs that end or are killed. They are forks of this process: new interpreters would take seconds. ----


def _save_behind_a_gate(connection, folder, ending) -> None:
    async_save_module._Background._all.clear()
    ckpt.async_save({"x": np.arange(5)}, checkpoint_id=folder / "c", no_dist=True).result()
    ckpt.async_save(
        {"x": np.arange(6)}, checkpoint_id=folder / "c", no_dist=True, storage_writer=GatedWriter(folder / "gate")
    )
    pid = _alone_pid()
    _wait_for((folder / f"waiting-{pid}").exists)
    connection.send(pid)
    if ending == "killed":
        signal.pause()
    async_save_module._finish_all()  # what the interpreter does at its end
    assert (folder / "gate").exists()
    connection.send("finished")


@pytest.mark.parametrize("ending", ["killed", "normal"])
def test_the_program_ends_while_its_checkpoint_is_written(tmp_path, ending):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    program = context.Process(target=_save_behind_a_gate, args=(there, tmp_path, ending))
    program.start()
    there.close()
    try:
        writer = here.recv()
        if ending == "killed":
            program.kill()
            program.join()
        assert _is_alive(writer)
        loaded = {"x": None}
        ckpt.load(loaded, checkpoint_id=tmp_path / "c", no_dist=True)
        assert len(loaded["x"]) == 5
        (tmp_path / "gate").touch()
        if ending == "normal":
            assert here.recv() == "finished"
            program.join()
            assert program.exitcode == 0
    finally:
        (tmp_path / "gate").touch()
        program.kill()
        program.join()
    _wait_for(lambda: not _is_alive(writer))  # it does not stay
    ckpt.load(loaded, checkpoint_id=tmp_path / "c", no_dist=True)
    assert len(loaded["x"]) == 6 and _num_files(tmp_path / "c") == 1


class _StuckPlanner(ckpt.StandardSavePlanner):
    """Never comes to an end with copying on rank 1."""

    def __init__(self, connection) -> None:
        super().__init__()
        self._connection = connection

    def get_data(self, item):
        if torch.distributed.get_rank() == 1:
            self._connection.send("stuck")
            signal.pause()
        return super().get_data(item)


def _rank_of_two(rank, connection, folder) -> None:
    async_save_module._Background._all.clear()
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    state = {"x": hp.distribute_tensor(torch.arange(4.0), hp.init_device_mesh("cpu", (2,)), [hp.Shard(0)])}
    ckpt.async_save(state, checkpoint_id=folder / "c").result()
    connection.send(_writer_pid())
    handle = ckpt.async_save(state, checkpoint_id=folder / "c", planner=_StuckPlanner(connection))
    try:
        handle.result()
    except ckpt.CheckpointError as error:
        connection.send(str(error))
    async_save_module._finish_all()
    connection.send("end")


def test_a_rank_is_killed_before_it_has_handed_its_part_over(tmp_path):
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(2)]
    ranks = [context.Process(target=_rank_of_two, args=(rank, pipes[rank][1], tmp_path)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for _, there in pipes:
        there.close()
    try:
        writers = [here.recv() for here, _ in pipes]
        assert pipes[1][0].recv() == "stuck"
        ranks[1].kill()
        ranks[1].join()
        assert "rank 1: it is gone" in pipes[0][0].recv()
        assert pipes[0][0].recv() == "end"
        ranks[0].join()
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    _wait_for(lambda: not any(map(_is_alive, writers)))
    loaded = {"x": torch.zeros(4)}
    ckpt.load(loaded, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(loaded["x"], torch.arange(4.0))


# ---- A pretended accelerator: tensors that count as being elsewhere, and copies that run once they are waited for ----


class _LazyEvent:
    def __init__(self, accelerator) -> None:
        self._accelerator = accelerator

    def record(self, stream) -> None:
        self._position = len(self._accelerator.queue)

    def synchronize(self) -> None:
        self._accelerator.run_until(self._position)


class _PretendedAccelerator:
    def __init__(self, monkeypatch, buffer_bytes: int) -> None:
        self.queue: list = []
        self.num_done = 0
        self.pinned: list[int] = []
        host_copies._buffers.cache_clear()
        monkeypatch.setattr(host_copies, "_BUFFER_BYTES", buffer_bytes)
        monkeypatch.setattr(host_copies, "is_in_host_memory", self.is_in_host_memory)
        monkeypatch.setattr(type(get_platform()), "is_in_host_memory", staticmethod(self.is_in_host_memory))
        monkeypatch.setattr(host_copies, "_pinned", self.pin)
        monkeypatch.setattr(host_copies, "_copy", lambda *both: self.queue.append(both))
        monkeypatch.setattr(host_copies.devices, "new_event", lambda: _LazyEvent(self))

    def is_in_host_memory(self, tensor) -> bool:
        return tensor.dtype is torch.int64  # a state has a bit of both

    def pin(self, num_bytes: int) -> torch.Tensor:
        self.pinned.append(num_bytes)
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def run_until(self, position: int) -> None:
        for target, source in self.queue[self.num_done : position]:
            target.copy_(source)
        self.num_done = max(self.num_done, position)


@pytest.mark.parametrize("buffer_bytes", [64, 1000, 1 << 20])
def test_from_a_device_through_pinned_memory_that_is_kept(tmp_path, monkeypatch, buffer_bytes):
    accelerator = _PretendedAccelerator(monkeypatch, buffer_bytes)

    def made(number):
        return {
            "large": torch.arange(300.0).reshape(20, 15) + number,
            "turned": (torch.arange(35).reshape(5, 7) + number).bfloat16().t(),
            "host": torch.arange(5) + number,
            "scalar": torch.tensor(2.5 + number, dtype=torch.float64),
            "complex": torch.view_as_complex(torch.arange(8.0).reshape(4, 2) + number).conj(),
            "empty": torch.empty(0, 3),
            "step": number,
        }

    for number in range(3):
        state = made(number)
        handle = ckpt.async_save(state, checkpoint_id=tmp_path / "c", no_dist=True)
        assert accelerator.num_done == len(accelerator.queue) > 0, "all copies were waited for"
        _spoil(state)
        handle.result()
        monkeypatch.setattr(type(get_platform()), "is_in_host_memory", staticmethod(lambda tensor: True))
        loaded = {name: torch.zeros_like(value) if torch.is_tensor(value) else None for name, value in state.items()}
        ckpt.load(loaded, checkpoint_id=tmp_path / "c", no_dist=True)
        monkeypatch.setattr(type(get_platform()), "is_in_host_memory", staticmethod(accelerator.is_in_host_memory))
        for name, value in made(number).items():
            assert torch.equal(loaded[name], value) if torch.is_tensor(value) else loaded[name] == value, name
    assert accelerator.pinned == [buffer_bytes] * 2, "pinned once, for all saves"
    ckpt.save(made(7), checkpoint_id=tmp_path / "d", no_dist=True)
    assert ckpt.verify(tmp_path / "d") == []
    async_save_module._finish_all()
    host_copies._buffers.cache_clear()
