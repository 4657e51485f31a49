"""The names of the files of a checkpoint: which are ours, and which save wrote them."""

from __future__ import annotations

import re
import secrets
import time

_DATA = re.compile(r"^([0-9a-f]{20})-r\d{5,}-\d{3,}\.safetensors$")
_LOCK = re.compile(r"^\.([0-9a-f]{20})\.saving$")
_AGREEMENT = re.compile(r"^\..+\.(save|load)-agreement$")
_ASIDE = re.compile(r"^\.([0-9a-f]{20})\.metadata$")

ALIVE = "alive-"  # starts the names of files that ranks of an agreement hold locked


def new_save_name() -> str:
    """A name that no other save has."""
    return f"{time.time_ns() // 1000 & (1 << 52) - 1:013x}{secrets.token_hex(4)}"[:20]


def data_file_name(save_name: str, rank: int, number: int) -> str:
    return f"{save_name}-r{rank:05d}-{number:03d}.safetensors"


def lock_file_name(save_name: str) -> str:
    """The file that the coordinator of a living save holds locked."""
    return f".{save_name}.saving"


def aside_file_name(save_name: str) -> str:
    """The metadata file before it is committed."""
    return f".{save_name}.metadata"


def save_of(file_name: str) -> str | None:
    """The save that wrote a file, None for a file that is none of ours (or the metadata file)."""
    for pattern in (_DATA, _LOCK, _ASIDE):
        if match := pattern.match(file_name):
            return match[1]
    return None


def is_data_file(file_name: str) -> bool:
    return _DATA.match(file_name) is not None


def agreement_name(checkpoint: str, what: str) -> str:
    """The directory beside a checkpoint in which ranks agree on a save or load through files."""
    return f".{checkpoint}.{what}-agreement"


def is_agreement(directory_name: str) -> bool:
    return _AGREEMENT.match(directory_name) is not None
