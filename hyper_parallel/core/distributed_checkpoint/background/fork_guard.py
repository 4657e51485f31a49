"""Sockets that a forked child must not keep: whoever is at the other end learns that a process has ended by their end.

A child that is forked has them too, and would keep them open. So it closes all that are known here, and a fork waits
while a program is being started, whose first word the child would keep from being heard.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref

no_forks = threading.RLock()
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def not_for_children(sock: socket.socket) -> socket.socket:
    """Have forked children close it."""
    _sockets.add(sock)
    return sock


def _close_in_child() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(before=no_forks.acquire, after_in_parent=no_forks.release, after_in_child=no_forks.release)
os.register_at_fork(after_in_child=_close_in_child)
