"""PyTorch as a platform. Each method is the function of its name in the file of its concept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel.platform.contract.tables import takes_from
from hyper_parallel.platform.platform import Platform, PlatformType
from hyper_parallel.platform.shared.membership import belongs_to_rank
from hyper_parallel.platform.torch.base import (  # noqa: F401
    devices,
    dtensor_base,
    rank_state,
    returnable_memory,
    row_groups,
    tensors,
)
from hyper_parallel.platform.torch.communication import (
    coalesced,
    collectives,
    differentiable,
    groups,
    overlap,
    pretend_groups,
    symmetric_memory,
)
from hyper_parallel.platform.torch.dry_run import counted_runs
from hyper_parallel.platform.torch.dtensor import (
    attention_kernels,
    block_transfer,
    dtensor_gradients,
    dtensor_support,
    grad_norm,
    gradients,
    local_calls,
    local_ops_reductions,
    view_facts,
)
from hyper_parallel.platform.torch.lowering import compiled_programs, programs, recording
from hyper_parallel.platform.torch.modules import (
    activation,
    deferred,
    host_copies,
    micro_batch,
    modules,
    optimizer_state,
    parameter_units,
    parameter_uses,
    raw_bits,
    state,
    watched_losses,
    watched_uses,
)
from hyper_parallel.platform.torch.takes_over import (
    addressed_draws,
    compiling,
    function_calls,
    install,
    masked_functions,
    optimizer_steps,
    python_bodies,
    random_state,
)


@takes_from(
    activation,
    addressed_draws,
    attention_kernels,
    block_transfer,
    coalesced,
    collectives,
    compiled_programs,
    compiling,
    counted_runs,
    deferred,
    devices,
    differentiable,
    dtensor_base,
    dtensor_support,
    function_calls,
    grad_norm,
    gradients,
    groups,
    host_copies,
    install,
    local_calls,
    local_ops_reductions,
    masked_functions,
    micro_batch,
    modules,
    optimizer_state,
    optimizer_steps,
    overlap,
    parameter_units,
    parameter_uses,
    pretend_groups,
    programs,
    python_bodies,
    random_state,
    raw_bits,
    recording,
    watched_uses,
    returnable_memory,
    row_groups,
    state,
    symmetric_memory,
    tensors,
    view_facts,
    watched_losses,
)
class TorchPlatform(Platform):
    """PyTorch on CPUs, CUDA GPUs and Ascend NPUs (through ``torch_npu``)."""

    platform_type = PlatformType.PYTORCH
    Tensor = torch.Tensor
    Parameter = torch.nn.Parameter
    Module = torch.nn.Module
    Function = torch.autograd.Function
    records_during_backward = True
    asks_subclasses = True
    DTensorBase = dtensor_base.DTensorBase
    ones = staticmethod(torch.ones)
    empty = staticmethod(torch.empty)
    full = staticmethod(torch.full)
    meta_device = devices.meta_device
    checkpoint = staticmethod(activation.checkpoint)
    noop_context_fn = staticmethod(activation.noop_context_fn)

    # Named otherwise in their rooms.
    _create_group = staticmethod(groups.make_group)
    count_on_one_rank = staticmethod(dtensor_gradients.count_on_one_rank)
    recording = staticmethod(torch.enable_grad)
    grad_mode = torch.set_grad_enabled
    drawing_alike = staticmethod(dtensor_support.seeded)

    def __init__(self) -> None:
        install.install()
        self._grad_reduction: overlap.GradReduction | None = None
        belongs_to_rank(lambda: self._grad_reduction, lambda saved: setattr(self, "_grad_reduction", saved))

    def set_grad_reduce_handle(self, handle: Any, post_process: Callable[[], None] | None = None) -> None:
        if self._grad_reduction is None:
            self._grad_reduction = overlap.GradReduction(
                devices.new_stream, devices.get_stream_context, devices.get_current_stream
            )
        self._grad_reduction.set(handle, post_process)

    def wait_grad_handle(self) -> None:
        if self._grad_reduction is not None:
            self._grad_reduction.wait()
