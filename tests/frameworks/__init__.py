"""The platform under test, spoken to in PyTorch's tensors on every framework, so that one text tests all of them.

A test makes its inputs and what it expects with PyTorch, in one process. What is tested comes from here:
``collectives``, ``differentiable``, ``dist`` and the like. On PyTorch these are the platform's own functions. On
MindSpore they are the same functions behind a bridge (``bridge.py``): tensors cross with their values, dtype and
strides, what is written in place is written back, gradients cross too. ``known_dtypes`` leaves out what
the framework has no numbers for.

Where the subject keeps tensors (parameters, graphs, distributed tensors) a test works on the framework's own, made and
compared by ``values.py``: ``ours``, ``equal``, ``backward`` and the like. ``platform_module`` gives a file of the
platform, ``models`` small modules with the same names and the same behaviour on every framework.

Tests of one framework alone import it by name in a file of their own and run on that framework only.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hyper_parallel.platform import get_platform
from tests.frameworks.values import (
    assert_close,
    backward,
    distribute_tensor,
    dtype_of,
    equal,
    from_local,
    grad,
    grad_of,
    is_leaf,
    known_names,
    leaf,
    named,
    needs_second_gradients,
    on_mindspore,
    ours,
    parameter,
    requires_grad,
    same_bits,
    theirs,
    write,
    zero_grad,
)

if on_mindspore:
    from tests.frameworks.bridge import known_dtypes, over_the_bridge
    from tests.frameworks.bridge_modules import collectives, differentiable, groups, overlap
else:
    from hyper_parallel.platform.torch.communication import collectives, differentiable, groups, overlap

    def known_dtypes(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
        return list(dtypes)

    def over_the_bridge(function: Any) -> Any:
        return function


def platform_module(name: str) -> ModuleType:
    """The file ``name`` of the platform under test, in whichever of its rooms."""
    package = importlib.import_module(f"hyper_parallel.platform.{'mindspore' if on_mindspore else 'torch'}")
    folder = Path(package.__path__[0])
    (found,) = [*folder.glob(f"{name}.py"), *folder.glob(f"*/{name}.py")]
    return importlib.import_module(".".join([package.__name__, *found.relative_to(folder).with_suffix("").parts]))


class _Dist:
    """What tests ask about ranks, of the platform instead of a framework."""

    @staticmethod
    def get_rank(group: Any = None) -> int:
        return get_platform().get_group_local_rank(group)

    @staticmethod
    def get_world_size(group: Any = None) -> int:
        return len(get_platform().get_process_group_ranks(group))

    @staticmethod
    def new_group(ranks: list[int]) -> Any:
        """The group of these ranks; None on a rank that is not one of them."""
        return get_platform().create_group(ranks) if get_platform().get_rank() in ranks else None

    @staticmethod
    def all_gather_object(objects: list[Any], mine: Any, group: Any = None) -> None:
        get_platform().all_gather_object(objects, mine, group)

    @staticmethod
    def all_reduce(tensor: torch.Tensor, group: Any = None) -> None:
        collectives.all_reduce(tensor, group)

    @staticmethod
    def barrier(group: Any = None) -> None:
        get_platform().barrier(group)


dist = _Dist()

__all__ = [
    "assert_close",
    "backward",
    "collectives",
    "differentiable",
    "dist",
    "distribute_tensor",
    "dtype_of",
    "equal",
    "from_local",
    "grad",
    "grad_of",
    "groups",
    "is_leaf",
    "known_dtypes",
    "known_names",
    "leaf",
    "named",
    "needs_second_gradients",
    "on_mindspore",
    "ours",
    "over_the_bridge",
    "overlap",
    "parameter",
    "platform_module",
    "requires_grad",
    "same_bits",
    "theirs",
    "torch",
    "write",
    "zero_grad",
]
