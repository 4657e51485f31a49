"""Parameters of modules, the same on every framework: replacing them, and reading and writing this rank's part of them.

A parameter may be spread over ranks: then it is an object with ``to_local()``, and what is read and written here is
this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hyper_parallel.platform.shared.framework_of import kind_of

__all__ = ["FoundParameter", "ParameterFramework", "ParameterFunctions", "check_init_arguments", "local_part"]

_LAYOUT_ATTRIBUTE = "hyper_parallel_layout"  # ``layout`` of a plain tensor may mean something else to the framework


class FoundParameter(NamedTuple):
    """Where a parameter is: the name of the module that owns it, that module, and the parameter."""

    owner_name: str
    owner: Any
    parameter: Any


@dataclass(frozen=True)
class ParameterFramework:
    """What these functions need from a framework."""

    tensor: type
    places: Callable[[Any], Iterable[tuple[Any, str, Any]]]  # (module, name, parameter) of all that are inside a module
    install: Callable[[Any, str, Any], None]
    as_parameter: Callable[[Any, Any], Any]  # (a tensor, the parameter that it replaces)
    detached: Callable[[Any], Any]
    is_meta: Callable[[Any], bool]
    keeps_meaning: Callable[[Any, Any], bool]  # whether numbers of the first dtype are numbers of the second, rounded
    dtype_name: Callable[[Any], str]
    copy: Callable[[Any, Any], None]  # (target, source): casts, without gradient


def _is_spread(tensor: object) -> bool:
    return hasattr(tensor, "to_local")


def local_part(parameter: Any) -> Any:
    """This rank's part; a plain parameter is its own."""
    return parameter.to_local() if _is_spread(parameter) else parameter


class ParameterFunctions:
    """The functions about parameters, for one framework."""

    def __init__(self, framework: ParameterFramework) -> None:
        self._framework = framework

    def update_parameter_by_name(self, cell: Any, result: Any, new_param: Any) -> Any:
        """Put ``new_param`` where ``search_parameter_by_name`` found the old one, and return what was installed.

        It is installed in every place of ``cell`` that holds the old parameter, so tied parameters stay tied. A plain
        tensor becomes a parameter with the old one's ``requires_grad``. Optimizers keep the parameters they were given:
        make them afterwards.
        """
        if result is None:
            raise ValueError("update_parameter_by_name: result is None: the search found no parameter of that name")
        if not isinstance(new_param, self._framework.tensor):
            raise TypeError(
                f"update_parameter_by_name: the new parameter must be a tensor, got {type(new_param).__name__}"
            )
        owner_name, _, old_param = result
        places = [(owner, name) for owner, name, found in self._framework.places(cell) if found is old_param]
        if not places:
            raise ValueError(
                f"update_parameter_by_name: the parameter found in '{owner_name or type(cell).__name__}' is no longer "
                "in this module; search again before each update"
            )
        installed = self._framework.as_parameter(new_param, old_param)
        for owner, name in places:
            self._framework.install(owner, name, installed)
        return installed

    def set_layout_into_parameter(self, param: Any, layout: Any) -> Any:
        """Note on a parameter that its values are one part of a larger tensor that lies as ``layout`` says."""
        if not _is_spread(param):
            setattr(param, _LAYOUT_ATTRIBUTE, layout)
        elif param.layout != layout:
            raise ValueError(
                f"set_layout_into_parameter: the parameter already has {param.layout}, which is not {layout}; "
                "change it with redistribute()"
            )
        return param

    def get_param_local_shape(self, param: Any) -> Any:
        """The shape of this rank's part."""
        return local_part(param).shape

    def get_param_local_data(self, param: Any) -> Any:
        """This rank's values, without graph, in the memory of the parameter."""
        return self._framework.detached(local_part(param))

    def update_param_data(self, param: Any, data: Any) -> None:
        """Let a plain parameter use ``data`` as its values from now on (its shape may change); no values are copied.

        A parameter spread over ranks has a fixed shape: this rank's part is overwritten by a copy.
        """
        self._require_tensor("update_param_data", data)
        if _is_spread(param):
            self.load_into_param(param, data)
            return
        if self._framework.is_meta(param) != self._framework.is_meta(data):
            raise ValueError(
                f"update_param_data: a parameter on {param.device} cannot take data on {data.device}; replace the "
                "parameter with update_parameter_by_name"
            )
        param.data = self._framework.detached(data)

    def load_into_param(self, param: Any, data: Any) -> None:
        """Copy ``data`` into this rank's values, in place; casts numbers, but never, say, floating to integer."""
        self._require_tensor("load_into_param", data)
        if _is_spread(data):
            if not _is_spread(param) or param.layout != data.layout:
                held = f"has {param.layout}" if _is_spread(param) else "is a plain tensor"
                raise ValueError(
                    f"load_into_param: the data has {data.layout} but the parameter {held}; redistribute the data first"
                )
            data = data.to_local()
        local = local_part(param)
        if tuple(local.shape) != tuple(data.shape):
            part = f" (this rank's part of {tuple(param.shape)})" if _is_spread(param) else ""
            raise ValueError(
                f"load_into_param: data of shape {tuple(data.shape)} does not fit a parameter of shape "
                f"{tuple(local.shape)}{part}"
            )
        if not self._framework.keeps_meaning(data.dtype, local.dtype):
            name = self._framework.dtype_name
            raise TypeError(
                f"load_into_param: data of {name(data.dtype)} would lose its meaning in a parameter of "
                f"{name(local.dtype)}; cast it on purpose with tensor_type_cast first"
            )
        for what, tensor in (("parameter", local), ("data", data)):
            if self._framework.is_meta(tensor):
                raise ValueError(
                    f"load_into_param: the {what} of shape {tuple(tensor.shape)} is on the meta device and has no "
                    "memory; materialise it first, a parameter with init_parameters"
                )
        self._framework.copy(local, data)

    def _require_tensor(self, function: str, data: Any) -> None:
        if not isinstance(data, self._framework.tensor):
            raise TypeError(f"{function} takes a tensor, got {kind_of(data)}")


def check_init_arguments(module: Any, kind: type, stage_index: Any, device: Any) -> None:
    """Raise for arguments that ``init_parameters`` cannot take; ``kind`` is the framework's class of modules."""
    if module is None:
        raise ValueError("init_parameters: module is None; give the module of this pipeline stage")
    if not isinstance(module, kind):
        raise TypeError(f"init_parameters takes a module, got {kind_of(module)}")
    if isinstance(stage_index, bool) or not isinstance(stage_index, int):
        raise TypeError(f"init_parameters: stage_index must be an int, got {stage_index!r}")
    if stage_index < 0:
        raise ValueError(f"init_parameters: stage_index must be 0 or more, got {stage_index}")
    if device is not None and str(device).lower().startswith("meta"):
        raise ValueError("init_parameters: the meta device holds no values; give the device that they shall be on")
