"""How the gradients of a unit are put together for a reduction: which are sent as they are, and where the others go.

Note [Who used it]
All ranks reduce all gradients of a unit, zeros where a rank has none, so that ranks that ran different parts of a
module do not wait for each other. A parameter that no rank used has no gradient on one device, and an optimizer leaves
it alone. So behind the gradients goes one number for each parameter: 1 from a rank that used it. Only a rank that has
no gradient of its own looks at the sum, so a step in which all are used reads nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hyper_parallel.core.fully_shard.flat_buffer import LARGE
from hyper_parallel.core.fully_shard.sharded_parameter import ShardedParameter
from hyper_parallel.platform import get_platform

_platform = get_platform()


class GradientLayout:
    """Parameters on the same axes whose gradients have one dtype: their part of a unit's reduction."""

    def __init__(self, parameters: Sequence[tuple[int, ShardedParameter]], dtype: Any, reduce_dtype: Any) -> None:
        self.axes = parameters[0][1].axes
        self.num_rows = self.axes.num_shards
        self.dtype = reduce_dtype or dtype
        self.parameters = list(parameters)
        self.large = [
            (i, p)
            for i, p in self.parameters
            if p.is_sharded and p.lies_straight and p.segment * self.num_rows >= LARGE
        ]
        is_large = {i for i, _ in self.large}
        self.packed = [(i, p) for i, p in self.parameters if i not in is_large]
        starts = list(itertools.accumulate((p.segment for _, p in self.packed), initial=0))
        self.flags_start = starts[-1]
        #: Elements of all that is sent.
        self.num_elements = self.num_rows * (starts[-1] + sum(p.segment for _, p in self.large) + len(self.parameters))
        self._places = [(start, p.block_shape) for start, (_, p) in zip(starts, self.packed, strict=False)]
        self._numbers = [i for i, _ in self.parameters]
        #: Those whose gradient is one reshape away from its rows, and has elements.
        self._are_rows = [
            bool(p.segment) and (p.lies_straight and not p.is_padded if p.is_sharded else self.num_rows == 1)
            for _, p in self.packed
        ]
        self._all_used = (True,) * len(self.parameters)
        self._flags: dict[Any, Any] = {}

    # ---------------------------------------------------------------- what is sent

    def rows(self, p: ShardedParameter, gradient: Any) -> Any:
        """One row for each rank of the shard group: its part of the gradient, padded to the largest."""
        if not p.is_sharded:
            flat = gradient.reshape(1, -1)
            return flat if self.num_rows == 1 else _platform.cat([flat] * self.num_rows, 0)
        if p.lies_straight:
            if not p.is_padded:
                return gradient.reshape(self.num_rows, p.segment)
            return _padded(gradient.reshape(-1), p.segment * self.num_rows).reshape(self.num_rows, p.segment)
        parts = [_padded(gradient[box.slices].reshape(-1), p.segment) for box in p.layouts.boxes]
        return _platform.cat(parts, 0).reshape(self.num_rows, p.segment)

    def sent_alone(self, p: ShardedParameter, gradient: Any, device: Any) -> Any:
        """A large gradient as it is, wherever that can be."""
        if gradient is None:
            return _platform.zeros((self.num_rows * p.segment,), self.dtype, device)
        return self._cast(self.rows(p, gradient)).reshape(-1)

    def sent_packed(self, gradients: Sequence[Any], device: Any) -> Any:
        """The other gradients side by side, and the flags."""
        # Gradients without elements, of which some frameworks do not know the dtype, are not looked at.
        given = next((gradients[i] for i, p in self.packed if p.segment and gradients[i] is not None), None)
        dtype = self.dtype if given is None else given.dtype
        pieces, num_rows = [], self.num_rows
        for (i, p), is_rows in zip(self.packed, self._are_rows, strict=True):
            gradient = gradients[i]
            if gradient is None or not p.segment:
                pieces.append(_platform.zeros((num_rows, p.segment), dtype, device))
            else:
                pieces.append(gradient.reshape(num_rows, p.segment) if is_rows else self.rows(p, gradient))
        used = self._all_used
        if any(gradients[i] is None for i in self._numbers):
            used = tuple([gradients[i] is not None for i in self._numbers])
        pieces.append(self._used(used, dtype, device))
        return self._cast(_platform.cat(pieces, 1)).reshape(-1)

    def _used(self, used: tuple[bool, ...], dtype: Any, device: Any) -> Any:
        key = (used, dtype, device)
        if key not in self._flags:
            values = np.tile(np.array(used, np.float32), (self.num_rows, 1))
            self._flags[key] = _platform.from_numpy(values, dtype, device)
        return self._flags[key]

    def _cast(self, tensor: Any) -> Any:
        return tensor if tensor.dtype == self.dtype else _platform.tensor_type_cast(tensor, self.dtype)

    # ---------------------------------------------------------------- what comes back

    def blocks(self, results: Sequence[Any]) -> dict[int, Any]:
        """This rank's part of each gradient, out of the results: those of the large ones in order, then the packed."""
        found = {
            i: _platform.parts_of(one, [(0, p.block_shape)])[0]
            for (i, p), one in zip(self.large, results, strict=False)
        }
        parts = _platform.parts_of(results[-1], self._places)
        return found | {i: part for (i, _), part in zip(self.packed, parts, strict=True)}

    def used_by_any(self, results: Sequence[Any]) -> list[bool]:
        """For each parameter, whether any rank used it: a look at values on the host."""
        if _platform.has_no_memory(results[-1]):
            return [False] * len(self.parameters)
        return [bool(abs(value) > 0) for value in _platform.tensor_to_numpy(results[-1][self.flags_start :])]


def _padded(flat: Any, size: int) -> Any:
    missing = size - flat.shape[0]
    return flat if not missing else _platform.cat([flat, _platform.zeros((missing,), flat.dtype, flat.device)], 0)
