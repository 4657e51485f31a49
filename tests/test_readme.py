"""The documents are true: their Python blocks run, their commands work, their links lead somewhere."""

import multiprocessing
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.commands import command_environment
from tests.world import small_or_sweep
from tests.world.frameworks import FRAMEWORKS

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md"))]

# Commands that would run these tests again, or that .ci/run or test_demo.py runs: here make only has to know them.
_RUN_ELSEWHERE = ("make test", "make sweep", "make demo", "make lint", "make bench", ".ci/run", ".venv/bin/pytest")
# Too long for every change: another program under torchrun, a model of 70 billion parameters, a second forecast.
_SWEPT = ("examples/layouts.py", "dry-run llama-70b", "forecast examples/run.toml --nproc 4")
_COMMAND_LINE = ".venv/bin/hyper-parallel "


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


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def forks():
    """Processes that have the frameworks loaded already: the blocks are many, and an import takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*FRAMEWORKS["torch"].preloaded])
    with pytest.MonkeyPatch.context() as patch:  # Forking is sound only with one thread.
        for name, value in command_environment(
            OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1"
        ).items():
            patch.setenv(name, value)
        forkserver.ensure_running()
        yield context


def _print_to(output):
    with open(output, "w") as file:
        for standard in (1, 2):
            os.dup2(file.fileno(), standard)


def _run_script(script, output, variables):
    os.environ.update(variables)
    _print_to(output)
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")


def _run_command_line(words, output):
    os.chdir(ROOT)
    _print_to(output)
    sys.argv = words
    runpy.run_module("hyper_parallel.cli", run_name="__main__", alter_sys=True)


def _run_on_processes(forks, script, num_processes):
    """(exit codes, output) of a script that is run as the ranks of a world."""
    shared = {"WORLD_SIZE": str(num_processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    outputs = [script.with_suffix(f".{rank}") for rank in range(num_processes)]
    ranks = [
        forks.Process(target=_run_script, args=(script, output, {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared}))
        for rank, output in enumerate(outputs)
    ]
    return _ended(ranks), "\n".join(output.read_text() for output in outputs)


def _ended(processes):
    """Their exit codes."""
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=300)
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def _is_an_example(text):
    return any(example.read_text() == text for example in ROOT.glob("examples/*.py"))


# The blocks of this page go on from each other, on two ranks: tests/context_parallel/test_page.py runs them.
_PAGE_OF_TWO_RANKS = "long_sequences.md"


@pytest.mark.parametrize(
    "text",
    [
        block
        for block in _blocks("python")
        if not _is_an_example(block.values[0]) and not block.id.startswith(_PAGE_OF_TWO_RANKS)
    ],
)
def test_python_block_runs(text, tmp_path, forks):
    script = tmp_path / "block.py"
    script.write_text(text)
    statuses, output = _run_on_processes(forks, script, 2 if re.search(r"init_process_group|run\.mine", text) else 1)
    assert set(statuses) == {0}, output


def test_readme_shows_an_example_as_it_is_and_the_command_that_runs_it_on_two_processes():
    (shown,) = [block.values[0] for block in _blocks("python") if block.id.startswith("README")]
    assert shown == (ROOT / "examples" / "hugging_face.py").read_text()
    assert ".venv/bin/torchrun --standalone --nproc-per-node 2 examples/hugging_face.py tp=2" in _commands()


@pytest.mark.parametrize(
    "command", small_or_sweep(_commands(), [one for one in _commands() if not any(swept in one for swept in _SWEPT)])
)
def test_command_works(command, forks, tmp_path):
    if command.startswith(_COMMAND_LINE):  # as tests/test_cli.py starts it, but with the frameworks loaded already
        output = tmp_path / "output"
        assert _ended([forks.Process(target=_run_command_line, args=(shlex.split(command), output))]) == [0], output
        assert "\x1b" not in output.read_text(), "colours where there is no terminal"
        return
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
        env=command_environment(),
    )
    assert done.returncode == 0, done.stdout
    assert "\x1b" not in done.stdout, "colours where there is no terminal"


def test_the_readme_opens_with_demo_and_test():
    first_block = next(block.values[0] for block in _blocks("bash") if block.id.startswith("README"))
    commands = [line.partition("#")[0].strip() for line in first_block.splitlines()]
    assert commands == ["make demo", "make test"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert missing == []
