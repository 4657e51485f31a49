"""The state of a model as a dict of tensors, and safetensors files of it that are whole or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn

from hyper_parallel.platform.atomic_file import atomic_file

__all__ = ["get_model_state_dict", "load_checkpoint", "save_checkpoint"]


# ---------------------------------------------------------------------------------------------------------------------
# State dicts
# ---------------------------------------------------------------------------------------------------------------------

_STATE_DICT_OPTIONS = ("full_state_dict", "cpu_offload", "ignore_frozen_params")
# These say how to load, or what to do with optimizers; they are taken so that one options object serves everywhere.
_OPTIONS_FOR_OTHERS = (
    "broadcast_from_rank0",
    "dsd_fqn_modifiers",
    "flatten_optimizer_state_dict",
    "keep_submodule_prefixes",
    "strict",
)


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
        raise TypeError(f"get_model_state_dict takes a module, got {type(model).__name__}")
    full_state_dict, cpu_offload, ignore_frozen_params = _read_options(options)

    state = model.state_dict()
    if ignore_frozen_params:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad:
                state.pop(name, None)
    wrappers = _wrappers(model)
    state = {_without_wrappers(name, wrappers): value for name, value in state.items()}
    if full_state_dict:
        state = {name: _whole(value) for name, value in state.items()}
    if cpu_offload:
        if full_state_dict and dist.is_initialized() and dist.get_rank() != 0:
            return {}
        state = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    return state


def _read_options(options: Any) -> list[bool]:
    if options is None:
        return [False] * len(_STATE_DICT_OPTIONS)
    if isinstance(options, Mapping):
        known = (*_STATE_DICT_OPTIONS, *_OPTIONS_FOR_OTHERS)
        unknown = [name for name in options if name not in known]
        if unknown:
            raise ValueError(
                f"get_model_state_dict: unknown option(s) {', '.join(map(repr, unknown))}; "
                f"the options are {', '.join(known)}"
            )
        return [bool(options.get(name, False)) for name in _STATE_DICT_OPTIONS]
    if not any(hasattr(options, name) for name in _STATE_DICT_OPTIONS):
        raise TypeError(
            "get_model_state_dict: options must be a dict or an object with attributes such as full_state_dict, got "
            f"{type(options).__name__}"
        )
    return [bool(getattr(options, name, False)) for name in _STATE_DICT_OPTIONS]


def _whole(value: Any) -> Any:
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
    _check_format("save_checkpoint", ckpt_format)
    if isinstance(cell, nn.Module):
        cell = get_model_state_dict(cell)
    elif not isinstance(cell, Mapping):
        raise TypeError(f"save_checkpoint takes a module or a dict of tensors, got {type(cell).__name__}")
    tensors = {name: _whole(value) for name, value in cell.items()}
    _check_can_be_saved(tensors)
    with atomic_file(file_path) as aside, open(aside, "wb") as file:
        _write_safetensors(tensors, file)


def load_checkpoint(
    file_path: str | os.PathLike, ckpt_format: str = "safetensors", device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """The tensors of a file, by name, sorted by name."""
    _check_format("load_checkpoint", ckpt_format)
    path = os.fspath(file_path)
    if os.path.isdir(path):
        raise IsADirectoryError(f"cannot load a checkpoint from '{path}': it is a directory; name a file in it")
    if not os.path.exists(path):
        raise FileNotFoundError(f"cannot load a checkpoint from '{path}': there is no such file")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            return {name: file.get_tensor(name) for name in sorted(file.keys())}
    except SafetensorError as error:
        raise ValueError(
            f"'{path}' ({os.path.getsize(path)} bytes) is not a whole safetensors file: {error}; it was cut short, "
            "damaged, or is of another format. Load another copy of it, or save it again"
        ) from error


def _check_format(function: str, ckpt_format: str) -> None:
    if ckpt_format != "safetensors":
        raise ValueError(f"{function}: unknown checkpoint format {ckpt_format!r}; the known formats are: 'safetensors'")


def _check_can_be_saved(tensors: Mapping[str, Any]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"save_checkpoint: the names of tensors must be strings, got {name!r}")
        if name == "__metadata__":
            raise ValueError("save_checkpoint: '__metadata__' is a reserved name; give the tensor another one")
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


# Note [Why not safetensors.save_file]
# It writes aside too, but under a random name that nobody can tell from a user's file after a crash and without fsync,
# it refuses tied and non-contiguous tensors, and to please it all of them would have to be copied before the first byte
# is written. The format is a length, a JSON header and the raw bytes in the header's order, so tensors are written one
# by one here: only one copy exists at a time.
def _write_safetensors(tensors: Mapping[str, torch.Tensor], file: BinaryIO) -> None:
    # Wide elements first: every tensor then starts at a multiple of its element size, so readers can map the file.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header = json.dumps(_safetensors_header(ordered), ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    for _, tensor in ordered:
        values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        file.write(values.reshape(-1).view(torch.uint8).numpy().data)


def _safetensors_header(ordered: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    return header
