"""A mean over all elements of all ranks, where ranks have different numbers of them."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import resolve_mesh
from hyper_parallel.platform import get_platform

_platform = get_platform()


def share_of_mean(loss_sum: Any, count: Any, mesh: DeviceMesh | None = None) -> Any:
    """This rank's share of the mean over all elements of the ranks of ``mesh``: the average of the shares is the mean.

    ``loss_sum`` is the sum over this rank's elements, ``count`` their number, an int or a tensor of one element.
    Gradients that are averaged over ranks are then those of the mean, though ranks (or, with the count of a whole step,
    micro-batches) have different numbers of elements; a mean of the ranks' means would be another number.

    forward: loss_sum * number of ranks / all-reduced count; backward: the same factor.
    """
    mesh = resolve_mesh(mesh, "share_of_mean")
    total = _as_tensor(count, loss_sum)
    if mesh.size() > 1:
        total = _platform.all_reduce(total, mesh.get_group(tuple(range(mesh.ndim))))
    total = _platform.tensor_type_cast(total.reshape(()), loss_sum.dtype)
    return loss_sum * (mesh.size() / total)


def _as_tensor(count: Any, like: Any) -> Any:
    if _platform.is_tensor(count):
        return _platform.copied(_platform.detached(count))
    if isinstance(count, int):
        return _platform.index_tensor([[count]], like.device)
    return _platform.full_like(_platform.detached(like), count)


def hsdp_sync_stream() -> None:
    """HyperParallel 1.0's name for waiting until gradients are there; they are, as soon as backward has returned."""
    _platform.wait_grad_handle()
