"""Paths of a model's modules, and the sizes of its linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.platform import get_platform


def is_below(path: str, other: str) -> bool:
    return path.startswith(f"{other}.") if other else bool(path)


def below(path: str, modules: Mapping[str, Any]) -> list[str]:
    return [other for other in modules if is_below(other, path)]


def own_weights(module: Any) -> list[str]:
    """Names of the module's own parameters with more than one dim."""
    return [name for name, parameter in get_platform().own_parameters(module).items() if parameter.ndim > 1]


def sizes_of(path: str, modules: Mapping[str, Any]) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer."""
    dims = get_platform().linear_weight_dims(modules[path])
    assert dims is not None, f"{path} is not a linear layer"
    outputs, inputs = dims
    shape = get_platform().own_parameters(modules[path])["weight"].shape
    return shape[inputs], shape[outputs]
