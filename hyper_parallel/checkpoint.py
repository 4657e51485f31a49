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
    "read_metadata": f"{_HERE}.format.stored_files",
    "verify": f"{_HERE}.format.stored_files",
    "latest": f"{_HERE}.storage.cleanup",
    "keep_last": f"{_HERE}.storage.cleanup",
    "checkpoints": f"{_HERE}.storage.cleanup",
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
    "load_hugging_face": f"{_HERE}.foreign.hugging_face",
    "save_hugging_face": f"{_HERE}.foreign.hugging_face",
    "KeyMapping": f"{_HERE}.foreign.key_mapping",
    "load_torch": f"{_HERE}.foreign.load_torch",
    "StandardSavePlanner": f"{_HERE}.planning.standard_planner",
    "StandardLoadPlanner": f"{_HERE}.planning.standard_planner",
    **dict.fromkeys(
        ("SavePlanner", "LoadPlanner", "SavePlan", "LoadPlan", "WriteItem", "ReadItem"), f"{_HERE}.planning.planner"
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
        f"{_HERE}.base.metadata",
    ),
    "StorageWriter": f"{_HERE}.storage.storage",
    "StorageReader": f"{_HERE}.storage.storage",
    "FileSystemWriter": f"{_HERE}.storage.filesystem",
    "FileSystemReader": f"{_HERE}.storage.filesystem",
    "FsspecWriter": f"{_HERE}.storage.fsspec_storage",
    "FsspecReader": f"{_HERE}.storage.fsspec_storage",
    **dict.fromkeys(("CheckpointError", "CorruptCheckpointError"), f"{_HERE}.base.errors"),
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
