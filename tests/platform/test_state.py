"""Tests of state dicts, of safetensors files, and that killing a writer never leaves a broken file."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from hyper_parallel.platform import atomic_file as atomic_file_module
from hyper_parallel.platform.atomic_file import PARTIAL_SUFFIX, atomic_file, remove_leftovers
from hyper_parallel.platform.torch import state as state_module
from hyper_parallel.platform.torch.state import get_model_state_dict, load_checkpoint, save_checkpoint
from tests.world import run_on_ranks


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


class Spread(torch.Tensor):
    """Stands for a tensor spread over ranks."""

    def full_tensor(self):
        return torch.cat([self.as_subclass(torch.Tensor)] * 2)


# ---------------------------------------------------------------------------------------------------------------------
# State dicts
# ---------------------------------------------------------------------------------------------------------------------


def test_every_name_and_every_persistent_tensor():
    model = Model()
    state = get_model_state_dict(model)
    assert list(state) == list(model.state_dict())
    assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr() == model.head.weight.data_ptr()
    assert "scratch" not in state
    assert not any(tensor.requires_grad for tensor in state.values())


def state_dict_options(**options):
    from torch.distributed.checkpoint.state_dict import StateDictOptions  # here: its import costs a second

    return StateDictOptions(**options)


@pytest.mark.parametrize("make_options", [dict, state_dict_options])
def test_options(make_options):
    model = Model()
    model.norm.weight.requires_grad_(False)
    state = get_model_state_dict(model, options=make_options(ignore_frozen_params=True, strict=False))
    assert set(model.state_dict()) - set(state) == {"norm.weight"}
    whole = get_model_state_dict(model, options=make_options(full_state_dict=True, cpu_offload=True))
    assert list(whole) == list(model.state_dict())
    assert {tensor.device.type for tensor in whole.values()} == {"cpu"}


def test_full_state_dicts_gather_what_is_spread():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("part", torch.arange(2.0).as_subclass(Spread))

    part = get_model_state_dict(Holder())["part"]
    assert part.tolist() == [0.0, 1.0]
    whole = get_model_state_dict(Holder(), options={"full_state_dict": True})["part"]
    assert type(whole) is torch.Tensor
    assert whole.tolist() == [0.0, 1.0, 0.0, 1.0]


def test_compiled_modules_give_the_names_of_the_bare_ones():
    model = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Sequential(torch.compile(nn.Linear(2, 2)))))
    assert list(model.state_dict())[-1] == "1._orig_mod.0._orig_mod.bias"
    assert list(get_model_state_dict(model)) == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]
    assert list(get_model_state_dict(torch.compile(nn.Linear(1, 1)))) == ["weight", "bias"]


@run_on_ranks(2)
def test_wrapped_models_and_whole_state_on_rank_0_only():
    import torch.distributed as dist

    wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2)))
    wrapped.module[0].weight.requires_grad_(False)
    assert list(get_model_state_dict(wrapped)) == ["0.weight", "0.bias"]
    assert list(get_model_state_dict(wrapped, options={"ignore_frozen_params": True})) == ["0.bias"]
    whole = get_model_state_dict(wrapped, options=state_dict_options(full_state_dict=True, cpu_offload=True))
    assert list(whole) == (["0.weight", "0.bias"] if dist.get_rank() == 0 else [])


def test_mistakes_in_options_are_named():
    with pytest.raises(ValueError, match=r"unknown option\(s\) 'full'; the options are full_state_dict, cpu_offload"):
        get_model_state_dict(Model(), options={"full": True})
    with pytest.raises(TypeError, match=r"options must be a dict or an object .*, got str"):
        get_model_state_dict(Model(), options="full_state_dict")
    with pytest.raises(TypeError, match="takes a module, got dict"):
        get_model_state_dict({})


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------

DTYPES = list(state_module._SAFETENSORS_NAMES)


def assert_same(left, right):
    assert sorted(left) == sorted(right)
    for name, tensor in left.items():
        other = right[name]
        assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), name
        as_bytes = [t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (tensor, other)]
        assert torch.equal(*as_bytes), name


def test_every_dtype_and_every_shape_comes_back(tmp_path):
    tensors = {f"of {dtype}": torch.tensor([[1, 2, 4]]).to(dtype) for dtype in DTYPES}
    tensors |= {f"none of {dtype}": torch.zeros(0, 3).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(3.5), "odd": torch.ones(3, dtype=torch.int8), 'ünïcode "name"': torch.ones(1)}
    path = tmp_path / "all.safetensors"
    save_checkpoint(tensors, path)
    loaded = load_checkpoint(path)
    assert_same(tensors, loaded)
    assert list(loaded) == sorted(tensors)
    assert_same(tensors, safetensors.torch.load_file(path))
    loaded["scalar"] += 1
    assert load_checkpoint(path)["scalar"].item() == 3.5, "a loaded tensor is the reader's own"


def test_files_of_others_are_read(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5)}
    safetensors.torch.save_file(tensors, tmp_path / "theirs")
    assert_same(tensors, load_checkpoint(tmp_path / "theirs"))


def test_tied_overlapping_and_strided_tensors_are_written_in_full(tmp_path):
    base = torch.arange(24.0).view(4, 6)
    tensors = {
        "base": base,
        "again": base,
        "rows": base[1:3],
        "transposed": base.t(),
        "steps": base[::2, 1::3],
        "expanded": torch.tensor([7.0]).expand(5),
        "conjugated": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    save_checkpoint(tensors, tmp_path / "views")
    assert_same(tensors, load_checkpoint(tmp_path / "views"))
    assert load_checkpoint(tmp_path / "views")["conjugated"].tolist() == [1 - 2j, 3 + 1j]


def test_a_module_is_saved_and_loaded(tmp_path):
    model, other = Model(), Model()
    save_checkpoint(model, str(tmp_path / "model.safetensors"), "safetensors")
    other.load_state_dict(load_checkpoint(str(tmp_path / "model.safetensors")))
    assert_same(model.state_dict(), other.state_dict())
    save_checkpoint({}, tmp_path / "empty")
    assert load_checkpoint(tmp_path / "empty") == {}
    save_checkpoint({"spread": torch.ones(2).as_subclass(Spread)}, tmp_path / "spread")
    assert load_checkpoint(tmp_path / "spread")["spread"].shape == (4,)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({"x": 3}, TypeError, "'x' is of type int, a safetensors file holds tensors only"),
        ({3: torch.ones(1)}, TypeError, "names of tensors must be strings, got 3"),
        ({"x": torch.ones(1, dtype=torch.complex128)}, TypeError, r"'x' has dtype torch.complex128, .*complex64"),
        ({"x": torch.ones(1, device="meta")}, ValueError, "'x' is on the meta device and has no values"),
        ({"x": torch.eye(2).to_sparse()}, TypeError, "'x' is a sparse tensor"),
        ({"__metadata__": torch.ones(1)}, ValueError, "'__metadata__' is a reserved name"),
        ([torch.ones(1)], TypeError, "takes a module or a dict of tensors, got list"),
    ],
)
def test_what_cannot_be_saved_leaves_the_old_file(tmp_path, value, error, message):
    path = tmp_path / "old"
    save_checkpoint({"old": torch.ones(1)}, path)
    with pytest.raises(error, match=message):
        save_checkpoint(value, path)
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
    save_checkpoint({"x": torch.randn(100), "y": torch.arange(3)}, path)
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
NUM_ELEMENTS = 500_000


def tensors_of(version):
    return {f"tensor {index}": torch.full((NUM_ELEMENTS,), float(version)) for index in range(NUM_TENSORS)}


def version_of(path):
    versions = set()
    for tensor in load_checkpoint(path).values():
        versions |= {tensor.min().item(), tensor.max().item()}
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
    for number, (step, (owner, name, replacement)) in enumerate(steps.items(), start=1):
        save_checkpoint(tensors_of(-number), path)

        def save(owner=owner, name=name, replacement=replacement, number=number):
            setattr(owner, name, replacement)
            save_checkpoint(tensors_of(number), path)

        _, status = os.waitpid(in_a_child(save), 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, step
        expected = number if step == "after the rename" else -number
        assert version_of(path) == expected, step


def kill_at_random_moments(path):
    """Kill a writer that saves again and again, ten times or more, until at least three kills came during a save."""
    chance, num_kills, num_during_a_save, last = random.Random(1), 0, 0, 0.0
    start = time.perf_counter()
    save_checkpoint(tensors_of(last), path)
    seconds_per_save = time.perf_counter() - start

    def save_for_ever():
        version = last
        while True:
            version += 1
            save_checkpoint(tensors_of(version), path)

    while num_kills < 10 or num_during_a_save < 3:
        child = in_a_child(save_for_ever)
        time.sleep(0.01 + chance.random() * 3 * seconds_per_save)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        version = version_of(path)
        assert version >= last
        last = version
        num_kills += 1
        num_during_a_save += bool(remove_leftovers(path))


def test_a_killed_writer_leaves_a_whole_file(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    program = (
        "import sys; from tests.platform.test_state import kill_at_every_step, kill_at_random_moments;"
        "kill_at_every_step(sys.argv[1]); kill_at_random_moments(sys.argv[1])"
    )
    # A process of its own does the forking: it has torch loaded, but no threads that a fork would lose.
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    save_checkpoint(tensors_of(1), path)
    assert os.listdir(tmp_path) == [path.name], "the next writer removes what the dead left"
