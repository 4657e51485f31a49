"""How much a batch counts: its valid targets and rows, here and in the whole batch; and by which a part's loss does.

Note [Sums, never means of means]
The loss of a batch is the mean over the valid targets of the whole batch. A rank or a micro-batch has a sum over its
own targets; divided by the number of all of them it is a share, and shares add up, as do their gradients: no factor
depends on how the batch was split. A mean over ranks of their means is another number whenever labels are masked
unevenly.

Note [A mean of what]
A part's mean counts by its targets, the labels that are not -100. A model that averages over something else (labels
behind the first, tokens that are not padding, another value to be ignored, classes with weights, two means of different
labels) would give another number for each way to cut the batch, and nothing would say so. So the calls of the
framework's loss functions are watched, and their counts compared with the targets, until a batch has shown that they
are the same: one in which not all labels are targets. Where a batch is not cut there is nothing to compare.
Two kinds of loss are no mean over targets and known all the same: sums, whose parts are added as they are, and
connectionist temporal classification, whose mean is one over samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.contract.modules import SeenLoss

__all__ = ["IGNORED", "Counts", "LossMeans", "num_targets", "total_counts"]

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
        given = batch.get("shift_labels")  # the token behind each position, in place of the labels
        return cls(num_targets(labels if given is None else given), num_targets(later), number)

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


class LossMeans:
    """Of one model, ``name``; see Note [A mean of what]. ``watches`` is False where a batch is in one part."""

    def __init__(self, name: str, watches: bool) -> None:
        self._name = name
        self._watches = watches
        self._kind = "targets"
        self._seen: list[tuple[list[SeenLoss], Any, Counts, Any]] = []
        self._ratios: dict[int, int] = {}

    def watch(self) -> AbstractContextManager[list[SeenLoss]]:
        """Context: around a part's forward; the calls of loss functions in it."""
        return _platform.watch_losses() if self._watches else nullcontext([])

    def known(self) -> None:
        """The model was told what to divide by: nothing is left to be found out."""
        self._watches = False

    def share(self, loss: Any, seen: list[SeenLoss], part: Counts, total: Counts, batch: Mapping[str, Any]) -> Any:
        """What a part's loss gives of that of the whole batch."""
        if seen and self._watches:
            if all(one.reduction == "sum" for one in seen):
                self._kind = "sum"
            elif all(one.name == "ctc_loss" and one.reduction == "mean" for one in seen):
                self._kind = "rows"
            self._seen.append((seen, _platform.detached(loss), part, batch.get("labels")))
        if self._kind == "sum":
            return loss
        if self._kind == "rows":
            return _part_of_mean(loss, part.rows, total.rows)
        return _part_of_mean(loss, part.targets, total.targets)

    def checked(self, found: Sequence[Any]) -> Sequence[Any]:
        """``found``, of a step that is done; an error if its losses were not what their parts were taken to be.

        The host looks at values here, and waits for the step.
        """
        parts, self._seen = self._seen, []
        for seen, loss, part, labels in parts:
            if any(_platform.has_no_memory(plain(one.value)) for one in seen) or not _read(part.rows):
                continue
            if self._kind == "sum":
                self._check_sum(seen, loss)
            elif self._kind == "targets":
                self._check_means(seen, part, labels)
        if parts and self._kind != "targets":
            self._watches = False
        return found

    def _check_sum(self, seen: list[SeenLoss], loss: Any) -> None:
        total, given = sum(_read(one.value) for one in seen), _read(loss)
        if total == total and abs(total - given) > 1e-4 * max(abs(total), abs(given)):
            raise self._error(f"computed {_names(seen)} as a sum, {total:.6g}, and of it its loss, {given:.6g}")

    def _check_means(self, seen: list[SeenLoss], part: Counts, labels: Any) -> None:
        targets = int(_read(part.targets))
        for place, one in enumerate(seen):
            if one.count is None:
                raise self._error(f"computed {one.name} as a mean by weights of the classes")
            if one.reduction == "sum":
                raise self._error(f"computed {one.name} as a sum beside {_names(seen)}, which are means")
            count = int(_read(one.count))
            if not targets and not count:
                continue
            ratio = self._ratios.setdefault(place, count // targets) if targets else 0
            if not count or count != ratio * targets:
                raise self._error(
                    f"computed {one.name} as a mean over {count} numbers in a part of the batch where {targets} labels "
                    "are targets (not -100)"
                )
        is_of_samples = _platform.is_tensor(labels) and (
            labels.ndim < 2 or "float" in _platform.dtype_name(labels.dtype)
        )
        if is_of_samples or (_platform.is_tensor(labels) and 0 < targets < labels.numel()):
            self._watches = False

    def _error(self, what: str) -> ValueError:
        return ValueError(
            f"{self._name} {what}: losses of parts of a batch cannot be added up by their targets. Tell parallelize "
            "how the loss is computed: loss=fn(outputs, batch) -> (sum, count); hp.next_token_loss is one, for labels "
            "that are the tokens themselves"
        )


def _part_of_mean(mean: Any, count: Any, total: Any) -> Any:
    """A mean over ``count`` as a share of that over ``total``; a mean of nothing, which is no number, is 0."""
    return (mean * count / total).masked_fill(count == 0, 0.0)


def _names(seen: list[SeenLoss]) -> str:
    return ", ".join(dict.fromkeys(one.name for one in seen))


def _read(value: Any) -> float:
    if not _platform.is_tensor(value):
        return float(value)
    with _platform.no_grad():
        return float(_platform.tensor_to_numpy(_platform.detached(plain(value))))
