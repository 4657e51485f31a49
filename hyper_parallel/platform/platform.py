"""The contract between HyperParallel and a framework.

Everything above this folder speaks to PyTorch or MindSpore only through a :class:`Platform`. To add a third framework,
read this file, then ``distributed_tensors.py``: subclass :class:`Platform`, set the class attributes, write every
abstract method as its docstring says, and add the framework to :func:`_find_platform`. A class with a method missing
cannot be instantiated, and Python's error lists what is missing.

Three rules hold for every method:

* **Bad input is an error on the calling rank, before anything is sent.** A rank that raises inside a collective leaves
  its peers waiting, so shapes, splits, devices and ranks are checked first.
* **Collectives with gradients follow one law.** The gradient of a value that is whole on every rank is whole on every
  rank; the gradient of a shard is that shard of the gradient; the gradient of a pending sum is whole on every rank.
  So an all-reduce's gradient is the identity, a gather's is a slice, a reduce-scatter's is a gather.
* **Streams and events always exist.** Where a device has none, stand-ins keep program order and cost nothing.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import Any, ClassVar

from hyper_parallel.platform.distributed_tensors import DistributedTensorSupport

HYPER_PARALLEL_PLATFORM = "HYPER_PARALLEL_PLATFORM"
HYPER_PARALLEL_PLATFORM_MINDSPORE = "mindspore"
HYPER_PARALLEL_PLATFORM_TORCH = "torch"

# Groups by their ranks in ascending order. One table for the process, so that every mesh, plan and test that asks for
# the same ranks shares one communicator.
EXISTING_COMM_GROUPS: dict[tuple[int, ...], Any] = {}


class PlatformType(Enum):
    """The frameworks HyperParallel runs on."""

    MINDSPORE = auto()
    PYTORCH = auto()


class Platform(DistributedTensorSupport):
    """What a framework must provide, grouped as the library uses it."""

    # The framework's own types and factories.
    platform_type: ClassVar[PlatformType]
    Tensor: ClassVar[Any]
    Parameter: ClassVar[Any]
    Module: ClassVar[Any]
    Function: ClassVar[Any]  # base class of autograd functions: static forward(ctx, ...) and backward(ctx, ...)
    DTensorBase: ClassVar[Any]  # tensor type whose operators can be intercepted; DTensor derives from it
    ones: ClassVar[Callable[..., Any]]
    empty: ClassVar[Callable[..., Any]]
    full: ClassVar[Callable[..., Any]]

    # ---------------------------------------------------------------- groups and ranks

    @staticmethod
    @abstractmethod
    def init_process_group(
        backend: str | None = None,
        *,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        pg_options: Any = None,
        device_id: Any = None,
    ) -> None:
        """Join the world; ``backend=None`` takes the one that fits the accelerator. A second call is an error."""

    @staticmethod
    @abstractmethod
    def destroy_process_group(group: Any = None) -> None:
        """Leave ``group``, or the world and every group made in it."""

    @staticmethod
    @abstractmethod
    def get_rank() -> int:
        """This process's rank in the world; 0 before there is one."""

    @staticmethod
    @abstractmethod
    def get_world_size() -> int:
        """The number of processes in the world; 1 before there is one."""

    @staticmethod
    @abstractmethod
    def get_global_rank(group: Any, group_rank: int) -> int:
        """The world rank of the ``group_rank``-th member of ``group``."""

    @staticmethod
    @abstractmethod
    def get_group_local_rank(group: Any = None) -> int:
        """This process's rank inside ``group``."""

    @staticmethod
    @abstractmethod
    def get_process_group_ranks(group: Any = None) -> list[int]:
        """The world ranks of ``group``, in group order."""

    @staticmethod
    @abstractmethod
    def get_backend(group: Any = None) -> str:
        """The name of the transport behind ``group``."""

    @staticmethod
    @abstractmethod
    def barrier(group: Any = None, async_op: bool = False, device_ids: Sequence[int] | None = None) -> Any:
        """Wait until every rank of ``group`` is here; with ``async_op`` return a handle instead."""

    @staticmethod
    @abstractmethod
    def split_group(
        parent_pg: Any = None,
        split_ranks: Sequence[Sequence[int]] | None = None,
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: str | None = None,
    ) -> Any:
        """One list of ranks per new group, called by every rank of the parent; each rank gets its own group or None."""

    @staticmethod
    @abstractmethod
    def _create_group(rank_list: list[int]) -> Any:
        """Make the group of exactly these ascending ranks; only its members call this, in any order of groups."""

    def create_group(self, rank_list: Iterable[int]) -> Any:
        """The group of exactly these ranks; the same set asked again, in any order, is the same group.

        Only members call it, and no order among different groups is required.
        """
        key = _group_key(rank_list)
        group = self.get_created_group(key)
        if group is not None:
            return group
        rank, world_size = self.get_rank(), self.get_world_size()
        if key[0] < 0 or key[-1] >= world_size:
            raise ValueError(f"create_group({list(key)}): the ranks of this world are 0 to {world_size - 1}")
        if rank not in key:
            raise ValueError(
                f"create_group({list(key)}): rank {rank} is not one of them; only the members of a group create it"
            )
        group = EXISTING_COMM_GROUPS[key] = self._create_group(list(key))
        return group

    @classmethod
    def get_created_group(cls, rank_list: Iterable[int]) -> Any:
        """The group that was made for these ranks, in any order, or None."""
        cls.world_generation()  # forgets the groups of a world that was left without our knowledge
        return EXISTING_COMM_GROUPS.get(_group_key(rank_list))

    @classmethod
    def mark_created_groups(cls, process_group: Any) -> None:
        """Put a group made elsewhere, or a list of them, into the table that :meth:`create_group` looks in.

        It replaces a group of the same ranks, so that all members that mark it use the same one from then on.
        """
        groups = process_group if isinstance(process_group, (list, tuple)) else [process_group]
        cls.world_generation()  # forgets the groups of a world that was left without our knowledge
        for group in groups:
            EXISTING_COMM_GROUPS[_group_key(cls.get_process_group_ranks(group))] = group

    # ---------------------------------------------------------------- collectives on plain tensors
    # ``group_info`` is a group, None for the world, or anything with a ``group`` attribute. The result is returned, or
    # ``(result, handle)`` with ``async_op=True``; the result is complete after ``handle.wait()``.

    @staticmethod
    @abstractmethod
    def all_reduce(data: Any, group_info: Any, async_op: bool = False, op: str = "sum") -> Any:
        """Reduce ``data`` over the group, in place."""

    @staticmethod
    @abstractmethod
    def all_gather_into_tensor(data: Any, group_info: Any, async_op: bool = False) -> Any:
        """The ranks' equally shaped ``data``, concatenated on dim 0 in group order."""

    @staticmethod
    @abstractmethod
    def reduce_scatter_tensor(data: Any, group_info: Any, async_op: bool = False, op: str = "sum") -> Any:
        """Reduce ``data`` over the group and keep this rank's equal part of dim 0."""

    @staticmethod
    @abstractmethod
    def broadcast(data: Any, src: int, group: Any, async_op: bool = False) -> Any:
        """Overwrite ``data`` with that of world rank ``src``, in place."""

    @staticmethod
    @abstractmethod
    def all_to_all_single(input_tensor: Any, output_shape: Sequence[int], group: Any, async_op: bool = False) -> Any:
        """Part r of dim 0 goes to rank r; always ``(output, handle)``, the handle None when it is done already."""

    @staticmethod
    @abstractmethod
    def isend(tensor: Any, dst: int | None = None, group: Any = None, tag: int = 0) -> Any:
        """Start sending to world rank ``dst``; a handle."""

    @staticmethod
    @abstractmethod
    def irecv(tensor: Any, src: int | None = None, group: Any = None, tag: int = 0) -> Any:
        """Start receiving into ``tensor`` from world rank ``src``; a handle."""

    @staticmethod
    @abstractmethod
    def send_object_list(obj_list: list[Any], dst: int | None = None, group: Any = None) -> None:
        """Send picklable objects to world rank ``dst``."""

    @staticmethod
    @abstractmethod
    def recv_object_list(obj_list: list[Any], src: int | None = None, group: Any = None) -> Any:
        """Fill ``obj_list`` with as many objects from world rank ``src``."""

    @staticmethod
    @abstractmethod
    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        """Fill ``object_list`` with every rank's ``obj``, in group order."""

    # ---------------------------------------------------------------- collectives with gradients

    @staticmethod
    @abstractmethod
    def differentiable_all_gather_concat(data: Any, group: Any, concat_size: Any, concat_dim: int) -> Any:
        """forward: all ranks' shards concatenated on ``concat_dim``; backward: this rank's slice of the gradient."""

    @staticmethod
    @abstractmethod
    def differentiable_all_reduce(data: Any, op: str, group: Any) -> Any:
        """forward: the reduction over the group; backward: the identity (for a sum)."""

    @staticmethod
    @abstractmethod
    def differentiable_reduce_scatter(data: Any, dev_num: int, axis: int, op: str, group: Any) -> Any:
        """forward: reduce, keep this rank's chunk of dim ``axis``; backward: the gradient's chunks gathered."""

    @staticmethod
    @abstractmethod
    def differentiable_all_to_all(input_data: Any, output_shape: Sequence[int], group: Any) -> Any:
        """forward: even all-to-all on dim 0, shaped as ``output_shape``; backward: the reverse all-to-all."""

    @staticmethod
    @abstractmethod
    def differentiable_all_to_all_single(input_tensor: Any, input_splits: Any, output_splits: Any, group: Any) -> Any:
        """forward: ``input_splits[r]`` rows go to rank r; backward: the rows come back, splits swapped."""

    @staticmethod
    @abstractmethod
    def differentiable_all_to_all_single_async(
        input_tensor: Any, input_splits: Any, output_splits: Any, group: Any
    ) -> Any:
        """As :meth:`differentiable_all_to_all_single`, but only the stream waits; the host returns at once."""

    @staticmethod
    @abstractmethod
    def p2p_exchange(tensor: Any, peer_rank: int, group: Any = None) -> Any:
        """forward: send mine, receive world rank ``peer_rank``'s; backward: the same exchange of the gradients."""

    @staticmethod
    @abstractmethod
    def differentiable_async_a2a_wait(
        x: Any,
        work: Any,
        out_perm: Sequence[int] | None,
        group: Any,
        world_size: int,
        concat_dim: int,
        split_dim: int,
        handle_box: list[Any] | None = None,
    ) -> Any:
        """forward: finish an all-to-all launched earlier; backward: launch the reverse one into ``handle_box``."""

    @staticmethod
    @abstractmethod
    def differentiable_sync_hook(x: Any, hook_name: str, coordinator: Any) -> Any:
        """The identity that meets ``coordinator`` at hook "A", "B", "C" or "D" in forward and in backward."""

    @abstractmethod
    def set_grad_reduce_handle(self, handle: Any, post_process: Callable[[], None] | None = None) -> None:
        """Finish the gradient reduction in flight (wait, then its callback) on a stream of its own; keep this one."""

    @abstractmethod
    def wait_grad_handle(self) -> None:
        """Finish the last gradient reduction and let the main stream wait for it."""

    # ---------------------------------------------------------------- gradients

    @staticmethod
    @abstractmethod
    def backward(tensors: Any, gradients: Any = None, retain_graph: bool = False, create_graph: bool = False) -> None:
        """Add the gradients of ``tensors`` to the leaves they were computed from; scalars need no ``gradients``."""

    @staticmethod
    @abstractmethod
    def value_and_grad(fn: Callable[..., Any], weights: Sequence[Any]) -> Callable[..., Any]:
        """A function that calls ``fn`` and gives ``(value, gradients of the weights)``; no ``grad`` is touched."""

    @staticmethod
    @abstractmethod
    def get_grad(tensor: Any) -> Any:
        """The gradient that :meth:`backward` has added up in a leaf; None before."""

    @staticmethod
    @abstractmethod
    def set_grad(tensor: Any, gradient: Any) -> None:
        """Replace a leaf's gradient; None forgets it."""

    # ---------------------------------------------------------------- tensors

    @staticmethod
    @abstractmethod
    def is_tensor(obj: Any) -> bool:
        """Whether ``obj`` is a tensor of this framework."""

    @staticmethod
    @abstractmethod
    def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
        """Concatenate."""

    @staticmethod
    @abstractmethod
    def chunk(data: Any, split_dim: int, split_size: int, index: int) -> Any:
        """Part ``index`` of ``split_size`` parts of a dim: ceil-sized blocks, the last ones short or empty."""

    @staticmethod
    @abstractmethod
    def arange(start: Any, end: Any = None, step: Any = 1, dtype: Any = None, device: Any = None) -> Any:
        """``range`` as a tensor."""

    @staticmethod
    @abstractmethod
    def zeros(size: Any, dtype: Any = None, device: Any = None) -> Any:
        """A tensor of zeros."""

    @staticmethod
    @abstractmethod
    def full_like(tensor: Any, fill_value: Any, dtype: Any = None) -> Any:
        """A constant tensor of the same shape."""

    @staticmethod
    @abstractmethod
    def empty_like(tensor: Any, *, dtype: Any = None, device: Any = None, pin_memory: bool = False) -> Any:
        """Unset memory of the same shape."""

    @staticmethod
    @abstractmethod
    def new_tensor(tensor_shape: Any, tensor_type: Any, device: Any) -> Any:
        """Unset memory."""

    @staticmethod
    @abstractmethod
    def new_zero_parameter(param_shape: Any, param_type: Any, requires_grad: bool, device: Any) -> Any:
        """A parameter of zeros."""

    @staticmethod
    @abstractmethod
    def tensor_type_cast(input_data: Any, cast_type: Any) -> Any:
        """The tensor in another dtype, given as a dtype or by name."""

    @abstractmethod
    def cast_fp_tensor(self, dtype: Any, x: Any) -> Any:
        """``x`` in ``dtype`` when it is a floating tensor; anything else unchanged."""

    @staticmethod
    @abstractmethod
    def tensor_to_numpy(tensor: Any) -> Any:
        """The values as a numpy array; types numpy lacks (bfloat16, float8) as float32."""

    @staticmethod
    @abstractmethod
    def get_element_size(tensor: Any) -> int:
        """Bytes per element."""

    @staticmethod
    @abstractmethod
    def get_tensor_storage_size(tensor: Any) -> int:
        """Bytes of the tensor's elements."""

    @abstractmethod
    def str_to_dtype(self, dtype_str: str) -> Any:
        """The dtype named by ``"float32"``, ``"torch.float32"`` and the like."""

    @abstractmethod
    def list_to_size(self, size_list: Sequence[int]) -> Any:
        """The framework's own shape type."""

    @staticmethod
    @abstractmethod
    def construct_strided_slice(x: Any, begin: Sequence[int], end: Sequence[int], stride: Sequence[int]) -> Any:
        """``x[begin:end:stride]`` in every dim."""

    @staticmethod
    @abstractmethod
    def set_tensor_requires_grad(input_tensor: Any) -> Any:
        """Ask for this tensor's gradient; the tensor."""

    @abstractmethod
    def tree_map(self, fn: Callable[[Any], Any], tree: Any) -> Any:
        """``fn`` on every leaf of nested containers."""

    @abstractmethod
    def apply_to_tensors(self, fn: Callable[[Any], Any], container: Any) -> Any:
        """``fn`` on every tensor in nested containers, the rest unchanged."""

    @staticmethod
    @abstractmethod
    def get_op_name(func: Callable[..., Any]) -> str:
        """The canonical name of an operator, however it was reached."""

    # Set by the package, which lies above this folder.
    tensor_transform_provider: ClassVar[Callable[[], Any]]
    load_operators: ClassVar[Callable[[], Any]]  # makes operators work on DTensors

    @staticmethod
    def get_tensor_transform() -> Any:
        """The layout-to-layout transformer on plain blocks: ``transform(block, source, target, global_shape)``."""
        return Platform.tensor_transform_provider()

    # ---------------------------------------------------------------- modules and parameters

    @staticmethod
    @abstractmethod
    def get_cell_construct(cell: Any) -> Callable[..., Any]:
        """The module's forward function."""

    @staticmethod
    @abstractmethod
    def get_cells_and_names(cell: Any) -> Iterable[tuple[str, Any]]:
        """(name, module) of the module and all below it."""

    @staticmethod
    @abstractmethod
    def parameters_dict(cell: Any) -> dict[str, Any]:
        """The parameters by name."""

    @staticmethod
    @abstractmethod
    def search_parameter_by_name(cell: Any, param_name: str) -> Any:
        """Where a parameter lives, for :meth:`update_parameter_by_name`; None when there is none of that name."""

    @staticmethod
    @abstractmethod
    def update_parameter_by_name(cell: Any, result: Any, new_param: Any) -> None:
        """Put ``new_param`` where :meth:`search_parameter_by_name` found the old one."""

    @staticmethod
    @abstractmethod
    def set_layout_into_parameter(param: Any, layout: Any) -> Any:
        """Record ``layout`` on the parameter."""

    @staticmethod
    @abstractmethod
    def get_param_local_shape(param: Any) -> Any:
        """The shape of this rank's part."""

    @staticmethod
    @abstractmethod
    def get_param_local_data(param: Any) -> Any:
        """This rank's part, without gradient."""

    @staticmethod
    @abstractmethod
    def update_param_data(param: Any, data: Any) -> None:
        """Let the parameter hold ``data`` from now on."""

    @staticmethod
    @abstractmethod
    def load_into_param(param: Any, data: Any) -> None:
        """Copy ``data`` into the parameter's own memory; shapes must agree."""

    @staticmethod
    @abstractmethod
    def get_param_type_size(param: Any) -> int:
        """Bytes per element."""

    @staticmethod
    @abstractmethod
    def is_linear_module(module: Any) -> bool:
        """Whether it is the framework's dense layer."""

    @staticmethod
    @abstractmethod
    def is_embedding_module(module: Any) -> bool:
        """Whether it is the framework's embedding."""

    @classmethod
    def linear_weight_dims(cls, module: Any) -> tuple[int, int] | None:
        """The dims of a dense layer's ``weight`` that stand for its outputs and its inputs; None for other modules."""
        return (0, 1) if cls.is_linear_module(module) else None

    @staticmethod
    def weight_name(module: Any) -> str:
        """What a dense layer or an embedding calls its weight."""
        del module
        return "weight"

    @staticmethod
    def linear_function(module: Any) -> Callable[[Any, Any, Any], Any] | None:
        """``(x, weight, bias or None) -> output`` of a dense layer; None for a module that computes something else.

        A layer for which None is given keeps its own forward.
        """
        del module
        return None

    @staticmethod
    def replace_forward(module: Any, forward: Callable[..., Any]) -> None:
        """Let ``forward(module, ...)`` compute the module's output; hooks stay around it."""
        raise TypeError(f"the forward function of a {type(module).__name__} cannot be replaced on this platform")

    @classmethod
    def own_parameters(cls, module: Any) -> dict[str, Any]:
        """The parameters that belong to the module itself, by their names there; not those of modules inside it."""
        return {name: parameter for name, parameter in cls.parameters_dict(module).items() if "." not in name}

    @staticmethod
    def reset_parameters(module: Any, parameters: list[Any], fill_random: Callable[..., Any]) -> None:
        """Give ``parameters``, distributed ones, the initial values that the modules inside were built for.

        From the inside out; other parameters keep theirs. ``fill_random(parameter, kind, **arguments)`` overwrites one
        with random values that do not depend on its layout; kinds are those of ``core/dtensor/random_fill.py``.
        """
        del parameters, fill_random
        raise TypeError(
            f"the modules of a {type(module).__name__} have no way of their own to make initial values on this "
            "platform; give materialize an init= function"
        )

    def without_memory(self) -> Any:
        """Context: modules built inside have parameters without memory, and buffers as usual."""
        return self.init_on_device(self.meta_device)

    @staticmethod
    def install_parameter(module: Any, name: str, parameter: Any) -> None:
        """Let ``parameter`` be the module's own parameter of that name."""
        setattr(module, name, parameter)

    @staticmethod
    def plain_parameters_behind(tensor: Any, known: Iterable[Any]) -> list[Any]:
        """The plain parameters that ``tensor`` was computed from, up to where a layout changed.

        ``known`` are those that are looked for where the graph itself does not show them; empty where a framework does
        not show its graph.
        """
        del tensor, known
        return []

    @staticmethod
    def use_separate_projections(module: Any) -> None:
        """Let an attention module of the framework that has one weight for query, key and value compute with three."""
        raise TypeError(f"a {type(module).__name__} of this framework has no weights that can be separated")

    @staticmethod
    def has_no_memory(tensor: Any) -> bool:
        """Whether the tensor has a shape only, as those on :attr:`meta_device`."""
        del tensor
        return False

    @staticmethod
    @abstractmethod
    def register_forward_pre_hook(
        module: Any, hook: Callable[..., Any], prepend: bool = False, with_kwargs: bool = False
    ) -> Any:
        """Call ``hook`` before forward; a handle with ``remove()``."""

    @staticmethod
    @abstractmethod
    def register_full_backward_hook(module: Any, hook: Callable[..., Any], prepend: bool = False) -> Any:
        """Call ``hook`` after the module's gradients are computed; a handle with ``remove()``."""

    @staticmethod
    @abstractmethod
    def register_full_backward_pre_hook(module: Any, hook: Callable[..., Any], prepend: bool = False) -> Any:
        """Call ``hook`` before the module's gradients are computed; a handle with ``remove()``."""

    @staticmethod
    @abstractmethod
    def init_parameters(module: Any, stage_index: int) -> None:
        """Give memory and initial values to parameters that have none; None module or negative stage: ValueError."""

    @property
    @abstractmethod
    def meta_device(self) -> Any:
        """The device whose tensors have a shape and no memory."""

    @abstractmethod
    def init_on_device(self, device: Any, include_buffers: bool = False) -> Any:
        """Context: parameters (and buffers) of modules built inside live on ``device``."""

    @staticmethod
    @abstractmethod
    def micro_batch(micro_batch_num: int, args_batch_dim: Any = None, kwargs_batch_dim: Any = None) -> Any:
        """Decorator: split a call's inputs along their batch dims, call once per part, return the list of results."""

    # ---------------------------------------------------------------- activation memory

    @property
    @abstractmethod
    def checkpoint(self) -> Callable[..., Any]:
        """``checkpoint(fn, *args)``: drop the activations of ``fn`` and compute them again in backward."""

    @property
    @abstractmethod
    def noop_context_fn(self) -> Callable[[], Any]:
        """The context function that changes nothing."""

    @staticmethod
    @abstractmethod
    def ckpt_wrapper(module: Any, checkpoint_fn: Any = None, **checkpoint_fn_kwargs: Any) -> Any:
        """The module with its forward under :attr:`checkpoint`; parameter names stay."""

    @staticmethod
    @abstractmethod
    def swap_wrapper(module: Any, policy_fn: Any = None) -> Any:
        """The module with its saved activations kept in host memory until backward; parameter names stay."""

    @staticmethod
    @abstractmethod
    def create_selective_checkpoint_contexts(policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False) -> Any:
        """The two contexts (forward, recompute) that keep what the policy names and recompute the rest."""

    @staticmethod
    @abstractmethod
    def async_save_on_cpu(policy_fn: Any = None) -> Any:
        """Context: tensors saved for backward inside are kept in host memory, copied beside the computation."""

    # ---------------------------------------------------------------- streams and profiling

    @abstractmethod
    def new_stream(self) -> Any:
        """A stream of work beside the current one."""

    @abstractmethod
    def get_stream_context(self) -> Any:
        """``with platform.get_stream_context()(stream):`` runs what is inside on ``stream``."""

    @abstractmethod
    def get_current_stream(self) -> Any:
        """The stream that work goes to now."""

    @abstractmethod
    def new_event(self) -> Any:
        """A mark in a stream that others can wait for."""

    @staticmethod
    @abstractmethod
    def profiler_record(name: str) -> Any:
        """Context: a named range in the framework's profiler."""

    # ---------------------------------------------------------------- state

    @staticmethod
    @abstractmethod
    def get_model_state_dict(model: Any, *, options: Any = None) -> dict[str, Any]:
        """Parameters and buffers by name, as ``options`` asks."""

    @staticmethod
    @abstractmethod
    def save_checkpoint(cell: Any, file_path: Any, ckpt_format: str = "safetensors") -> None:
        """Write a module's or dict's tensors to one file, whole or not at all."""

    @staticmethod
    @abstractmethod
    def load_checkpoint(file_path: Any, ckpt_format: str = "safetensors") -> dict[str, Any]:
        """The tensors of a file by name."""

    # What a checkpoint asks of models and optimizers. A framework whose optimizers do not tell keeps these errors.

    def named_state_parameters(self, model: Any) -> dict[str, Any]:
        """Every parameter under each of its names, the names as in ``get_model_state_dict``."""
        return self.parameters_dict(model)

    def set_extra_states(self, model: Any, states: Any) -> None:
        """Give modules back what they have in the state dict besides tensors."""
        if states:
            raise TypeError(f"modules of {self.platform_type.name} keep no state besides tensors, got {list(states)}")

    def optimizer_groups(self, optimizer: Any) -> list[tuple[list[Any], dict[str, Any]]]:
        """(parameters, options as plain values) of each parameter group."""
        raise TypeError(f"a {type(optimizer).__name__} does not tell its parameters, so its state has no names")

    def set_optimizer_options(self, optimizer: Any, index: int, options: Any) -> None:
        """Set the options of one parameter group."""
        raise TypeError(f"a {type(optimizer).__name__} does not take options, group {index}: {options}")

    def optimizer_slots(self, optimizer: Any, parameter: Any) -> dict[str, Any]:
        """What the optimizer keeps for a parameter (moments and the like); empty before its first step."""
        raise TypeError(f"a {type(optimizer).__name__} does not tell what it keeps for a parameter")

    def blank_optimizer_slots(self, optimizer: Any, parameter: Any) -> dict[str, Any]:
        """Slots as the first step would make them, to load values into; the values in them mean nothing."""
        return {}

    def check_optimizer_state(self, optimizer: Any, slots: Any, options: Any) -> None:
        """Raise if the optimizer cannot go on from this: slots (or None) by parameter name, options by group."""

    def set_optimizer_slots(self, optimizer: Any, parameter: Any, slots: Any) -> None:
        """Let the optimizer keep copies of these slots for a parameter; None: as before its first step."""
        raise TypeError(f"a {type(optimizer).__name__} does not take what it keeps for a parameter")

    def raw_array(self, tensor: Any) -> Any:
        """The bits of the tensor (of a DTensor: of its block) as a numpy array of unsigned integers, of its shape.

        The same memory where that is the host's, else a copy. What numpy knows by itself works without an override.
        """
        tensor = self.detached(tensor)
        array = self.tensor_to_numpy(tensor)
        size = self.get_element_size(tensor)
        if array.dtype.itemsize != size:
            raise TypeError(f"dtype {self.dtype_name(tensor.dtype)} has no raw bits on this platform")
        return array.view("V16" if size == 16 else f"u{size}")

    def set_raw(self, tensor: Any, array: Any) -> None:
        """Give the tensor (a DTensor: its block) these bits, unless ``array`` is its own memory already."""
        own = self.raw_array(tensor)
        place = own.__array_interface__["data"][0]
        if own.size == 0 or place == array.__array_interface__["data"][0]:
            return
        if self.raw_array(tensor).__array_interface__["data"][0] != place:
            raise TypeError("the bits of a tensor outside of the host's memory cannot be set on this platform")
        own[...] = array

    def is_in_host_memory(self, tensor: Any) -> bool:
        """Whether the bits of the tensor (of a DTensor: of its block) are where the host can look at them."""
        return True

    def copy_raw_to_host(self, copies: Iterable[tuple[Any, Any]]) -> None:
        """Fill each array of bytes with the bits of its tensor (of a DTensor: of its block), in row-major order.

        From a device through pinned memory that is kept, where there is such a thing.
        """
        for tensor, target in copies:
            memoryview(target)[:] = self.raw_array(tensor).tobytes()

    @staticmethod
    @abstractmethod
    def no_grad() -> Any:
        """Context: no gradients are recorded inside."""

    @staticmethod
    @abstractmethod
    def clip_grad_norm_(
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        """Scale the gradients so that their norm is at most ``max_norm``; the norm before."""

    @staticmethod
    @abstractmethod
    def set_whole_norms(whole_norms: Any) -> Any:
        """Let ``whole_norms(tensors, order)`` give the norms of tensors of which some are distributed."""

    @staticmethod
    @abstractmethod
    def let_optimizers_take(kind: Any) -> Any:
        """Let the framework's optimizers step on tensors of ``kind`` as cheaply as on plain ones."""

    @staticmethod
    @abstractmethod
    def block_norms(blocks: Any, norm_type: float, dtype: Any = None) -> Any:
        """One norm for each block, in the precision in which they are to be added up over ranks."""

    @staticmethod
    @abstractmethod
    def complete_norms(norms: Any, norm_type: float, group: Any) -> Any:
        """The norms of tensors from those of their parts on the group's ranks, by one reduction."""

    @staticmethod
    @abstractmethod
    def finished_norm(norm: Any, block: Any, dtype: Any = None) -> Any:
        """The norm in the dtype that the framework gives it for values like the block's."""

    # ---------------------------------------------------------------- one-sided memory

    @staticmethod
    @abstractmethod
    def get_symmetric_memory_handler() -> Any:
        """Memory that every rank of a group on one host can read and write."""


def _group_key(rank_list: Iterable[int]) -> tuple[int, ...]:
    ranks = sorted(int(rank) for rank in rank_list)
    if not ranks:
        raise ValueError("a group needs at least one rank, got an empty rank list")
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"a group's ranks must differ, got {ranks}")
    return tuple(ranks)


# ---------------------------------------------------------------- choosing the framework

_current: Platform | None = None


def get_platform() -> Platform:
    """The one platform of this process, made on first use.

    ``HYPER_PARALLEL_PLATFORM`` (``torch`` or ``mindspore``) decides; without it MindSpore when it can be imported, else
    PyTorch.

    >>> get_platform().platform_type.name in ("PYTORCH", "MINDSPORE")
    True
    """
    return _current if _current is not None else _find_platform()


def get_torch_platform() -> Platform:
    """Make PyTorch the platform of this process."""
    global _current
    if importlib.util.find_spec("torch") is None:
        raise ImportError("PyTorch is not installed; run: pip install 'hyper-parallel[torch]'")
    from hyper_parallel.platform.torch.platform import TorchPlatform

    if not isinstance(_current, TorchPlatform):
        _current = TorchPlatform()
    return _current


def get_mindspore_platform() -> Platform:
    """Make MindSpore the platform of this process."""
    global _current
    if not _mindspore_is_there():
        raise ImportError("MindSpore cannot be used: it is not installed; run: pip install 'hyper-parallel[mindspore]'")
    from hyper_parallel.platform.mindspore.platform import MindSporePlatform

    if not isinstance(_current, MindSporePlatform):
        _current = MindSporePlatform()
    return _current


def _mindspore_is_there() -> bool:
    return importlib.util.find_spec("mindspore") is not None


def _find_platform() -> Platform:
    asked = os.environ.get(HYPER_PARALLEL_PLATFORM)
    if asked is not None:
        name = asked.strip().lower()
        if name == HYPER_PARALLEL_PLATFORM_TORCH:
            return get_torch_platform()
        if name == HYPER_PARALLEL_PLATFORM_MINDSPORE:
            return get_mindspore_platform()
        raise ValueError(
            f"{HYPER_PARALLEL_PLATFORM}={asked!r} is not a platform; "
            f"set it to {HYPER_PARALLEL_PLATFORM_TORCH!r} or {HYPER_PARALLEL_PLATFORM_MINDSPORE!r}"
        )
    torch_is_there = importlib.util.find_spec("torch") is not None
    if _mindspore_is_there():
        try:
            return get_mindspore_platform()
        except ImportError as error:
            if not torch_is_there:
                raise
            warnings.warn(
                f"MindSpore is installed but cannot be imported, so HyperParallel runs on PyTorch: {error} "
                f"(with {HYPER_PARALLEL_PLATFORM}={HYPER_PARALLEL_PLATFORM_TORCH} it is not tried)",
                RuntimeWarning,
                stacklevel=3,
            )
    if torch_is_there:
        return get_torch_platform()
    raise ImportError(
        "HyperParallel needs a framework; run: pip install 'hyper-parallel[torch]' or 'hyper-parallel[mindspore]'"
    )
