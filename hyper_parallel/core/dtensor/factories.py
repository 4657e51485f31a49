"""Making distributed tensors where they will lie: every rank makes its own block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distribute import distribute_tensor
from hyper_parallel.core.dtensor.distributed_tensor import DTensor, resolve_layout, resolve_mesh
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh_transfer import outside_shape
from hyper_parallel.core.dtensor.random import random_state
from hyper_parallel.core.dtensor.random.random_fill import random_block
from hyper_parallel.platform import get_platform

Block = Callable[[Layout, tuple[int, ...], tuple[int, ...], Any, Any], Any]


def _make(
    name: str, size: Any, device_mesh: Any, placements: Any, dtype: Any, device: Any, requires_grad: bool, block: Block
) -> DTensor:
    """The tensor of which ``block(layout, shape, local_shape, dtype, device)`` makes this rank's part."""
    platform = get_platform()
    shape = (size,) if isinstance(size, int) else tuple(int(length) for length in size)
    if any(length < 0 for length in shape):
        raise ValueError(f"{name}: sizes cannot be negative, got {shape}")
    mesh = resolve_mesh(device_mesh, name)
    layout = resolve_layout(mesh, placements, len(shape))
    local_shape = outside_shape(shape) if mesh.get_coordinate() is None else layout.local_shape(shape)
    where = mesh.device_type if device is None else device
    dtype = platform.str_to_dtype(dtype) if isinstance(dtype, str) else dtype
    made = platform.as_dtensor(DTensor, block(layout, shape, local_shape, dtype, where), layout, shape)
    if requires_grad:
        made.requires_grad = True
    return made


def _constant(value: Any) -> Block:
    """A block of ``value``; on an axis with a pending reduction the reduction of all blocks is ``value``."""

    def block(layout: Layout, shape: tuple[int, ...], local_shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
        del shape
        platform = get_platform()
        local = platform.full(local_shape, value, dtype=dtype, device=device)
        for axis, op in enumerate(layout.partials):
            if op is not None and not layout.mesh.leads((axis,)):
                local = platform.identity_like(local, op)
        return local

    return block


def ones(
    size: Any,
    device_mesh: DeviceMesh | None = None,
    placements: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
) -> DTensor:
    """A distributed tensor of ones."""
    return _make("ones", size, device_mesh, placements, _or_default(dtype), device, requires_grad, _constant(1))


def zeros(
    size: Any,
    device_mesh: DeviceMesh | None = None,
    placements: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
) -> DTensor:
    """A distributed tensor of zeros."""
    return _make("zeros", size, device_mesh, placements, _or_default(dtype), device, requires_grad, _constant(0))


def empty(
    size: Any,
    device_mesh: DeviceMesh | None = None,
    placements: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
) -> DTensor:
    """A distributed tensor of unset memory."""

    def block(layout: Any, shape: Any, local_shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
        del layout, shape
        return get_platform().empty(local_shape, dtype=dtype, device=device)

    return _make("empty", size, device_mesh, placements, _or_default(dtype), device, requires_grad, block)


def full(
    size: Any,
    fill_value: Any,
    *,
    device_mesh: DeviceMesh | None = None,
    placements: Any = None,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
) -> DTensor:
    """A distributed tensor of ``fill_value``."""
    return _make("full", size, device_mesh, placements, dtype, device, requires_grad, _constant(fill_value))


def arange(
    start: Any,
    end: Any = None,
    step: Any = 1,
    *,
    device_mesh: DeviceMesh | None = None,
    placements: Any = None,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
) -> DTensor:
    """The numbers from ``start`` (0 when only one bound is given) up to ``end``, as a distributed tensor."""
    platform = get_platform()
    low, high = (0, start) if end is None else (start, end)
    dtype = platform.str_to_dtype(dtype) if isinstance(dtype, str) else dtype
    mesh = resolve_mesh(device_mesh, "arange")
    whole = platform.arange(low, high, step, dtype=dtype, device=mesh.device_type if device is None else device)
    made = distribute_tensor(whole, mesh, placements)
    if requires_grad:
        made.requires_grad = True
    return made


def _random(
    name: str, kind: str, size: Any, mesh: Any, placements: Any, dtype: Any, device: Any, grad: bool
) -> DTensor:
    draw = random_state.next_draw()

    def block(layout: Layout, shape: tuple[int, ...], local_shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
        return random_block(kind, {}, draw, layout, shape, dtype, device)

    return _make(name, size, mesh, placements, _or_default(dtype), device, grad, block)


def rand(
    size: Any,
    device_mesh: DeviceMesh | None = None,
    placements: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
) -> DTensor:
    """Uniform numbers in [0, 1), the same bits under every layout; see ``docs/random.md``."""
    return _random("rand", "uniform", size, device_mesh, placements, dtype, device, requires_grad)


def randn(
    size: Any,
    device_mesh: DeviceMesh | None = None,
    placements: Any = None,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
) -> DTensor:
    """Standard normal numbers, the same bits under every layout; see ``docs/random.md``."""
    return _random("randn", "normal", size, device_mesh, placements, dtype, device, requires_grad)


def _or_default(dtype: Any) -> Any:
    return get_platform().default_dtype() if dtype is None else dtype
