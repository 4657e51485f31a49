"""Building cells whose parameters have no memory, and giving them values later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base import devices, initializers
from hyper_parallel.platform.mindspore.base.tensors import is_meta

_CONSTANT = "hyper_parallel_constant"
_INITIALIZER = "hyper_parallel_initializer"


@contextmanager
def without_memory() -> Iterator[None]:
    """Cells built inside have parameters on the meta device; their buffers are made as usual.

    MindSpore's own cells make parameters with initializers, of which there is never any memory. A parameter made with
    values has them until the constructor of ``Parameter`` returns.
    """
    with devices.making_parameters_on(devices.meta_device, _note_values):
        yield


def _note_values(parameter: Parameter, given: Any) -> None:
    """Note on a new parameter without memory what its values are to be: a number or an initializer, if it is known."""
    if isinstance(given, Tensor) and given.has_init:
        constant = initializers.constant_of(given.init)
        note, value = (_INITIALIZER, given.init) if constant is None else (_CONSTANT, constant)
        setattr(parameter, note, value)
        return
    if isinstance(given, Tensor) and is_meta(given):
        return
    values = given.asnumpy() if isinstance(given, Tensor) else np.asarray(given)
    if values.size and (values == values.reshape(-1)[0]).all():
        setattr(parameter, _CONSTANT, values.reshape(-1)[0].item())


def reset_parameters(
    module: nn.Cell, parameters: list[Any], fill_random: Callable[..., Any], around: Callable[[nn.Cell], Any]
) -> None:
    """Give ``parameters`` the values of the initializers that they were made with, from the inside out.

    A cell whose parameters have neither initializer nor number is asked to fill them by its ``reset_parameters``.
    """
    waiting = {id(parameter) for parameter in parameters}
    for cell in _from_inside_out(module, set()):
        own = [one for one in private_api.parameters_of(cell).values() if id(one) in waiting]
        unknown = False
        for parameter in own:
            waiting.discard(id(parameter))
            initializer = getattr(parameter, _INITIALIZER, None)
            if initializer is not None:
                kind, arguments = _distribution(parameter, initializer)
                fill_random(parameter, kind, **arguments)
            elif getattr(parameter, _CONSTANT, None) is None:
                unknown = True
        if unknown and callable(getattr(cell, "reset_parameters", None)):
            with around(cell):
                cell.reset_parameters()


def _distribution(parameter: Any, initializer: Any) -> initializers.Distribution:
    try:
        return initializers.distribution_of(initializer, tuple(parameter.shape), parameter.dtype)
    except ValueError as error:
        raise ValueError(f"{parameter.name!r}, made with {type(initializer).__name__}: {error}") from None


def _from_inside_out(cell: nn.Cell, seen: set[int]) -> Iterator[nn.Cell]:
    if id(cell) not in seen:
        seen.add(id(cell))
        for child in private_api.cells_of(cell).values():
            if child is not None:
                yield from _from_inside_out(child, seen)
        yield cell
