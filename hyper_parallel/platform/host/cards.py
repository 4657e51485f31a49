"""What the ranks of a world tell each other when they meet: a card for each, and the blocks in which cards are sent."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import typing
from dataclasses import dataclass
from typing import Any

from hyper_parallel.platform.host.reception import receive_exactly
from hyper_parallel.platform.host.shared_segment import ProcessIdentity

__all__ = ["LISTED_CARD_BYTES", "Card", "receive_block", "send_block"]

_LENGTH = struct.Struct("<I")
_LONGEST_TEXT = 255
LISTED_CARD_BYTES = 16 * 1024  # more than a card of such texts has


@dataclass(frozen=True)
class Card:
    """Which process a rank is, and where the ranks above it call it; ``port`` is 0 where nobody calls it."""

    rank: int
    host: str
    address: str
    port: int
    process: ProcessIdentity

    @classmethod
    def read(cls, data: Any, world_size: int) -> Card:
        """A card that came from another process; ValueError where it cannot be one."""
        fields = _fields(cls, data)
        card = cls(**{**fields, "process": ProcessIdentity(**_fields(ProcessIdentity, fields["process"]))})
        if not (0 <= card.rank < world_size and 0 <= card.port < 65536 and card.process.pid >= 0):
            raise ValueError(f"rank {card.rank}, port {card.port} or process {card.process.pid} cannot be")
        return card


def _fields(kind: type, data: Any) -> dict[str, Any]:
    expected = typing.get_type_hints(kind)
    if not isinstance(data, dict) or data.keys() != expected.keys():
        raise ValueError(f"it does not have the fields {', '.join(expected)}")
    for name, value in data.items():
        if expected[name] in (int, str) and type(value) is not expected[name]:
            raise ValueError(f"{name} is not {expected[name].__name__}")
        if isinstance(value, str) and not (len(value) <= _LONGEST_TEXT and value.isprintable()):
            raise ValueError(f"{name} is not a short line of text")
    return data


def send_block(sock: socket.socket, content: dict[str, Any]) -> None:
    """To a rank that may have ended meanwhile; who waits for it finds out."""
    data = json.dumps(content).encode()
    with contextlib.suppress(OSError):
        sock.sendall(_LENGTH.pack(len(data)) + data)


def receive_block(sock: socket.socket, most_bytes: int, end: float) -> dict[str, Any]:
    """A few fields, of so many bytes at most; ValueError if it is something else."""
    (length,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size, end))
    if length > most_bytes:
        raise ValueError(f"{length} bytes are too many")
    content = json.loads(receive_exactly(sock, length, end).decode())
    if not isinstance(content, dict):
        raise ValueError("no fields")
    return content
