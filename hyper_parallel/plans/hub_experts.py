"""How files of the hub call the experts of an unmodified mixture: one by one, where transformers has them stacked.

Note [Tried with numbers]
Transformers knows for each of its models how tensors are renamed, split and stacked when it saves one, as code. So this
code runs once, on small tensors in place of the weights, in which no number occurs twice: where the numbers are found
tells what became of what. A tensor of which this does not tell keeps its own name; what does not fit is found where
files are compared with the model.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from hyper_parallel.core.expert_parallel.module_experts import is_module_of_experts
from hyper_parallel.plans.layers import is_below
from hyper_parallel.platform import get_platform

__all__ = ["hub_mapping"]

_platform = get_platform()

_EXPERTS = 2  # of each mixture; the others are called as they are
_SMALL = (2, 3)  # an expert's matrix; dims of one number would be lost where it is taken out of the stack


def hub_mapping(model: Any, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rules for the mixtures of a model of transformers, for ``mapping=``; none for other models."""
    saving = _code_for_saving(model)
    if saving is None:
        return []
    modules = dict(_platform.get_cells_and_names(model))
    experts = [path for path, module in modules.items() if is_module_of_experts(module)]
    if not experts:
        return []
    around = [path.rpartition(".")[0] for path in experts]
    names = [name for name in state if any(is_below(name, path) for path in around if path)]
    numbers: dict[str, np.ndarray] = {}
    next_number = 0
    for name in names:
        shape = tuple(state[name].shape)
        parts = 2 if name.rpartition(".")[2] == "gate_up_proj" and len(shape) == 3 else 1
        is_stacked = len(shape) == 3 and any(is_below(name, path) for path in experts)
        small = (min(shape[0], _EXPERTS), parts * _SMALL[0], _SMALL[1]) if is_stacked else (1,) * len(shape)
        numbers[name] = np.arange(next_number, next_number + int(np.prod(small))).reshape(small).astype(np.float64)
        next_number += int(np.prod(small))
    dtype = _platform.str_to_dtype("float64")
    found = saving(model, {name: _platform.from_numpy(value, dtype, "cpu") for name, value in numbers.items()})
    places = {
        int(number): (name, tuple(value.shape))
        for name, value in found.items()
        for number in _platform.tensor_to_numpy(value).reshape(-1)
    }
    rules = [_in_any_block(rule) for name, value in numbers.items() if (rule := _rule(name, value, places)) is not None]
    return [rule for place, rule in enumerate(rules) if rule not in rules[:place]]


def _code_for_saving(model: Any) -> Any:
    if not any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__):
        return None
    try:
        loading = importlib.import_module("transformers.core_model_loading")
    except ModuleNotFoundError:  # transformers 4 has no fused experts
        return None
    return loading.revert_weight_conversion


def _rule(name: str, numbers: np.ndarray, places: Mapping[int, tuple[str, Any]]) -> dict[str, Any] | None:
    """What became of one tensor; None: it is the same, or cannot be told."""
    first, shape = places[int(numbers.reshape(-1)[0])]
    if {places[int(number)][0] for number in numbers.reshape(-1)} == {first}:
        return {"files": first, "ours": name} if first != name and shape == numbers.shape else None
    if numbers.ndim != 3 or any(places[int(number)][1] != _SMALL for number in numbers.reshape(-1)):
        return None
    patterns = []
    for part in range(0, numbers.shape[1], _SMALL[0]):
        mine = enumerate(numbers[:, part : part + _SMALL[0]])
        spelled = {_numbered(places[int(one)][0], expert) for expert, block in mine for one in block.reshape(-1)}
        if len(spelled) != 1:
            return None
        patterns.append(spelled.pop())
    if len(patterns) == 1:
        return {"files": patterns[0], "ours": name, "stack": 0}
    return {"files": patterns, "ours": name, "stack": 0, "join": 1}


def _in_any_block(rule: dict[str, Any]) -> dict[str, Any]:
    """The rule with ``*`` for the numbers of blocks, where both sides have the same ones."""
    names = [rule["ours"], *(rule["files"] if "join" in rule else [rule["files"]])]
    if len({tuple(re.findall(r"\.(\d+)(?=\.)", name)) for name in names}) > 1:
        return rule
    ours, *files = (re.sub(r"\.\d+(?=\.)", ".*", name) for name in names)
    return {**rule, "ours": ours, "files": files if "join" in rule else files[0]}


def _numbered(name: str, expert: int) -> str:
    """The name of an expert's tensor with ``{n}`` for its number, the last one in the name."""
    return re.sub(rf"\.{expert}\.(?!.*\.\d+\.)", ".{n}.", name)
