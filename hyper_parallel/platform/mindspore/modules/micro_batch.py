"""Splitting the inputs of a call into micro-batches; what it does is in ``platform/shared/micro_batch.py``."""

from __future__ import annotations

import functools

from hyper_parallel.platform.mindspore.base.tensors import is_tensor
from hyper_parallel.platform.shared import micro_batch as shared

__all__ = ["micro_batch"]

micro_batch = functools.partial(shared.micro_batch, is_tensor=is_tensor)
