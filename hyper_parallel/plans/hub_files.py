"""How files of the hub call the tensors of an unmodified model of transformers: other names, parts of what is one here,
experts one by one that are stacked here.

Note [Tried without memory and with numbers]
Transformers knows for each of its models how tensors are renamed, split and stacked when it saves one, as code. So this
code runs once on tensors without memory: what comes out as it went in has been renamed. It runs again on the others,
small and with no number in them twice: where the numbers are found tells what became of what. A tensor of which this
does not tell keeps its own name; what does not fit is found where files are compared with the model.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hyper_parallel.platform import get_platform

__all__ = ["hub_mapping"]

_platform = get_platform()

Shape = tuple[int, ...]

_EXPERTS = 2  # of each mixture; the others are called as they are
_SMALL = (2, 3)  # an expert's matrix; dims of one number would be lost where it is taken out of the stack


def hub_mapping(model: Any, shapes: Mapping[str, Shape]) -> list[dict[str, Any]]:
    """Rules for the tensors of a model of transformers, for ``mapping=``; none for other models."""
    saving = _code_for_saving(model)
    if saving is None:
        return []
    dtype = _platform.str_to_dtype("float64")
    empty = {name: _platform.new_tensor(shape, dtype, "meta") for name, shape in shapes.items()}
    found = saving(model, dict(empty))
    files = {id(one): name for name, one in found.items()}
    rules = [{"files": files[id(one)], "ours": name} for name, one in empty.items() if id(one) in files]
    others = {name: shapes[name] for name, one in empty.items() if id(one) not in files}
    sizes = {name: tuple(one.shape) for name, one in found.items()}
    rules += _of_converted(model, saving, others, sizes) if others else []
    return _in_any_block(rules)


def _code_for_saving(model: Any) -> Any:
    if not any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__):
        return None
    try:
        loading = importlib.import_module("transformers.core_model_loading")
    except ModuleNotFoundError:  # transformers 4 has no fused experts
        return None
    return loading.revert_weight_conversion


def _of_converted(
    model: Any, saving: Any, shapes: Mapping[str, Shape], sizes: Mapping[str, Shape]
) -> list[dict[str, Any]]:
    """Rules for tensors that are more than renamed; ``sizes`` are those of the files."""
    numbers: dict[str, np.ndarray] = {}
    next_number = 0
    for name, shape in shapes.items():
        small = _small(name, shape)
        count = int(np.prod(small))
        numbers[name] = np.arange(next_number, next_number + count).reshape(small).astype(np.float64)
        next_number += count
    dtype = _platform.str_to_dtype("float64")
    found = saving(model, {name: _platform.from_numpy(value, dtype, "cpu") for name, value in numbers.items()})
    parts: dict[str, dict[str, np.ndarray]] = {name: {} for name in shapes}
    ends = np.cumsum([value.size for value in numbers.values()])
    for name, value in found.items():
        part = _platform.tensor_to_numpy(value)
        source = int(np.searchsorted(ends, part.reshape(-1)[0], side="right"))
        parts[list(shapes)[source]][name] = part
    rules = []
    for name, pieces in parts.items():
        rule = _stack(name, numbers[name], pieces) if _is_stack(name, shapes[name]) else None
        rule = rule or _join(name, numbers[name], pieces)
        rules.append(rule if rule is not None and _fits(rule, shapes[name], sizes) else {"files": name, "ours": name})
    return rules


def _is_stack(name: str, shape: Shape) -> bool:
    return len(shape) == 3 and ".experts." in f".{name}"


def _small(name: str, shape: Shape) -> Shape:
    if _is_stack(name, shape):
        num_parts = 2 if name.rpartition(".")[2] == "gate_up_proj" else 1
        return min(shape[0], _EXPERTS), num_parts * _SMALL[0], _SMALL[1]
    return (*shape[:1], *(1 for _ in shape[1:]))


def _stack(name: str, numbers: np.ndarray, pieces: Mapping[str, np.ndarray]) -> dict[str, Any] | None:
    """A rule for a stack that became a matrix for each expert, or two."""
    patterns = []
    for begin in range(0, numbers.shape[1], _SMALL[0]):
        spelled = set()
        for expert, matrix in enumerate(numbers[:, begin : begin + _SMALL[0]]):
            same = [file for file, piece in pieces.items() if np.array_equal(piece, matrix)]
            spelled |= {_numbered(file, expert) for file in same} or {""}
        if len(spelled) != 1 or spelled == {""}:
            return None
        patterns.append(spelled.pop())
    if len(patterns) == 1:
        return {"files": patterns[0], "ours": name, "stack": 0}
    return {"files": patterns, "ours": name, "stack": 0, "join": 1}


def _join(name: str, numbers: np.ndarray, pieces: Mapping[str, np.ndarray]) -> dict[str, Any] | None:
    """A rule for a tensor that became several, or was only given another name."""
    if [np.array_equal(piece, numbers) for piece in pieces.values()] == [True]:
        return {"files": next(iter(pieces)), "ours": name}
    if len(pieces) < 2 or any(piece.ndim != numbers.ndim for piece in pieces.values()):
        return None
    files = sorted(pieces, key=lambda file: pieces[file].reshape(-1)[0])
    if not np.array_equal(np.concatenate([pieces[file] for file in files]), numbers):
        return None
    return {"files": files, "ours": name, "join": 0, "sizes": [len(pieces[file]) for file in files]}


def _fits(rule: Mapping[str, Any], shape: Shape, sizes: Mapping[str, Shape]) -> bool:
    """Whether the files' whole tensors have the sizes that the rule says; a stack's are found where it is loaded."""
    if "stack" in rule:
        return True
    files = [rule["files"]] if isinstance(rule["files"], str) else rule["files"]
    rows = sum(sizes[file][0] for file in files) if "join" in rule else sizes[files[0]][0] if shape else 0
    return all(sizes[file][1:] == shape[1:] for file in files) and rows == (shape[0] if shape else 0)


def _in_any_block(rules: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rules with ``*`` for the numbers of blocks, where the tensors of all blocks are called alike on both sides;
    without those that change nothing."""
    theirs: dict[str, set[str]] = {}
    ours: dict[str, set[str]] = {}
    for rule in rules:
        for file in _files(rule):
            theirs.setdefault(_starred(rule["ours"]), set()).add(str([_starred(one) for one in _files(rule)]))
            ours.setdefault(_starred(file), set()).add(_starred(rule["ours"]))
    alone, shared = [], []
    for rule in rules:
        names = [rule["ours"], *_files(rule)]
        if names[0] == rule["files"]:
            continue
        forms = [_starred(name) for name in names]
        is_shared = len(theirs[forms[0]]) == 1 and all(len(ours[form]) == 1 for form in forms[1:])
        if is_shared and len({tuple(re.findall(_NUMBER, name)) for name in names}) == 1:
            rule = {**rule, "ours": forms[0], "files": forms[1] if isinstance(rule["files"], str) else forms[1:]}
            if rule not in shared:
                shared.append(rule)
        else:
            alone.append(rule)
    return alone + shared


_NUMBER = r"(?<=\.)\d+(?=\.)"


def _starred(name: str) -> str:
    return re.sub(_NUMBER, "*", name)


def _files(rule: Mapping[str, Any]) -> list[str]:
    return [rule["files"]] if isinstance(rule["files"], str) else list(rule["files"])


def _numbered(name: str, expert: int) -> str:
    """The name of an expert's tensor with ``{n}`` for its number, the last one in the name."""
    return re.sub(rf"\.{expert}\.(?!.*\.\d+\.)", ".{n}.", name)
