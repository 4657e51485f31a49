"""Agreement through files: who has ended is found out at once, who never came after a while, and by name."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel import checkpoint as ckpt
from hyper_parallel.core.distributed_checkpoint.agreement import file_agreement
from hyper_parallel.core.distributed_checkpoint.agreement.agreement import GroupAgreement
from hyper_parallel.core.distributed_checkpoint.agreement.agreement_folder import AgreementFolder
from hyper_parallel.core.distributed_checkpoint.agreement.file_agreement import FileAgreement
from hyper_parallel.core.distributed_checkpoint.base.errors import CheckpointError, LostRankError
from hyper_parallel.core.distributed_checkpoint.storage.cleanup import remove_leftovers
from hyper_parallel.core.distributed_checkpoint.storage.file_locks import hold_lock, is_held
from tests.frameworks import dist, distribute_tensor, equal, ours
from tests.world import run_on_ranks


def agree(agreement):
    """One round, and the end; what came of it."""
    try:
        return agreement.round("counting", lambda: agreement.rank, sum)
    except CheckpointError as error:
        return error
    finally:
        agreement.close()


class InThread(threading.Thread):
    def __init__(self, agreement):
        super().__init__(daemon=True)
        self._agreement = agreement
        self.start()

    def run(self):
        self.result = agree(self._agreement)

    def outcome(self):
        self.join()
        return self.result


def get_stuck(directory, rank, at, connection):
    """A rank that never writes a file whose name starts in a certain way, and says so instead."""
    put = AgreementFolder.put_encoded

    def stuck_put(folder, name, data):
        if name.startswith(at):
            connection.send("stuck")
            signal.pause()
        put(folder, name, data)

    AgreementFolder.put_encoded = stuck_put  # in a process of its own
    agree(FileAgreement(directory, rank, 2))


@pytest.fixture
def stuck():
    """Starts a process with a rank that gets stuck; gives it once that has happened, or at once with ``wait=False``."""
    context = multiprocessing.get_context("fork")
    started = []

    def start(directory, rank, name, wait=True):
        here, there = context.Pipe()
        process = context.Process(target=get_stuck, args=(directory, rank, name, there))
        process.start()
        started.append(process)
        if wait:
            assert here.recv() == "stuck"
        return process, here

    yield start
    for process in started:
        process.kill()
        process.join()


def kill(process):
    process.kill()
    process.join()


def test_a_rank_that_ends_is_missed_at_once(tmp_path, stuck):
    """The time limit is half an hour here: nobody waits for it."""
    process, said = stuck(tmp_path / "a", 1, "report", wait=False)
    coordinator = InThread(FileAgreement(tmp_path / "a", 0, 2))
    assert said.recv() == "stuck"
    kill(process)
    found = str(coordinator.outcome())
    assert "counting failed on rank 1: it is gone (the process of rank 1 has ended without writing" in found
    assert "report-" in found
    assert not (tmp_path / "a").exists()

    # Also one that ends in its work, before it has anything to report, and before the coordinator looks for it.
    coordinator = FileAgreement(tmp_path / "c", 0, 2)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=lambda: FileAgreement(tmp_path / "c", 1, 2).round("counting", signal.pause))
    process.start()
    while not (tmp_path / "c" / "hello-1").exists():
        time.sleep(0.005)
    kill(process)
    assert "counting failed on rank 1: it is gone (the process of rank 1 has ended" in str(agree(coordinator))
    assert not (tmp_path / "c").exists()

    for name in ("opening", "verdict"):
        process, said = stuck(tmp_path / "b", 0, name, wait=False)
        other = InThread(FileAgreement(tmp_path / "b", 1, 2))
        assert said.recv() == "stuck"
        if name == "opening":
            kill(process)
            process, said = stuck(tmp_path / "b", 0, "verdict", wait=False)  # the one that it is waiting for
            assert said.recv() == "stuck"
        kill(process)
        found = other.outcome()
        assert isinstance(found, LostRankError)
        assert "the process of rank 0 has ended without writing" in str(found) and "verdict-" in str(found)


def test_what_an_older_run_has_left_is_not_taken_for_this_one(tmp_path, stuck):
    directory = tmp_path / ".step-1.save-agreement"
    process, _ = stuck(directory, 1, "report", wait=False)
    while not (directory / "hello-1").exists():
        time.sleep(0.005)
    kill(process)
    coordinator = InThread(FileAgreement(directory, 0, 2))
    while not (directory / "opening").exists():
        time.sleep(0.005)
    other = FileAgreement(directory, 1, 2)
    assert agree(other) == coordinator.outcome() == 1
    assert not directory.exists()

    # Nobody comes back: the next save beside it cleans up, but not what is in use.
    process, _ = stuck(directory, 1, "report", wait=False)
    while not (directory / "hello-1").exists():
        time.sleep(0.005)
    (tmp_path / "step-2").mkdir()
    remove_leftovers(tmp_path / "step-2")
    assert directory.exists()
    kill(process)
    remove_leftovers(tmp_path / "step-2")
    assert not directory.exists()


def test_who_never_comes_is_named_with_the_file(tmp_path, monkeypatch):
    found = str(agree(FileAgreement(tmp_path / "a", 0, 3, timeout=0.2)))
    for rank in (1, 2):
        assert f"rank {rank}: it is gone (rank 0 waited 0 s for rank {rank}, which has not written" in found
        assert f"hello-{rank}': it is on another host and has ended there, or was never started" in found
    with pytest.raises(LostRankError, match=r"rank 1 waited 0 s for rank 0, which has not written '.*opening'"):
        FileAgreement(tmp_path / "b", 1, 2, timeout=0.2).round("counting", lambda: 1)

    # Where files cannot be locked, or on another host, the end of a rank is not seen, and nobody is taken for dead.
    monkeypatch.setattr(file_agreement, "hold_lock", lambda path: None)
    coordinator = InThread(FileAgreement(tmp_path / "c", 0, 2))
    assert agree(FileAgreement(tmp_path / "c", 1, 2)) == coordinator.outcome() == 1


def test_one_meeting_after_the_other_in_one_place(tmp_path):
    """The end of one removes nothing of the next, for which some ranks have come already."""
    directory = tmp_path / "a"
    first = [FileAgreement(directory, rank, 3) for rank in range(3)]
    threads = [InThread(agreement) for agreement in first[1:]]
    assert first[0].round("counting", lambda: 0, sum) == 3
    assert [thread.outcome() for thread in threads] == [3, 3]
    early = FileAgreement(directory, 1, 3)
    first[0].close()
    assert {path.name.partition("-")[0] for path in directory.iterdir()} == {"hello", "alive"}
    threads = [InThread(early), InThread(FileAgreement(directory, 2, 3))]
    assert agree(FileAgreement(directory, 0, 3)) == 3
    assert [thread.outcome() for thread in threads] == [3, 3]
    assert not directory.exists()


def test_locks_that_end_with_their_process(tmp_path):
    path = tmp_path / "lock"
    assert not is_held(path)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def hold():
        hold_lock(path)
        there.send("held")
        signal.pause()

    process = context.Process(target=hold)
    process.start()
    assert here.recv() == "held"
    assert is_held(path)
    kill(process)
    assert not is_held(path)


class GatheringSavePlanner(ckpt.StandardSavePlanner):
    """Has all plans sent to the coordinator and back, with something of its own in them."""

    needs_global_plan = True

    def __init__(self, own):
        super().__init__()
        self._own = own

    def build_local_plan(self):
        plan = super().build_local_plan()
        plan.planner_data = self._own
        return plan

    def finalize_plan(self, plan):
        assert plan.planner_data == self._own
        return super().finalize_plan(plan)


class GatheringLoadPlanner(ckpt.StandardLoadPlanner):
    needs_global_plan = True

    def build_global_plan(self, all_plans):
        return all_plans


class OwnKind:
    pass


@run_on_ranks(2)
def test_all_that_ranks_say_goes_through_files(tmp_path):
    mesh, rank = hp.init_device_mesh("cpu", (2,)), dist.get_rank()
    whole = torch.arange(10.0)

    def saved(number):
        return {"w": distribute_tensor(whole + number, mesh, [hp.Shard(0)]), "step": number}

    def assert_loads(number, **options):
        target = {"w": distribute_tensor(torch.zeros(10), mesh, [hp.Replicate()]), "step": None}
        ckpt.load(target, checkpoint_id=tmp_path / "c", use_collectives=False, **options)
        assert equal(target["w"].to_local(), whole + number) and target["step"] == number

    on_one = {"on_one": ours(whole[:3])} if rank == 1 else {}  # They tell each other what they hold.
    ckpt.save(saved(1) | on_one, checkpoint_id=tmp_path / "c", use_collectives=False)
    assert_loads(1)
    own = {"a": (1, None), ("b", 2): [1.5, {3}, b"4"]}
    ckpt.save(saved(2), checkpoint_id=tmp_path / "c", use_collectives=False, planner=GatheringSavePlanner(own))
    assert_loads(2, planner=GatheringLoadPlanner())
    for number in (3, 4):
        ckpt.async_save(saved(number), checkpoint_id=tmp_path / "c", use_collectives=False).result()
        assert_loads(number)

    foreign = GatheringSavePlanner(OwnKind())
    said = r"rank 1: TypeError: a .*OwnKind cannot be sent to other ranks .*; leave use_collectives at True, or let"
    with pytest.raises(CheckpointError, match=said):
        ckpt.save(saved(5), checkpoint_id=tmp_path / "c", use_collectives=False, planner=foreign)
    assert_loads(4)
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


@run_on_ranks(3)
def test_messages_of_any_length_go_through_a_group():
    agreement, rank = GroupAgreement(), dist.get_rank()
    for length in (0, 1, 900, *range(930, 1030), 5000, 300_000):  # The first piece of a message has 1,024 bytes.
        text = str(rank) * length
        assert agreement.round("telling", lambda text=text: text, lambda texts: texts) == [
            str(other) * length for other in range(3)
        ]
