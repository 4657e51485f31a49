"""PyTorch as a platform: the table of contents. Each group of methods lives in the file of its concept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel.platform.platform import Platform, PlatformType
from hyper_parallel.platform.torch import (
    activation,
    blocks,
    collectives,
    compiling,
    deferred,
    devices,
    differentiable,
    dtensor_base,
    dtensor_gradients,
    dtensor_support,
    function_calls,
    grad_norm,
    gradients,
    groups,
    host_copies,
    local_calls,
    local_ops_reductions,
    masked_functions,
    micro_batch,
    modules,
    optimizer_state,
    optimizer_steps,
    overlap,
    parameter_uses,
    python_bodies,
    random_state,
    raw_bits,
    state,
    symmetric_memory,
    tensors,
    view_facts,
)


class TorchPlatform(Platform):
    """PyTorch on CPUs, CUDA GPUs and Ascend NPUs (through ``torch_npu``)."""

    platform_type = PlatformType.PYTORCH
    Tensor = torch.Tensor
    Parameter = torch.nn.Parameter
    Module = torch.nn.Module
    Function = torch.autograd.Function
    asks_subclasses = True
    DTensorBase = dtensor_base.DTensorBase
    ones = staticmethod(torch.ones)
    empty = staticmethod(torch.empty)
    full = staticmethod(torch.full)

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
    vary = staticmethod(differentiable.vary)
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

    # gradients
    backward = staticmethod(gradients.backward)
    value_and_grad = staticmethod(gradients.value_and_grad)
    get_grad = staticmethod(gradients.get_grad)
    set_grad = staticmethod(gradients.set_grad)

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
    get_element_size = staticmethod(tensors.get_element_size)
    get_tensor_storage_size = staticmethod(tensors.get_tensor_storage_size)
    str_to_dtype = staticmethod(tensors.str_to_dtype)
    list_to_size = staticmethod(tensors.list_to_size)
    construct_strided_slice = staticmethod(tensors.construct_strided_slice)
    set_tensor_requires_grad = staticmethod(tensors.set_tensor_requires_grad)
    tree_map = staticmethod(tensors.tree_map)
    apply_to_tensors = staticmethod(tensors.apply_to_tensors)
    get_op_name = staticmethod(tensors.get_op_name)
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
    linear_function = staticmethod(modules.linear_function)
    replace_forward = staticmethod(modules.replace_forward)
    own_parameters = staticmethod(modules.own_parameters)
    reset_parameters = staticmethod(modules.reset_parameters)
    without_memory = staticmethod(deferred.without_memory)
    install_parameter = staticmethod(modules.install_parameter)
    plain_parameters_behind = staticmethod(parameter_uses.plain_parameters_behind)
    has_no_memory = staticmethod(modules.has_no_memory)
    use_separate_projections = staticmethod(modules.use_separate_projections)
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
    def meta_device(self) -> torch.device:
        return devices.meta_device

    # state
    get_model_state_dict = staticmethod(state.get_model_state_dict)
    save_checkpoint = staticmethod(state.save_checkpoint)
    load_checkpoint = staticmethod(state.load_checkpoint)
    named_state_parameters = staticmethod(optimizer_state.named_state_parameters)
    set_extra_states = staticmethod(optimizer_state.set_extra_states)
    optimizer_groups = staticmethod(optimizer_state.optimizer_groups)
    set_optimizer_options = staticmethod(optimizer_state.set_optimizer_options)
    optimizer_slots = staticmethod(optimizer_state.optimizer_slots)
    blank_optimizer_slots = staticmethod(optimizer_state.blank_optimizer_slots)
    set_optimizer_slots = staticmethod(optimizer_state.set_optimizer_slots)
    raw_array = staticmethod(raw_bits.raw_array)  # type: ignore[assignment]
    set_raw = staticmethod(raw_bits.set_raw)  # type: ignore[assignment]
    is_in_host_memory = staticmethod(host_copies.is_in_host_memory)  # type: ignore[assignment]
    copy_raw_to_host = staticmethod(host_copies.copy_raw_to_host)  # type: ignore[assignment]
    clip_grad_norm_ = staticmethod(grad_norm.clip_grad_norm_)
    get_total_norm = staticmethod(grad_norm.get_total_norm)
    block_norms = staticmethod(grad_norm.block_norms)
    complete_norms = staticmethod(grad_norm.complete_norms)
    finished_norm = staticmethod(grad_norm.finished_norm)
    set_whole_norms = staticmethod(grad_norm.set_whole_norms)
    let_optimizers_take = staticmethod(optimizer_steps.let_optimizers_take)

    # one-sided memory
    get_symmetric_memory_handler = staticmethod(symmetric_memory.get_symmetric_memory_handler)

    # distributed tensors
    as_dtensor = staticmethod(dtensor_base.as_dtensor)
    alias = staticmethod(dtensor_base.alias)
    local_alias = staticmethod(dtensor_base.local_alias)
    detached = staticmethod(dtensor_base.detached)
    without_interception = staticmethod(dtensor_base.without_interception)
    graph_function = staticmethod(dtensor_base.graph_function)
    set_dispatcher = staticmethod(dtensor_base.set_dispatcher)
    set_rebuilder = staticmethod(dtensor_base.set_rebuilder)
    set_function_handler = staticmethod(function_calls.set_function_handler)
    apply_function = staticmethod(function_calls.apply_function)
    counted_once = staticmethod(dtensor_gradients.counted_once)
    carry_random_state = staticmethod(random_state.carry_random_state)
    counting_versions = staticmethod(dtensor_support.counting_versions)
    owns_memory = staticmethod(dtensor_support.owns_memory)
    take_masked_functions = staticmethod(masked_functions.take_masked_functions)
    view_ops = staticmethod(view_facts.view_ops)
    version_of = staticmethod(view_facts.version_of)
    recording = staticmethod(torch.enable_grad)
    shares_memory = staticmethod(view_facts.shares_memory)
    block_strides = staticmethod(view_facts.block_strides)
    would_be_view = staticmethod(view_facts.would_be_view)
    body_of = staticmethod(python_bodies.body_of)
    call_on_blocks = staticmethod(dtensor_support.call_on_blocks)
    wrap_result = staticmethod(dtensor_support.wrap_result)
    result_wrapper = staticmethod(local_calls.result_wrapper)
    blocks_of = staticmethod(local_calls.blocks_of)
    label_all = staticmethod(local_calls.label_all)
    output_shapes = staticmethod(local_calls.output_shapes)
    argument_names = staticmethod(local_calls.argument_names)
    leave_uncompiled = staticmethod(compiling.leave_uncompiled)
    silenced = staticmethod(local_calls.silenced)
    depends_on_values = staticmethod(local_calls.depends_on_values)
    seeded = staticmethod(dtensor_support.seeded)
    drawing_alike = staticmethod(dtensor_support.seeded)
    is_dense_tensor = staticmethod(dtensor_support.is_dense_tensor)
    is_intercepted = staticmethod(dtensor_support.is_intercepted)
    is_framework_service = staticmethod(dtensor_support.is_framework_service)
    observe_collectives = staticmethod(dtensor_support.observe_collectives)
    needs_grad = staticmethod(dtensor_support.needs_grad)
    requires_grad = staticmethod(dtensor_support.requires_grad)
    is_leaf = staticmethod(dtensor_support.is_leaf)
    copied = staticmethod(dtensor_support.copied)
    write_mark = staticmethod(dtensor_support.write_mark)
    default_dtype = staticmethod(dtensor_support.default_dtype)
    is_dtype = staticmethod(dtensor_support.is_dtype)
    dtype_name = staticmethod(dtensor_support.dtype_name)
    from_numpy = staticmethod(dtensor_support.from_numpy)
    index_tensor = staticmethod(dtensor_support.index_tensor)
    to_device = staticmethod(dtensor_support.to_device)
    digest = staticmethod(dtensor_support.digest)
    as_parameter = staticmethod(dtensor_support.as_parameter)
    fill_block = staticmethod(dtensor_support.fill_block)
    replace_block = staticmethod(dtensor_support.replace_block)
    convert = staticmethod(dtensor_support.convert)
    replicate_plain_tensors = staticmethod(dtensor_support.replicate_plain_tensors)
    register_forward_hook = staticmethod(dtensor_support.register_forward_hook)

    # local operators
    losing_value = staticmethod(local_ops_reductions.losing_value)
    machine_epsilon = staticmethod(local_ops_reductions.machine_epsilon)
    vector_norm = staticmethod(local_ops_reductions.vector_norm)
    result_like = staticmethod(local_ops_reductions.result_like)

    # moving blocks
    gather_blocks = staticmethod(blocks.gather_blocks)
    reduce_blocks = staticmethod(blocks.reduce_blocks)
    reduce_whole = staticmethod(blocks.reduce_whole)
    exchange_blocks = staticmethod(blocks.exchange_blocks)
    slice_block = staticmethod(blocks.slice_block)
    embed_block = staticmethod(blocks.embed_block)
    neutral_like = staticmethod(blocks.neutral_like)
