"""The state of a model by name, whole or sharded, and back into a model under any layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.platform import get_platform

_platform = get_platform()


def get_model_state_dict(model: Any, *, options: Any = None) -> dict[str, Any]:
    """Every parameter and persistent buffer by its name, as distributed tensors where they are such.

    ``options``, a dict or an object with attributes: ``full_state_dict`` gathers them (every rank must call),
    ``cpu_offload`` copies them to host memory, together only on rank 0; ``ignore_frozen_params`` leaves those out.
    """
    return _platform.get_model_state_dict(model, options=options)


def set_model_state_dict(model: Any, model_state_dict: Mapping[str, Any], *, options: Any = None) -> None:
    """Copy values into a model's parameters and buffers, in place; every rank must call it.

    A value is a distributed tensor under any layout, or a whole tensor, of which every rank takes its part.
    ``options``: ``strict=False`` lets names be missing or too many; ``broadcast_from_rank0`` sends the whole
    values of rank 0, and the other ranks may give an empty dict.
    """
    broadcasts, strict = (_option(options, name, default) for name, default in _DEFAULTS)
    targets = _platform.get_model_state_dict(model)
    given = dict(model_state_dict)
    names = _agreed_names(list(given)) if broadcasts else list(given)
    unknown = [name for name in names if name not in targets]
    missing = [name for name in targets if name not in names]
    if strict and (unknown or missing):
        raise ValueError(
            f"set_model_state_dict: the model has no {', '.join(map(repr, unknown)) or 'other names'}; missing in the "
            f"state are {', '.join(map(repr, missing)) or 'none'}. options={{'strict': False}} takes what fits"
        )
    others = {}
    with _platform.no_grad():
        for name in names:
            target = targets.get(name)
            if target is None:
                continue
            if not _platform.is_tensor(target):
                others[name] = given.get(name)
                continue
            value = _sent(given.get(name), target) if broadcasts else given[name]
            _fill(name, target, value)
    if others and not broadcasts:
        _platform.set_extra_states(model, others)


_DEFAULTS = (("broadcast_from_rank0", False), ("strict", True))


def _option(options: Any, name: str, default: bool) -> bool:
    if options is None:
        return default
    found = options.get(name, default) if isinstance(options, Mapping) else getattr(options, name, default)
    return bool(found)


def _agreed_names(names: list[str]) -> list[str]:
    """The names that rank 0 has."""
    everybody: list[Any] = [None] * _platform.get_world_size()
    _platform.all_gather_object(everybody, names if _platform.get_rank() == 0 else None)
    return everybody[0]


def _sent(value: Any, target: Any) -> Any:
    """The whole value that rank 0 has."""
    block = _platform.detached(target)
    if _platform.get_rank() == 0:
        value = value.full_tensor() if isinstance(value, DTensor) else value
        sent = _platform.copied(_platform.tensor_type_cast(_platform.detached(value), block.dtype))
    else:
        sent = _platform.new_tensor(tuple(target.shape), block.dtype, block.device)
    return _platform.broadcast(sent, 0, None)


def _fill(name: str, target: Any, value: Any) -> None:
    if tuple(value.shape) != tuple(target.shape):
        raise ValueError(
            f"set_model_state_dict: {name!r} has shape {tuple(target.shape)} in the model and {tuple(value.shape)} in "
            "the state"
        )
    if not isinstance(target, DTensor):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        _platform.load_into_param(target, whole)
        return
    layout = target._layout
    if isinstance(value, DTensor):
        block = _platform.detached(value.detach().redistribute(layout.mesh, layout))
    else:
        block = _platform.detached(value)[layout.local_region(tuple(target.shape)).slices]
    _platform.fill_block(target, _platform.tensor_type_cast(block, target.dtype))
