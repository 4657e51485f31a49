"""Checkpoints of every kind, opened without the framework."""

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

Place = Annotated[str, typer.Argument(help="A checkpoint: of hyper-parallel, of torch, or a Hugging Face folder.")]


def checkpoint_module(name: str) -> Any:
    """A module of the library's checkpoints. `hyper_parallel.core` itself would load the framework: it is passed by."""
    front_door = "hyper_parallel.core"
    if front_door not in sys.modules:
        package = importlib.util.find_spec("hyper_parallel")
        assert package is not None and package.submodule_search_locations is not None
        stand_in = types.ModuleType(front_door)
        stand_in.__path__ = [os.path.join(folder, "core") for folder in package.submodule_search_locations]
        sys.modules[front_door] = stand_in
    return importlib.import_module(f"{front_door}.distributed_checkpoint.{name}")


@contextmanager
def open_checkpoint(place: str) -> Iterator[Any]:
    """The checkpoint at a place, to read from."""
    source = checkpoint_module("tensor_source").open_source(place)
    try:
        yield source
    finally:
        source.close()


def is_whole(url: str) -> bool:
    """Whether there is a checkpoint at a URL."""
    try:
        with open_checkpoint(url):
            return True
    except FileNotFoundError:
        return False


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """How many bytes the elements of a tensor take."""
    total = checkpoint_module("metadata").dtype_size(dtype)
    for size in shape:
        total *= size
    return total
