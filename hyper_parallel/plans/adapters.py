"""Layers with an adapter around them, as peft makes them: a plan reads them as the layers that they were.

The adapter's own weights are small and stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_INSIDE = "base_layer"


def without_adapters(modules: Mapping[str, Any]) -> dict[str, Any]:
    """The modules by path, with a layer at the path of the adapter around it, and nothing else of that."""
    return {
        path: modules[adapted_path(path, modules)]
        for path in modules
        if not any(f"{outer}.{_INSIDE}" in modules for outer in _around(path))
    }


def adapted_path(path: str, modules: Mapping[str, Any]) -> str:
    """Where the layer itself is that :func:`without_adapters` has at ``path``."""
    while f"{path}.{_INSIDE}" in modules:
        path = f"{path}.{_INSIDE}"
    return path


def adapted_parameters(modules: Mapping[str, Any]) -> list[str]:
    """Parameters that peft's ``target_parameters`` adapts, by their names without it; it replaces them while their
    module runs."""
    wrappers = {path: module for path, module in modules.items() if type(module).__name__ == "ParamWrapper"}
    return [f"{path}.{module.parameter_name}".replace(f".{_INSIDE}.", ".") for path, module in wrappers.items()]


def _around(path: str) -> list[str]:
    names = path.split(".")
    return [".".join(names[:count]) for count in range(1, len(names))]
