"""New tensors like an existing one: of its shape they get its layout, of another shape they are whole on every rank.
With another width only (the last dim), they are sharded as it is but for that: models write parts into such a tensor.

The values of the existing one do not matter, so a pending reduction is left alone: the new tensor is whole where the
existing one is pending.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.dispatching.special_ops import SPECIAL_OPS
from hyper_parallel.platform import get_platform

_platform = get_platform()


def _number(value: Any) -> Any:
    """A number to fill with may come as a tensor, of which a block is not the value."""
    return value.item() if isinstance(value, DTensor) else value


def _like(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0] if args else kwargs["input"]
    filled = {name: _number(value) if name == "fill_value" else value for name, value in kwargs.items()}
    plain_args, plain_kwargs = _platform.blocks_of((*args[:1], *map(_number, args[1:])), filled)
    made = func(*plain_args, **plain_kwargs)
    return _platform.as_dtensor(DTensor, made, tensor.layout.reduced(), tensor.shape)


def _new(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, given = args[0], [_number(value) for value in args[1:]]
    kwargs = {name: _number(value) for name, value in kwargs.items()}
    has_size = "size" in kwargs
    name = _platform.get_op_name(func)
    sizes: Any = kwargs.pop("size") if has_size else given
    if not has_size and name == "new_full":
        sizes, given = given[0], given[1:]
    elif not has_size:
        sizes, given = (sizes[0] if sizes and isinstance(sizes[0], (list, tuple)) else sizes), []
    shape = tuple(int(size) for size in sizes)
    layout = _layout_for(shape, tensor)
    block = _platform.local_alias(tensor)
    made = func(block, shape if layout is None else layout.local_shape(shape), *given, **kwargs)
    if layout is None:
        return DTensor.from_local(made.detach(), tensor.device_mesh, shape=made.shape).requires_grad_(
            _platform.requires_grad(made)
        )
    return _platform.as_dtensor(DTensor, made, layout, shape)


def _layout_for(shape: tuple[int, ...], tensor: DTensor) -> Layout | None:
    """How a new tensor of ``shape`` lies; None: whole on every rank."""
    layout, own = tensor.layout.reduced(), tuple(tensor.shape)
    if shape == own:
        return layout
    if len(own) < 2 or len(shape) != len(own) or shape[:-1] != own[:-1]:
        return None
    return Layout.of(layout.mesh, [*layout.shard_axes[:-1], ()])


def _new_tensor(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    if isinstance(rest[0] if rest else kwargs.get("data"), DTensor):
        raise TypeError(
            "new_tensor: the data is a distributed tensor already; write clone().detach(), or to(...) for another dtype"
        )
    made = func(_platform.local_alias(tensor), *rest, **kwargs)
    return DTensor.from_local(made.detach(), tensor.device_mesh, shape=made.shape).requires_grad_(
        _platform.requires_grad(made)
    )


SPECIAL_OPS.update(
    {
        **dict.fromkeys(("zeros_like", "ones_like", "full_like", "empty_like"), _like),
        **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), _new),
        "new_tensor": _new_tensor,
    }
)
