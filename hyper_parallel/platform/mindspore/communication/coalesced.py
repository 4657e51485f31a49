"""Collectives on lists of tensors: small ones of one dtype travel in one operation.

Large ones have an operation each, straight from their memory and into it: to join them would cost two copies, which
take longer than a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from mindspore import Tensor, mint

from hyper_parallel.platform.mindspore.base.tensors import new_tensor, overwrite
from hyper_parallel.platform.mindspore.communication import collectives
from hyper_parallel.platform.mindspore.communication.groups import ProcessGroup, unwrap_group
from hyper_parallel.platform.mindspore.communication.transports import Pending

__all__ = ["all_gather_into_tensors", "reduce_scatter_tensors"]

_LARGE = 1 << 14  # elements from which a tensor is sent by itself


def all_gather_into_tensors(
    data: Sequence[Tensor], group_info: Any, async_op: bool = False, *, out: Sequence[Tensor] | None = None
) -> Any:
    """:func:`all_gather_into_tensor` of each tensor, in one operation for the small ones of a dtype; all results."""
    group = unwrap_group(group_info)
    size = group.size()
    shapes = [(shape[0] * size, *shape[1:]) for shape in (tuple(tensor.shape) or (1,) for tensor in data)]

    def gather(joined: Tensor, out: Tensor | None) -> tuple[Tensor, Any]:
        return collectives.all_gather_into_tensor(joined, group_info, True, out=out)

    return _by_dtype("all_gather_into_tensors", data, shapes, out, async_op, 1, group, gather)


def reduce_scatter_tensors(
    data: Sequence[Tensor],
    group_info: Any,
    async_op: bool = False,
    op: str = "sum",
    *,
    out: Sequence[Tensor] | None = None,
) -> Any:
    """:func:`reduce_scatter_tensor` of each tensor, in one operation for the small ones of a dtype; all results."""
    group = unwrap_group(group_info)
    size = group.size()
    for tensor in data:
        if not tensor.ndim or tensor.shape[0] % size:
            raise ValueError(
                f"reduce_scatter_tensors: shape {tuple(tensor.shape)} cannot be cut into {size} equal parts of dim 0; "
                f"pad dim 0 to a multiple of {size}"
            )
    shapes = [(tensor.shape[0] // size, *tensor.shape[1:]) for tensor in data]

    def reduce(joined: Tensor, out: Tensor | None) -> tuple[Tensor, Any]:
        return collectives.reduce_scatter_tensor(joined, group_info, True, op, out=out)

    return _by_dtype("reduce_scatter_tensors", data, shapes, out, async_op, size, group, reduce)


def _by_dtype(
    function: str,
    data: Sequence[Tensor],
    shapes: Sequence[Sequence[int]],
    out: Sequence[Tensor] | None,
    async_op: bool,
    num_rows: int,
    group: ProcessGroup,
    start: Any,
) -> Any:
    """Join small tensors of a dtype as ``num_rows`` rows, ``start`` an operation on them, take its result apart."""
    if out is not None:
        if len(out) != len(data):
            raise ValueError(f"{function}: {len(data)} tensors but {len(out)} in out; give one for each")
        for one, shape, tensor in zip(out, shapes, data, strict=True):
            collectives.check_out(function, one, shape, tensor, group)
    if out is None:
        out = [new_tensor(shape, tensor.dtype, tensor.device) for tensor, shape in zip(data, shapes, strict=True)]
    results = list(out)
    pending = []
    alone = []
    together: dict[Any, list[int]] = {}
    for place, tensor in enumerate(data):
        if prod(tensor.shape) >= _LARGE:
            alone.append(start(tensor, results[place])[1])
        else:
            together.setdefault(tensor.dtype, []).append(place)
    for places in together.values():
        rows = [data[place].reshape(num_rows, -1) for place in places]
        joined = rows[0] if len(rows) == 1 else mint.cat(rows, 1)
        pending.append((places, [row.shape[1] for row in rows], *start(joined, None)))

    def finish() -> None:
        for handle in alone:
            handle.wait()
        for places, widths, gathered, handle in pending:
            handle.wait()
            at = 0
            for place, width in zip(places, widths, strict=True):
                overwrite(results[place], gathered[:, at : at + width].reshape(shapes[place]))
                at += width

    if async_op:
        return results, Pending(finish)
    finish()
    return results
