"""MindSpore as a platform. Each method is the function of its name in the file of its concept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore

from hyper_parallel.platform.contract.tables import takes_from
from hyper_parallel.platform.mindspore.base import (
    devices,
    returnable_memory,
    row_groups,
    start,  # isort: split - the first of all: it checks and configures
    tensors,
)
from hyper_parallel.platform.mindspore.communication import (
    coalesced,
    collectives,
    differentiable,
    groups,
    overlap,
    symmetric_memory,
)
from hyper_parallel.platform.mindspore.dtensor import (
    block_transfer,
    dtensor_gradients,
    grad_norm,
    local_calls,
    services,
    tensor_type,
)
from hyper_parallel.platform.mindspore.lowering import programs, recording
from hyper_parallel.platform.mindspore.mends import same_bits
from hyper_parallel.platform.mindspore.modules import (
    activation,
    deferred,
    micro_batch,
    modules,
    optimizer_state,
    parameter_units,
    parameter_uses,
    raw_bits,
    state,
    watched_uses,
)
from hyper_parallel.platform.mindspore.operators import creation
from hyper_parallel.platform.mindspore.takes_over import (
    added_methods,
    addressed_draws,
    autograd_functions,
    doors,
    watched_losses,
)
from hyper_parallel.platform.platform import Platform, PlatformType

__all__ = ["MindSporePlatform", "added_methods", "start"]


@takes_from(
    activation,
    addressed_draws,
    autograd_functions,
    block_transfer,
    coalesced,
    collectives,
    deferred,
    devices,
    differentiable,
    doors,
    dtensor_gradients,
    grad_norm,
    groups,
    local_calls,
    micro_batch,
    modules,
    optimizer_state,
    overlap,
    parameter_units,
    parameter_uses,
    programs,
    raw_bits,
    recording,
    watched_uses,
    returnable_memory,
    row_groups,
    services,
    state,
    symmetric_memory,
    tensor_type,
    tensors,
    watched_losses,
)
class MindSporePlatform(Platform):
    """MindSpore on Ascend NPUs and on CPUs."""

    platform_type = PlatformType.MINDSPORE
    Tensor = mindspore.Tensor
    Parameter = mindspore.Parameter
    Module = mindspore.nn.Cell
    Function = autograd_functions.Function
    DTensorBase = tensor_type.DTensorBase
    records_during_backward = False
    ones = staticmethod(tensors.ones)
    empty = staticmethod(tensors.empty)
    full = staticmethod(tensors.full)
    meta_device = devices.meta_device
    runs_without_memory = False
    checkpoint = staticmethod(activation.checkpoint)
    noop_context_fn = staticmethod(activation.noop_context_fn)

    # Named otherwise in their rooms, or known to two of them.
    _create_group = staticmethod(groups.make_group)
    copied = staticmethod(creation.clone)
    logarithm = staticmethod(same_bits.log)
    power = staticmethod(same_bits.power)
    grad = staticmethod(dtensor_gradients.grad)
    get_op_name = staticmethod(autograd_functions.get_op_name)
    detached = staticmethod(tensor_type.detached)
    needs_grad = staticmethod(dtensor_gradients.needs_grad)
    requires_grad = staticmethod(dtensor_gradients.requires_grad)
    grad_mode = staticmethod(programs.grad_mode)

    def __init__(self) -> None:
        self._grad_reduction: overlap.GradReduction | None = None

    def set_grad_reduce_handle(self, handle: Any, post_process: Callable[[], None] | None = None) -> None:
        if self._grad_reduction is None:
            self._grad_reduction = overlap.GradReduction(
                devices.new_stream, devices.get_stream_context, devices.get_current_stream
            )
        self._grad_reduction.set(handle, post_process)

    def wait_grad_handle(self) -> None:
        if self._grad_reduction is not None:
            self._grad_reduction.wait()
