"""Units that nobody named: the items of lists of modules, if they are large enough to be worth a collective."""

from __future__ import annotations

import math
from typing import Any

from hyper_parallel.core.fully_shard.hsdp_module import unit_of
from hyper_parallel.platform import get_platform

_platform = get_platform()

SMALLEST = 1 << 20  # bytes of a unit; smaller items stay with the module around them


def find_units(root: Any, ignored: set[int]) -> list[Any]:
    """The modules inside ``root`` to make units of, from the inside out.

    The items of lists of modules, of those lists that are in no item themselves. If all of them are small, so is the
    model, and they are taken all the same: its units overlap, and a few bytes more are no matter.
    """
    items: list[Any] = []
    inside: set[int] = set()
    for _, module in _platform.get_cells_and_names(root):
        if id(module) in inside or not _platform.is_container(module):
            continue
        for item in _platform.items_of(module):
            if id(item) in inside or unit_of(item) is not None or _platform.is_container(item):
                continue
            inside.update(id(one) for _, one in _platform.get_cells_and_names(item))
            items.append(item)
    sizes = [_num_bytes(item, ignored) for item in items]
    large = [item for item, size in zip(items, sizes, strict=True) if size >= SMALLEST]
    return large or [item for item, size in zip(items, sizes, strict=True) if size]


def _num_bytes(module: Any, ignored: set[int]) -> int:
    return sum(
        math.prod(parameter.shape) * _platform.get_element_size(_platform.detached(parameter))
        for parameter in _platform.parameters_dict(module).values()
        if id(parameter) not in ignored
    )
