"""How a MindSpore world starts: plain processes, torchrun and msrun; and what the others do when a rank is killed."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import mindspore
import pytest

from hyper_parallel.platform.host import reception
from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base import start
from hyper_parallel.platform.mindspore.communication import groups

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
LONG = 400.0

PROGRAM = """
import os, signal
from hyper_parallel import get_platform

platform = get_platform()
platform.init_process_group()
rank, size = platform.get_rank(), platform.get_world_size()
total = platform.all_reduce(platform.full((2,), rank + 1.0), None)
print(f"rank {rank} of {size}: {total.asnumpy().tolist()}", flush=True)
if os.environ.get("KILLED") == str(rank):
    os.kill(os.getpid(), signal.SIGKILL)
if "KILLED" in os.environ:
    try:
        platform.all_reduce(total, None)
    except RuntimeError as error:
        print(f"rank {rank} raised: {error}", flush=True)
else:
    for _ in range(2):
        platform.barrier()
        platform.destroy_process_group()
        assert (platform.get_rank(), platform.get_world_size()) == (0, 1)
        platform.init_process_group()
        group = platform.split_group(None, [[1, 0]])
        assert platform.all_reduce(platform.full((2,), rank + 1.0), group).asnumpy().tolist() == [3, 3]
        assert platform.create_group([rank]).size() == 1
    platform.barrier()
    platform.destroy_process_group()
    print(f"rank {rank} came back", flush=True)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def environment(**more):
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return {**inherited, "PYTHONPATH": str(ROOT), "HYPER_PARALLEL_PLATFORM": "mindspore", "PATH": path, **more}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_plain_processes_and_a_killed_one(program):
    """The survivors raise at once, with the rank of the dead."""
    port = str(free_port())
    names = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "KILLED": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, program], env=environment(RANK=str(rank), **names), stdout=subprocess.PIPE, text=True
        )
        for rank in range(3)
    ]
    said = [process.communicate(timeout=LONG)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL, 0]
    for rank in range(3):
        assert f"rank {rank} of 3: [6.0, 6.0]" in said[rank]
    for rank in (0, 2):
        assert f"rank {rank} raised: all_reduce on rank {rank} cannot end: rank 1 (process " in said[rank]
        assert "has died" in said[rank]


@pytest.mark.sweep("mindspore")
def test_a_world_with_a_secret_is_made_among_strangers(program):
    """Somebody who knows all but the secret calls all the time, from before rank 1 comes."""
    port = free_port()
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    answers = []
    while not processes or processes[0].poll() is None:
        if len(processes) == 0 or (len(processes) == 1 and "refused" in answers):
            shown = environment(RANK=str(len(processes)), **names, HYPER_PARALLEL_SECRET="known to the ranks alone")
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            processes.append(subprocess.Popen([sys.executable, program], env=shown, **pipes))
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as stranger:
            try:
                reception.introduce(stranger, b"", f"world-0--127.0.0.1-{port}/2/rank 0", {"rank": 1})
                answers.append("taken")
            except reception.Refused:
                answers.append("refused")
        time.sleep(0.001)
    said = [process.communicate(timeout=LONG) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert set(answers) == {"refused"}
    assert said[0][1].count("rank 0 sent somebody away: a caller from 127.0.0.1 knows the name, but does not know") == 1
    for rank in range(2):
        assert f"rank {rank} of 2: [3.0, 3.0]" in said[rank][0]
        assert f"rank {rank} came back" in said[rank][0]


def test_a_secret_that_others_can_read_is_refused(program, tmp_path):
    path = tmp_path / "secret"
    path.write_text("known to the ranks alone")
    path.chmod(0o644)
    names = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    shown = environment(**names, HYPER_PARALLEL_SECRET_FILE=str(path))
    done = subprocess.run([sys.executable, program], env=shown, capture_output=True, text=True, timeout=LONG)
    assert f"ValueError: HYPER_PARALLEL_SECRET_FILE={path} has the mode 0644" in done.stderr


def test_an_address_of_ipv6_has_brackets_in_a_url():
    assert groups._whereabouts("tcp://[::1]:29500", 0, 1) == (0, 1, "::1", 29500)
    assert groups._whereabouts("tcp://localhost:29500", 0, 1) == (0, 1, "localhost", 29500)


@pytest.mark.sweep("mindspore")
def test_torchrun(program):
    command = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", program]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    for rank in range(2):  # The two write to one pipe, so their lines may run together.
        assert f"rank {rank} of 2: [3.0, 3.0]" in done.stdout
        assert f"rank {rank} came back" in done.stdout


def test_msrun(program, tmp_path):
    port = f"--master_port={free_port()}"
    places = ["--worker_num=2", "--local_worker_num=2", "--master_addr=127.0.0.1", port, "--log_dir=logs"]
    command = [BIN / "msrun", *places, "--join=True", program]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=LONG)
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert done.returncode == 0, (done.stderr, logs)
    for rank in range(2):
        assert f"rank {rank} of 2: [3.0, 3.0]" in logs[f"worker_{rank}.log"]
        assert f"rank {rank} came back" in logs[f"worker_{rank}.log"]


def test_numpy_2_is_refused_with_the_fix():
    code = (
        "import numpy; numpy.__version__ = '2.1.0'\n"
        "try: import hyper_parallel.platform.mindspore.base.start\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG, env=environment())
    assert "fails at its first operator under numpy 2.1.0; run: pip install 'numpy<2'" in done.stdout, done.stderr


def test_another_version_of_mindspore_is_warned_about(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start._check_version()
    monkeypatch.setattr(mindspore, "__version__", "2.11.0")
    with pytest.warns(RuntimeWarning, match=r"checked on MindSpore 2.10 and this is 2.11.0; .*private_api.py lists"):
        start._check_version()
    assert private_api.CHECKED_VERSION == "2.10"


def test_private_names_are_in_one_file():
    private = {"_pynative_executor", "_Function", "_no_grad", "_make_subclass", "_grad", "_requires_grad", "_grad_node"}
    for path in Path(private_api.__file__).parent.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        used |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
        modules = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        if path.name == "private_api.py":
            assert private <= used
        else:
            assert not private & used, path.name
            assert not any(module.startswith("mindspore._") for module in modules), path.name


def test_the_example_of_the_page_runs():
    (block,) = re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs" / "mindspore.md").read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/mindspore.md", "exec"), {})
