"""What may stand on a tape as it is: values that cannot change and hide no tensors.

Note [Values that are baked in]
A tape that is right for the batch it was recorded on proves nothing: a mask that hides in an object is a constant on
the tape, and wrong for the next batch. So only what is known not to change may be a constant: numbers, names, layouts,
meshes, groups, types, functions that close over such, and objects whose class vouches for them: ``constant_parts()``
gives all that they depend on. All else is refused, whatever it holds.
"""

from __future__ import annotations

import enum
import types
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.region import Region

_platform = get_platform()
_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), enum.Enum, type)
_OURS = (Layout, DeviceMesh, Placement, Region)
_DEEPEST = 6


def why_not_constant(value: Any, outer: tuple[Any, ...] = ()) -> str | None:
    """None where ``value`` may stand on a tape as it is; else what is in the way."""
    if isinstance(value, (*_IMMUTABLE, *_OURS)) or _platform.is_framework_constant(value):
        return None
    if _platform.is_tensor(value):
        return f"a tensor of shape {tuple(value.shape)} hides in an object or in a function"
    if any(one is value for one in outer):  # a function that its own closure holds
        return None
    if len(outer) >= _DEEPEST:
        return f"a {type(value).__name__} is nested too deeply to be looked through"
    inner = _parts_of(value)
    if inner is None:
        return f"a {type(value).__name__} may change, or hide tensors"
    for part in inner:
        found = why_not_constant(part, (*outer, value))
        if found is not None:
            return found
    return None


def _parts_of(value: Any) -> list[Any] | None:
    """What a value is made of; None where that cannot be said, or could be changed."""
    if isinstance(value, (tuple, frozenset)):
        return list(value)
    if isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)):
        return []
    if isinstance(value, types.MethodWrapperType):  # an attribute of tensors that is one
        return [] if isinstance(value.__self__, types.GetSetDescriptorType) else None
    if isinstance(value, types.MethodType):
        return [value.__func__, *([] if isinstance(value.__self__, type) else [value.__self__])]
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    parts = getattr(type(value), "constant_parts", None)
    if parts is not None:
        own: list[Any] = parts(value)
        return own
    frozen = getattr(type(value), "__dataclass_params__", None)
    if frozen is not None and frozen.frozen:
        return [getattr(value, name) for name in type(value).__dataclass_fields__]
    return None


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
