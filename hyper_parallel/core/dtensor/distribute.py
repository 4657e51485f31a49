"""Turning plain tensors and modules into distributed ones."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor, resolve_layout, resolve_mesh
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh_transfer import outside_shape
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.framework_of import kind_of, require_module
from hyper_parallel.platform.shared.region import Region

_DISTRIBUTED = "_hyper_parallel_distributed"


def distribute_tensor(
    tensor: Any, device_mesh: DeviceMesh | None = None, placements: Any = None, *, src_data_rank: int | None = None
) -> DTensor:
    """Cut a tensor that every rank holds, without communication.

    With ``src_data_rank`` only that rank's values count: it sends every rank its block. The others pass a tensor of the
    same shape and dtype. A leaf gives a leaf that needs a gradient when ``tensor`` does; a computed tensor stays
    connected.
    """
    platform = get_platform()
    mesh = resolve_mesh(device_mesh, "distribute_tensor")
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != mesh:
            raise ValueError(
                f"distribute_tensor: the tensor is on {tensor.device_mesh} already; "
                f"use redistribute to move it to {mesh}"
            )
        layout = resolve_layout(mesh, placements, tensor.ndim)
        if layout is not tensor.layout:
            raise ValueError(f"distribute_tensor: the tensor has {tensor.layout} already; use redistribute")
        return tensor
    if not platform.is_tensor(tensor):
        raise TypeError(f"distribute_tensor takes a tensor, got {kind_of(tensor)}")
    if not platform.is_dense_tensor(tensor):
        raise TypeError(
            "distribute_tensor cannot shard a sparse or nested tensor; use to_dense() or to_padded_tensor()"
        )
    shape = tuple(tensor.shape)
    layout = resolve_layout(mesh, placements, len(shape))
    if platform.needs_grad(tensor) and not platform.is_leaf(tensor):
        if src_data_rank is not None:
            raise ValueError(
                f"distribute_tensor: a computed tensor of shape {shape} that needs a gradient cannot be sent from rank "
                f"{src_data_rank}: its gradient would not find back; detach() it, or leave src_data_rank out"
            )
        full = DTensor.from_local(tensor, mesh, shape=shape)
        return full.redistribute(mesh, layout) if mesh.get_coordinate() is not None else _relabelled(full, layout)
    local = _local_part(tensor, layout, shape, src_data_rank)
    made = platform.as_dtensor(DTensor, local, layout, shape)
    if platform.requires_grad(tensor):
        made.requires_grad = True
    return platform.as_parameter(made) if isinstance(tensor, platform.Parameter) else made


def _relabelled(outside: DTensor, layout: Layout) -> DTensor:
    """The empty block of a rank outside the mesh, under another layout."""
    platform = get_platform()
    return platform.as_dtensor(DTensor, platform.local_alias(outside), layout, outside.shape)


def _local_part(tensor: Any, layout: Layout, shape: tuple[int, ...], src_data_rank: int | None) -> Any:
    platform, mesh = get_platform(), layout.mesh
    coordinate = mesh.get_coordinate()
    full = platform.detached(tensor)
    if src_data_rank is not None and mesh.size() > 1:
        local = _scatter(full, layout, shape, src_data_rank)
    elif coordinate is None:
        local = platform.new_tensor(outside_shape(shape), tensor.dtype, tensor.device)
    else:
        local = platform.slice_block(full, layout.local_region(shape, coordinate))
    if coordinate is not None:
        local = platform.to_device(local, mesh.device_type)
        for place, op in zip(coordinate, layout.partials, strict=True):
            if op is not None and place != 0:
                local = platform.identity_like(local, op)
    return local


def _scatter(full: Any, layout: Layout, shape: tuple[int, ...], source: int) -> Any:
    """Every rank's block from rank ``source``; only the block travels."""
    platform, mesh = get_platform(), layout.mesh
    if source not in mesh.rank_list:
        raise ValueError(f"distribute_tensor: src_data_rank={source} is not a rank of {mesh}")
    rank = mesh.get_rank()
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return platform.new_tensor(outside_shape(shape), full.dtype, full.device)
    ranks = sorted(mesh.rank_list)
    local_shape = layout.local_shape(shape, coordinate)
    inside = Region.whole(local_shape)
    sends: list[Region | None] = [None] * len(ranks)
    receives: list[Region | None] = [None] * len(ranks)
    kept = None
    if rank == source:
        for place, other in enumerate(ranks):
            if other != source:
                sends[place] = layout.local_region(shape, mesh.coordinate_of(other))
        kept = (layout.local_region(shape, coordinate), inside)
    else:
        receives[ranks.index(source)] = inside
    full = platform.to_device(full, mesh.device_type)
    group = mesh.get_group(tuple(range(mesh.ndim)))
    return platform.exchange_blocks(full, sends, receives, kept, local_shape, group).wait()


def distribute_module(
    module: Any,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, Any, DeviceMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> Any:
    """Make a module's parameters and buffers distributed tensors; the module itself is changed and returned.

    ``partition_fn(name, submodule, mesh)`` is called on every submodule first; what it leaves plain becomes replicated.
    ``input_fn(module, inputs, mesh)`` and ``output_fn(module, outputs, mesh)`` are hooked onto the root's forward.
    """
    platform = get_platform()
    require_module("distribute_module", module)
    mesh = resolve_mesh(device_mesh, "distribute_module")
    if getattr(module, _DISTRIBUTED, False):
        raise RuntimeError(
            f"distribute_module: this {type(module).__name__} was distributed before; a module can be distributed once"
        )
    before = _with_mesh(input_fn, mesh, "input_fn")
    after = _with_mesh(output_fn, mesh, "output_fn")
    for name, submodule in platform.get_cells_and_names(module):
        if partition_fn is not None:
            partition_fn(name, submodule, mesh)
    platform.replicate_plain_tensors(module, lambda tensor: distribute_tensor(tensor, mesh, None))
    if before is not None:
        platform.register_forward_pre_hook(module, lambda this, inputs: before(this, inputs))
    if after is not None:
        platform.register_forward_hook(module, lambda this, inputs, outputs: after(this, outputs))
    setattr(module, _DISTRIBUTED, True)
    return module


def _with_mesh(function: Callable[..., Any] | None, mesh: DeviceMesh, name: str) -> Callable[[Any, Any], Any] | None:
    """``function`` as one of (module, values), whichever of its two forms it has."""
    if function is None:
        return None
    num_arguments = len(inspect.signature(function).parameters)
    if num_arguments == 3:
        return lambda module, values: function(module, values, mesh)
    if num_arguments == 2:
        warnings.warn(
            f"distribute_module: {name} with 2 arguments, (values, mesh), is deprecated; "
            "give it 3, (module, values, mesh)",
            FutureWarning,
            stacklevel=3,
        )
        return lambda module, values: function(values, mesh)
    raise ValueError(
        f"distribute_module: {name} must take 3 arguments, (module, values, mesh), but takes {num_arguments}"
    )
