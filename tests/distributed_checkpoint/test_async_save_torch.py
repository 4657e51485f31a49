"""Saves in the background on PyTorch: programs that are killed meanwhile, copies from an accelerator, several threads.

The programs are forks of this process, which MindSpore, whose import starts threads, does not survive. Nor does it
survive two threads that compute at once.
"""

import multiprocessing
import os
import resource
import signal
import threading
import time

import numpy as np
import pytest
import torch

import hyper_parallel as hp
from hyper_parallel import checkpoint as ckpt
from hyper_parallel.core.distributed_checkpoint import async_save as async_save_module
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.torch.modules import host_copies
from tests.distributed_checkpoint.background_storage import GatedWriter, is_alive, num_files, wait_for


def _pid_of_the_writer() -> int:
    (background,) = async_save_module._Background._all.values()
    return background._process.pid


def _save_behind_a_gate(connection, folder, ending) -> None:
    async_save_module._Background._all.clear()
    ckpt.async_save({"x": np.arange(5)}, checkpoint_id=folder / "c", no_dist=True).result()
    ckpt.async_save(
        {"x": np.arange(6)}, checkpoint_id=folder / "c", no_dist=True, storage_writer=GatedWriter(folder / "gate")
    )
    pid = _pid_of_the_writer()
    wait_for((folder / f"waiting-{pid}").exists)
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
        assert is_alive(writer)
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
    wait_for(lambda: not is_alive(writer))  # it does not stay
    ckpt.load(loaded, checkpoint_id=tmp_path / "c", no_dist=True)
    assert len(loaded["x"]) == 6 and num_files(tmp_path / "c") == 1


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
    connection.send(_pid_of_the_writer())
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
    wait_for(lambda: not any(map(is_alive, writers)))
    loaded = {"x": torch.zeros(4)}
    ckpt.load(loaded, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(loaded["x"], torch.arange(4.0))


def _rank_that_is_killed(rank, num_ranks, folder) -> None:
    async_save_module._Background._all.clear()
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    store = torch.distributed.FileStore(str(folder / "store"), num_ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    mesh = hp.init_device_mesh("cpu", (num_ranks,))
    state = {"x": hp.distribute_tensor(torch.arange(1e3), mesh, [hp.Shard(0)])}
    ckpt.async_save(state, checkpoint_id=folder / "c")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ranks_that_are_killed_as_soon_as_the_call_returns_lose_nothing(tmp_path, num_ranks):
    """In the first save, whose writers are still starting then."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank_that_is_killed, args=(r, num_ranks, tmp_path)) for r in range(num_ranks)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [-signal.SIGKILL] * num_ranks
    end = time.monotonic() + 60
    while not (tmp_path / "c" / "metadata.json").exists():
        assert time.monotonic() < end, "the writers have not written it"
        time.sleep(0.01)
    assert ckpt.verify(tmp_path / "c") == []
    loaded = {"x": torch.zeros(1000)}
    ckpt.load(loaded, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(loaded["x"], torch.arange(1e3))


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
        for value in state.values():
            if torch.is_tensor(value):
                value.zero_()
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


def test_threads_take_turns(tmp_path):
    failed = []

    def save(number):
        for _ in range(3):
            state = {"w": torch.full((1000,), float(number))}
            handle = ckpt.async_save(state, checkpoint_id=tmp_path / str(number), no_dist=True)
            state["w"].zero_()
            handle.result()
            ckpt.load(state, checkpoint_id=tmp_path / str(number), no_dist=True)
            if not (state["w"] == number).all():
                failed.append(number)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
        assert not failed
    assert all(ckpt.verify(tmp_path / str(number)) == [] for number in range(1, 4))


def test_a_program_with_many_open_files(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        for _ in range(2):
            ckpt.async_save({"x": torch.ones(5 << 20)}, checkpoint_id=tmp_path / "c", no_dist=True).result()
        async_save_module._finish_all()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_forked_child_does_not_take_its_parents_answer(tmp_path):
    gate = tmp_path / "gate"
    handle = ckpt.async_save({"x": 1}, checkpoint_id=tmp_path / "c", no_dist=True, storage_writer=GatedWriter(gate))
    pid = os.fork()
    if pid == 0:
        try:
            handle.result()
        except ckpt.CheckpointError as error:
            os._exit(0 if f"process {os.getppid()}, which forked this one" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    gate.touch()
    assert handle.result() is not None
