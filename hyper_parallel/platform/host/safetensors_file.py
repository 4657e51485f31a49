"""Safetensors files that are whole or absent, written tensor by tensor; free of any framework.

Note [Why not safetensors.save_file]
    It writes aside too, but under a random name that nobody can tell from a user's file after a crash and without
    fsync, it refuses tied and non-contiguous tensors, and to please it all of them would have to be copied before the
    first byte is written. The format is a length, a JSON header and the raw bytes in the header's order, so tensors are
    written one by one here: only one copy exists at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.platform.host.atomic_file import atomic_file

__all__ = ["Entry", "check_format", "check_names", "check_path", "not_whole", "write_file"]


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its dtype's name in the format, its shape, and how to get its bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    get_bytes: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        num_bytes = self.itemsize
        for length in self.shape:
            num_bytes *= length
        return num_bytes


def write_file(path: str | os.PathLike, entries: Mapping[str, Entry]) -> None:
    """Write the file aside and put it in its place; killed at any moment, the old file or the new one is there."""
    # Wide elements first: every tensor then starts at a multiple of its element size, so readers can map the file.
    ordered = sorted(entries.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header = json.dumps(_header(ordered), ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with atomic_file(path) as aside, open(aside, "wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        for _, entry in ordered:
            file.write(entry.get_bytes().data)


def _header(ordered: list[tuple[str, Entry]]) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, entry in ordered:
        end = offset + entry.num_bytes
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    return header


# ---------------------------------------------------------------- messages


def check_format(function: str, ckpt_format: str) -> None:
    if ckpt_format != "safetensors":
        raise ValueError(f"{function}: unknown checkpoint format {ckpt_format!r}; the known formats are: 'safetensors'")


def check_names(tensors: Mapping[str, Any]) -> None:
    for name in tensors:
        if not isinstance(name, str):
            raise TypeError(f"save_checkpoint: the names of tensors must be strings, got {name!r}")
        if name == "__metadata__":
            raise ValueError("save_checkpoint: '__metadata__' is a reserved name; give the tensor another one")


def check_path(file_path: str | os.PathLike) -> str:
    """The path of a file that is there."""
    path = os.fspath(file_path)
    if os.path.isdir(path):
        raise IsADirectoryError(f"cannot load a checkpoint from '{path}': it is a directory; name a file in it")
    if not os.path.exists(path):
        raise FileNotFoundError(f"cannot load a checkpoint from '{path}': there is no such file")
    if not os.path.isfile(path):  # A FIFO would be waited for, a device read without end.
        raise ValueError(f"cannot load a checkpoint from '{path}': it is no regular file")
    return path


def not_whole(path: str, error: Exception) -> ValueError:
    return ValueError(
        f"'{path}' ({os.path.getsize(path)} bytes) is not a whole safetensors file: {error}; it was cut short, "
        "damaged, or is of another format. Load another copy of it, or save it again"
    )
