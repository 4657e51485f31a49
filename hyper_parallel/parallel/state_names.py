"""Names in checkpoints that are the same on both frameworks: MindSpore calls the weight of an embedding otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.core.distributed_checkpoint.planning.flatten import Entries
from hyper_parallel.platform import get_platform

__all__ = ["renamed_model", "renamed_optimizer", "shared_names"]

_platform = get_platform()


def shared_names(model: Any) -> dict[str, str]:
    """From names of this framework to those of both, where they differ."""
    names = {}
    for path, module in _platform.get_cells_and_names(model):
        own = _platform.weight_name(module)
        if own != "weight":
            start = f"{path}." if path else ""
            names[f"{start}{own}"] = f"{start}weight"
    return names


def renamed_model(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The state of a model by other names."""
    return {names.get(name, name): value for name, value in state.items()}


def renamed_optimizer(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The state of an optimizer by other names of parameters; each is kept apart, as stages have different ones."""
    return {kind: Entries(renamed_model(by_name, names)) for kind, by_name in state.items()}
