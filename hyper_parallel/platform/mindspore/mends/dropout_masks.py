"""The masks of MindSpore's own dropout, kept for recomputation.

On a CPU the dropout of MindSpore 2.10 has a state that cannot be restored::

    x, state = Tensor(np.ones(8, np.float32)), mindspore.get_rng_state()
    first = ops.dropout(x, 0.5)
    mindspore.set_rng_state(state)
    ops.dropout(x, 0.5)  # drops other elements than the first did

So the first run of a checkpoint notes the masks, and the second takes them from there. Checkpoints nest: what an inner
one draws in its first run is noted by the outer ones too, or comes from the one that runs again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from mindspore import ops

from hyper_parallel.platform.mindspore.base.tensors import detached
from hyper_parallel.platform.mindspore.mends import ACTIVE

__all__ = ["active"]


class _Dropouts(threading.local):
    """The checkpoints that run in this thread: their masks, and whether they run again."""

    def __init__(self) -> None:
        self._stack: list[tuple[list[Any], bool]] = []

    @contextlib.contextmanager
    def active(self, masks: list[Any], again: bool) -> Iterator[None]:
        self._stack.append((masks, again))
        try:
            yield
        finally:
            self._stack.pop()

    def call(self, dropout: ops.Dropout, data: Any) -> Any:
        if not self._stack or hasattr(data, "to_local"):
            return _draw(dropout, data)
        repeated = [masks for masks, again in self._stack if again]
        if repeated:
            mask = repeated[-1].pop(0)
            result = data * mask  # which has the scale in it
        else:
            result, mask = _draw(dropout, data)
            mask = detached(mask)
        for masks, again in self._stack:
            if not again:
                masks.append(mask)
        return result, mask


_dropouts = _Dropouts()
_draw = ops.Dropout.__call__
active = _dropouts.active
if ACTIVE:
    ops.Dropout.__call__ = lambda self, data: _dropouts.call(self, data)
