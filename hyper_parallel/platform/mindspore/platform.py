"""MindSpore as a platform: the table of contents. Each group of methods lives in the file of its concept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore

from hyper_parallel.platform.mindspore import (
    activation,
    collectives,
    deferred,
    devices,
    differentiable,
    grad_norm,
    groups,
    micro_batch,
    modules,
    optimizer_state,
    overlap,
    parameter_uses,
    raw_bits,
    start,  # isort: split - the first of all: it checks and configures
    state,
    symmetric_memory,
    tensors,
)
from hyper_parallel.platform.mindspore.dtensor_platform import DistributedTensors
from hyper_parallel.platform.platform import Platform, PlatformType

__all__ = ["MindSporePlatform", "start"]


class MindSporePlatform(DistributedTensors, Platform):
    """MindSpore on Ascend NPUs and on CPUs."""

    platform_type = PlatformType.MINDSPORE
    Tensor = mindspore.Tensor
    Parameter = mindspore.Parameter
    Module = mindspore.nn.Cell
    ones = staticmethod(tensors.ones)
    empty = staticmethod(tensors.empty)
    full = staticmethod(tensors.full)

    def __init__(self) -> None:
        self._grad_reduction: overlap.GradReduction | None = None

    # groups and ranks
    init_process_group = staticmethod(groups.init_process_group)
    destroy_process_group = staticmethod(groups.destroy_process_group)
    get_rank = staticmethod(groups.get_rank)
    get_world_size = staticmethod(groups.get_world_size)
    get_global_rank = staticmethod(groups.get_global_rank)
    get_group_local_rank = staticmethod(groups.get_group_local_rank)
    get_process_group_ranks = staticmethod(groups.get_process_group_ranks)
    get_backend = staticmethod(groups.get_backend)
    barrier = staticmethod(groups.barrier)
    split_group = staticmethod(groups.split_group)
    _create_group = staticmethod(groups.make_group)

    world_generation = staticmethod(groups.world_generation)
    on_leaving = staticmethod(groups.on_leaving)

    # collectives on plain tensors
    all_reduce = staticmethod(collectives.all_reduce)
    all_gather_into_tensor = staticmethod(collectives.all_gather_into_tensor)
    reduce_scatter_tensor = staticmethod(collectives.reduce_scatter_tensor)
    broadcast = staticmethod(collectives.broadcast)
    all_to_all_single = staticmethod(collectives.all_to_all_single)
    isend = staticmethod(collectives.isend)
    irecv = staticmethod(collectives.irecv)
    send_object_list = staticmethod(collectives.send_object_list)
    recv_object_list = staticmethod(collectives.recv_object_list)
    all_gather_object = staticmethod(collectives.all_gather_object)

    # collectives with gradients
    differentiable_all_gather_concat = staticmethod(differentiable.differentiable_all_gather_concat)
    differentiable_all_reduce = staticmethod(differentiable.differentiable_all_reduce)
    differentiable_reduce_scatter = staticmethod(differentiable.differentiable_reduce_scatter)
    differentiable_all_to_all = staticmethod(differentiable.differentiable_all_to_all)
    differentiable_all_to_all_single = staticmethod(differentiable.differentiable_all_to_all_single)
    differentiable_all_to_all_single_async = staticmethod(differentiable.differentiable_all_to_all_single_async)
    p2p_exchange = staticmethod(differentiable.p2p_exchange)
    differentiable_async_a2a_wait = staticmethod(overlap.differentiable_async_a2a_wait)
    launch_async_all_to_all = staticmethod(overlap.launch_async_all_to_all)
    differentiable_sync_hook = staticmethod(overlap.differentiable_sync_hook)

    def set_grad_reduce_handle(self, handle: Any, post_process: Callable[[], None] | None = None) -> None:
        if self._grad_reduction is None:
            self._grad_reduction = overlap.GradReduction(
                devices.new_stream, devices.get_stream_context, devices.get_current_stream
            )
        self._grad_reduction.set(handle, post_process)

    def wait_grad_handle(self) -> None:
        if self._grad_reduction is not None:
            self._grad_reduction.wait()

    # tensors
    is_tensor = staticmethod(tensors.is_tensor)
    cat = staticmethod(tensors.cat)
    chunk = staticmethod(tensors.chunk)
    arange = staticmethod(tensors.arange)
    zeros = staticmethod(tensors.zeros)
    full_like = staticmethod(tensors.full_like)
    empty_like = staticmethod(tensors.empty_like)
    new_tensor = staticmethod(tensors.new_tensor)
    new_zero_parameter = staticmethod(tensors.new_zero_parameter)
    tensor_type_cast = staticmethod(tensors.tensor_type_cast)
    cast_fp_tensor = staticmethod(tensors.cast_fp_tensor)
    tensor_to_numpy = staticmethod(tensors.tensor_to_numpy)
    raw_array = staticmethod(raw_bits.raw_array)  # type: ignore[assignment]
    set_raw = staticmethod(raw_bits.set_raw)  # type: ignore[assignment]
    is_in_host_memory = staticmethod(raw_bits.is_in_host_memory)  # type: ignore[assignment]
    get_element_size = staticmethod(tensors.get_element_size)
    get_tensor_storage_size = staticmethod(tensors.get_tensor_storage_size)
    str_to_dtype = staticmethod(tensors.str_to_dtype)
    list_to_size = staticmethod(tensors.list_to_size)
    construct_strided_slice = staticmethod(tensors.construct_strided_slice)
    set_tensor_requires_grad = staticmethod(tensors.set_tensor_requires_grad)
    tree_map = staticmethod(tensors.tree_map)
    apply_to_tensors = staticmethod(tensors.apply_to_tensors)
    no_grad = staticmethod(tensors.no_grad)

    # modules and parameters
    get_cell_construct = staticmethod(modules.get_cell_construct)
    get_cells_and_names = staticmethod(modules.get_cells_and_names)
    parameters_dict = staticmethod(modules.parameters_dict)
    search_parameter_by_name = staticmethod(modules.search_parameter_by_name)
    update_parameter_by_name = staticmethod(modules.update_parameter_by_name)
    set_layout_into_parameter = staticmethod(modules.set_layout_into_parameter)
    get_param_local_shape = staticmethod(modules.get_param_local_shape)
    get_param_local_data = staticmethod(modules.get_param_local_data)
    update_param_data = staticmethod(modules.update_param_data)
    load_into_param = staticmethod(modules.load_into_param)
    get_param_type_size = staticmethod(modules.get_param_type_size)
    is_linear_module = staticmethod(modules.is_linear_module)
    is_embedding_module = staticmethod(modules.is_embedding_module)
    linear_weight_dims = staticmethod(modules.linear_weight_dims)
    weight_name = staticmethod(modules.weight_name)
    linear_function = staticmethod(modules.linear_function)
    replace_forward = staticmethod(modules.replace_forward)
    own_parameters = staticmethod(modules.own_parameters)
    install_parameter = staticmethod(modules.install_parameter)
    plain_parameters_behind = staticmethod(parameter_uses.plain_parameters_behind)
    has_no_memory = staticmethod(modules.has_no_memory)
    without_memory = staticmethod(deferred.without_memory)
    reset_parameters = staticmethod(deferred.reset_parameters)
    register_forward_pre_hook = staticmethod(modules.register_forward_pre_hook)
    register_full_backward_hook = staticmethod(modules.register_full_backward_hook)
    register_full_backward_pre_hook = staticmethod(modules.register_full_backward_pre_hook)
    init_parameters = staticmethod(modules.init_parameters)
    micro_batch = staticmethod(micro_batch.micro_batch)

    # activation memory
    ckpt_wrapper = staticmethod(activation.ckpt_wrapper)
    swap_wrapper = staticmethod(activation.swap_wrapper)
    create_selective_checkpoint_contexts = staticmethod(activation.create_selective_checkpoint_contexts)
    async_save_on_cpu = staticmethod(activation.async_save_on_cpu)

    @property
    def checkpoint(self) -> Callable[..., Any]:
        return activation.checkpoint

    @property
    def noop_context_fn(self) -> Callable[[], Any]:
        return activation.noop_context_fn

    # devices, streams and profiling
    new_stream = staticmethod(devices.new_stream)
    get_stream_context = staticmethod(devices.get_stream_context)
    get_current_stream = staticmethod(devices.get_current_stream)
    new_event = staticmethod(devices.new_event)
    profiler_record = staticmethod(devices.profiler_record)
    init_on_device = staticmethod(devices.init_on_device)
    get_device_type = staticmethod(devices.get_device_type)

    @property
    def meta_device(self) -> str:
        return devices.meta_device

    # state
    get_model_state_dict = staticmethod(state.get_model_state_dict)
    save_checkpoint = staticmethod(state.save_checkpoint)
    load_checkpoint = staticmethod(state.load_checkpoint)
    named_state_parameters = staticmethod(optimizer_state.named_state_parameters)
    optimizer_groups = staticmethod(optimizer_state.optimizer_groups)
    set_optimizer_options = staticmethod(optimizer_state.set_optimizer_options)
    optimizer_slots = staticmethod(optimizer_state.optimizer_slots)
    blank_optimizer_slots = staticmethod(optimizer_state.blank_optimizer_slots)
    check_optimizer_state = staticmethod(optimizer_state.check_optimizer_state)  # type: ignore[assignment]
    set_optimizer_slots = staticmethod(optimizer_state.set_optimizer_slots)
    clip_grad_norm_ = staticmethod(grad_norm.clip_grad_norm_)
    get_total_norm = staticmethod(grad_norm.get_total_norm)
    block_norms = staticmethod(grad_norm.block_norms)
    complete_norms = staticmethod(grad_norm.complete_norms)
    finished_norm = staticmethod(grad_norm.finished_norm)
    set_whole_norms = staticmethod(grad_norm.set_whole_norms)
    let_optimizers_take = staticmethod(grad_norm.let_optimizers_take)

    # one-sided memory
    get_symmetric_memory_handler = staticmethod(symmetric_memory.get_symmetric_memory_handler)
