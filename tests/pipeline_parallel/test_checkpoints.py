"""Checkpoints of a run in stages go on under any other split, with the optimizer's moments and steps."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hyper_parallel as hp
from hyper_parallel.core.distributed_checkpoint.foreign.safetensors_folder import SafetensorsFolder
from hyper_parallel.platform import get_platform
from hyper_parallel.testing import threads
from tests.frameworks import on_mindspore
from tests.pipeline_parallel import hugging_face_models as toys
from tests.pipeline_parallel import training
from tests.world import small_or_sweep

_RANKS = {"dp_shard=1": 1, "tp=2": 2, "pp=2": 2, "pp=2, tp=2": 4, "pp=4": 4, "pp=4, tp=2": 8}
_SCHEDULES = {"pp=2": ("zbv", 5), "pp=2, tp=2": ("zb_h1", 3), "pp=4": ("1f1b", 3), "pp=4, tp=2": ("1f1b", 2)}
_SMALL = {("pp=2", "dp_shard=1")} if on_mindspore else {("pp=2, tp=2", "pp=4"), ("tp=2", "pp=2"), ("pp=4", "tp=2")}
_AS_MANY_AS_FIT = {degrees for degrees, ranks in _RANKS.items() if not on_mindspore or ranks <= 4}
_PAIRS = [(one, other) for one in _RANKS for other in _RANKS if {one, other} <= _AS_MANY_AS_FIT]
_STEPS = 2  # before the checkpoint, and behind it


def _start(degrees: str, scale: float = 1.0) -> tuple[hp.Parallel, Any]:
    model = training.model_with_values(tied=True)
    if scale != 1.0:  # values that a checkpoint has to replace
        platform = get_platform()
        with platform.no_grad():
            for parameter in platform.parameters_dict(model).values():
                platform.load_into_param(parameter, platform.detached(parameter) * scale)
    schedule, microbatches = _SCHEDULES.get(degrees, ("1f1b", 2))
    run = hp.parallelize(model, degrees, schedule=schedule, microbatches=microbatches)
    return run, training.optimizer_of(run)


def _go_on(run: hp.Parallel, optimizer: Any) -> training.Seen:
    part, losses, norms = training.rows_of(run), [], []
    for _ in range(_STEPS):
        losses.append(float(training.values_of(run.forward_backward(*part))))
        norms.append(float(training.values_of(run.clip_grad_norm_(1.0))))
        get_platform().step_optimizer(optimizer)
        run.zero_grad()
    return losses, norms, {name: training.values_of(one) for name, one in run.named_parameters()}


def first_half(degrees: str, folder: str) -> None:
    run, optimizer = _start(degrees)
    _go_on(run, optimizer)
    run.save(folder, optimizer, told="by all stages")


def second_half(degrees: str, folder: str) -> training.Seen:
    run, optimizer = _start(degrees, scale=0.5)
    assert run.load(folder, optimizer, told=None) == {"told": "by all stages"}
    assert run.step == _STEPS
    return _go_on(run, optimizer)


@functools.cache
def _in_one_piece() -> training.Seen:
    return training.in_one_piece(tied=True, steps=2 * _STEPS)


def check(found: list[training.Seen]) -> None:
    """The second half of a run on one device, from every rank's view."""
    losses, norms, weights = _in_one_piece()
    for got in found:
        training.check(got, (losses[_STEPS:], norms[_STEPS:], weights))
    held = {name.replace("embedding_table", "weight") for _, _, weights in found for name in weights}
    assert held == set(weights)


def _on_ranks(worlds: Any, degrees: str, function: Any, folder: str) -> Any:
    """Ranks are threads on PyTorch, also in a sweep: 36 loads and 6 saves are 147 ranks."""
    world = worlds(_RANKS[degrees], timeout=500) if on_mindspore else threads(_RANKS[degrees])
    return world.run(function, degrees, folder)


@pytest.fixture(scope="module")
def saved(worlds: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a checkpoint by degrees, written when it is first asked for."""
    folders: dict[str, str] = {}

    def folder_of(degrees: str) -> str:
        if degrees not in folders:
            folders[degrees] = str(tmp_path_factory.mktemp("stages"))
            _on_ranks(worlds, degrees, first_half, folders[degrees])
        return folders[degrees]

    return folder_of


@pytest.mark.sweep("mindspore")
@pytest.mark.parametrize("pair", small_or_sweep(_PAIRS, _SMALL), ids=" -> ".join)
def test_training_goes_on_under_any_other_split(pair: tuple[str, str], saved: Any, worlds: Any) -> None:
    before, after = pair
    check(_on_ranks(worlds, after, second_half, saved(before)))


@pytest.mark.sweep("mindspore")
@pytest.mark.skipif(not on_mindspore, reason="one pair of frameworks is enough, and MindSpore's world has both")
def test_a_checkpoint_crosses_frameworks_there_and_back(worlds: Any, tmp_path: Path) -> None:
    ours, theirs = str(tmp_path / "mindspore"), str(tmp_path / "torch")
    _on_pytorch("first_half", "pp=4", theirs)
    check(worlds(2, timeout=500).run(second_half, "pp=2", theirs))
    worlds(2, timeout=500).run(first_half, "pp=2", ours)
    _on_pytorch("second_half_is_right", "pp=2, tp=2", ours)


def second_half_is_right(degrees: str, folder: str) -> None:
    check(threads(_RANKS[degrees]).run(second_half, degrees, folder))


def _on_pytorch(function: str, degrees: str, folder: str) -> None:
    """Run a function of this file on PyTorch, in the precision of the other side."""
    environment = {**os.environ, "HYPER_PARALLEL_PLATFORM": "torch", "HYPER_PARALLEL_TEST_DTYPE": "float32"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.pipeline_parallel.test_checkpoints", function, degrees, folder],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(on_mindspore, reason="folders are read by neutral code; models of Hugging Face are PyTorch's")
@pytest.mark.parametrize("degrees", ["pp=2", "pp=2, dp_shard=2"])
def test_a_folder_of_hugging_face_there_and_back(degrees: str, tmp_path: Path) -> None:
    """Of a tied head, whose stage is not the embedding's; one file has tensors of both stages."""
    transformers = pytest.importorskip("transformers", reason='an extra: pip install "hyper-parallel[transformers]"')
    whole = toys.build("qwen3")
    whole.save_pretrained(tmp_path / "given")

    def work() -> None:
        with hp.deferred_init():
            model = toys.build("qwen3")
        run = hp.parallelize(model, degrees, schedule="1f1b", microbatches=2)
        assert run.load_hugging_face(tmp_path / "given") == ([], [])
        run.save_hugging_face(tmp_path / "made")
        for name, parameter in run.named_parameters():
            value = parameter.full_tensor() if isinstance(parameter, hp.DTensor) else parameter
            assert torch.equal(value, whole.get_parameter(name)), name

    threads(4 if "dp" in degrees else 2).run(work)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype="auto")
    for name, parameter in whole.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter), name


@pytest.mark.skipif(on_mindspore, reason="folders are read by neutral code; models of Hugging Face are PyTorch's")
def test_a_folder_of_hugging_face_is_read_in_parts(tmp_path: Path) -> None:
    """A rank reads the bytes of its stages, and never holds more than its part of the weights."""
    transformers = pytest.importorskip("transformers", reason='an extra: pip install "hyper-parallel[transformers]"')
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    whole = transformers.LlamaForCausalLM(config)
    whole.save_pretrained(tmp_path)
    want = {name: one.detach() for name, one in whole.named_parameters()}

    def load() -> tuple[int, int, int, int]:
        with hp.deferred_init():
            model = transformers.LlamaForCausalLM(config)
        source = SafetensorsFolder(tmp_path)
        with _HeldBytes() as held:
            run = hp.parallelize(model, "pp=2", microbatches=2)
            assert run.load_hugging_face(source) == ([], [])
        for name, parameter in run.named_parameters():
            assert torch.equal(parameter, want[name]), name
        own = sum(one.numel() * one.element_size() for one in run.parameters())
        return own, source.bytes_read, held.peak, len(run.parameters())

    found = threads(2).run(load)
    assert sum(count for *_, count in found) == len(want)
    for own, read, peak, _ in found:
        assert 0 < own < 0.7 * sum(one.numel() * 4 for one in want.values())
        assert read <= 1.05 * own, (read, own)
        assert peak <= 1.1 * own, (peak, own)


class _HeldBytes(TorchDispatchMode):
    """The largest sum of bytes of tensors with memory that were made on this thread and alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._alive = 0
        self._known = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                memory = tensor.untyped_storage()
                if memory not in self._known:
                    self._known.add(memory)
                    self._alive += memory.nbytes()
                    self.peak = max(self.peak, self._alive)
                    weakref.finalize(memory, self._freed, memory.nbytes())
        return result

    def _freed(self, num_bytes: int) -> None:
        self._alive -= num_bytes


if __name__ == "__main__":
    if sys.argv[1] == "first_half":
        threads(_RANKS[sys.argv[2]]).run(first_half, *sys.argv[2:])
    else:
        second_half_is_right(*sys.argv[2:])
