"""The state of a model as a dict of tensors, and safetensors files of it that are whole or absent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from hyper_parallel.platform.host import safetensors_file
from hyper_parallel.platform.shared.framework_of import kind_of
from hyper_parallel.platform.shared.state_options import read_options
from hyper_parallel.platform.torch.base.tensors import as_bytes
from hyper_parallel.platform.torch.communication import groups

__all__ = ["get_model_state_dict", "load_checkpoint", "save_checkpoint"]


# ---------------------------------------------------------------------------------------------------------------------
# State dicts
# ---------------------------------------------------------------------------------------------------------------------


def get_model_state_dict(model: nn.Module, *, options: Any = None) -> dict[str, Any]:
    """Every parameter and persistent buffer by its name; a tied one appears under each of its names.

    ``options`` is a dict or an object such as torch's ``StateDictOptions``:

    - ``full_state_dict``: tensors spread over ranks are gathered (every rank must call);
    - ``cpu_offload``: the tensors are on the CPU; with ``full_state_dict`` only rank 0 gets them, the others nothing;
    - ``ignore_frozen_params``: parameters without ``requires_grad`` are left out.

    What DistributedDataParallel and ``torch.compile`` put into names is taken out, so a wrapped model gives the names
    of the bare one. The tensors are those of the model, not copies, unless an option makes one.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"get_model_state_dict takes a module, got {kind_of(model)}")
    full_state_dict, cpu_offload, ignore_frozen_params = read_options(options)

    state = model.state_dict()
    if ignore_frozen_params:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                state.pop(name, None)
    wrappers = _wrappers(model)
    state = {_without_wrappers(name, wrappers): value for name, value in state.items()}
    if full_state_dict:
        state = {name: _full(value) for name, value in state.items()}
    if cpu_offload:
        if full_state_dict and groups.get_rank() != 0:
            return {}
        state = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    return state


def _full(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _wrappers(model: nn.Module) -> list[tuple[str, str]]:
    """(prefix with the wrapper's own name part, prefix without), the innermost wrapper first."""
    found = []
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = "module"
        elif type(module).__name__ == "OptimizedModule":  # what torch.compile makes; the class has no public name
            inner = "_orig_mod"
        else:
            continue
        prefix = f"{name}." if name else ""
        found.append((f"{prefix}{inner}.", prefix))
    return sorted(found, key=lambda pair: len(pair[0]), reverse=True)


def _without_wrappers(name: str, wrappers: list[tuple[str, str]]) -> str:
    for wrapped, bare in wrappers:
        if name.startswith(wrapped):
            name = bare + name[len(wrapped) :]
    return name


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------

_SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save_checkpoint(
    cell: nn.Module | Mapping[str, torch.Tensor], file_path: str | os.PathLike, ckpt_format: str = "safetensors"
) -> None:
    """Write a module's state, or a dict of tensors, to ``file_path``; an old file there is replaced as a whole.

    Killed at any moment, it leaves the old file or the new one (see Note [A file is whole or absent]). Tied and
    overlapping tensors are written in full under every name. A tensor spread over ranks is gathered, so then every rank
    must call.
    """
    safetensors_file.check_format("save_checkpoint", ckpt_format)
    if isinstance(cell, nn.Module):
        cell = get_model_state_dict(cell)
    elif not isinstance(cell, Mapping):
        raise TypeError(f"save_checkpoint takes a module or a dict of tensors, got {kind_of(cell)}")
    tensors = {name: _full(value) for name, value in cell.items()}
    _check_can_be_saved(tensors)
    safetensors_file.write_file(file_path, {name: _entry(tensor) for name, tensor in tensors.items()})


def _entry(tensor: torch.Tensor) -> safetensors_file.Entry:
    def get_bytes() -> np.ndarray:
        values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return as_bytes(values).numpy()

    return safetensors_file.Entry(
        _SAFETENSORS_NAMES[tensor.dtype], tuple(tensor.shape), tensor.element_size(), get_bytes
    )


def load_checkpoint(
    file_path: str | os.PathLike, ckpt_format: str = "safetensors", device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """The tensors of a file, by name, sorted by name."""
    safetensors_file.check_format("load_checkpoint", ckpt_format)
    path = safetensors_file.check_path(file_path)
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            return {name: file.get_tensor(name) for name in sorted(file.keys())}
    except SafetensorError as error:
        raise safetensors_file.not_whole(path, error) from error


def _check_can_be_saved(tensors: Mapping[str, Any]) -> None:
    safetensors_file.check_names(tensors)
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"save_checkpoint: '{name}' is of type {type(tensor).__name__}, a safetensors file holds tensors only"
            )
        if tensor.is_meta:
            raise ValueError(
                f"save_checkpoint: '{name}' is on the meta device and has no values; materialise it, with "
                "init_parameters for instance"
            )
        if tensor.layout is not torch.strided:
            raise TypeError(f"save_checkpoint: '{name}' is a sparse tensor; save its to_dense()")
        if tensor.dtype not in _SAFETENSORS_NAMES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _SAFETENSORS_NAMES)
            raise TypeError(
                f"save_checkpoint: '{name}' has dtype {tensor.dtype}, which safetensors files cannot hold; cast it "
                f"to one of {known}"
            )
