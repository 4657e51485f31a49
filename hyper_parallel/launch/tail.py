"""Following the output of ranks while it is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["Tail", "last_lines"]

_MOST_BYTES = 64 * 1024  # of a log, looked at for its last lines


class Tail:
    """The lines that come to a file from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = path.stat().st_size if path.exists() else 0
        self._half = b""

    def new_lines(self, at_end: bool = False) -> Iterator[str]:
        """The lines that have come since; ``at_end``: the last one too, if it has no end of line."""
        with self._path.open("rb") as file:
            file.seek(self._place)
            data = file.read()
        self._place += len(data)
        *lines, self._half = (self._half + data).split(b"\n")
        if at_end and self._half:
            lines.append(self._half)
            self._half = b""
        for line in lines:
            yield line.decode(errors="replace")


def last_lines(path: Path, count: int, begin: int = 0) -> list[str]:
    """The last lines of a file, from a place on, that are not empty."""
    try:
        with path.open("rb") as file:
            file.seek(max(begin, path.stat().st_size - _MOST_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-count:]
