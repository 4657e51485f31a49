"""Random numbers by sample: inside :func:`draws_by_sample` a draw is named by where it is made, not by how many were
made before it, and an element by its sample; see ``docs/random.md``.

Note [The address of a draw]
A draw is (seed, step, place, number). The *place* is a numbered block of the model (``number_blocks``), or what lies
behind it, or before the first; and which visit of it this is, for layers that share one block. The *number* counts the
draws at the place. So neither the blocks that another pipeline stage holds, nor what they draw, change an address.

Note [What recomputation restores]
The address travels with the state of the random numbers, which recomputation takes before the first run and sets for
the second: the second draws as the first, whenever and inside of which context it runs, for whole blocks and for parts.
It is state of the thread: ranks that are threads have their own, and a thread that loads data is left alone.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.dtensor.random.draw import Draw
from hyper_parallel.core.dtensor.random.philox import philox4x32
from hyper_parallel.core.dtensor.random.sample_rows import SampleRows
from hyper_parallel.platform.checks.taps import inside_of_lines
from hyper_parallel.platform.shared.membership import followed_by_threads

_MASK32 = 0xFFFFFFFF
_BEFORE = (-1, 0, False)  # no block has been entered yet


def derived_seed(seed: int, *numbers: int) -> int:
    """A seed of its own for each row of numbers in [0, 2**64)."""
    for number in numbers:
        words = philox4x32((number & _MASK32, number >> 32, len(numbers), 0), (seed & _MASK32, seed >> 32))
        seed = words[0] << 32 | words[1]
    return seed


class Address:
    """Where a program is among its draws."""

    __slots__ = ("_number", "_outer", "_place", "_purpose", "_seed", "_seed_of", "_visits", "rows", "step")

    def __init__(self, step: int, rows: SampleRows | None, purpose: int = 0) -> None:
        self.step, self.rows, self._purpose = step, rows, purpose
        self._place: tuple[int, int, bool] = _BEFORE
        self._number = 0
        self._visits: dict[int, int] = {}
        self._outer: tuple[tuple[tuple[int, int, bool], int], ...] = ()
        self._seed_of: Any = None
        self._seed = 0

    def copy(self) -> Address:
        """The same address, counted on by itself."""
        other = Address(self.step, self.rows, self._purpose)
        other._place, other._number, other._outer = self._place, self._number, self._outer
        other._visits = dict(self._visits)
        return other

    def next_draw(self, seed: int) -> Draw:
        """The next draw of this place."""
        if self._seed_of != (seed, self._place):
            self._seed = self._seed_here(seed)
            self._seed_of = (seed, self._place)
        draw = Draw(self._seed, self._number, self.rows)
        self._number += 1
        return draw

    def draw_aside(self, seed: int) -> Draw:
        """A draw that is not counted: for what cannot be addressed, and must be alike on ranks that hold these rows."""
        first = 0 if self.rows is None else self.rows.first
        return Draw(derived_seed(self._seed_here(seed), first), self._number)

    def _seed_here(self, seed: int) -> int:
        block, visit, is_inside = self._place
        return derived_seed(seed, self._purpose, self.step, block + 1, visit, is_inside)

    def enter(self, block: int) -> None:
        """The forward of a block begins."""
        visit = self._visits.get(block, 0)
        self._visits[block] = visit + 1
        self._outer += ((self._place, self._number),)
        self._place, self._number = (block, visit, True), 0

    def leave(self) -> None:
        """The forward of the block that was entered last ends."""
        if not self._outer:  # entered before the context was
            return
        block, visit, _ = self._place
        *outer, (place, number) = self._outer
        self._outer = tuple(outer)
        self._place, self._number = (place, number) if self._outer else ((block, visit, False), 0)


class _Current(threading.local):
    address: Address | None = None


current = followed_by_threads(_Current())


def get_address() -> Address | None:
    """A copy of where this thread is; None outside of :func:`draws_by_sample`."""
    return None if current.address is None else current.address.copy()


def set_address(address: Address | None) -> None:
    """Go back to what :func:`get_address` gave."""
    current.address = None if address is None else address.copy()


@contextmanager
def at_address(address: Address | None) -> Iterator[None]:
    """Inside, this thread draws from ``address``."""
    inside_of_lines("addresses of random numbers are set (draws_by_sample)")
    before, current.address = current.address, address
    try:
        yield
    finally:
        current.address = before


@contextmanager
def without_samples() -> Iterator[None]:
    """Inside, tensors are drawn alike for all samples, whatever their shapes; see Note [Which tensors have samples]."""
    address = current.address
    if address is None:
        yield
        return
    inside_of_lines("random numbers are drawn alike for all samples (without_samples)")
    rows, address.rows = address.rows, None
    try:
        yield
    finally:
        address.rows = rows


def checked_step(step: Any) -> int:
    """`step` as a number in [0, 2**64)."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 2**64:
        raise ValueError(
            f"draws_by_sample: step must be the number of the training step, a whole number from 0 on, got {step!r}"
        )
    return number
