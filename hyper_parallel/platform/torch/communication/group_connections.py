"""Members of a new process group that find each other; see Note [Creating groups never deadlocks] in ``groups``."""

from __future__ import annotations

import atexit
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

connecting: dict[dist.ProcessGroup, Connection] = {}  # groups whose members are still finding each other
creation_lock = threading.Lock()
_CONNECT_TAG = 2**31 - 1
_STOP_SECONDS = 3.0
_SECONDS_TO_LET_GO = 0.02  # for threads of the backend to release the tensors of the last collective


def wait_until_connected(group: dist.ProcessGroup) -> None:
    """Return when all members of ``group`` have created it; see Note [Creating groups never deadlocks]."""
    connection = connecting.get(group)
    if connection is not None:
        connection.finished.wait()
        if connection.error is not None:
            raise RuntimeError(connection.error)


def stop_connecting(stopped: list[dist.ProcessGroup]) -> None:
    """End the threads of these groups: those whose members are all there are done in a moment, the others give up."""
    found = [connecting.pop(group, None) for group in stopped]
    connections = [connection for connection in found if connection is not None]
    for connection in connections:
        connection.cancelled.set()
    end = time.monotonic() + _STOP_SECONDS
    for connection in connections:
        connection.thread.join(max(0.0, end - time.monotonic()))


@atexit.register
def _end_threads() -> None:
    """A thread that is in a call of torch, or waits for the interpreter, when that ends brings the process down."""
    stop_connecting(list(connecting))
    time.sleep(_SECONDS_TO_LET_GO)


class Connection:
    """The thread that connects one new group to its members as they come."""

    def __init__(self, group: dist.ProcessGroup, store: dist.Store, ranks: list[int], timeout: timedelta) -> None:
        self.finished = threading.Event()
        self.cancelled = threading.Event()
        self.error: str | None = None
        self.thread = threading.Thread(target=self._run, args=(group, store, ranks, timeout), daemon=True)
        store.set(_created_key(group.rank()), b"1")
        self.thread.start()

    def _run(self, group: dist.ProcessGroup, store: dist.Store, ranks: list[int], timeout: timedelta) -> None:
        try:
            if self._all_created(store, ranks, timeout):
                _exchange_bytes(group)
                with creation_lock:  # The creating thread may not have entered it into the table yet.
                    connecting.pop(group, None)
            elif self.cancelled.is_set():
                store.delete_key(_created_key(group.rank()))
        except Exception as error:  # Raised to the user at the first use of the group.
            self.error = f"the ranks of the group {ranks} could not be connected: {error}"
        finally:
            self.finished.set()

    def _all_created(self, store: dist.Store, ranks: list[int], timeout: timedelta) -> bool:
        keys = [_created_key(place) for place in range(len(ranks))]
        end = time.monotonic() + timeout.total_seconds()
        pause = 0.0005
        while not store.check(keys):
            if self.cancelled.is_set():
                return False
            if time.monotonic() > end:
                absent = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
                self.error = (
                    f"the group {ranks} cannot be used: rank(s) {absent} did not create it within "
                    f"{timeout.total_seconds():g} s; every member must call create_group({ranks})"
                )
                return False
            self.cancelled.wait(pause)
            pause = min(pause * 1.5, 0.05)
        return True


def _created_key(group_rank: int) -> str:
    return f"created/{group_rank}"


def _exchange_bytes(group: dist.ProcessGroup) -> None:
    """Let every pair of members talk once, which makes their connection."""
    peers = [peer for peer in range(group.size()) if peer != group.rank()]
    sent, received = torch.zeros(1, dtype=torch.uint8), torch.zeros(group.size(), dtype=torch.uint8)
    works = []
    for peer in peers:
        works.append(group.recv([received[peer : peer + 1]], peer, _CONNECT_TAG))
        works.append(group.send([sent], peer, _CONNECT_TAG))
    for work in works:
        work.wait()
