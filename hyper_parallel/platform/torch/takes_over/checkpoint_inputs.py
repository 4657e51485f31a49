"""The inputs of a checkpointed function keep their labels when something else is asked to keep them.

Note [Checkpoints inside checkpoints]
``torch.utils.checkpoint`` keeps the inputs of a function as saved tensors, so that an outer checkpoint, or a swap to
the host, may drop or move them. What comes back from there has gone through the engine, which knows blocks only: a
plain tensor. So the labels are kept beside the inputs. PyTorch has no hook for this; a checkpoint's frame is private.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import checkpoint

from hyper_parallel.platform.torch.base.dtensor_base import DTensorBase, as_dtensor

_Frame = checkpoint._CheckpointFrame
_save_inputs = _Frame.save_inputs
_get_inputs = _Frame.get_inputs


def _save(frame: Any, *args: Any) -> None:
    frame.labels_of_inputs = [
        (type(arg), arg._layout, arg._global_shape) if isinstance(arg, DTensorBase) else None for arg in args
    ]
    _save_inputs(frame, *args)


def _get(frame: Any) -> list[Any]:
    inputs = _get_inputs(frame)
    labels = getattr(frame, "labels_of_inputs", None) or [None] * len(inputs)
    return [_labelled(value, label) for value, label in zip(inputs, labels, strict=True)]


def _labelled(value: Any, label: Any) -> Any:
    if label is None or not isinstance(value, torch.Tensor) or isinstance(value, DTensorBase):
        return value
    return as_dtensor(label[0], value, *label[1:])


def keep_labels_of_inputs() -> None:
    """Let checkpoints give DTensors back as DTensors."""
    _Frame.save_inputs = _save  # type: ignore[method-assign]
    _Frame.get_inputs = _get  # type: ignore[method-assign]
