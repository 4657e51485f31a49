"""Checkpoints, by their short names: ``from hyper_parallel import checkpoint as ckpt; ckpt.save(...)``.

The parts live in ``hyper_parallel.core.distributed_checkpoint``, one file for each; names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_HERE = "hyper_parallel.core.distributed_checkpoint"
_HOME_OF = {
    "save": f"{_HERE}.save",
    "async_save": f"{_HERE}.async_save",
    "AsyncSave": f"{_HERE}.async_save",
    "load": f"{_HERE}.load",
    "read_metadata": f"{_HERE}.stored_files",
    "verify": f"{_HERE}.stored_files",
    "latest": f"{_HERE}.cleanup",
    "keep_last": f"{_HERE}.cleanup",
    "checkpoints": f"{_HERE}.cleanup",
    **dict.fromkeys(
        (
            "get_state_dict",
            "set_state_dict",
            "get_model_state_dict",
            "set_model_state_dict",
            "get_optimizer_state_dict",
            "set_optimizer_state_dict",
        ),
        f"{_HERE}.state_dict",
    ),
    "load_hugging_face": f"{_HERE}.hugging_face",
    "save_hugging_face": f"{_HERE}.hugging_face",
    "KeyMapping": f"{_HERE}.key_mapping",
    "load_torch": f"{_HERE}.load_torch",
    "StandardSavePlanner": f"{_HERE}.standard_planner",
    "StandardLoadPlanner": f"{_HERE}.standard_planner",
    **dict.fromkeys(
        ("SavePlanner", "LoadPlanner", "SavePlan", "LoadPlan", "WriteItem", "ReadItem"), f"{_HERE}.planner"
    ),
    **dict.fromkeys(
        (
            "Metadata",
            "MetadataIndex",
            "ChunkStorageMetadata",
            "TensorProperties",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
        ),
        f"{_HERE}.metadata",
    ),
    "StorageWriter": f"{_HERE}.storage",
    "StorageReader": f"{_HERE}.storage",
    "FileSystemWriter": f"{_HERE}.filesystem",
    "FileSystemReader": f"{_HERE}.filesystem",
    "FsspecWriter": f"{_HERE}.fsspec_storage",
    "FsspecReader": f"{_HERE}.fsspec_storage",
    **dict.fromkeys(("CheckpointError", "CorruptCheckpointError"), f"{_HERE}.errors"),
}

__all__ = [*_HOME_OF]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
