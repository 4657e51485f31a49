"""Batches on their way to the model: this rank's samples, as tensors, by the names of the model's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.data.spelling import spell
from hyper_parallel.parallel.counts import IGNORED, num_targets
from hyper_parallel.parallel.losses import is_hugging_face
from hyper_parallel.platform import get_platform

if TYPE_CHECKING:
    from hyper_parallel.data.dataset import Dataset
    from hyper_parallel.parallel.parallel import Parallel

__all__ = ["Feeder", "aligned_loss", "takes_labels"]


class _AlignedLoss:
    """(sum, count) of the cross entropies of logits with labels that are shifted already, as data has them."""

    shifts_labels = False

    def __call__(self, outputs: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        logits = getattr(outputs, "logits", outputs)
        flat, targets = logits.reshape(-1, logits.shape[-1]), batch["labels"].reshape(-1)
        return get_platform().cross_entropy_sum(flat, targets, IGNORED), num_targets(targets)

    def count(self, batch: Mapping[str, Any]) -> Any:
        return num_targets(batch["labels"])


aligned_loss = _AlignedLoss()


def takes_labels(model: Any) -> bool:
    """Whether the model computes its loss by itself."""
    names, takes_any = _arguments(model)
    return "labels" in names or (takes_any and is_hugging_face(model))


def _arguments(model: Any) -> tuple[list[str], bool]:
    parameters = inspect.signature(get_platform().get_cell_construct(model)).parameters.values()
    named = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return named, any(one.kind is one.VAR_KEYWORD for one in parameters)


class Feeder:
    """Samples of a dataset as the arguments of a model.

    ``spelling`` says how the model is told where packed documents begin; None: data that is not packed.
    """

    def __init__(self, run: Parallel, data: Dataset, spelling: str | None = None) -> None:
        self._run, self._data, self.spelling = run, data, spelling
        names, takes_any = _arguments(run.model)
        self._ids = "input_ids" if "input_ids" in names or takes_any else names[0]
        self._shifts = is_hugging_face(run.model) and takes_any
        self._known = None if takes_any else {*names, "labels"}
        self._device = get_platform().get_device_type()

    def load(self, numbers: np.ndarray) -> tuple[np.ndarray, Any]:
        """The numbers of a batch and this rank's rows of it as arrays; called ahead of the step, by another thread."""
        return numbers, self._data.collate(self._run.part_of(numbers))

    def arguments(self, batch: Any) -> dict[str, Any]:
        """The batch as tensors."""
        arrays = dict(batch) if self.spelling is None else spell(batch, self.spelling)
        if self._shifts and "labels" in arrays:
            arrays["shift_labels"] = arrays["labels"]
        if self._ids != "input_ids":
            arrays[self._ids] = arrays.pop("input_ids")
        if self._known is not None:
            arrays = {name: array for name, array in arrays.items() if name in self._known}
        return {name: self._tensor(array) for name, array in arrays.items()}

    def _tensor(self, array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return array
        platform = get_platform()
        return platform.from_numpy(np.ascontiguousarray(array), platform.str_to_dtype(str(array.dtype)), self._device)
