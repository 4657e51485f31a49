"""Tests of state dicts, of safetensors files, and that killing a writer never leaves a broken file."""

import os
import random
import signal
import time

import numpy as np
import pytest
import safetensors.torch
import torch

from hyper_parallel import Replicate, Shard
from hyper_parallel.core.dtensor.device_mesh import init_device_mesh
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.host import atomic_file as atomic_file_module
from hyper_parallel.platform.host.atomic_file import PARTIAL_SUFFIX, atomic_file, remove_leftovers
from tests.frameworks import (
    dist,
    distribute_tensor,
    equal,
    named,
    ours,
    parameter,
    platform_module,
    same_bits,
    theirs,
)
from tests.frameworks.models import TABLE, Module, TiedModel, fill
from tests.world import run_on_ranks

state_module = platform_module("state")
get_model_state_dict = state_module.get_model_state_dict
load_checkpoint, save_checkpoint = state_module.load_checkpoint, state_module.save_checkpoint

# ---------------------------------------------------------------------------------------------------------------------
# State dicts
# ---------------------------------------------------------------------------------------------------------------------

NAMES = {
    *("scale", f"embedding.{TABLE}", "head.weight", "block.linear.weight", "block.linear.bias"),
    *("block.norm.weight", "block.norm.bias", "block.norm.seen"),
}


def test_every_name_and_every_persistent_tensor():
    model = TiedModel()
    state = get_model_state_dict(model)
    assert set(state) == NAMES
    table = f"embedding.{TABLE}"
    assert state["head.weight"].data_ptr() == state[table].data_ptr() == model.head.weight.data_ptr()


def test_options():
    model = TiedModel()
    model.block.linear.weight.requires_grad = False
    state = get_model_state_dict(model, options={"ignore_frozen_params": True, "strict": False})
    assert NAMES - set(state) == {"block.linear.weight"}
    whole = get_model_state_dict(model, options={"full_state_dict": True, "cpu_offload": True})
    assert set(whole) == NAMES
    assert equal(whole["scale"], model.scale)


class Holder(Module):
    def __init__(self, tensor):
        super().__init__()
        self.part = get_platform().as_parameter(tensor)


@run_on_ranks(2)
def test_full_state_dicts_gather_what_is_spread(tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    values = torch.arange(3.0)
    for placement in (Shard(0), Replicate()):
        holder = Holder(distribute_tensor(values, mesh, [placement]))
        part = get_model_state_dict(holder)["part"]
        assert part.placements == (placement,)
        whole = get_model_state_dict(holder, options={"full_state_dict": True})["part"]
        assert not hasattr(whole, "to_local") and equal(whole, values)
        on_one = get_model_state_dict(holder, options={"full_state_dict": True, "cpu_offload": True})
        assert list(on_one) == (["part"] if dist.get_rank() == 0 else [])
        save_checkpoint(holder, tmp_path / f"of {dist.get_rank()}")
        assert equal(load_checkpoint(tmp_path / f"of {dist.get_rank()}")["part"], values)


def test_mistakes_in_options_are_named():
    with pytest.raises(ValueError, match=r"unknown option\(s\) 'full'; the options are full_state_dict, cpu_offload"):
        get_model_state_dict(TiedModel(), options={"full": True})
    with pytest.raises(TypeError, match=r"options must be a dict or an object .*, got str"):
        get_model_state_dict(TiedModel(), options="full_state_dict")
    with pytest.raises(TypeError, match="takes a module, got dict"):
        get_model_state_dict({})


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------

DTYPES = [theirs(dtype) for dtype in state_module._SAFETENSORS_NAMES if "float8" not in str(dtype)]


def assert_same(left, right):
    assert sorted(left) == sorted(right)
    for name, tensor in left.items():
        assert same_bits(tensor, right[name]), name


def test_every_dtype_and_every_shape_comes_back(tmp_path):
    tensors = {f"of {dtype}": torch.tensor([[1, 2, 4]]).to(dtype) for dtype in DTYPES}
    tensors |= {f"none of {dtype}": torch.zeros(0, 3).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(3.5), "odd": torch.ones(3, dtype=torch.int8), 'ünïcode "name"': torch.ones(1)}
    path = tmp_path / "all.safetensors"
    save_checkpoint(ours(tensors), path)
    loaded = load_checkpoint(path)
    assert_same(tensors, loaded)
    assert list(loaded) == sorted(tensors)
    assert_same(tensors, safetensors.torch.load_file(path))
    get_platform().load_into_param(loaded["scalar"], ours(torch.tensor(4.5)))
    assert load_checkpoint(path)["scalar"].item() == 3.5, "a loaded tensor is the reader's own"


def test_files_of_others_are_read(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.randn(2, 3).bfloat16()}
    safetensors.torch.save_file(tensors, tmp_path / "theirs")
    assert_same(tensors, load_checkpoint(tmp_path / "theirs"))


def test_tied_overlapping_and_strided_tensors_are_written_in_full(tmp_path):
    base = torch.arange(24.0).view(4, 6)
    own = ours(base)
    tensors = {
        "base": (own, base),
        "again": (own, base),
        "rows": (own[1:3], base[1:3]),
        "transposed": (own.T, base.T),
        "steps": (own[::2, 1::3], base[::2, 1::3]),
        "expanded": (ours(torch.tensor([7.0])).expand((5,)), torch.full((5,), 7.0)),
        "parameter": (parameter(torch.ones(2)), torch.ones(2)),
    }
    save_checkpoint({name: saved for name, (saved, _) in tensors.items()}, tmp_path / "views")
    assert_same({name: expected for name, (_, expected) in tensors.items()}, load_checkpoint(tmp_path / "views"))


def test_a_module_is_saved_and_loaded(tmp_path):
    model, other = fill(TiedModel(), 1), fill(TiedModel(), 2)
    save_checkpoint(model, str(tmp_path / "model.safetensors"), "safetensors")
    for name, tensor in load_checkpoint(str(tmp_path / "model.safetensors")).items():
        get_platform().load_into_param(get_model_state_dict(other)[name], tensor)
    assert_same(get_model_state_dict(model), get_model_state_dict(other))
    save_checkpoint({}, tmp_path / "empty")
    assert load_checkpoint(tmp_path / "empty") == {}


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({"x": 3}, TypeError, "'x' is of type int, a safetensors file holds tensors only"),
        ({3: torch.ones(1)}, TypeError, "names of tensors must be strings, got 3"),
        (
            {"x": torch.ones(1, dtype=torch.complex128)},
            TypeError,
            rf"'x' has dtype {named(torch.complex128)}, .*complex64",
        ),
        ({"x": torch.ones(1, device="meta")}, ValueError, "'x' is on the meta device and has no values"),
        ({"__metadata__": torch.ones(1)}, ValueError, "'__metadata__' is a reserved name"),
        ([torch.ones(1)], TypeError, "takes a module or a dict of tensors, got list"),
    ],
)
def test_what_cannot_be_saved_leaves_the_old_file(tmp_path, value, error, message):
    path = tmp_path / "old"
    save_checkpoint(ours({"old": torch.ones(1)}), path)
    with pytest.raises(error, match=message):
        save_checkpoint(ours(value), path)
    assert list(load_checkpoint(path)) == ["old"]
    assert os.listdir(tmp_path) == ["old"]


@pytest.mark.parametrize(
    "function", [lambda path: save_checkpoint({}, path, "pt"), lambda path: load_checkpoint(path, "pt")]
)
def test_other_formats_are_refused(tmp_path, function):
    with pytest.raises(ValueError, match="unknown checkpoint format 'pt'; the known formats are: 'safetensors'"):
        function(tmp_path / "file")


DAMAGES = {
    "empty": lambda raw: b"",
    "cut in the header's length": lambda raw: raw[:5],
    "cut in the header": lambda raw: raw[:40],
    "cut in the data": lambda raw: raw[:-1],
    "longer": lambda raw: raw + b"x",
    "garbage": lambda raw: bytes(range(256)) * 4,
    "header is no JSON": lambda raw: raw[:8] + b"?" + raw[9:],
    "a pickle": lambda raw: b"\x80\x04\x95" + raw,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named(tmp_path, damage):
    path = tmp_path / "damaged.safetensors"
    save_checkpoint(ours({"x": torch.randn(100), "y": torch.arange(3)}), path)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(
        ValueError, match=r"damaged.safetensors' \(\d+ bytes\) is not a whole safetensors file: .*cut short"
    ):
        load_checkpoint(path)


def test_missing_files_and_directories_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="/absent': there is no such file"):
        load_checkpoint(tmp_path / "absent")
    with pytest.raises(IsADirectoryError, match="it is a directory; name a file in it"):
        load_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"the directory '.*/nowhere' does not exist; create it first"):
        save_checkpoint({}, tmp_path / "nowhere" / "file")
    with pytest.raises(IsADirectoryError, match="it is a directory; give the name of a file in it"):
        save_checkpoint({}, tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Whole or absent
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_error_on_the_way_keeps_the_old_file_and_leaves_nothing(tmp_path, monkeypatch, failing, error):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(*args):
        raise error

    monkeypatch.setattr(atomic_file_module.os, failing, fail)
    with pytest.raises(type(error)), atomic_file(path) as aside:
        aside.write_text("new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_an_error_inside_the_block_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_file(path) as aside:
        assert aside.name.endswith(PARTIAL_SUFFIX)
        aside.write_text(str(1 / 0))
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_content_is_on_disk_before_its_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    steps = []
    fsync, replace = os.fsync, os.replace

    def watch_fsync(descriptor):
        steps.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def watch_replace(source, target):
        steps.append(("replace", str(source)))
        replace(source, target)

    monkeypatch.setattr(atomic_file_module.os, "fsync", watch_fsync)
    monkeypatch.setattr(atomic_file_module.os, "replace", watch_replace)
    with atomic_file(tmp_path / "file") as aside:
        aside.write_text("new")
    assert steps == [("fsync", str(aside)), ("replace", str(aside)), ("fsync", str(tmp_path))]


def test_new_files_follow_the_umask_and_links_are_followed(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    previous = os.umask(0o027)
    try:
        with atomic_file(tmp_path / "link") as aside:
            aside.write_text("new")
    finally:
        os.umask(previous)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"
    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o640


def test_leftovers_of_the_dead_go_and_the_work_of_the_living_stays(tmp_path):
    path = tmp_path / "fi[l]e*"
    dead = tmp_path / f".{path.name}.0123{PARTIAL_SUFFIX}"
    others = [tmp_path / f".other.0123{PARTIAL_SUFFIX}", tmp_path / "fi[l]e*.bak"]
    for file in (dead, *others):
        file.write_text("half")
    with atomic_file(path) as first:
        assert not dead.exists()
        first.write_text("first")
        with atomic_file(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
        assert remove_leftovers(path) == []
    assert path.read_text() == "first"
    assert sorted(tmp_path.iterdir()) == sorted([path, *others])


NUM_TENSORS = 6
NUM_ELEMENTS = 100_000


class Versions:
    """Tensors that all hold one number. A forked child sets it through their memory, without the framework, whose
    threads a fork loses."""

    def __init__(self):
        platform = get_platform()
        self.tensors = {f"tensor {index}": platform.zeros(NUM_ELEMENTS) for index in range(NUM_TENSORS)}
        self._arrays = [platform.tensor_to_numpy(tensor) for tensor in self.tensors.values()]

    def save(self, version, path):
        for array in self._arrays:
            array.fill(version)
        save_checkpoint(self.tensors, path)


def version_of(path):
    versions = set()
    for tensor in load_checkpoint(path).values():
        versions |= set(np.unique(get_platform().tensor_to_numpy(tensor)).tolist())
    assert len(versions) == 1, f"several versions in one file: {versions}"
    return versions.pop()


def kill_myself(*args):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_after(function):
    def call(*args):
        function(*args)
        kill_myself()

    return call


class HalfFile:
    """Bytes of a tensor that cannot be had: the writer is killed while it writes."""

    def __init__(self, *args):
        self.itemsize, self.num_bytes, self.dtype, self.shape = 4, 4, "F32", (1,)

    def get_bytes(self):
        kill_myself()


def in_a_child(function):
    """Start the function in a forked child; returns its process id."""
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(0)
    return child


def kill_at_every_step(path):
    """Kill a writer at each named step: before the rename the old file is there, after it the new one."""
    steps = {
        "while writing": (state_module, "_entry", HalfFile),
        "before the first fsync": (os, "fsync", kill_myself),
        "after the first fsync": (os, "fsync", kill_after(os.fsync)),
        "before the rename": (os, "replace", kill_myself),
        "after the rename": (os, "replace", kill_after(os.replace)),
    }
    versions = Versions()
    for number, (step, (owner, name, replacement)) in enumerate(steps.items(), start=1):
        versions.save(-number, path)

        def save(owner=owner, name=name, replacement=replacement, number=number):
            setattr(owner, name, replacement)
            versions.save(number, path)

        _, status = os.waitpid(in_a_child(save), 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, step
        expected = number if step == "after the rename" else -number
        assert version_of(path) == expected, step


def kill_at_random_moments(path):
    """Kill a writer that saves again and again, ten times or more, until at least three kills came during a save."""
    chance, num_kills, num_during_a_save, last = random.Random(1), 0, 0, 0.0
    versions, parent = Versions(), os.getpid()
    start = time.perf_counter()
    versions.save(last, path)
    seconds_per_save = time.perf_counter() - start

    def save_again_and_again():
        version = last
        while os.getppid() == parent:
            version += 1
            versions.save(version, path)

    while num_kills < 10 or num_during_a_save < 3:
        child = in_a_child(save_again_and_again)
        time.sleep(0.01 + chance.random() * 3 * seconds_per_save)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        version = version_of(path)
        assert version >= last
        last = version
        num_kills += 1
        num_during_a_save += bool(remove_leftovers(path))


@run_on_ranks(2)
def test_a_killed_writer_leaves_a_whole_file(tmp_path):
    if dist.get_rank() == 0:
        path = tmp_path / "checkpoint.safetensors"
        kill_at_every_step(path)
        kill_at_random_moments(path)
        Versions().save(1, path)
        assert os.listdir(tmp_path) == [path.name], "the next writer removes what the dead left"
