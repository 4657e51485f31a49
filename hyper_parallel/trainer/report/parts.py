"""What ranks wrote of the step that was recorded, each in a file of its own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["PARTS_FOLDER", "damaged_parts", "forget_parts", "read_parts"]

PARTS_FOLDER = "recorded"


def forget_parts(folder: Path) -> None:
    """Remove what an earlier run has left."""
    for path in (folder / PARTS_FOLDER).glob("rank-*.json"):
        path.unlink(missing_ok=True)


def read_parts(folder: Path) -> list[dict[str, Any]]:
    """The parts that the ranks have written of the step that was recorded last, by rank; damaged ones are left out."""
    parts = [part for path in _files(folder) if (part := _part(path)) is not None]
    last = max((part["step"] for part in parts), default=0)
    return sorted((part for part in parts if part["step"] == last), key=lambda part: part["rank"])


def damaged_parts(folder: Path) -> list[str]:
    """The names of those that :func:`read_parts` leaves out because they are damaged."""
    return [f"{PARTS_FOLDER}/{path.name}" for path in sorted(_files(folder)) if _part(path) is None]


def _files(folder: Path) -> Iterable[Path]:
    return (folder / PARTS_FOLDER).glob("rank-*.json")


def _part(path: Path) -> dict[str, Any] | None:
    try:
        part = json.loads(path.read_bytes())
        is_part = type(part["step"]) is int and type(part["rank"]) is int and type(part["memory"]["peak"]) is int
    except (OSError, ValueError, RecursionError, TypeError, KeyError):
        return None
    return part if is_part else None
