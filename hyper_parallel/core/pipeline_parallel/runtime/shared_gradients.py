"""Parameters of which several stages hold a copy, such as a head that is tied to the embedding: one gradient for all.

Each holder has its own share of the gradient when a step ends. The holders send theirs to each other and add all up in
the order of the stages, so that the copies have the same bits, and their optimizers step alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hyper_parallel.core.dtensor.comm_recorder import attributed
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.platform import get_platform

__all__ = ["SharedGradients"]

_platform = get_platform()
_REASON = "a parameter that stages share"


class SharedGradients:
    """The shared parameters that this rank holds, with the other ranks that do.

    ``holders`` has for each name the places of the ranks that have a copy, the same on all of them; ``parameters``
    gives this rank's parameters by name.
    """

    def __init__(
        self, holders: Mapping[str, Sequence[int]], parameters: Callable[[], Mapping[str, Any]], group: Any
    ) -> None:
        self._group, self._ranks, self._parameters = group, _platform.get_process_group_ranks(group), parameters
        self._place = self._ranks.index(_platform.get_rank())
        self._holders: dict[str, list[int]] = {}
        for name, places in sorted(holders.items()):
            if self._place in places and len(set(places)) > 1:
                self._holders[name] = list(dict.fromkeys(places))

    def spread_values(self) -> None:
        """Give all copies the first one's values. forward: a message from its holder to each other; backward: none."""
        named = self._parameters()
        for tag, (name, places) in enumerate(self._holders.items(), 1):
            parameter, root = named[name], self._ranks[places[0]]
            block = _platform.copied(_platform.detached(parameter))
            if self._place == places[0]:
                peers = [self._ranks[place] for place in places[1:]]
                sent = [attributed(_REASON, _platform.isend, block, peer, self._group, tag) for peer in peers]
                for handle in sent:
                    handle.wait()
                continue
            attributed(_REASON, _platform.irecv, block, root, self._group, tag).wait()
            with _platform.no_grad():
                fill = _platform.fill_block if isinstance(parameter, DTensor) else _platform.load_into_param
                fill(parameter, block)

    def set_aside(self) -> dict[str, Any]:
        """Gradients of earlier steps, which are sums over the holders already; this one starts without them."""
        named = self._parameters() if self._holders else {}
        before = {name: _platform.get_grad(named[name]) for name in self._holders}
        for name in before:
            _platform.set_grad(named[name], None)
        return before

    def add_up(self, before: Mapping[str, Any]) -> None:
        """Sum each gradient over its holders. forward: a message from each holder to each other; backward: none."""
        named = self._parameters() if self._holders else {}
        for tag, (name, places) in enumerate(self._holders.items(), 1):
            parameter = named[name]
            gradient = _platform.get_grad(parameter)
            if gradient is None:
                gradient = _zero_gradient(parameter)
            with _platform.no_grad():
                total = self._summed(_platform.detached(gradient), places, tag)
                if before[name] is not None:
                    total = _platform.detached(before[name]) + total
            if isinstance(gradient, DTensor):
                total = _platform.as_dtensor(DTensor, total, gradient._layout, tuple(gradient.shape))
            _platform.set_grad(parameter, total)

    def _summed(self, mine: Any, places: list[int], tag: int) -> Any:
        mine = _platform.copied(mine)
        coming: dict[int, Any] = {place: _platform.empty_like(mine) for place in places if place != self._place}
        handles = []
        for place, block in coming.items():
            peer = self._ranks[place]
            calls = [(_platform.isend, mine), (_platform.irecv, block)]
            for call, memory in calls if self._place < place else calls[::-1]:  # first the lower rank's message
                handles.append(attributed(_REASON, call, memory, peer, self._group, tag))
        for handle in handles:
            handle.wait()
        coming[self._place] = mine
        total = coming[places[0]]
        for place in places[1:]:
            total = total + coming[place]
        return total


def _zero_gradient(parameter: Any) -> Any:
    zeros = _platform.full_like(_platform.detached(parameter), 0.0)
    if not isinstance(parameter, DTensor):
        return zeros
    return _platform.as_dtensor(DTensor, zeros, parameter._layout.gradient(), tuple(parameter.shape))
