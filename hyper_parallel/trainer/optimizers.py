"""The optimizer that a config asks for: parameters that decay and those that do not, in two groups."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from hyper_parallel.platform import get_platform

if TYPE_CHECKING:
    from hyper_parallel.trainer.config.sections.optimizer import OptimizerConfig

__all__ = ["make_optimizer", "set_rate"]


def make_optimizer(config: OptimizerConfig, named: Iterable[tuple[str, Any]]) -> Any:
    """An optimizer of the framework over the parameters that need gradients.

    Parameters whose names match ``no_decay``, and those of one dim (norms, biases), do not decay.
    """
    platform = get_platform()
    decays: list[Any] = []
    stays: list[Any] = []
    for name, parameter in named:
        if not platform.requires_grad(parameter):
            continue
        is_kept = len(parameter.shape) <= 1 or any(fnmatchcase(name, pattern) for pattern in config.no_decay)
        (stays if is_kept else decays).append(parameter)
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((decays, config.weight_decay), (stays, 0.0))
        if parameters
    ]
    if not groups:
        raise ValueError("no parameter of the model needs a gradient: there is nothing to train")
    options: dict[str, Any] = {"lr": config.lr}
    if config.name == "sgd":
        options["momentum"] = config.momentum
    else:
        options |= {"betas": tuple(config.betas), "eps": config.eps}
    return platform.new_optimizer(config.name, groups, options)


def set_rate(optimizer: Any, rate: float) -> None:
    """The learning rate of all parameters from now on."""
    for index in range(len(optimizer.param_groups)):
        get_platform().set_optimizer_options(optimizer, index, {"lr": rate})
