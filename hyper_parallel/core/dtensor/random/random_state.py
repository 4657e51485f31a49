"""The random state of a process: a seed, and the number of random tensors drawn since it was set. Nothing else is kept,
because the generator is counter-based: a `Draw` (seed, number) fixes every element of a random tensor. Ranks that run
the same program draw in the same order, so they agree on each draw without communication."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.dtensor.random.draw import Draw
from hyper_parallel.core.dtensor.random.sample_address import Address, current, get_address, set_address
from hyper_parallel.platform.checks.taps import inside_of_lines

DEFAULT_SEED = 0x5EED
"""The seed until `manual_seed` is called: a constant, since a seed from the clock would differ between the ranks."""

_NUM_SEEDS = 2**64


class RandomState:
    """Seed and draw counter.

    Every method is atomic: one lock per object. Threads share the state of their process, so draws that threads make
    concurrently get numbers in an order that may differ between ranks; let one thread at a time draw.
    """

    def __init__(self, seed: int = DEFAULT_SEED) -> None:
        self._lock = threading.Lock()
        self._seed = _as_seed(seed)
        self._next_number = 0

    def manual_seed(self, seed: int) -> None:
        """Set the seed (any int, taken modulo 2**64) and start again at draw 0."""
        checked = _as_seed(seed)
        with self._lock:
            self._seed, self._next_number = checked, 0

    def initial_seed(self) -> int:
        """The seed in use."""
        return self._seed

    def next_draw(self) -> Draw:
        """Take the next draw. Each random tensor takes one, also on ranks whose part of it is empty."""
        with self._lock:
            draw = Draw(self._seed, self._next_number)
            self._next_number = (self._next_number + 1) % _NUM_SEEDS
        return draw

    def take(self, count: int) -> int:
        """Take the numbers of `count` draws, for later; the first of them."""
        with self._lock:
            first = self._next_number
            self._next_number = (first + count) % _NUM_SEEDS
        return first

    def get_state(self) -> tuple[int, int]:
        """(seed, number of the next draw): two ints, to keep in a checkpoint."""
        with self._lock:
            return self._seed, self._next_number

    def set_state(self, state: tuple[int, int]) -> None:
        """Return to a state that `get_state` gave."""
        checked = _as_state(state)
        with self._lock:
            self._seed, self._next_number = checked

    @contextmanager
    def preserve(self, state: tuple[int, int] | None = None) -> Iterator[None]:
        """Leave the state, at exit, as it was at entry. With `state`, the block starts there.

        Recompute repeats its random numbers with the state that `get_state` gave before the first run:
        ``with preserve(state): run_again()``.
        """
        before = self.get_state()
        if state is not None:
            self.set_state(state)
        try:
            yield
        finally:
            self.set_state(before)


def _as_seed(seed: Any) -> int:
    if not isinstance(seed, bool):
        try:
            return operator.index(seed) % _NUM_SEEDS
        except TypeError:
            pass
    raise TypeError(f"manual_seed: the seed must be an int, got {seed!r} of type {type(seed).__name__}")


def _as_state(state: Any) -> tuple[int, int]:
    try:
        seed, number = (operator.index(part) for part in state)
    except (TypeError, ValueError):
        seed, number = -1, -1
    if not (0 <= seed < _NUM_SEEDS and 0 <= number < _NUM_SEEDS):
        raise ValueError(
            f"set_rng_state: expected (seed, draw number), two ints in [0, 2**64), got {state!r}; "
            "pass what get_rng_state() returned"
        )
    return seed, number


default_state = RandomState()
"""The state of this process, which the module-level functions act on and every random DTensor draws from."""


def manual_seed(seed: int) -> None:
    """Seed the random DTensors of this process. Call it with the same seed on every rank."""
    default_state.manual_seed(seed)


def initial_seed() -> int:
    """The seed in use: the last `manual_seed`, else `DEFAULT_SEED`."""
    return default_state.initial_seed()


def next_draw() -> Draw:
    """Take the next draw of this process; inside `draws_by_sample` that of this address."""
    inside_of_lines("random numbers are drawn")
    address = current.address
    return default_state.next_draw() if address is None else address.next_draw(default_state.initial_seed())


def draw_aside() -> Draw:
    """A draw for what the framework's own generator must draw: inside `draws_by_sample` it moves no address."""
    inside_of_lines("the framework's generator is set for a part of the model, which holds for a whole model's call")
    address = current.address
    return default_state.next_draw() if address is None else address.draw_aside(default_state.initial_seed())


def get_rng_state() -> tuple[int, int]:
    """(seed, number of the next draw) of this process."""
    return default_state.get_state()


def set_rng_state(state: tuple[int, int]) -> None:
    """Return to a state that `get_rng_state` gave."""
    default_state.set_state(state)


def get_whole_state() -> tuple[tuple[int, int], Address | None]:
    """All that the next draw depends on: `get_rng_state` and the address of `draws_by_sample`."""
    return default_state.get_state(), get_address()


def set_whole_state(state: tuple[tuple[int, int], Address | None]) -> None:
    """Return to a state that `get_whole_state` gave."""
    default_state.set_state(state[0])
    set_address(state[1])
