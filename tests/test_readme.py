"""The documents are true: their Python blocks run, their commands work, their links lead somewhere."""

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md"))]

# Commands that would run these tests again, or that .ci/run runs on its own: here make only has to know them.
_RUN_ELSEWHERE = ("make test", "make lint", "make bench", ".ci/run", ".venv/bin/pytest")


def _blocks(language):
    """(document and number, text) of each fenced block of a language."""
    found = []
    for document in DOCUMENTS:
        texts = re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.MULTILINE | re.DOTALL)
        found += [pytest.param(text, id=f"{document.name}-{number}") for number, text in enumerate(texts)]
    return found


def _commands():
    """Each command of the documents once, without its comment."""
    lines = [line for block in _blocks("bash") for line in block.values[0].splitlines()]
    commands = [shlex.join(shlex.split(line, comments=True)) for line in lines]
    return sorted({command for command in commands if command})


def _environment(**variables):
    """The caller's environment without what a test process, a terminal or `make test ARGS=...` adds to it."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTEST_CURRENT_TEST")
    dropped += ("ARGS", "PLATFORM", "TESTS", "EXTRAS", "BENCH", "MAKEOVERRIDES")
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**inherited, "CI": "true", "GLOO_SOCKET_IFNAME": "lo", "HYPER_PARALLEL_PLATFORM": "torch", **variables}


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _run_on_two_processes(script):
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=_environment(RANK=str(rank), LOCAL_RANK=str(rank), **shared),
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [rank.returncode for rank in ranks], "\n".join(outputs)


def _is_an_example(text):
    return any(example.read_text() == text for example in ROOT.glob("examples/*.py"))


@pytest.mark.parametrize("text", [block for block in _blocks("python") if not _is_an_example(block.values[0])])
def test_python_block_runs(text, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(text)
    if "init_process_group" in text:
        statuses, output = _run_on_two_processes(script)
    else:
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, env=_environment())
        statuses, output = [done.returncode], done.stdout + done.stderr
    assert set(statuses) == {0}, output


def test_readme_shows_an_example_as_it_is_and_the_command_that_runs_it_on_two_processes():
    (shown,) = [block.values[0] for block in _blocks("python") if block.id.startswith("README")]
    assert shown == (ROOT / "examples" / "tensor_parallel.py").read_text()
    assert ".venv/bin/torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py" in _commands()


@pytest.mark.parametrize("command", _commands())
def test_command_works(command):
    if command.startswith(_RUN_ELSEWHERE):
        if command.startswith("make "):
            command = f"make --dry-run {command.removeprefix('make ')}"
        else:
            command = f"test -x {shlex.split(command)[0]}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        env=_environment(),
    )
    assert done.returncode == 0, done.stdout
    assert "\x1b" not in done.stdout, "colours where there is no terminal"
    if command == "make demo":
        assert "The losses are equal on every rank at all 60 steps" in done.stdout


def test_the_readme_opens_with_demo_and_test():
    first_block = next(block.values[0] for block in _blocks("bash") if block.id.startswith("README"))
    commands = [line.partition("#")[0].strip() for line in first_block.splitlines()]
    assert commands == ["make demo", "make test"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert missing == []
