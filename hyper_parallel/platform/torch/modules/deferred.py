"""Building modules whose parameters have no memory, and giving them values later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from hyper_parallel.platform.torch.base.devices import init_on_device

_CONSTANT = "hyper_parallel_constant"


class _EmptyWithoutMemory(TorchFunctionMode):
    """``torch.empty`` gives a tensor on the meta device: what its values are nobody has said yet.

    PyTorch's own modules make their parameters by it. Tensors made otherwise have values, and stay.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None and kwargs.get("out") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _remember_constant(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Note on a parameter that has values the one value of all of its elements, such as the ones of a norm."""
    del module, name
    if parameter is None or parameter.is_meta or parameter.numel() == 0 or nn.parameter.is_lazy(parameter):
        return
    values = parameter.detach()
    first = values.reshape(-1)[0]
    if bool((values == first).all()):
        setattr(parameter, _CONSTANT, first.item())


@contextmanager
def without_memory() -> Iterator[None]:
    """Modules built inside have parameters on the meta device; their buffers are made as usual.

    A parameter made with values exists for a moment, until it is registered; of one made by ``torch.empty``, as
    PyTorch's modules make theirs, there is never any memory.
    """
    handle = register_module_parameter_registration_hook(_remember_constant)
    try:
        with init_on_device("meta"), _EmptyWithoutMemory():
            yield
    finally:
        handle.remove()
