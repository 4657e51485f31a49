"""The inputs of a checkpointed function keep their labels when something else is asked to keep them.

Note [Checkpoints inside checkpoints]
``torch.utils.checkpoint`` keeps the inputs of a function as saved tensors, so that an outer checkpoint, or a swap to
the host, may drop or move them. What comes back from there has gone through the engine, which knows blocks only: a
plain tensor. So the labels are kept beside the inputs. PyTorch has no hook for this; a checkpoint's frame is private.

Note [The shape of a block]
What is saved in both passes is compared by its shape. An output that an operator saves without a gradient, such as the
indices of a maximum, is compared once before it got its label and once behind; so the shape is that of the block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import checkpoint

from hyper_parallel.platform.torch.base.dtensor_base import DTensorBase, as_dtensor
from hyper_parallel.platform.torch.private_api import NoInterception

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


def _facts_of_block(x: torch.Tensor) -> dict[str, Any]:
    with NoInterception():
        return {"shape": torch.Tensor.size(x), "dtype": x.dtype, "device": x.device}


def keep_labels_of_inputs() -> None:
    """Let checkpoints give DTensors back as DTensors, and compare what they save by its blocks."""
    checkpoint._default_meta_extractor = _facts_of_block
    checkpoint._allowed_determinism_checks_to_fns[checkpoint._DEFAULT_DETERMINISM_MODE] = _facts_of_block
    _Frame.save_inputs = _save  # type: ignore[method-assign]
    _Frame.get_inputs = _get  # type: ignore[method-assign]
