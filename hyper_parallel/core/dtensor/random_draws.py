"""Which draw a random DTensor takes: the next one, or, in recompute, the one that it took in forward.

Note [Recompute repeats its draws]
Recompute calls the same functions once more, in backward, and their random tensors must come out as before. The
framework puts its own generator back for that, whoever recomputes: our wrapper or the framework's own. So each draw
takes one number from that generator as a fingerprint. Outside of backward the draw is the next one, and the fingerprint
is written down with it; in backward a fingerprint that is known gives its draw again. The generator moves on with each
fingerprint, so every draw has its own.

Outside of backward nothing is looked up. A program that seeds the framework's generator again, or on one rank only,
changes no draw of ours: ranks that make the same random tensors in the same order agree.

Two draws can have the same fingerprint when the framework's generator is set back between them. Then the later one
counts, if a recompute or a new seed lies between the two; else nobody can say which one recompute is to repeat, and it
raises.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from hyper_parallel.core.dtensor.random_state import Draw, RandomState, default_state
from hyper_parallel.platform import get_platform

_MAX_REMEMBERED = 1 << 17


class _Drawn(NamedTuple):
    draw: Draw
    era: int  # draws of one era may all be waiting for their recompute
    is_ambiguous: bool


class DrawRecord:
    """Draws of ``state``, with the fingerprints under which they were taken."""

    def __init__(self, state: RandomState, max_remembered: int = _MAX_REMEMBERED) -> None:
        self._state = state
        self._max_remembered = max_remembered
        self._lock = threading.Lock()
        self._drawn: dict[int, _Drawn] = {}
        self._era = 0
        self._has_repeated = False
        self._left_at = state.get_state()

    def next_draw(self) -> Draw:
        """The next draw, or in recompute the one of forward; see Note [Recompute repeats its draws]."""
        platform = get_platform()
        fingerprint = platform.rng_fingerprint()
        in_backward = platform.is_in_backward()
        with self._lock:
            known = self._drawn.get(fingerprint)
            if in_backward and known is not None:
                return self._repeat(known)
            if self._has_repeated or self._state.get_state() != self._left_at:
                self._era += 1
                self._has_repeated = False
            draw = self._state.next_draw()
            self._left_at = self._state.get_state()
            self._drawn.pop(fingerprint, None)
            self._drawn[fingerprint] = _Drawn(draw, self._era, known is not None and known.era == self._era)
            if len(self._drawn) > self._max_remembered:
                del self._drawn[next(iter(self._drawn))]
            return draw

    def _repeat(self, known: _Drawn) -> Draw:
        if known.is_ambiguous:
            raise RuntimeError(
                "recompute of a random DTensor: the framework's generator was set to the same state before two draws "
                f"(the later one is draw {known.draw.number} of seed {known.draw.seed}), so it is not known which one "
                "is to be repeated. Do not seed the framework's generator between a forward and its backward, or seed "
                "with hyper_parallel.manual_seed, which random DTensors follow"
            )
        self._has_repeated = True
        return known.draw


_record = DrawRecord(default_state)


def next_draw() -> Draw:
    """The draw of a random DTensor of this process; each takes one, also on ranks whose block is empty."""
    return _record.next_draw()
