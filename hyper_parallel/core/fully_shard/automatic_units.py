"""Units that nobody named: the items of lists of modules, so many that a unit is worth a collective."""

from __future__ import annotations

import math
from typing import Any

from hyper_parallel.core.fully_shard.hsdp_module import unit_of
from hyper_parallel.platform import get_platform

_platform = get_platform()

SMALLEST = 1 << 20  # bytes from which a unit is large enough


def find_units(root: Any, ignored: set[int]) -> list[list[Any]]:
    """The modules inside ``root`` to make units of, from the inside out, each unit a list of neighbours.

    The items of lists of modules, of those lists that are in no item themselves. Small ones are put together with those
    behind them in their list, as a collective of a few bytes takes as long as one of many.
    """
    units: list[list[Any]] = []
    inside: set[int] = set()
    for _, module in _platform.get_cells_and_names(root):
        if id(module) in inside or not _platform.is_container(module):
            continue
        size = SMALLEST
        for item in _platform.items_of(module):
            if id(item) in inside or unit_of(item) is not None or _platform.is_container(item):
                continue
            inside.update(id(one) for _, one in _platform.get_cells_and_names(item))
            own = _num_bytes(item, ignored)
            if not own:
                continue
            if size >= SMALLEST:
                units.append([])
                size = 0
            units[-1].append(item)
            size += own
    return units


def _num_bytes(module: Any, ignored: set[int]) -> int:
    return sum(
        math.prod(parameter.shape) * _platform.get_element_size(_platform.detached(parameter))
        for parameter in _platform.parameters_dict(module).values()
        if id(parameter) not in ignored
    )
