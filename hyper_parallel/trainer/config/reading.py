"""Small text files of the user's, whatever stands under their names."""

from __future__ import annotations

import os

__all__ = ["read_text"]

_MOST_BYTES = 16 << 20  # no config is larger, and /dev/zero has no end


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file, with "\\n" at the end of each line; a ValueError that says why it cannot be read."""
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    if len(content) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB, which no config has")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"byte 0x{content[error.start]:02x} in line {line} is no UTF-8; save it as UTF-8") from error
    return text.replace("\r\n", "\n")
