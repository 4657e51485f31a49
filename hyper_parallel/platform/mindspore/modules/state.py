"""The state of a model as a dict of tensors, and safetensors files of it that are whole or absent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn
from safetensors import SafetensorError, safe_open

from hyper_parallel.platform.host import safetensors_file
from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base.memory import bytes_of, from_array
from hyper_parallel.platform.mindspore.base.tensors import dtype_name, is_meta, own_copy
from hyper_parallel.platform.mindspore.communication import groups
from hyper_parallel.platform.mindspore.modules.modules import parameters_dict
from hyper_parallel.platform.shared.framework_of import kind_of
from hyper_parallel.platform.shared.state_options import read_options

__all__ = ["get_model_state_dict", "load_checkpoint", "save_checkpoint"]


def get_model_state_dict(model: nn.Cell, *, options: Any = None) -> dict[str, Any]:
    """Every parameter and persistent buffer by its name; a tied one appears under each of its names.

    ``options`` is a dict or an object with these attributes:

    - ``full_state_dict``: tensors spread over ranks are gathered (every rank must call);
    - ``cpu_offload``: the tensors are copies on the CPU; with ``full_state_dict`` only rank 0 gets them;
    - ``ignore_frozen_params``: parameters without ``requires_grad`` are left out.

    The tensors are those of the model, not copies, unless an option makes one.
    """
    if not isinstance(model, nn.Cell):
        raise TypeError(f"get_model_state_dict takes a module, got {kind_of(model)}")
    full_state_dict, cpu_offload, ignore_frozen_params = read_options(options)
    parameters = parameters_dict(model, remove_duplicate=False)
    state: dict[str, Any] = {
        name: parameter
        for name, parameter in parameters.items()
        if not ignore_frozen_params or private_api.requires_grad(parameter)
    }
    for owner_name, owner in model.cells_and_names():
        transient = private_api.transient_buffers_of(owner)
        for name, buffer in private_api.buffers_of(owner).items():
            if buffer is not None and name not in transient:
                state[f"{owner_name}.{name}" if owner_name else name] = buffer
    if full_state_dict:
        state = {name: _full(value) for name, value in state.items()}
    if cpu_offload:
        if full_state_dict and groups.get_rank() != 0:
            return {}
        state = {name: own_copy(value) for name, value in state.items()}
    return state


def _full(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


# ---------------------------------------------------------------- files

_SAFETENSORS_NAMES = {
    ms.float64: "F64",
    ms.float32: "F32",
    ms.float16: "F16",
    ms.bfloat16: "BF16",
    ms.complex64: "C64",
    ms.int64: "I64",
    ms.int32: "I32",
    ms.int16: "I16",
    ms.int8: "I8",
    ms.uint64: "U64",
    ms.uint32: "U32",
    ms.uint16: "U16",
    ms.uint8: "U8",
    ms.bool_: "BOOL",
}


def save_checkpoint(
    cell: nn.Cell | Mapping[str, Tensor], file_path: str | os.PathLike, ckpt_format: str = "safetensors"
) -> None:
    """Write a module's state, or a dict of tensors, to ``file_path``; an old file there is replaced as a whole.

    Killed at any moment, it leaves the old file or the new one (see Note [A file is whole or absent]). Tied and
    overlapping tensors are written in full under every name. A tensor spread over ranks is gathered, so then every rank
    must call.
    """
    safetensors_file.check_format("save_checkpoint", ckpt_format)
    if isinstance(cell, nn.Cell):
        cell = get_model_state_dict(cell)
    elif not isinstance(cell, Mapping):
        raise TypeError(f"save_checkpoint takes a module or a dict of tensors, got {kind_of(cell)}")
    tensors = {name: _full(value) for name, value in cell.items()}
    safetensors_file.check_names(tensors)
    for name, tensor in tensors.items():
        _check_can_be_saved(name, tensor)
    safetensors_file.write_file(file_path, {name: _entry(tensor) for name, tensor in tensors.items()})


def _entry(tensor: Tensor) -> safetensors_file.Entry:
    name = _SAFETENSORS_NAMES[tensor.dtype]
    return safetensors_file.Entry(name, tuple(tensor.shape), tensor.itemsize, lambda: bytes_of(tensor))


def load_checkpoint(file_path: str | os.PathLike, ckpt_format: str = "safetensors") -> dict[str, Tensor]:
    """The tensors of a file, by name, sorted by name."""
    safetensors_file.check_format("load_checkpoint", ckpt_format)
    path = safetensors_file.check_path(file_path)
    try:
        with safe_open(path, framework="np") as file:
            return {name: from_array(file.get_tensor(name)) for name in sorted(file.keys())}
    except SafetensorError as error:
        raise safetensors_file.not_whole(path, error) from error


def _check_can_be_saved(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"save_checkpoint: '{name}' is of type {type(tensor).__name__}, a safetensors file holds tensors only"
        )
    if is_meta(tensor):
        raise ValueError(
            f"save_checkpoint: '{name}' is on the meta device and has no values; materialise it, with "
            "init_parameters for instance"
        )
    if tensor.dtype not in _SAFETENSORS_NAMES:
        known = ", ".join(dtype_name(dtype) for dtype in _SAFETENSORS_NAMES)
        raise TypeError(
            f"save_checkpoint: '{name}' has dtype {dtype_name(tensor.dtype)}, which safetensors files cannot hold; "
            f"cast it to one of {known}"
        )
