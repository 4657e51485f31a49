"""The pytest plugin of the test worlds: `--platform`, `--world-size`, the fixture `worlds`, cases of `run_on_ranks`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    config.addinivalue_line("markers", "sweep: too long for every change; run by make sweep")
    config.addinivalue_line(
        "markers", "processes(why): the ranks of this test are real processes, also where others are threads"
    )
    name = config.getoption("--platform")
    if name not in FRAMEWORKS:  # It can come from the environment, which argparse does not check.
        raise pytest.UsageError(f"HYPER_PARALLEL_PLATFORM={name}: must be one of {', '.join(FRAMEWORKS)}")
    if not FRAMEWORKS[name].is_installed:
        raise pytest.UsageError(f'--platform={name}: {name} is not installed; pip install "hyper-parallel[{name}]"')
    os.environ["HYPER_PARALLEL_PLATFORM"] = name


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
        sizes = [*mark.args, *(pytest.param(size, marks=pytest.mark.sweep) for size in mark.kwargs["sweep"])]
        ids = [f"world{size}" for size in (*mark.args, *mark.kwargs["sweep"])]
        metafunc.parametrize(WORLD_SIZE, sizes, ids=ids)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted, sweep = config.getoption("--world-size"), config.getoption("--sweep")

    def is_selected(item: pytest.Item) -> bool:
        return (wanted is None or _world_size(item) == wanted) and (sweep or item.get_closest_marker("sweep") is None)

    config.hook.pytest_deselected(items=[item for item in items if not is_selected(item)])
    items[:] = [item for item in items if is_selected(item)]


def _world_size(item: pytest.Item) -> int | None:
    call = getattr(item, "callspec", None)
    return call.params.get(WORLD_SIZE) if call else None


# Whose ranks are threads: what communicates through the platform only, and is not about how it does.
_ON_THREADS = ("core", "shard", "tensor_parallel", "fully_shard", "parallel")


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
