"""The names of the files of a checkpoint: which are ours, and which save wrote them.

A name is ours as a whole or not at all: nothing before, nothing after, no line break at its end.
"""

from __future__ import annotations

import re
import secrets
import time

_DATA = re.compile(r"([0-9a-f]{20})-r[0-9]{5,10}-[0-9]{3,10}\.safetensors")
_LOCK = re.compile(r"\.([0-9a-f]{20})\.saving")
_ASIDE = re.compile(r"\.([0-9a-f]{20})\.metadata")
_ASIDE_FOLDER = re.compile(r"\..+\.([0-9a-f]{20})\.saving", re.DOTALL)
_AGREEMENT = re.compile(r"\..+\.(save|load)-agreement", re.DOTALL)
_MESSAGE = r"opening|hello-[0-9]+|(report|verdict)-[0-9a-f]+-([0-9]+|bye)-[0-9]+"
_OF_AGREEMENT = re.compile(rf"alive-[0-9]+-[0-9a-f]+|{_MESSAGE}|\.({_MESSAGE})\.[0-9a-f]+")

ALIVE = "alive-"  # starts the names of files that ranks of an agreement hold locked


def new_save_name() -> str:
    """A name that no other save has."""
    return f"{time.time_ns() // 1000 & (1 << 52) - 1:013x}{secrets.token_hex(4)}"[:20]


def data_file_name(save_name: str, rank: int, number: int) -> str:
    return f"{save_name}-r{rank:05d}-{number:03d}.safetensors"


def lock_file_name(save_name: str) -> str:
    """The mark of a save: its coordinator holds this file locked while it lives; see ``save_marks.py``."""
    return f".{save_name}.saving"


def aside_file_name(save_name: str) -> str:
    """The metadata file before it is committed."""
    return f".{save_name}.metadata"


def save_of(file_name: str) -> str | None:
    """The save that wrote a file, None for a file that is none of ours (or the metadata file)."""
    for pattern in (_DATA, _LOCK, _ASIDE):
        if match := pattern.fullmatch(file_name):
            return match[1]
    return None


def is_mark(file_name: str) -> bool:
    return _LOCK.fullmatch(file_name) is not None


def is_data_file(file_name: str) -> bool:
    return _DATA.fullmatch(file_name) is not None


def aside_folder_name(folder: str, save_name: str) -> str:
    """The folder beside a Hugging Face folder in which a save of it is written."""
    return f".{folder}.{save_name}.saving"


def is_aside_folder(name: str) -> bool:
    return _ASIDE_FOLDER.fullmatch(name) is not None


def agreement_name(checkpoint: str, what: str) -> str:
    """The directory beside a checkpoint in which ranks agree on a save or load through files."""
    return f".{checkpoint}.{what}-agreement"


def is_agreement(directory_name: str) -> bool:
    return _AGREEMENT.fullmatch(directory_name) is not None


def is_agreement_file(file_name: str) -> bool:
    """Whether ranks that agree through files make files of this name, or write them aside under it."""
    return _OF_AGREEMENT.fullmatch(file_name) is not None
