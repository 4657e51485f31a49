"""What distributed tensors need from MindSpore, put together from the files that begin with ``dtensor``."""

from __future__ import annotations

from hyper_parallel.platform.mindspore import (
    differentiable,
    dtensor_base,
    dtensor_blocks,
    dtensor_calls,
    dtensor_functions,
    dtensor_gradients,
    dtensor_methods,
    dtensor_ops_creation,
    dtensor_support,
    dtensor_vocabulary,
    steady,
    tensors,
)

__all__ = ["DistributedTensors", "dtensor_vocabulary"]


class DistributedTensors:
    """What distributed tensors need from MindSpore."""

    DTensorBase = dtensor_base.DTensorBase
    Function = dtensor_functions.Function

    # the tensor type
    as_dtensor = staticmethod(dtensor_base.as_dtensor)
    alias = staticmethod(dtensor_base.alias)
    local_alias = staticmethod(dtensor_base.local_alias)
    detached = staticmethod(dtensor_base.detached)
    set_rebuilder = staticmethod(dtensor_base.set_rebuilder)
    set_dispatcher = staticmethod(dtensor_methods.set_dispatcher)
    without_interception = staticmethod(dtensor_calls.without_interception)
    graph_function = staticmethod(dtensor_support.graph_function)
    body_of = staticmethod(dtensor_support.body_of)
    is_intercepted = staticmethod(dtensor_support.is_intercepted)
    is_framework_service = staticmethod(dtensor_support.is_framework_service)

    # calling operators on blocks
    call_on_blocks = staticmethod(dtensor_calls.call_on_blocks)
    blocks_of = staticmethod(dtensor_calls.blocks_of)
    result_wrapper = staticmethod(dtensor_calls.result_wrapper)
    wrap_result = staticmethod(dtensor_calls.wrap_result)
    label_all = staticmethod(dtensor_calls.label_all)
    output_shapes = staticmethod(dtensor_calls.output_shapes)
    depends_on_values = staticmethod(dtensor_calls.depends_on_values)
    silenced = staticmethod(dtensor_calls.silenced)
    result_like = staticmethod(dtensor_support.result_like)

    # gradients
    backward = staticmethod(dtensor_gradients.backward)
    value_and_grad = staticmethod(dtensor_gradients.value_and_grad)
    grad = staticmethod(dtensor_gradients.grad)
    get_grad = staticmethod(dtensor_gradients.get_grad)
    set_grad = staticmethod(dtensor_gradients.set_grad)
    needs_grad = staticmethod(dtensor_gradients.needs_grad)
    requires_grad = staticmethod(dtensor_gradients.requires_grad)
    is_leaf = staticmethod(dtensor_gradients.is_leaf)
    write_mark = staticmethod(dtensor_gradients.write_mark)
    counted_once = staticmethod(dtensor_gradients.counted_once)
    copied = staticmethod(dtensor_ops_creation.clone)
    vary = staticmethod(differentiable.vary)
    set_function_handler = staticmethod(dtensor_functions.set_function_handler)
    apply_function = staticmethod(dtensor_functions.apply_function)
    carry_random_state = staticmethod(dtensor_support.carry_random_state)
    counting_versions = staticmethod(dtensor_support.counting_versions)
    owns_memory = staticmethod(dtensor_support.owns_memory)

    # moving blocks
    gather_blocks = staticmethod(dtensor_blocks.gather_blocks)
    reduce_blocks = staticmethod(dtensor_blocks.reduce_blocks)
    reduce_whole = staticmethod(dtensor_blocks.reduce_whole)
    exchange_blocks = staticmethod(dtensor_blocks.exchange_blocks)
    slice_block = staticmethod(dtensor_blocks.slice_block)
    embed_block = staticmethod(dtensor_blocks.embed_block)
    neutral_like = staticmethod(dtensor_blocks.neutral_like)
    fill_block = staticmethod(dtensor_support.fill_block)
    replace_block = staticmethod(dtensor_support.replace_block)

    # small services
    get_op_name = staticmethod(dtensor_functions.get_op_name)
    default_dtype = staticmethod(dtensor_support.default_dtype)
    is_dtype = staticmethod(tensors.is_dtype)
    dtype_name = staticmethod(tensors.dtype_name)
    from_numpy = staticmethod(tensors.from_numpy)
    is_dense_tensor = staticmethod(dtensor_support.is_dense_tensor)
    index_tensor = staticmethod(dtensor_support.index_tensor)
    to_device = staticmethod(dtensor_support.to_device)
    digest = staticmethod(dtensor_support.digest)
    as_parameter = staticmethod(dtensor_support.as_parameter)
    convert = staticmethod(dtensor_support.convert)
    replicate_plain_tensors = staticmethod(dtensor_support.replicate_plain_tensors)
    register_forward_hook = staticmethod(dtensor_support.register_forward_hook)
    observe_collectives = staticmethod(dtensor_support.observe_collectives)
    seeded = staticmethod(dtensor_support.seeded)
    number_like = staticmethod(dtensor_support.number_like)
    logarithm = staticmethod(steady.log)
    power = staticmethod(steady.power)
    losing_value = staticmethod(dtensor_support.losing_value)
    machine_epsilon = staticmethod(dtensor_support.machine_epsilon)
    vector_norm = staticmethod(dtensor_support.vector_norm)
