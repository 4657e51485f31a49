"""Checkpoints of every kind, opened without the framework."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

Place = Annotated[str, typer.Argument(help="A checkpoint: of hyper-parallel, of torch, or a Hugging Face folder.")]


def checkpoint_module(name: str) -> Any:
    """A module of the library's checkpoints, imported when a command runs."""
    return importlib.import_module(f"hyper_parallel.core.distributed_checkpoint.{name}")


@contextmanager
def open_checkpoint(place: str) -> Iterator[Any]:
    """The checkpoint at a place, to read from."""
    source = checkpoint_module("tools.tensor_source").open_source(place)
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
    total = checkpoint_module("base.metadata").dtype_size(dtype)
    for size in shape:
        total *= size
    return total
