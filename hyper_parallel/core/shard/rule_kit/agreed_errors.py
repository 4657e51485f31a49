"""Operators that may refuse the values of one block: all ranks raise then, or none.

Note [An error on one rank]
``linalg.cholesky`` of a cut batch raises on the rank that has the bad matrix. The others would go on and wait for it in
the next collective. So the ranks tell each other whether they have failed, and if so the first error is raised by all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.shard.rule_kit.empty_blocks import block_tensors
from hyper_parallel.core.shard.rule_kit.signature import LocalCall, Signature
from hyper_parallel.platform import get_platform

_platform = get_platform()

_FAILED = 2**62  # above every number that ranks agree on


def with_agreed_errors(signature: Signature, may_fail: Callable[[LocalCall], bool] | None = None) -> Signature:
    """The signature of an operator that looks at values and may raise; without ``may_fail`` always.

    ``may_fail(call)`` must be the same on every rank.
    """
    inner, needed = signature.local, signature.needs_local

    def run(call: LocalCall) -> Any:
        if inner is not None and (needed is None or needed(call)):
            return inner(call)
        return call.plain()

    def local(call: LocalCall) -> Any:
        if may_fail is not None and not may_fail(call):
            return run(call)
        result, error = None, None
        try:
            result = run(call)
        except RuntimeError as raised:
            error = raised
        _agree(call, error)
        return result

    def is_needed(call: LocalCall) -> bool:
        return bool(_shard_axes(call)) or (inner is not None and (needed is None or needed(call)))

    return dataclasses.replace(signature, local=local, needs_local=is_needed)


def on_host(call: LocalCall) -> bool:
    """Whether the operator runs on the host: a device's kernels report on their own."""
    return str(block_tensors(call)[0].device).lower().startswith("cpu")


def _shard_axes(call: LocalCall) -> tuple[int, ...]:
    axes_of_inputs = {axis for layout in call.inputs for axes in layout.shard_axes for axis in axes}
    return tuple(sorted(axis for axis in axes_of_inputs if call.mesh.shape[axis] > 1))


def _agree(call: LocalCall, error: RuntimeError | None) -> None:
    agreed_maximum(call.mesh, _shard_axes(call), 0, error)


def agreed_maximum(mesh: DeviceMesh, axes: tuple[int, ...], number: int, error: RuntimeError | None) -> int:
    """The largest ``number`` (none is negative) of the ranks along ``axes``, all of which raise if one has an error.

    forward: one all-reduce of one number.
    """
    if axes:
        group = mesh.get_group(axes)
        largest = _platform.index_tensor([[number if error is None else _FAILED]], mesh.device_type)
        _platform.all_reduce(largest, group, op="max")
        if largest.item() < _FAILED:
            return int(largest.item())
        errors: list[Any] = [None] * len(_platform.get_process_group_ranks(group))
        _platform.all_gather_object(errors, None if error is None else (type(error), str(error)), group)
        kind, message = next(one for one in errors if one is not None)
        raise kind(message) from error
    if error is not None:
        raise error
    return number
