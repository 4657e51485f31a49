"""The pytest plugin of the test worlds: `--platform`, `--world-size`, the fixture `worlds`, cases of `run_on_ranks`."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.world.cpu_seconds import CpuSeconds, is_possible
from tests.world.decorator import WORLD_SIZE
from tests.world.frameworks import FRAMEWORKS
from tests.world.world import Worlds


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("worlds of processes")
    group.addoption(
        "--platform",
        choices=tuple(FRAMEWORKS),
        default=os.environ.get("HYPER_PARALLEL_PLATFORM", "torch").lower(),
        help="framework the tests run on (default: HYPER_PARALLEL_PLATFORM, else torch)",
    )
    group.addoption(
        "--world",
        choices=("threads", "processes"),
        help="what the ranks of `run_on_ranks` are; without it threads of one process for the parallelisms on PyTorch "
        "(but for tests marked `processes`, and in a sweep), real processes for all else",
    )
    group.addoption("--sweep", action="store_true", help="try everything, not the small selection of every change")
    group.addoption(
        "--world-size", type=int, metavar="N", help="run only the cases of `run_on_ranks` that have N ranks"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "ranks(*sizes, sweep): the test runs on every rank of worlds of these sizes (use run_on_ranks)"
    )
    config.addinivalue_line(
        "markers",
        "sweep(*platforms): too long for every change, on these frameworks or on all; run by make sweep",
    )
    config.addinivalue_line(
        "markers", "processes(why): the ranks of this test are real processes, also where others are threads"
    )
    name = config.getoption("--platform")
    if name not in FRAMEWORKS:  # It can come from the environment, which argparse does not check.
        raise pytest.UsageError(f"HYPER_PARALLEL_PLATFORM={name}: must be one of {', '.join(FRAMEWORKS)}")
    if not FRAMEWORKS[name].is_installed:
        raise pytest.UsageError(f'--platform={name}: {name} is not installed; pip install "hyper-parallel[{name}]"')
    os.environ["HYPER_PARALLEL_PLATFORM"] = name
    if is_possible():
        config.pluginmanager.register(CpuSeconds())


_USES_THREADS = pytest.StashKey[bool]()
_WORLDS = pytest.StashKey[Worlds]()

_IMPORTS = {
    "torch": re.compile(
        r"^\s*(import|from) (torch|hyper_parallel\.platform\.torch|tests\.shard\.op_coverage)\b", re.MULTILINE
    ),
    "mindspore": re.compile(
        r"^\s*(import|from) (mindspore|hyper_parallel\.platform\.mindspore|tests\.shard\.mindspore_samples)\b",
        re.MULTILINE,
    ),
}


_ONLY_ON = re.compile(r'^only_on = "(\w+)"  # .', re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that imports one framework by name is about that one, unless it goes through ``tests.frameworks``.

    ``only_on = "torch"  # why`` says so in words.
    """
    if not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    source = collection_path.read_text()
    tested = config.getoption("--platform")
    if (only := _ONLY_ON.search(source)) is not None:
        return True if only[1] != tested else None
    if "from tests.frameworks import" in source:
        return None
    if collection_path.parent.name in ("tests", "world") and tested != "torch":
        return True  # About the package, its commands and pages, or about the test world: once is enough.
    return True if any(found.search(source) for name, found in _IMPORTS.items() if name != tested) else None


def pytest_report_header(config: pytest.Config) -> str:
    return f"platform under test: {config.getoption('--platform')}"


@pytest.hookimpl(tryfirst=True)  # The world comes first in the names of cases: [world4-bfloat16].
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is not None:
        often = mark.args
        if metafunc.config.getoption("--platform") == "mindspore":
            often = _few_sizes(mark.args, metafunc.definition.path)
        sizes = (*mark.args, *mark.kwargs["sweep"])
        cases = [pytest.param(size, marks=() if size in often else pytest.mark.sweep) for size in sizes]
        metafunc.parametrize(WORLD_SIZE, cases, ids=[f"world{size}" for size in sizes])


# Note [What runs on MindSpore at every change]
# A rank on MindSpore is a new interpreter that takes five seconds of a core to start, and an operator takes many times
# as long as on PyTorch, where the same tests run in full, in one process. So at every change a test runs on the smaller
# of its worlds. These are worlds of 2 ranks, and of 4 in one file, for meshes of two axes: four more interpreters cost
# as much as all tests of a folder. A test on ranks that runs on both frameworks has the first and the last of its
# cases. A sweep has all.
_SIZES_ON_MINDSPORE = (2, 4)
_ON_FOUR_ON_MINDSPORE = "fully_shard/on_mindspore/test_training.py"
_CASES_ON_MINDSPORE = 2


def _few_sizes(sizes: tuple[int, ...], path: Path) -> tuple[int, ...]:
    on_four = path.as_posix().endswith(_ON_FOUR_ON_MINDSPORE)
    return tuple(sorted(set(sizes) & set(_SIZES_ON_MINDSPORE if on_four else _SIZES_ON_MINDSPORE[:1]))[:1])


def _is_mindspores(path: Path) -> bool:
    return _IMPORTS["mindspore"].search(path.read_text()) is not None


def _few_cases(items: list[pytest.Item]) -> set[pytest.Item]:
    """Those of tests on ranks that PyTorch runs too: the first and the last case of each."""
    by_test: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("ranks") is not None and not _is_mindspores(item.path):
            by_test.setdefault((item.path, item.originalname), []).append(item)
    left_out = [cases[1:-1] for cases in by_test.values() if len(cases) > _CASES_ON_MINDSPORE]
    return {item for cases in left_out for item in cases}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted, sweep = config.getoption("--world-size"), config.getoption("--sweep")

    on_mindspore = config.getoption("--platform") == "mindspore"

    def is_selected(item: pytest.Item) -> bool:
        if wanted is not None and _world_size(item) != wanted:
            return False
        marks = [] if sweep else [mark.args for mark in item.iter_markers("sweep")]
        return not any(not platforms or config.getoption("--platform") in platforms for platforms in marks)

    selected = [item for item in items if is_selected(item)]
    if on_mindspore and not sweep:
        left_out = _few_cases(selected)
        selected = [item for item in selected if item not in left_out]
    chosen = set(selected)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = selected


def _world_size(item: pytest.Item) -> int | None:
    call = getattr(item, "callspec", None)
    return call.params.get(WORLD_SIZE) if call else None


# Whose ranks are threads: what communicates through the platform only, and is not about how it does.
_ON_THREADS = ("core", "shard", "tensor_parallel", "fully_shard", "context_parallel", "parallel", "pipeline_parallel")


def _uses_threads(item: pytest.Item) -> bool:
    asked = item.config.getoption("--world")
    may = item.config.getoption("--platform") == "torch" and item.path.parent.name in _ON_THREADS
    if asked is None:
        asked = "processes" if item.config.getoption("--sweep") else "threads"
    return may and asked == "threads" and item.get_closest_marker("processes") is None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.config.stash[_USES_THREADS] = _uses_threads(item)
    if _WORLDS in item.config.stash:
        item.config.stash[_WORLDS].uses_threads = item.config.stash[_USES_THREADS]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Between files this process leaves the world that tests have joined: files run in any order."""
    is_last = nextitem is None or nextitem.path != item.path
    if is_last and {item.config.getoption("--platform"), "hyper_parallel.platform.platform"} <= sys.modules.keys():
        from hyper_parallel.platform import get_platform

        with contextlib.suppress(RuntimeError, ValueError):  # what it says where there is none
            get_platform().get_backend()
            get_platform().destroy_process_group()


@pytest.fixture(scope="session")
def worlds(pytestconfig: pytest.Config) -> Iterator[Worlds]:
    """`worlds(4).run(function, *args)`: the results of a module-level function by rank, on 4 real processes."""
    worlds = Worlds(pytestconfig.getoption("--platform"))
    worlds.sweep = pytestconfig.getoption("--sweep")
    worlds.uses_threads = pytestconfig.stash[_USES_THREADS]
    pytestconfig.stash[_WORLDS] = worlds
    yield worlds
    worlds.close()


@pytest.fixture(scope="session")
def sweep(pytestconfig: pytest.Config) -> bool:
    """Whether this run tries everything (``make sweep``), and not only the small selection of every change."""
    return pytestconfig.getoption("--sweep")
