"""``torch.masked``, and how ``nn.Transformer`` looks at its masks, on distributed tensors.

These functions are plain Python that nobody can intercept as a whole. They make tensors for themselves, from the shape
of their input: whole ones, where the input is distributed. So they run with plain tensors taken as whole, while a plain
tensor that the caller hands in beside a distributed one stays an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import transformer
from torch.utils._pytree import tree_leaves

from hyper_parallel.platform.torch.base.dtensor_base import DTensorBase

_NAMES = (
    *("sum", "prod", "cumsum", "cumprod", "amax", "amin", "argmax", "argmin", "mean", "median", "logsumexp"),
    *("logaddexp", "norm", "normalize", "var", "std", "softmax", "log_softmax", "softmin"),
)


def install_masked_functions(promise: Callable[[], Any], refuse: Callable[[str, Any], None]) -> None:
    """Run these functions inside ``promise()``; ``refuse(name, value)`` looks at plain arguments."""
    for name in _NAMES:
        plain = getattr(torch.masked, name)
        if not hasattr(plain, "_takes_dtensors"):
            setattr(torch.masked, name, _wrapped(f"torch.masked.{name}", plain, promise, refuse))
    plain = transformer._detect_is_causal_mask  # it compares a mask with one of its own making; no public name
    if not hasattr(plain, "_takes_dtensors"):
        transformer._detect_is_causal_mask = _wrapped("nn.Transformer", plain, promise, refuse)


def _wrapped(name: str, plain: Callable[..., Any], promise: Callable[[], Any], refuse: Callable[..., None]) -> Any:
    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        if not any(isinstance(leaf, DTensorBase) for leaf in leaves):
            return plain(*args, **kwargs)
        for leaf in leaves:
            if not isinstance(leaf, DTensorBase):
                refuse(name, leaf)
        with promise():
            return plain(*args, **kwargs)

    call._takes_dtensors = True  # type: ignore[attr-defined]
    return call
