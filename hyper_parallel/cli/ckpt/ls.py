"""`hyper-parallel ckpt ls`: the checkpoints in a folder or under a URL."""

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from hyper_parallel.cli.ckpt.reading import checkpoint_module, is_whole, open_checkpoint, tensor_bytes
from hyper_parallel.cli.ckpt.terminal import AsJson, print_table, say, say_json, shown_errors, size_text


def ls(
    directory: Annotated[str, typer.Argument(help="A folder with checkpoints in it, or one checkpoint.")] = ".",
    as_json: AsJson = False,
) -> None:
    """List the checkpoints in a folder, the oldest first."""
    with shown_errors():
        described = [_described(place) for place in _checkpoints_in(directory)]
    if as_json:
        say_json(described)
        return
    if not described:
        say(f"no checkpoints in '{directory}'")
        return
    rows = [["checkpoint", "kind", "tensors", "objects", "size", "written"]]
    for one in described:
        if one["error"]:
            rows.append([one["path"], one["kind"], "-", "-", "-", f"unreadable: {one['error']}"])
        else:
            counts = [str(one["tensors"]), str(one["objects"]), size_text(one["bytes"])]
            rows.append([one["path"], one["kind"], *counts, one["written"] or "-"])
    print_table(rows)


def _checkpoints_in(directory: str) -> list[str]:
    """The checkpoints in a folder or under a URL, or the one that it is itself."""
    kind_of = checkpoint_module("tools.tensor_source").kind_of
    ours = [os.fspath(place) for place in checkpoint_module("storage.cleanup").checkpoints(directory)]
    if checkpoint_module("storage.storage").storage_for(directory) == "fsspec":
        return ours or ([directory] if is_whole(directory) else [])
    if kind_of(directory):
        return [directory]
    root = Path(directory.removeprefix("file://"))
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder '{directory}'")
    order = {place: number for number, place in enumerate(ours)}
    found = [str(path) for path in root.iterdir() if path.is_dir() and kind_of(path)]
    return sorted(found, key=lambda place: (order.get(place, -1), place))


def _described(place: str) -> dict[str, Any]:
    kind = checkpoint_module("tools.tensor_source").kind_of(place)
    try:
        with open_checkpoint(place) as source:
            known = source.known()
            return {
                "path": place,
                "kind": kind,
                "tensors": len(known),
                "objects": len(source.objects()),
                "bytes": sum(tensor_bytes(*one) for one in known.values()),
                "written": _time_of(place),
                "error": None,
            }
    except (OSError, ValueError, TypeError, RuntimeError, MemoryError) as error:
        return {"path": place, "kind": kind, "error": str(error)}


def _time_of(place: str) -> str | None:
    """When a checkpoint was written; None where that is not known."""
    try:
        seconds = Path(place.removeprefix("file://")).stat().st_mtime
    except OSError:
        return None
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
