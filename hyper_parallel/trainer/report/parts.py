"""What ranks wrote of the step that was recorded, each in a file of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["PARTS_FOLDER", "forget_parts", "read_parts"]

PARTS_FOLDER = "recorded"


def forget_parts(folder: Path) -> None:
    """Remove what an earlier run has left."""
    for path in (folder / PARTS_FOLDER).glob("rank-*.json"):
        path.unlink(missing_ok=True)


def read_parts(folder: Path) -> list[dict[str, Any]]:
    """The parts that the ranks have written of the step that was recorded last, by rank."""
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in (folder / PARTS_FOLDER).glob("rank-*.json")]
    last = max((part["step"] for part in parts), default=0)
    return sorted((part for part in parts if part["step"] == last), key=lambda part: part["rank"])
