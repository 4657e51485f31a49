"""Ranks that die or fail, and damaged files: a clear error, the last good checkpoint intact, and never a hang."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
import torch

from hyper_parallel import Shard, checkpoint, init_device_mesh
from hyper_parallel.core.distributed_checkpoint.base.checksum import crc32c
from hyper_parallel.core.distributed_checkpoint.base.index_frame import VERSION
from hyper_parallel.platform import get_platform
from tests.distributed_checkpoint.versions import save_version, state_of, stray_files, version_of
from tests.frameworks import distribute_tensor, equal, on_mindspore, ours
from tests.world import RanksFailed, run_on_ranks

# ---------------------------------------------------------------- ranks that die


class DyingWriter(checkpoint.FileSystemWriter):
    """Kills its own process before or after one of its steps, on one rank."""

    def __init__(self, rank, step, after=False):
        super().__init__()
        self._dies = get_platform().get_rank() == rank
        self._step, self._after = step, after

    def _do(self, step, *args):
        if self._dies and step == self._step and not self._after:
            os.kill(os.getpid(), signal.SIGKILL)
        getattr(super(), step)(*args)
        if self._dies and step == self._step and self._after:
            os.kill(os.getpid(), signal.SIGKILL)

    def open(self, checkpoint_id):
        self._do("open", checkpoint_id)

    def write_file(self, name, buffers):
        self._do("write_file", name, buffers)

    def commit(self, metadata, files):
        self._do("commit", metadata, files)


def cut_state(value, dim=0):
    mesh = init_device_mesh("cpu", (get_platform().get_world_size(),))
    whole = torch.arange(30.0).reshape(6, 5) + value
    return {"w": distribute_tensor(whole, mesh, [Shard(dim)]), "b": ours(torch.full((3,), float(value))), "step": value}


def load_cut(path):
    state = cut_state(0, dim=1)
    checkpoint.load(state, checkpoint_id=path)
    assert equal(state["w"].full_tensor(), torch.arange(30.0).reshape(6, 5) + state["step"])
    assert equal(state["b"], torch.full((3,), float(state["step"])))
    return state["step"]


def save_and_lose_a_rank(path, rank, step, after, use_collectives):
    """What this rank saw goes to a file: the call as a whole fails, since one rank died."""
    writer = DyingWriter(rank, step, after)
    try:
        checkpoint.save(cut_state(2), checkpoint_id=path, storage_writer=writer, use_collectives=use_collectives)
        seen = "saved"
    except checkpoint.CheckpointError as error:
        seen = f"{type(error).__name__}: {error}"
    Path(f"{path}.rank{get_platform().get_rank()}").write_text(seen)


_DEATHS = [
    (1, "open", False, False, True),
    (2, "write_file", False, False, True),
    (1, "write_file", True, False, True),
    (0, "write_file", True, False, True),
    (0, "commit", False, False, True),
    (0, "commit", True, True, True),
    (2, "write_file", True, False, False),
    (0, "commit", True, True, False),
]
if on_mindspore:  # where the start of a world takes ten seconds
    _DEATHS = [pytest.param(2, "write_file", True, False, True, marks=pytest.mark.sweep)]


@pytest.mark.parametrize(("rank", "step", "after", "is_committed", "use_collectives"), _DEATHS)
def test_a_rank_that_dies_hangs_nobody(worlds, tmp_path, monkeypatch, rank, step, after, is_committed, use_collectives):
    monkeypatch.setattr("tests.world.world.GRACE", 100.0)  # On a busy machine the survivors need their time.
    path = str(tmp_path / "step-1")
    worlds(3, timeout=150).run(save_once, path)
    with pytest.raises(RanksFailed, match="SIGKILL"):
        worlds(3, timeout=150).run(save_and_lose_a_rank, path, rank, step, after, use_collectives)
    survivors = [other for other in range(3) if other != rank]
    for survivor in survivors:
        seen = Path(f"{path}.rank{survivor}").read_text()
        assert "Error" in seen, seen
        assert f"rank {rank}" in seen, seen
    assert worlds(3, timeout=150).run(load_cut, path) == [2 if is_committed else 1] * 3
    worlds(3, timeout=150).run(save_once, path)
    assert [path for path in stray_files(tmp_path) if ".rank" not in path.name] == []


def save_once(path):
    checkpoint.save(cut_state(1), checkpoint_id=path)


# ---------------------------------------------------------------- failing ranks, full disks


class FailingWriter(checkpoint.FileSystemWriter):
    def write_file(self, name, buffers):
        if get_platform().get_rank() == 1 and name.endswith(".safetensors"):
            super().write_file(name, buffers)
            raise OSError(28, "cannot write the checkpoint file: No space left on device")
        super().write_file(name, buffers)


class FailingCommit(checkpoint.FileSystemWriter):
    def commit(self, metadata, files):
        raise OSError(28, "No space left on device")


@run_on_ranks(3)
def test_a_rank_that_fails_fails_all(tmp_path):
    path = tmp_path / "step-1"
    save_once(path)
    with pytest.raises(checkpoint.CheckpointError, match=r"failed on rank 1: OSError: .*No space left"):
        checkpoint.save(cut_state(2), checkpoint_id=path, storage_writer=FailingWriter())
    with pytest.raises(checkpoint.CheckpointError, match=r"saving failed: OSError: .*No space left"):
        checkpoint.save(cut_state(2), checkpoint_id=path, storage_writer=FailingCommit())
    get_platform().barrier()
    assert stray_files(tmp_path) == []
    assert load_cut(path) == 1
    with pytest.raises(checkpoint.CheckpointError, match=r"failed on rank 1: OSError"):
        checkpoint.save(cut_state(2), checkpoint_id=tmp_path / "step-2", storage_writer=FailingWriter())
    get_platform().barrier()
    assert not (tmp_path / "step-2").exists()
    unsuitable = cut_state(3) | ({"bad": object()} if get_platform().get_rank() == 2 else {})
    with pytest.raises(checkpoint.CheckpointError, match=r"rank 2: TypeError: 'bad' holds a builtins.object"):
        checkpoint.save(unsuitable, checkpoint_id=path)
    assert load_cut(path) == 1
    own = tmp_path / f"of-rank-{get_platform().get_rank()}"
    with pytest.raises(
        checkpoint.CheckpointError, match=r"'\..*saving', which other.* cannot be found in '.*of-rank-1': the"
    ):
        checkpoint.save(cut_state(2), checkpoint_id=own)
    assert not own.exists()
    for step in ("state_dict", "load_state_dict"):
        keeper = {"step": FailingState(step)} if get_platform().get_rank() == 1 else {}
        with pytest.raises(checkpoint.CheckpointError, match=rf"loading.* failed on rank 1: ValueError: no {step}"):
            checkpoint.load(cut_state(0) | keeper, checkpoint_id=path)


class FailingState:
    """A value that keeps its own state, but one of its two methods fails."""

    def __init__(self, step):
        self._step = step

    def state_dict(self):
        if self._step == "state_dict":
            raise ValueError("no state_dict")

    def load_state_dict(self, state):
        raise ValueError("no load_state_dict")


def test_two_saves_to_one_place_at_a_time_leave_one_of_them_whole(tmp_path):
    path = tmp_path / "step-1"

    class Overtaken(checkpoint.FileSystemWriter):
        def write_file(self, name, buffers):
            super().write_file(name, buffers)
            if name.endswith(".safetensors"):
                checkpoint.save({"w": ours(torch.full((3,), 2.0))}, checkpoint_id=path)
                assert checkpoint.verify(path) == []

    checkpoint.save({"w": ours(torch.full((3,), 1.0))}, checkpoint_id=path, storage_writer=Overtaken())
    assert checkpoint.verify(path) == []
    target = {"w": ours(torch.zeros(3))}
    checkpoint.load(target, checkpoint_id=path)
    assert target["w"].tolist() == [1.0] * 3
    assert stray_files(tmp_path) == []


# ---------------------------------------------------------------- damage


def flip(path, place, mask=0x40):
    data = bytearray(path.read_bytes())
    data[place] ^= mask
    path.write_bytes(data)


def test_a_flipped_byte_anywhere_is_found(tmp_path):
    root = tmp_path / "step-1"
    state = ours({"w": torch.arange(20.0), "h": torch.arange(5).bfloat16()}) | {"note": {"a": [1, 2.5, b"xyz"]}}
    writer = checkpoint.FileSystemWriter(max_shard_bytes=90)
    checkpoint.save(state, checkpoint_id=root, storage_writer=writer)
    files = sorted(root.iterdir())
    assert len(files) == 3
    pick = random.Random(3)
    num_flips = 0
    step = 16 if on_mindspore else 1  # there each load takes ten times as long
    for path in files:
        size = path.stat().st_size
        for place in range(0, size, step):
            mask = 1 << pick.randrange(8)
            flip(path, place, mask)
            target = ours({"w": torch.zeros(20), "h": torch.zeros(5).bfloat16()}) | {"note": None}
            with pytest.raises(checkpoint.CorruptCheckpointError, match=path.name):
                checkpoint.load(target, checkpoint_id=root)
            if place % 7 == 0:
                (problem, *_) = checkpoint.verify(root)
                assert path.name in problem
            flip(path, place, mask)
            num_flips += 1
    assert num_flips * step >= sum(path.stat().st_size for path in files)
    checkpoint.load(target, checkpoint_id=root)


@run_on_ranks(2)
def test_a_flipped_byte_is_found_when_no_rank_reads_the_whole_chunk(tmp_path):
    path = tmp_path / "step-1"
    save_once(path)
    rank = get_platform().get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.FileSystemReader, "page_bytes", 0)  # also of such small ones
        for file in sorted(path.glob("*.safetensors")):
            size = file.stat().st_size
            start = 8 + int.from_bytes(file.read_bytes()[:8], "little")
            get_platform().barrier()
            for place in {*range(start, size, 3), 0, 9, start - 1, size - 1}:
                if rank == 0:
                    flip(file, place)
                get_platform().barrier()
                with pytest.raises(checkpoint.CorruptCheckpointError, match=f"{file.name}' is damaged"):
                    load_cut(path)
                get_platform().barrier()
                if rank == 0:
                    flip(file, place)
    get_platform().barrier()
    assert load_cut(path) == 1


@pytest.mark.parametrize("page_bytes", [0, 4096])
def test_one_process_that_wants_a_part_checks_the_whole_chunk(tmp_path, monkeypatch, page_bytes):
    monkeypatch.setattr(checkpoint.FileSystemReader, "page_bytes", page_bytes)
    mesh = init_device_mesh("cpu", (2,), rank_list=[0, 1], init_backend=False)
    checkpoint.save({"w": ours(torch.arange(8.0))}, checkpoint_id=tmp_path / "a")
    target = {"w": distribute_tensor(torch.zeros(8), mesh, [Shard(0)])}
    checkpoint.load(target, checkpoint_id=tmp_path / "a", no_dist=True)
    assert equal(target["w"].to_local(), torch.arange(4.0))
    (file,) = (tmp_path / "a").glob("*.safetensors")
    flip(file, file.stat().st_size - 1)
    with pytest.raises(checkpoint.CorruptCheckpointError, match="'w' at"):
        checkpoint.load(target, checkpoint_id=tmp_path / "a", no_dist=True)


def test_truncated_missing_and_foreign_files(tmp_path):
    root = tmp_path / "step-1"
    save_version(tmp_path, "step-0", 0)
    save_version(tmp_path, "step-1", 1)
    (data,) = root.glob("*.safetensors")
    metadata = root / "metadata.json"
    target = state_of(0)

    content = data.read_bytes()
    for size in (len(content) - 1, 100, 0):
        data.write_bytes(content[:size])
        with pytest.raises(checkpoint.CorruptCheckpointError, match=rf"{data.name}' has {size} bytes where \d+ were"):
            checkpoint.load(target, checkpoint_id=root)
        assert data.name in checkpoint.verify(root)[0]
    data.unlink()
    with pytest.raises(checkpoint.CorruptCheckpointError, match=f"{data.name}' is missing"):
        checkpoint.load(target, checkpoint_id=root)
    assert "is missing" in checkpoint.verify(root)[0]
    data.write_bytes(content + b"\0")
    with pytest.raises(checkpoint.CorruptCheckpointError, match="cut short or changed"):
        checkpoint.load(target, checkpoint_id=root)
    data.write_bytes(content)

    text = metadata.read_bytes()
    for size in (len(text) - 1, 30, 0):
        metadata.write_bytes(text[:size])
        with pytest.raises(checkpoint.CorruptCheckpointError, match=r"metadata.json' .* or it is damaged"):
            checkpoint.load(target, checkpoint_id=root)
    newer = text.replace(b'"version":%d' % VERSION, b'"version":%d' % (VERSION + 1))
    metadata.write_bytes(newer)
    with pytest.raises(checkpoint.CorruptCheckpointError, match=r"is of version 2 .* update hyper-parallel"):
        checkpoint.load(target, checkpoint_id=root)
    assert "update hyper-parallel" in checkpoint.verify(root)[0]
    body = text.partition(b'"body":')[2][:-2].replace(b'"world_size":1', b'"world_size":2')
    metadata.write_bytes(text.partition(b'"body":')[0] + b'"body":' + body + b"}\n")
    with pytest.raises(checkpoint.CorruptCheckpointError, match=f"checksum is {crc32c(body):08x} where"):
        checkpoint.load(target, checkpoint_id=root)
    metadata.unlink()
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        checkpoint.load(target, checkpoint_id=root)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-0"
    assert version_of(tmp_path / "step-0") == 0


def test_a_file_that_is_cut_short_while_it_is_read(tmp_path):
    save_version(tmp_path, "step-0", 0)
    (data,) = (tmp_path / "step-0").glob("*.safetensors")

    class Unlucky(checkpoint.FileSystemReader):
        def read_into(self, name, start, target):
            if start:  # The header was read before, and the size looked at.
                os.truncate(data, 4096)
            elif self.is_removed:
                data.unlink()
            super().read_into(name, start, target)

        is_removed = False

    with pytest.raises(checkpoint.CorruptCheckpointError, match=rf"{data.name}' ends at byte \d+ where \d+ are"):
        checkpoint.load(state_of(0), checkpoint_id=tmp_path / "step-0", storage_reader=Unlucky())
    save_version(tmp_path, "step-0", 0)
    (data,) = (tmp_path / "step-0").glob("*.safetensors")
    Unlucky.is_removed = True
    with pytest.raises(checkpoint.CorruptCheckpointError, match=rf"{data.name}' is missing: it was there"):
        checkpoint.load(state_of(0), checkpoint_id=tmp_path / "step-0", storage_reader=Unlucky())
