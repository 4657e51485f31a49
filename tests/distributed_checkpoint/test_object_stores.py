"""URLs that fsspec knows: in memory, on several ranks, in a local object store; and no byte more than is needed."""

from __future__ import annotations

import dataclasses
import json

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from moto.server import ThreadedMotoServer
from typer.testing import CliRunner

from hyper_parallel import Replicate, Shard, checkpoint, init_device_mesh
from hyper_parallel.cli.main import app
from hyper_parallel.core.distributed_checkpoint.storage import fsspec_storage
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.host.shared_segment import ProcessIdentity
from tests.frameworks import distribute_tensor, equal, ours
from tests.world import run_on_ranks


@pytest.fixture
def memory():
    """A URL of an empty folder in memory."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield "memory://runs"
    MemoryFileSystem.store.clear()


def save_step(url, step, **options):
    state = {"w": ours(torch.arange(6.0) + step), "none": None, "step": step}
    writer = checkpoint.FsspecWriter(**options)
    checkpoint.save(state, checkpoint_id=f"{url}/step-{step}", storage_writer=writer, no_dist=True)


def step_of(url, **options):
    target = {"w": ours(torch.zeros(6)), "none": 1, "step": None}
    checkpoint.load(target, checkpoint_id=url, storage_reader=checkpoint.FsspecReader(**options), no_dist=True)
    assert equal(target["w"], torch.arange(6.0) + target["step"])
    assert target["none"] is None
    return target["step"]


def go_through_a_store(url, **options):
    """Save, replace, list, drop and damage checkpoints; everything that a directory can do."""
    fs = fsspec.core.url_to_fs(url, **options)[0]
    assert checkpoint.latest(url, **options) is None
    for step in (9, 10, 8):
        save_step(url, step, **options)
    assert checkpoint.checkpoints(url, **options) == [f"{url}/step-{step}" for step in (8, 9, 10)]
    assert step_of(checkpoint.latest(url, **options), **options) == 10
    before = fs.ls(f"{url}/step-10", detail=False)
    save_step(url, 10, **options)
    fs.invalidate_cache()
    after = fs.ls(f"{url}/step-10", detail=False)
    assert len(after) == len(before) == 2, "the older files are gone, and nothing else is left"
    assert step_of(f"{url}/step-10", **options) == 10
    reader = checkpoint.FsspecReader(**options)
    assert checkpoint.verify(f"{url}/step-10", reader) == []

    (data,) = (path for path in after if path.endswith(".safetensors"))
    content = fs.cat_file(data)
    for damaged, said in (
        (content[:-1], "were written: it was cut short"),
        (content[:-1] + bytes([content[-1] ^ 1]), "is damaged: the checksum of"),
    ):
        fs.pipe_file(data, damaged)
        with pytest.raises(checkpoint.CorruptCheckpointError, match=said):
            step_of(f"{url}/step-10", **options)
        assert any(said in problem for problem in checkpoint.verify(f"{url}/step-10", reader))
    fs.rm_file(data)
    with pytest.raises(checkpoint.CorruptCheckpointError, match="is missing"):
        step_of(f"{url}/step-10", **options)

    assert checkpoint.latest(url, **options) == f"{url}/step-9", "the newest lacks a file"
    assert checkpoint.keep_last(url, 2, **options) == [], "what is kept is whole"
    fs.pipe_file(data, content)
    assert checkpoint.keep_last(url, 2, **options) == [f"{url}/step-8"]
    assert checkpoint.checkpoints(url, **options) == [f"{url}/step-{step}" for step in (9, 10)]
    assert not fs.exists(f"{url}/step-8")
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        step_of(f"{url}/step-8", **options)


def test_in_memory(memory):
    go_through_a_store(memory)


def test_a_write_that_fails_leaves_the_older_checkpoint(memory, monkeypatch):
    save_step(memory, 1)
    whole = dict(MemoryFileSystem.store)

    def fail(self, path, *args, **kwargs):
        if path.endswith(".metadata"):
            raise OSError(28, "no room")
        return opened(self, path, *args, **kwargs)

    opened = MemoryFileSystem._open
    monkeypatch.setattr(MemoryFileSystem, "_open", fail)
    with pytest.raises(OSError, match=r"cannot write the checkpoint file '.*metadata': .*no room"):
        checkpoint.save({"w": ours(torch.zeros(3))}, checkpoint_id=f"{memory}/step-1", no_dist=True)
    assert dict(MemoryFileSystem.store) == whole
    assert step_of(f"{memory}/step-1") == 1


def test_saves_that_meet_leave_one_of_them_whole(memory):
    url = f"{memory}/step-1"
    fs = fsspec.core.url_to_fs(url)[0]

    class Meeting(checkpoint.FsspecWriter):
        """Lets another save run from its beginning to its end at one of the moments of this one."""

        def meet(self, moment):
            if moment == self.moment:
                self.moment = None
                checkpoint.save(state_of(2), checkpoint_id=url, no_dist=True)

        def write_file(self, name, buffers):
            super().write_file(name, buffers)
            self.meet("metadata written" if name.endswith(".metadata") else "data written")

        def discard(self, names):
            self.meet("committed")
            super().discard(names)

    def state_of(step):
        return {"w": ours(torch.arange(6.0) + step), "none": None, "step": step}

    for moment, stays in (("data written", 1), ("metadata written", 1), ("committed", 2)):
        writer = Meeting()
        writer.moment = moment
        checkpoint.save(state_of(1), checkpoint_id=url, storage_writer=writer, no_dist=True)
        assert writer.moment is None
        assert step_of(url) == stays
        assert checkpoint.verify(url) == []
    checkpoint.save(state_of(3), checkpoint_id=url, no_dist=True)
    assert len(fs.ls(url)) == 2, "nothing is left of the others"


def test_what_killed_saves_have_left_in_a_store(memory, monkeypatch):
    url = f"{memory}/step-1"
    fs = fsspec.core.url_to_fs(url)[0]

    def leave(number, folder=None, replaces=(), **process):
        names = [f".{number:020x}.saving", f"{number:020x}-r00000-000.safetensors"]
        fs.pipe_file(f"{url}/{names[1]}", b"data")
        process = dataclasses.asdict(ProcessIdentity.current()) | process
        mark = {"folder": folder or "/runs/step-1", "process": process, "replaces": [f"{n:020x}" for n in replaces]}
        fs.pipe_file(f"{url}/{names[0]}", json.dumps(mark).encode())
        return names

    def names():
        return {path.rpartition("/")[2] for path in fs.ls(url, detail=False)}

    replaced, copied = (f"{number:020x}-r00000-000.safetensors" for number in (5, 6))
    fs.pipe_file(f"{url}/{replaced}", b"data")
    fs.pipe_file(f"{url}/{copied}", b"somebody copies this, the metadata will come last")
    dead, living, far = leave(1, replaces=[5], pid=2**22 + 1), leave(2), leave(3, hostname="elsewhere")
    of_another_folder = leave(4, "/runs/step-2", pid=2**22 + 1)
    save_step(memory, 1)
    assert not names() & {*dead, replaced}
    assert names() > {*living, *far, *of_another_folder, copied}
    monkeypatch.setattr(fsspec_storage, "_FORGOTTEN", 0.0)
    save_step(memory, 1)
    assert not names() & set(far)
    assert names() > set(living)
    assert step_of(url) == 1


def test_commands_take_urls(memory):
    def run(*arguments):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        return result.output

    save_step(memory, 3)
    save_step(memory, 4)
    listed = run("ckpt", "ls", memory)
    assert listed.index("step-3") < listed.index("step-4")
    assert "step-3" in run("ckpt", "ls", f"{memory}/step-3")
    assert "float32[6]" in run("ckpt", "show", f"{memory}/step-3")
    assert "every byte is sound" in run("ckpt", "verify", f"{memory}/step-3")
    assert "no checkpoints in" in run("ckpt", "ls", f"{memory}/nothing")


class Counted(LocalFileSystem):
    """Files of this machine as a store that is far away; counts the bytes of data that are asked for."""

    protocol = "counted"
    num_bytes = 0

    def cat_file(self, path, start=None, end=None, **kwargs):
        data = super().cat_file(path, start, end, **kwargs)
        if path.endswith(".safetensors") and start:  # not the header
            Counted.num_bytes += len(data)
        return data


@run_on_ranks(4)
def test_a_rank_reads_what_it_needs_and_replicas_once(tmp_path):
    fsspec.register_implementation("counted", Counted, clobber=True)
    platform = get_platform()
    mesh = init_device_mesh("cpu", (4,))
    url = f"counted://{tmp_path}/step-1"
    shapes = {"a": (64, 48), "b": (40, 8, 6), "c": (100,)}
    whole = {name: torch.arange(float(torch.Size(shape).numel())).reshape(shape) for name, shape in shapes.items()}
    checkpoint.save(
        {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in whole.items()}, checkpoint_id=url
    )

    def load(layout, **options):
        """The bytes that the ranks have read, and those of their blocks."""
        target = {
            name: distribute_tensor(torch.zeros_like(value), mesh, layout(value)) for name, value in whole.items()
        }
        Counted.num_bytes = 0
        checkpoint.load(target, checkpoint_id=url, storage_reader=checkpoint.FsspecReader(**options))
        for name, value in whole.items():
            assert equal(target[name].full_tensor(), value), name
        read, needed = Counted.num_bytes, sum(value.to_local().numel() * 4 for value in target.values())
        everybody = [None] * 4
        platform.all_gather_object(everybody, (read, needed))
        return everybody

    num_bytes = sum(value.numel() * 4 for value in whole.values())
    for layout in (lambda value: [Shard(0)], lambda value: [Shard(value.ndim - 1)]):
        for read, needed in load(layout):
            assert read <= 1.05 * needed
    assert all(read > 2 * needed for read, needed in load(lambda value: [Shard(value.ndim - 1)], max_gap=1 << 20))
    # Replicas: each byte once and by turns; without trading each rank reads everything.
    once = [read for read, _ in load(lambda value: [Replicate()])]
    assert sum(once) == num_bytes and max(once) < 0.5 * num_bytes
    assert [read for read, _ in load(lambda value: [Replicate()], reads_are_dear=False)] == [num_bytes] * 4


# ---------------------------------------------------------------- an object store of this machine


@pytest.fixture(scope="module")
def bucket():
    """Options for an S3 server on this machine, with an empty bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "none", "secret": "none", "endpoint_url": f"http://{host}:{port}", "use_listings_cache": True}
    fs = fsspec.filesystem("s3", **options)
    fs.mkdir("bucket")
    yield options
    server.stop()


def test_in_an_object_store(bucket):
    go_through_a_store("s3://bucket/run", **bucket)


def test_in_the_background_to_an_object_store(bucket):
    state = {"w": ours(torch.arange(6.0)), "none": None, "step": 0}
    writer = checkpoint.FsspecWriter(**bucket)
    checkpoint.async_save(state, checkpoint_id="s3://bucket/background", storage_writer=writer, no_dist=True).result()
    assert step_of("s3://bucket/background", **bucket) == 0
