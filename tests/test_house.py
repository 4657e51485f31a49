"""A newcomer finds their way: few files a folder, short files, private names of frameworks in one place."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGE = _ROOT / "hyper_parallel"

MOST_FILES = 18
MOST_LINES = 400
# One idea each, that sub-folders would only cut apart: a file per family of operators; layouts and tensors,
# whose contracted names make sub-packages import each other in circles.
LARGE_FOLDERS = {"core/shard/rules", "core/dtensor"}
LONG_FILES: dict[str, str] = {}
# Where names that a framework keeps to itself may stand: the file for them, and what replaces functions.
PRIVATE_NAMES = re.compile(r"platform/torch/(private_api\.py|takes_over/)")
# PyTorch's own code asks tensors for `layout` and means dense or sparse; programs ask DTensors for it and mean where
# the data lies (HyperParallel 1.0's name). Only the frame tells the two apart.
CALLER_SNIFFING = {"platform/torch/base/dtensor_base.py"}


def _files() -> list[Path]:
    return sorted(_PACKAGE.rglob("*.py"))


def _name(path: Path) -> str:
    return path.relative_to(_PACKAGE).as_posix()


def test_no_folder_is_a_heap():
    counts = Counter(_name(path.parent) for path in _files())
    assert {
        folder: count for folder, count in counts.items() if count > MOST_FILES and folder not in LARGE_FOLDERS
    } == {}


def test_files_are_short():
    long = {_name(path): lines for path in _files() if (lines := len(path.read_text().splitlines())) > MOST_LINES}
    assert {name: lines for name, lines in long.items() if name not in LONG_FILES} == {}
    assert set(LONG_FILES) <= set(long), "exceptions that are not needed any more"


def _private_names_of_torch(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """`torch._C`, `from torch._ops import x`, `from torch.utils import _pytree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if any(name.startswith("_") and not name.startswith("__") for name in names):
                yield node.lineno, f"from {node.module} import {', '.join(alias.name for alias in node.names)}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch.") and "._" in alias.name:
                    yield node.lineno, alias.name
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            text = ast.unparse(node.value)
            if text in ("torch", "dist", "c10d") or (text.startswith("torch.") and not text.startswith("torch.Tensor")):
                yield node.lineno, f"{text}.{node.attr}"


def test_private_names_of_torch_are_in_their_file():
    found = [
        f"{_name(path)}:{line}: {what}"
        for path in _files()
        if not PRIVATE_NAMES.search(_name(path))
        for line, what in _private_names_of_torch(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch._ops import OpOverload", "from torch._ops import OpOverload"),
        ("from torch.utils import _pytree", "from torch.utils import _pytree"),
        ("torch._C._f()", "torch._C"),
        ("c10d._world", "c10d._world"),
        ("self._own, torch.Tensor._version, torch.__version__", None),
    ],
)
def test_a_private_name_is_found(line, said):
    found = [what for _, what in _private_names_of_torch(ast.parse(line))]
    assert (said in found) if said else not found


def test_nobody_looks_who_calls():
    looking = {_name(path) for path in _files() if re.search(r"sys\._getframe|inspect\.currentframe", path.read_text())}
    assert looking <= CALLER_SNIFFING
