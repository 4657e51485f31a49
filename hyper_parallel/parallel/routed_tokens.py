"""What mixtures of experts must know of the ranks: which tokens are a batch's, counted once.

The ranks of a line of cp and tp have the same samples, and each of them counts all of their tokens; the others have
samples of their own. A rank without samples for a micro-batch runs along on one that does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.random.sample_address import current
from hyper_parallel.models.expert_balance import mixtures_of
from hyper_parallel.parallel.counts import plain
from hyper_parallel.platform import get_platform

__all__ = ["RoutedTokens"]

_platform = get_platform()


class RoutedTokens:
    """The ``batch`` of each mixture in ``parts``; ``mesh`` has the ranks with samples of their own."""

    def __init__(self, parts: Sequence[Any], mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._mixtures = [module for part in parts for _, module in mixtures_of(part)]
        for module in self._mixtures:
            module.batch = self

    def own(self, counts: Any) -> Any:
        """Counts of this rank's samples, plain; of those of the first pass where a block is computed again."""
        counts, rows = plain(counts), None if current.address is None else current.address.rows
        return counts * 0 if rows is not None and rows.runs_along else counts

    def total(self, counts: Any) -> Any:
        """Counts of all samples of the micro-batch.

        forward: all-reduce of a number for each expert over the ranks that share a batch; no backward.
        """
        if self._mesh.size() == 1:
            return counts
        group = self._mesh.get_group(tuple(range(self._mesh.ndim)))
        return _platform.all_reduce(_platform.copied(_platform.detached(counts)), group)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Around a step: what its mixtures count inside are counts of all ranks behind it.

        forward: one all-reduce for all mixtures over the ranks that share a batch; no backward.
        """
        if not self._mixtures or self._mesh.size() == 1:
            yield
            return
        buffers = [module.tokens_per_expert for module in self._mixtures]
        with _platform.no_grad():
            before = [_platform.copied(buffer) for buffer in buffers]
            for buffer in buffers:
                _platform.load_into_param(buffer, buffer * 0)
        yield
        with _platform.no_grad():
            counted = self.total(_platform.cat(buffers, 0))
            begin = 0
            for buffer, earlier in zip(buffers, before, strict=True):
                size = int(buffer.shape[0])
                _platform.load_into_param(buffer, earlier + counted[begin : begin + size])
                begin += size
