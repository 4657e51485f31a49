"""Runs on MindSpore: the curve of PyTorch's runs; a checkpoint of one framework goes on on the other."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from safetensors.numpy import load_file

from hyper_parallel.trainer.report.parts import read_parts
from tests.commands import command_environment
from tests.trainer.processes import Run
from tests.trainer.runs import steps_of
from tests.world import small_or_sweep

only_on = "mindspore"  # each run is a process of its own, of one framework or the other

STEPS = 8
FLOAT32 = 'train.dtype="float32"'  # which is what MindSpore trains in on a CPU


@pytest.fixture(scope="module")
def of_pytorch(tmp_path_factory):
    """The folder of a run on PyTorch in one process, whose curve is a hand-written loop's (test_curves.py)."""
    pytest.importorskip("torch")
    folder, export = tmp_path_factory.mktemp("of_pytorch"), "checkpoint.export_hugging_face=true"
    with Run(folder, FLOAT32, export, nproc=1, steps=STEPS, every=STEPS // 2) as run:
        status, out, err = run.end(timeout=200)
        assert status == 0, out + err
    return folder / "run"


@pytest.fixture(scope="module")
def straight(of_pytorch):
    return {line["step"]: line["loss"] for line in steps_of(of_pytorch)}


@pytest.mark.sweep  # The first loss of a run tells as much.
def test_first_values_are_those_of_pytorch():
    program = (
        "import hyper_parallel as hp\n"
        "hp.manual_seed(0)\n"
        "with hp.deferred_init():\n"
        "    model = hp.models.Llama(hp.models.LlamaConfig(dim=16, num_blocks=1, num_heads=2, num_kv_heads=2))\n"
        "hp.materialize(model)\n"
        "p = hp.get_platform()\n"
        "print([round(float(abs(p.tensor_to_numpy(x)).sum()), 3) for x in p.parameters_dict(model).values()])\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=command_environment(HYPER_PARALLEL_PLATFORM=name),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()[-1]
        for name in ("torch", "mindspore")
    ]
    assert said[0] == said[1]


_LAYOUTS = {
    "one": (1, ()),
    "tp": (2, ("parallel.tp=2",)),
    "dp_shard": (2, ()),
    "cp": (2, ("parallel.cp=2",)),
    "pp": (2, ("parallel.pp=2",)),
    "dp_shard x tp": (4, ("parallel.tp=2",)),
}


@pytest.mark.sweep("mindspore")
@pytest.mark.parametrize("layout", small_or_sweep(_LAYOUTS, ["tp"]))
def test_the_curve_is_that_of_pytorch(tmp_path, straight, layout):
    nproc, sets = _LAYOUTS[layout]
    with Run(tmp_path, FLOAT32, *sets, nproc=nproc, steps=STEPS, every=0, platform="mindspore") as run:
        status, out, err = run.end(timeout=300)
        assert status == 0, out + err
        assert run.losses() == pytest.approx(straight, rel=1e-5)
    for part in read_parts(tmp_path / "run"):
        assert part["memory"]["optimizer state"] >= 2 * part["memory"]["parameters"] > 0
        rows = {"phases", "modules"} | ({"model"} if layout != "pp" else set())  # of a stage there is no whole model
        assert rows < {row for row, *_ in part["spans"]}
        if layout == "tp":
            assert {one["axes"] for one in part["communication"]} == {"tp"}
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize(
    "order", small_or_sweep([("torch", "mindspore"), ("mindspore", "torch")], [("torch", "mindspore")])
)
def test_a_checkpoint_of_one_framework_goes_on_on_the_other(tmp_path, of_pytorch, straight, order):
    first, second = order
    half = f"step-{STEPS // 2}"
    if first == "torch":
        shutil.copytree(of_pytorch / "checkpoints" / half, tmp_path / "run" / "checkpoints" / half)
    else:
        with Run(tmp_path, FLOAT32, nproc=1, steps=STEPS // 2, every=0, platform=first) as run:
            status, out, err = run.end(timeout=300)
            assert status == 0, out + err
    with Run(tmp_path, FLOAT32, "parallel.tp=2", nproc=2, steps=STEPS, every=0, platform=second) as run:
        status, out, err = run.end(timeout=300)
        assert status == 0, out + err
        assert f"steps {STEPS // 2 + 1} to {STEPS}, from " in out
        losses = run.losses()
        assert losses == pytest.approx({step: straight[step] for step in losses}, rel=1e-5)
        assert list(losses)[-STEPS // 2 :] == list(range(STEPS // 2 + 1, STEPS + 1))


@pytest.mark.sweep
def test_twenty_steps_in_three_parts_on_both_frameworks_are_twenty_straight(tmp_path):
    with Run(tmp_path / "straight", FLOAT32, nproc=1, steps=20, every=0) as run:
        status, out, err = run.end(timeout=300)
        assert status == 0, out + err
        straight = run.losses()
    for steps, platform, nproc in ((7, "torch", 2), (14, "mindspore", 2), (20, "torch", 1)):
        degrees = "parallel.tp=2" if platform == "mindspore" else "parallel.tp=1"
        with Run(tmp_path, FLOAT32, degrees, nproc=nproc, steps=steps, every=0, platform=platform) as run:
            status, out, err = run.end(timeout=300)
            assert status == 0, out + err
    assert list(run.losses()) == list(range(1, 21))
    assert run.losses() == pytest.approx(straight, rel=1e-5)
    lines = steps_of(tmp_path / "run")
    assert [line["position"] for line in lines] == [4 * step for step in range(1, 21)]


@pytest.mark.sweep("mindspore")
def test_adapters_train_as_on_pytorch(tmp_path, of_pytorch):
    base = of_pytorch / "hugging_face"
    sets = FLOAT32, f'model.weights="{base}"', "model.lora={rank = 2}", "checkpoint.export_hugging_face=true"
    seen = []
    for platform, more, nproc in (("torch", (), 1), ("mindspore", ("parallel.tp=2",), 2)):
        with Run(tmp_path / platform, *sets, *more, nproc=nproc, steps=3, platform=platform) as run:
            status, out, err = run.end(timeout=300)
            assert status == 0, out + err
            seen.append(run.losses())
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)
    for name in ("adapter/adapter_model.safetensors", "hugging_face/model.safetensors"):
        first, second = (load_file(tmp_path / platform / "run" / name) for platform in ("torch", "mindspore"))
        assert first.keys() == second.keys()
        assert all(abs(first[key] - second[key]).max() < 1e-4 for key in first), name
