"""Positions outside of a dim: the same error on every rank, also where each rank sees only some of the positions.

Note [Agreeing on bad positions]
Where every rank has all positions, every rank finds the bad one by itself. Where the positions are cut, one rank would
raise and the others wait for it in the next collective. So the ranks tell each other their smallest and largest
position first. On the host only: on an accelerator reading them would wait for the device, whose kernels report bad
positions on their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.rule_kit.signature import LocalCall, Signature
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.checks.taps import one_line

_platform = get_platform()
_NONE = (2**62, -(2**62))  # the smallest and largest of no positions


def check_positions(
    call: LocalCall, index: Any, layout: Layout, low: int, high: int, error: Callable[[int], Exception]
) -> None:
    """Raise ``error(position)`` on all ranks if a position, of a block under ``layout``, is not in [low, high)."""
    if not str(index.device).lower().startswith("cpu"):  # "cpu" and "cuda:0", or "CPU" and "Ascend:0"
        return
    compare_positions(index, call.mesh, layout, low, high, error)


@one_line
def compare_positions(
    index: Any, mesh: DeviceMesh, layout: Layout, low: int, high: int, error: Callable[[int], Exception]
) -> None:
    """:func:`check_positions` on the host, which reads the positions."""
    smallest, largest = (int(index.min()), int(index.max())) if index.numel() else _NONE
    axes = tuple(sorted({axis for cut in layout.shard_axes for axis in cut if mesh.shape[axis] > 1}))
    if axes:
        ends = _platform.index_tensor([[-smallest, largest]], mesh.device_type)
        _platform.all_reduce(ends, mesh.get_group(axes), op="max")
        ((negated, largest),) = ends.tolist()
        smallest = -negated
    if (smallest, largest) != _NONE and (smallest < low or largest >= high):
        raise error(smallest if smallest < low else largest)


def with_checked_positions(
    signature: Signature,
    name: str,
    number: int,
    dim: int,
    size: int,
    *,
    kind: type[Exception] = IndexError,
    wraps: bool = False,
    low: int = 0,
    source: int = 0,
) -> Signature:
    """The signature of an operator whose input ``number`` has positions in dim ``dim`` of input ``source``.

    ``wraps``: negative positions count from the end; else ``low`` is the smallest one. ``kind`` is the error that the
    operator raises on one device.
    """
    inner, needed = signature.local, signature.needs_local

    def error(position: int) -> Exception:
        return kind(f"{name}: index {position} is out of bounds for dimension {dim} with size {size}")

    def local(call: LocalCall) -> Any:
        index = _tensors((call.args, tuple(call.kwargs.values())))[number]
        check_positions(call, index, call.inputs[number], -size if wraps else low, size, error)
        if inner is not None and (needed is None or needed(call)):
            return inner(call)
        return call.plain()

    def is_needed(call: LocalCall) -> bool:
        is_sharded = any(call.inputs[number].shard_axes) or any(call.inputs[source].shard_axes[dim : dim + 1])
        return is_sharded or (inner is not None and (needed is None or needed(call)))

    return dataclasses.replace(signature, local=local, needs_local=is_needed)


def _tensors(tree: Any) -> list[Any]:
    if _platform.is_tensor(tree):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [tensor for item in tree for tensor in _tensors(item)]
    return []
