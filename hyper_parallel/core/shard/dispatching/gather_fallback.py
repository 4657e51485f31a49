"""The way that is always right: gather the inputs, run the operator on whole tensors, cut what it changed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.random import random_state
from hyper_parallel.core.shard.dispatching.copied_views import is_view_call, link
from hyper_parallel.core.shard.dispatching.mixing import refuse_plain, same_mesh
from hyper_parallel.core.shard.dispatching.order_guard import check_gathered
from hyper_parallel.core.shard.dispatching.random_ops import DRAWS_ON_THE_WHOLE
from hyper_parallel.core.shard.dispatching.strict_mode import check_gathering
from hyper_parallel.platform import get_platform

_platform = get_platform()

_WRITING_UNCOUNTED = frozenset({"apply_", "map_", "map2_"})


def run_gathered(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` on the whole values; results are whole on every rank, what ``func`` wrote into keeps its layout.

    Sparse results stay plain: they are whole on every rank.
    """
    gathered: dict[int, tuple[DTensor, Any, Any, Any]] = {}
    mesh: DeviceMesh | None = None
    name = _platform.get_op_name(func)
    writes = name.endswith("_") or kwargs.get("inplace") is True

    def full_of(value: Any) -> Any:
        nonlocal mesh
        if isinstance(value, DTensor):
            mesh = same_mesh(name, mesh, value)
            if id(value) not in gathered:
                full = value.full_tensor()
                full = _platform.copied(full) if value.layout.is_replicated or writes else full
                gathered[id(value)] = (value, full, *_platform.write_mark(full))
            return gathered[id(value)][1]
        refuse_plain(name, value)
        return value

    layouts = []
    _platform.tree_map(
        lambda value: layouts.append(value.layout) if isinstance(value, DTensor) else None, (args, kwargs)
    )
    check_gathered(name, layouts)
    check_gathering(name, layouts, "it has no rule")
    with _platform.counting_versions():
        plain_args = _platform.tree_map(full_of, args)
        plain_kwargs = _platform.tree_map(full_of, kwargs)
        if name.rstrip("_") in DRAWS_ON_THE_WHOLE:
            addressed = _platform.addressed_form(func)
            if addressed is not None:
                result = addressed(*plain_args, **plain_kwargs)
            else:
                draw = random_state.draw_aside()
                with _platform.seeded(draw.seed, draw.number):
                    result = func(*plain_args, **plain_kwargs)
        else:
            result = func(*plain_args, **plain_kwargs)
    outs: list[int] = []  # written by what need not count: an operator may write through an alias
    _platform.tree_map(lambda value: outs.append(id(value)), kwargs.get("out"))
    if name in _WRITING_UNCOUNTED:
        outs.append(id(args[0]))
    if name == "_batch_norm_with_update":
        outs += [id(value) for value in (*args[3:5], kwargs.get("running_mean"), kwargs.get("running_var"))]
    same = {id(full): tensor for tensor, full, _, _ in gathered.values()}
    for tensor, full, version, history in gathered.values():
        if tuple(full.shape) != tuple(tensor.shape):  # an out= that was resized
            tensor.data = _replicated(_platform.detached(full), mesh)
        elif _platform.write_mark(full)[0] != version or id(tensor) in outs:
            sharded = _replicated(full, tensor.device_mesh).redistribute(tensor.device_mesh, tensor.layout)
            # Written without being recorded, as an embedding renormalises its table.
            if _platform.write_mark(full)[1] is history:
                with _platform.no_grad():
                    _platform.fill_block(tensor, sharded.to_local())
            else:
                _platform.fill_block(tensor, sharded.to_local())

    def distributed(value: Any) -> Any:
        if id(value) in same:
            return same[id(value)]
        if _platform.is_dense_tensor(value) and not isinstance(value, DTensor):
            return _replicated(value, mesh)
        return value

    result = _platform.tree_map(distributed, result)
    return link(name, result, func, args, kwargs, may_share=False) if is_view_call(name, args) else result


def write_into_plain(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func``, which writes into the plain tensor ``args[0]``: of whole values, so that their gradients are recorded
    with that tensor. Taken as a distributed one it would get the values, and its history would not know of them."""
    layouts: list[Any] = []

    def full_of(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        layouts.append(value.layout)
        return value.redistribute(value.device_mesh, value._layout.replicated()).to_local()

    args, kwargs = _platform.tree_map(full_of, args), _platform.tree_map(full_of, kwargs)
    check_gathered(_platform.get_op_name(func), layouts)
    return func(*args, **kwargs)


def _replicated(value: Any, mesh: Any) -> DTensor:
    """A tensor that every rank has computed alike."""
    return DTensor.from_local(value, mesh, shape=value.shape)
