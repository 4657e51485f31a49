"""Random blocks of distributed tensors: each rank makes its part of the one random tensor; see ``docs/random.md``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.random import random_state, random_values
from hyper_parallel.core.dtensor.random.draw import Draw
from hyper_parallel.core.dtensor.random.random_stream import GlobalRegion
from hyper_parallel.core.dtensor.random.sample_address import derived_seed
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.checks.taps import one_line
from hyper_parallel.platform.shared.membership import belongs_to_rank

belongs_to_rank(random_state.get_rng_state, random_state.set_rng_state)
get_platform().carry_random_state(random_state.get_whole_state, random_state.set_whole_state)


def _part_of_whole(draw: Draw, region: GlobalRegion, make: Callable[[Draw], np.ndarray], dtype: str) -> np.ndarray:
    """This region of what ``make`` makes of a draw: a whole array, for values of which no part is made alone."""
    del dtype
    whole = make(draw)
    return whole[tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))]


_MAKERS: dict[str, Callable[..., np.ndarray]] = {
    "uniform": random_values.uniform,
    "normal": random_values.normal,
    "trunc_normal": random_values.trunc_normal,
    "bernoulli": random_values.bernoulli,
    "randint": random_values.randint,
    "part of whole": _part_of_whole,
}


def random_block(
    kind: str, parameters: dict[str, Any], draw: Draw, layout: Layout, shape: tuple[int, ...], dtype: Any, device: Any
) -> Any:
    """This rank's block of the random tensor that ``draw`` names, as a plain tensor.

    Where a reduction is pending the first rank of the axis holds the values, and the others what leaves them unchanged.
    """
    platform = get_platform()
    coordinate = layout.mesh.get_coordinate()
    if coordinate is None:
        return platform.new_tensor((0,) * len(shape), dtype, device)
    block = random_values_of(kind, parameters, draw, GlobalRegion(shape, *layout.local_region(shape)), dtype, device)
    for place, op in zip(coordinate, layout.partials, strict=True):
        if op is not None and place != 0:
            block = platform.identity_like(block, op)
    return block


@one_line
def next_block(
    kind: str, parameters: dict[str, Any], layout: Layout, shape: tuple[int, ...], dtype: Any, device: Any
) -> Any:
    """:func:`random_block` of the next draw."""
    return random_block(kind, parameters, random_state.next_draw(), layout, shape, dtype, device)


def random_values_of(
    kind: str, parameters: dict[str, Any], draw: Draw, region: GlobalRegion, dtype: Any, device: Any
) -> Any:
    """This region of the random tensor that ``draw`` names, as a plain tensor; unset on a device without memory."""
    platform = get_platform()
    if str(device) == str(platform.meta_device):
        return platform.new_tensor(region.sizes, dtype, device)
    if kind != "bernoulli":
        parameters = {**parameters, "dtype": platform.dtype_name(dtype)}
    return platform.from_numpy(_MAKERS[kind](draw, region, **parameters), dtype, device)


class NumberedFills:
    """The draws of a parameter that gets its initial values: its own, whatever was drawn for others before."""

    def __init__(self, number: int) -> None:
        self._number, self._fills = number, 0

    def next_draw(self) -> Draw:
        """The draw that has its number; where it is filled more than once, others that belong to it."""
        seed, self._fills = random_state.initial_seed(), self._fills + 1
        return Draw(seed, self._number) if self._fills == 1 else Draw(derived_seed(seed, self._number), self._fills)

    def restart(self) -> None:
        """Begin again: a parameter that two modules share is filled by both, and a stage may have only one of them."""
        self._fills = 0


NUMBERED = "hyper_parallel_fills"
"""Where a tensor has its :class:`NumberedFills`, while it gets its initial values."""


def fill_random_(tensor: Any, kind: str, **parameters: Any) -> Any:
    """Overwrite a DTensor with random values, in place; the tensor."""
    platform = get_platform()
    fills = getattr(tensor, NUMBERED, None)
    where = (tensor.layout, tuple(tensor.shape), tensor.dtype, tensor.device)
    if fills is None:
        block = next_block(kind, parameters, *where)
    else:
        block = random_block(kind, parameters, fills.next_draw(), *where)
    platform.fill_block(tensor, block)
    return tensor
