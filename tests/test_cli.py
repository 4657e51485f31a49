"""`hyper-parallel` as a user meets it: the console script, the module, and doctor with and without a framework.

Environments that lack a framework are real ones: a virtual environment that sees every installed package but those.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hyper_parallel
from hyper_parallel.cli import environment
from hyper_parallel.cli.doctor import find_problems
from hyper_parallel.cli.main import app

ROOT = Path(__file__).parent.parent
SCRIPT = Path(sys.executable).parent / "hyper-parallel"


def _start(*command, **variables):
    """Start a command without a terminal and without the caller's choice of platform."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("HYPER_PARALLEL_PLATFORM", "RANK", "WORLD_SIZE", "FORCE_COLOR", "TTY_COMPATIBLE")
    }
    return subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**inherited, **variables},
    )


def _finish(process):
    stdout, stderr = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def _run(*command, **variables):
    return _finish(_start(*command, **variables))


@pytest.fixture(scope="module")
def doctors():
    """What doctor says in plain text, to programs and about an unknown platform, asked side by side."""
    started = {
        "text": _start(SCRIPT, "doctor", HYPER_PARALLEL_PLATFORM="Torch"),
        "json": _start(SCRIPT, "doctor", "--json", "--probe", HYPER_PARALLEL_PLATFORM="torch"),
        "unknown": _start(SCRIPT, "doctor", HYPER_PARALLEL_PLATFORM="jax"),
    }
    try:
        yield {name: _finish(process) for name, process in started.items()}
    finally:
        for process in started.values():
            process.kill()


def _make_environment(folder, without=()):
    """A virtual environment whose packages are links to the installed ones, except those named in `without`."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    target = next(folder.glob("lib/python*/site-packages"))
    installed = Path(next(path for path in sys.path if path.endswith("site-packages")))
    for entry in installed.iterdir():
        if not any(entry.name == name or entry.name.startswith(f"{name}-") for name in without):
            (target / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


FRAMEWORKS = ("torch", "torch_npu", "functorch", "torchgen", "mindspore")


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """Python with everything but a framework."""
    return _make_environment(tmp_path_factory.mktemp("bare") / "env", without=FRAMEWORKS)


@pytest.mark.parametrize("command", [[SCRIPT], [sys.executable, "-m", "hyper_parallel.cli"]], ids=["script", "module"])
def test_version(command):
    done = _run(*command, "--version")
    assert (done.returncode, done.stdout) == (0, f"hyper-parallel {hyper_parallel.__version__}\n")


def test_no_command_shows_help():
    done = CliRunner().invoke(app, [])
    assert "doctor" in done.output
    assert "--version" in done.output


def test_unknown_command_is_an_error_that_names_it():
    done = CliRunner().invoke(app, ["doctr"])
    assert done.exit_code == 2
    assert "doctr" in done.output


def test_command_line_imports_no_framework():
    code = (
        "import sys, hyper_parallel.cli.main; "
        "print([n for n in ('torch', 'mindspore', 'torch_npu', 'numpy') if n in sys.modules])"
    )
    done = _run(sys.executable, "-c", code)
    assert done.stdout == "[]\n", done.stderr


def test_doctor_reports_a_usable_platform_in_plain_text(doctors):
    done = doctors["text"]
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert ["chosen", "PyTorch"] in lines
    assert ["why", "HYPER_PARALLEL_PLATFORM=Torch"] in lines
    assert any(line[0] == "torch" and "gloo: yes" in line[1] for line in lines if len(line) == 2)
    for label in ("python", "hyper_parallel", "torch_npu", "mindspore", "numpy", "cpu", "shared"):
        assert any(line[0] == label for line in lines), label


def test_doctor_json_says_the_same_for_programs_and_probe_sums_over_two_processes(doctors):
    done = doctors["json"]
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["platform"]["chosen"] == "torch"
    assert report["platform"]["usable"] is True
    assert report["versions"]["hyper_parallel"] == hyper_parallel.__version__
    assert report["versions"]["torch"] == importlib.metadata.version("torch")
    assert report["devices"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert len(report["replaced"]) > 10
    assert {state for _, state, _ in report["replaced"]} == {"ours"}, "what this version of PyTorch no longer has"
    assert report["shared_memory"]["total_bytes"] == shutil.disk_usage("/dev/shm").total
    assert set(report["backends"]["torch"]) == {"gloo", "nccl", "hccl", "mpi"}
    assert report["collective"] == {"worked": True, "error": None, "backend": "gloo", "sum": 3, "world_size": 2}
    assert not [problem for problem in report["problems"] if problem["severity"] == "error"]


def test_doctor_names_the_fix_for_an_unknown_platform(doctors):
    done = doctors["unknown"]
    assert done.returncode == 1
    assert "HYPER_PARALLEL_PLATFORM='jax' is neither 'torch' nor 'mindspore'" in done.stdout
    assert "fix: export HYPER_PARALLEL_PLATFORM=torch" in done.stdout


def test_doctor_without_any_framework(bare_python):
    done = _run(bare_python, "-m", "hyper_parallel.cli", "doctor")
    assert done.returncode == 1, done.stderr
    assert "neither PyTorch nor MindSpore is installed" in done.stdout
    assert f"fix: {bare_python} -m pip install 'torch>=" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_doctor_when_the_asked_framework_is_missing(bare_python):
    done = _run(bare_python, "-m", "hyper_parallel.cli", "doctor", HYPER_PARALLEL_PLATFORM="torch")
    assert done.returncode == 1
    assert "PyTorch was asked for (HYPER_PARALLEL_PLATFORM=torch) and is not installed" in done.stdout
    assert f"fix: {bare_python} -m pip install 'torch>=" in done.stdout


def test_doctor_survives_a_framework_that_cannot_be_imported(tmp_path):
    python = _make_environment(tmp_path / "env", without=FRAMEWORKS)
    broken = next((tmp_path / "env").glob("lib/python*/site-packages")) / "torch"
    broken.mkdir()
    (broken / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    done = _run(python, "-m", "hyper_parallel.cli", "doctor")
    assert done.returncode == 1
    assert "PyTorch is installed but cannot be imported: the process was ended by signal 11" in done.stdout
    assert "--force-reinstall" in done.stdout


def _facts(**changes):
    """Facts of a healthy machine, with some changed: `versions__numpy="2.0.0"` changes one inside."""
    facts = {
        "platform": {
            "chosen": "torch",
            "reason": "HYPER_PARALLEL_PLATFORM=torch",
            "variable": "torch",
            "usable": True,
            "error": None,
            "supported": ["torch", "mindspore"],
        },
        "versions": {"torch": "2.13.0", "torch_npu": None, "mindspore": None, "numpy": "1.26.4"},
        "devices": {"accelerators": [], "device_files": {"cuda": False, "npu": False}},
        "backends": {"torch": {"gloo": True, "nccl": False, "hccl": False, "mpi": False}},
        "framework_errors": {},
        "npu_error": None,
        "shared_memory": {"path": "/dev/shm", "total_bytes": 8 << 30, "free_bytes": 8 << 30},
        "replaced": [],
    }
    for path, value in changes.items():
        *outer, last = path.split("__")
        table = facts
        for name in outer:
            table = table[name]
        table[last] = value
    return facts


def test_a_healthy_machine_misses_nothing():
    assert find_problems(_facts()) == []


@pytest.mark.parametrize(
    ("changes", "severity", "problem", "fix"),
    [
        ({"shared_memory__total_bytes": 64 << 20}, "note", "64 MiB", "--shm-size"),
        ({"shared_memory": None}, "note", "no /dev/shm", "mount -t tmpfs"),
        ({"replaced": [["torch.compile", "missing", "why"]]}, "warning", "torch.compile is missing: why", "'torch>="),
        ({"devices__device_files__npu": True}, "note", "torch_npu is not", "'torch-npu==2.13.*'"),
        ({"versions__torch_npu": "2.6.0", "npu_error": "no symbol"}, "note", "no symbol", "'torch-npu==2.13.*'"),
        ({"devices__device_files__cuda": True}, "note", "NVIDIA devices", "CUDA"),
        ({"backends__torch": {"gloo": False}}, "note", "no communication backend", "--force-reinstall"),
        ({"versions__mindspore": "2.10.0", "versions__numpy": "2.1.0"}, "note", "under numpy 2.1.0", "'numpy<2'"),
        (
            {"collective": {"worked": False, "error": "rank 1: refused"}},
            "error",
            "rank 1: refused",
            "GLOO_SOCKET_IFNAME=lo",
        ),
        (
            {"platform__chosen": "mindspore", "platform__usable": False},
            "error",
            "MindSpore was asked for",
            "'mindspore<2.11,>=2.10' 'numpy<2'",
        ),
    ],
)
def test_each_problem_comes_with_its_fix(changes, severity, problem, fix):
    (found,) = find_problems(_facts(**changes))
    assert found.severity == severity
    assert problem in found.problem
    assert fix in found.fix


def test_errors_come_before_notes():
    facts = _facts(shared_memory=None, platform__usable=False, versions__torch=None)
    assert [problem.severity for problem in find_problems(facts)] == ["error", "note"]


def test_a_probe_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(environment, "PROBE_SECONDS", 0.01)
    assert environment.run_probes(["platform"])["platform"].error == "no answer in 0.01 s"


def test_probes_after_one_that_crashes_still_answer(monkeypatch, tmp_path):
    broken = tmp_path / "mindspore"
    broken.mkdir()
    (broken / "__init__.py").write_text("import os\nos.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "jax")
    results = environment.run_probes(["mindspore", "platform"])
    assert results["mindspore"].error == "the process was ended by signal 6"
    assert results["platform"].error.startswith("ValueError: HYPER_PARALLEL_PLATFORM='jax'")
