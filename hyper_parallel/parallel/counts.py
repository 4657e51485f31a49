"""How much a batch counts: its valid targets and rows, here and in the whole batch.

Note [Sums, never means of means]
The loss of a batch is the mean over the valid targets of the whole batch. A rank or a micro-batch has a sum over its
own targets; divided by the number of all of them it is a share, and shares add up, as do their gradients: no factor
depends on how the batch was split. A mean over ranks of their means is another number whenever labels are masked
unevenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.platform import get_platform

__all__ = ["IGNORED", "Counts", "num_targets", "total_counts"]

IGNORED = -100  # a label that is no target, in PyTorch, MindSpore and Hugging Face's models alike

_platform = get_platform()


class Counts:
    """Of some rows, numbers as tensors without dims: targets, targets but for each row's first, and rows.

    ``shifted`` is for models that compare the logits of each position with the label behind it.
    """

    def __init__(self, targets: Any, shifted: Any, rows: Any) -> None:
        self.targets, self.shifted, self.rows = targets, shifted, rows

    @classmethod
    def of(cls, batch: Mapping[str, Any], rows: int, like: Any) -> Counts:
        """Of a batch of plain tensors."""
        labels = batch.get("labels")
        number = _number(rows, like)
        if rows == 0 or labels is None or not _platform.is_tensor(labels):
            return cls(_number(0, like) if rows == 0 else number, _number(0, like), number)
        later = labels[:, 1:] if labels.ndim > 1 else labels
        return cls(num_targets(labels), num_targets(later), number)

    def vector(self) -> Any:
        return _platform.cat([one.reshape(1) for one in (self.targets, self.shifted, self.rows)], 0)


def num_targets(labels: Any) -> Any:
    """How many of the labels are targets, as a number in a tensor; of labels that are no classes all are."""
    if "float" in _platform.dtype_name(labels.dtype):
        return _number(int(labels.shape[0]), labels)
    return _platform.tensor_type_cast(labels != IGNORED, "int64").sum()


def total_counts(
    parts: Sequence[Counts], mesh: DeviceMesh, compute_axes: Sequence[str], tell: Sequence[int]
) -> tuple[Counts, Any]:
    """The counts of the whole batch, and the sums of what all ranks tell.

    Ranks of one line along ``compute_axes`` have the same rows, so one of them counts them.

    forward: all-reduce of a few numbers over all ranks; no backward.
    """
    vector = parts[0].vector()
    for part in parts[1:]:
        vector = vector + part.vector()
    if any(mesh.get_local_rank(axis) for axis in compute_axes):
        vector = vector * 0
    if tell:
        vector = _platform.cat([vector, _platform.index_tensor([list(tell)], vector.device).reshape(-1)], 0)
    if mesh.size() > 1:
        vector = _platform.all_reduce(vector, mesh.get_group(tuple(range(mesh.ndim))))
    return Counts(vector[0], vector[1], vector[2]), vector[3:]


def _number(value: int, like: Any) -> Any:
    return _platform.index_tensor([[value]], like.device).reshape(())


def plain(value: Any) -> Any:
    """The whole value of a tensor, plain; its gradient is taken as whole."""
    if not isinstance(value, DTensor):
        return value
    return value.redistribute(value.device_mesh, value._layout.replicated()).to_local()
