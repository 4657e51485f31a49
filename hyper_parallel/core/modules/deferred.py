"""Deferred initialisation: build a model without memory, cut it, then let every rank make its own part of the values.

Note [The same bits]
Initial values come from random numbers that are addressed by draw and global element index, so a block can be made
without the rest. The draw of a parameter is its number (Note [Numbers of initial values]); plain parameters are made as
distributed ones that lie on this rank alone, and are plain again afterwards. So the values depend on the seed
(``hyper_parallel.manual_seed``) and the model, and are those of the same model on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import init_device_mesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.random.random_fill import NUMBERED, NumberedFills, fill_random_
from hyper_parallel.core.modules.hugging_face_init import has_own_distribution, hugging_face_init
from hyper_parallel.core.modules.initial_values import (
    carry_initial_values,
    constant_of,
    draws_of_module,
    number_initial_values,
    number_of,
)
from hyper_parallel.core.modules.lora import fill_adapters
from hyper_parallel.core.modules.replaced_parameters import remember_parameters
from hyper_parallel.platform import get_platform


def deferred_init() -> AbstractContextManager[None]:
    """Modules built inside have parameters without memory; :func:`materialize` gives them memory and values.

    In between the model can be cut, by :func:`parallelize_module` for instance. Buffers are made as usual.

    >>> import torch, hyper_parallel as hp
    >>> with hp.deferred_init():
    ...     model = torch.nn.Linear(1024, 1024)
    >>> model.weight.device.type
    'meta'
    >>> hp.materialize(model).weight.device.type
    'cpu'
    """
    return get_platform().without_memory()


def materialize(module: Any, *, device: Any = None, init: Callable[[Any], Any] | None = None) -> Any:
    """Give the parameters without memory this rank's block and its initial values, in place; the module.

    Values come from the modules' own ``reset_parameters`` (on MindSpore from the initializers that the parameters were
    made with), from the inside out as constructors run; from ``module.init_weights()`` where the module has it, or from
    ``init(module)``. Models of Hugging Face get the distribution that their class defines (:func:`hugging_face_init`).
    Parameters that a constructor set to one number keep it.
    All random numbers are HyperParallel's (``hyper_parallel.manual_seed``): the values have the same bits under every
    layout, on one device as well. No communication. A parameter that nothing gives a value is an error that names it.
    """
    platform = get_platform()
    device = device if device is not None else platform.get_device_type()
    made: dict[int, _Deferred] = {}
    compare_parameters = remember_parameters(module)
    number_initial_values(module)
    for path, owner in platform.get_cells_and_names(module):
        for name, parameter in platform.own_parameters(owner).items():
            if platform.has_no_memory(parameter):
                if id(parameter) not in made:
                    made[id(parameter)] = _Deferred(f"{path}.{name}" if path else name, parameter, device)
                platform.install_parameter(owner, name, made[id(parameter)].distributed)
    with platform.no_grad():
        if init is not None:
            with draws_of_module(module):
                init(module)
        else:
            wanted = list(made.values())
            if wanted and has_own_distribution(module):
                hugging_face_init(module)
                wanted = [one for one in wanted if not one.has_values()]
            elif wanted and callable(getattr(module, "init_weights", None)):
                with draws_of_module(module):
                    module.init_weights()
                wanted = [one for one in wanted if not one.has_values()]
            platform.reset_parameters(module, [one.distributed for one in wanted], fill_random_, draws_of_module)
    fill_adapters(module, {id(one.distributed) for one in made.values()})
    missing = [one.name for one in made.values() if not one.has_values()]
    if missing:
        raise RuntimeError(
            f"materialize: nothing gave a value to {', '.join(map(repr, missing))}; define reset_parameters() in the "
            "module (on MindSpore make the parameter with an initializer), or pass init=, a function that fills the "
            "parameters of the module that it is given"
        )
    for one in made.values():
        if hasattr(one.distributed, NUMBERED):
            delattr(one.distributed, NUMBERED)
    finished = {id(one.distributed): one.finished() for one in made.values() if not one.is_distributed}
    for _, owner in platform.get_cells_and_names(module):
        for name, parameter in platform.own_parameters(owner).items():
            if id(parameter) in finished:
                platform.install_parameter(owner, name, finished[id(parameter)])
    compare_parameters()
    return module


class _Deferred:
    """One parameter on its way to memory and values."""

    def __init__(self, name: str, parameter: Any, device: Any) -> None:
        platform = get_platform()
        self.name = name
        self.is_distributed = isinstance(parameter, DTensor)
        shape = tuple(parameter.shape)
        if self.is_distributed:
            layout = parameter._layout
        else:
            alone = init_device_mesh(
                platform.get_device_type(), (1,), rank_list=(platform.get_rank(),), init_backend=False
            )
            layout = Layout.of(alone, ((),) * len(shape))
        self.constant = constant_of(parameter)
        inside = layout.mesh.get_coordinate() is not None
        local_shape = layout.local_shape(shape) if inside else (0,) * len(shape)
        block = platform.new_tensor(local_shape, parameter.dtype, device)
        self.distributed = platform.as_parameter(
            platform.as_dtensor(DTensor, block, layout, shape), parameter.requires_grad
        )
        carry_initial_values(parameter, self.distributed)
        number = number_of(parameter)
        if number is not None:
            setattr(self.distributed, NUMBERED, NumberedFills(number))
        if self.constant is not None:
            with platform.no_grad():
                platform.fill_block(self.distributed, platform.full_like(block, self.constant))
        self._version = self.distributed._version

    def has_values(self) -> bool:
        """Whether something has been written; a question that all ranks answer alike, also those with empty blocks."""
        written = self.distributed._version != self._version
        return written or self.constant is not None or math.prod(self.distributed.shape) == 0

    def finished(self) -> Any:
        """The parameter as a plain one."""
        block = get_platform().detached(self.distributed)
        return get_platform().Parameter(block, requires_grad=self.distributed.requires_grad)
