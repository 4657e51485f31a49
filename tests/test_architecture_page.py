"""docs/architecture.md names what is there: rooms, functions on their way, attributes, replaced functions."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from hyper_parallel.platform.torch.takes_over.install import REPLACED

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGE = _ROOT / "hyper_parallel"
_PAGE = (_ROOT / "docs" / "architecture.md").read_text()
_FILES = sorted(_PACKAGE.rglob("*.py"))
_TREE, *_WALKS = re.findall(r"^```text\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _names_in(path: Path) -> set[str]:
    """The functions and classes of a file, wherever in it they are."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(_parsed(path)) if isinstance(node, kinds)}


def test_every_room_is_in_the_picture():
    rooms = {path.parent.relative_to(_PACKAGE).as_posix() for path in _FILES}
    missing = [room for room in sorted(rooms) if room not in (".", "core") and f"{Path(room).name}/" not in _TREE]
    assert missing == []


def test_functions_on_the_way_are_where_the_page_says():
    steps = [found for walk in _WALKS for found in re.findall(r"^ *([\w.]+)(?: \"\w+\")? {2,}(\w+\.py)\b", walk, re.M)]
    assert len(steps) > 40
    wrong = [
        f"{function} is not in {file}"
        for function, file in steps
        if not any(set(function.split(".")) <= _names_in(path) for path in _FILES if path.name == file)
    ]
    assert wrong == []


def _attributes_of_dtensors() -> Iterator[str]:
    """Those that a kind of DTensor declares, and those that a deep copy leaves behind."""
    for path in _FILES:
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.ClassDef) and (
                node.name == "DTensorBase"
                or any(ast.unparse(base).endswith(("DTensor", "DTensorBase")) for base in node.bases)
            ):
                for line in node.body:
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                        yield line.target.id
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_NOT_COPIED":
                yield from ast.literal_eval(node.value.args[0])


def test_every_attribute_of_a_dtensor_is_explained():
    found = {name for name in _attributes_of_dtensors() if name != "_on_operator"}
    assert {"_layout", "_edges", "_handle", "_source", "_parts", "_local"} <= found
    carries = _PAGE.partition("## What a DTensor carries")[2].partition("\n## ")[0]
    explained = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^- (\*\*.*?\*\*)[: ]", carries, re.M))))
    assert found - explained == set()
    source = "".join(path.read_text() for path in _FILES)
    assert [name for name in explained if name not in source] == []


def test_every_replaced_function_of_pytorch_is_listed():
    assert [one.name for one in REPLACED if f"`torch.{one.name}`" not in _PAGE] == []
