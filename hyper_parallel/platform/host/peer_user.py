"""Whose process is at the other end of a connection inside this host, as Linux tells in /proc/net.

Asked where no secret tells ranks from strangers: on the loopback device the user who owns the other socket does.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
from typing import Any

__all__ = ["can_tell_users", "is_same_user", "user_of_peer"]

_TABLES = {4: "/proc/net/tcp", 16: "/proc/net/tcp6"}  # by the bytes of an address
_ESTABLISHED = "01"


def can_tell_users() -> bool:
    """Whether this system says whose sockets are whose."""
    return os.path.exists(_TABLES[4])


def is_same_user(sock: socket.socket) -> bool:
    """Whether the other end belongs to a process of this process's user."""
    return user_of_peer(sock) == os.geteuid()


def user_of_peer(sock: socket.socket) -> int | None:
    """The user of the other end; None if there is none on this host, or none that a process holds.

    A socket that was closed, or that nobody has accepted yet, is listed as if it were root's: without an inode.
    """
    try:
        ends = sock.getpeername(), sock.getsockname()
    except OSError:  # It has gone.
        return None
    for _ in range(3):  # A table that changes while it is read may miss a row.
        for num_bytes, table in _TABLES.items():
            names = [_as_listed(end, num_bytes) for end in ends]
            if None not in names and (user := _find(table, f" {names[0]} {names[1]} {_ESTABLISHED} ")) is not None:
                return user
    return None


def _find(table: str, row: str) -> int | None:
    with contextlib.suppress(FileNotFoundError), open(table) as lines:  # There may be no IPv6.
        for line in lines:
            if row in line:
                fields = line.split()
                return int(fields[7]) if fields[9] != "0" else None
    return None


def _as_listed(end: tuple[Any, ...], num_bytes: int) -> str | None:
    """How the table of addresses with so many bytes writes it; None if it cannot be there."""
    address = ipaddress.ip_address(end[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    packed = address.packed
    if len(packed) > num_bytes:
        return None
    if len(packed) < num_bytes:
        packed = bytes(10) + b"\xff\xff" + packed
    words = [int.from_bytes(packed[start : start + 4], sys.byteorder) for start in range(0, num_bytes, 4)]
    return "".join(f"{word:08X}" for word in words) + f":{end[1]:04X}"
