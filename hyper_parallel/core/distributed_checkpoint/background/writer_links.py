"""The connections between the writer processes of all ranks: a star around that of rank 0.

Note [Who can get in between writers]
Writers never listen. The ranks connect, in two rounds of agreement, and hand the connections over. In the first round
rank 0 opens a door and says where it is; in the second the others come in, and then it is closed.

- On one host the door is a Unix socket in a new folder of mode 0700, which is removed as soon as all have come, and
  there is no TCP. One host means that boot, namespaces and user are the same. Nobody else gets into the folder, and
  both ends ask the kernel besides whose process is at the other.
- On several hosts it is a TCP port at the address of rank 0, for as long as the second round takes.

At both doors both sides prove that they know a secret which is drawn for this and told in the first round
(``platform/host/reception.py``). A caller is taken once for a rank that there is. Strangers can call, be silent, talk
nonsense or hang up: they are sent away, and nobody waits for them. What writers say later is neither signed nor
encrypted; it is plain data (``messages.py``), and none of it is ever run.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from hyper_parallel.core.distributed_checkpoint.agreement.agreement import COORDINATOR, Agreement
from hyper_parallel.core.distributed_checkpoint.background.fork_guard import not_for_children
from hyper_parallel.core.distributed_checkpoint.base.errors import CheckpointError
from hyper_parallel.platform.host.reception import Reception, Refused, introduce

_NAME = "checkpoint writers"
_SOCKET = "door"  # the name of the Unix socket in its folder
_PATIENCE = 600.0  # seconds that a rank may take to introduce itself: it may be slow, and only strangers are not
_ATTEMPTS = 8  # Many strangers at once can push a rank out that has not introduced itself yet.
_CREDENTIALS = struct.Struct("iII")  # process, user, group


class Door(NamedTuple):
    """Where rank 0 takes calls: a folder with a Unix socket, or (with an empty one) a host and port; and the secret."""

    folder: str
    host: str
    port: int
    secret: bytes


class Place(NamedTuple):
    """Where a process runs. Equal networks have one loopback device, equal hosts the same files and users besides."""

    network: str
    host: str


def connect_writers(agreement: Agreement) -> dict[int, socket.socket]:
    """Every rank calls: a connection to each other rank on rank 0, one to rank 0 on the others."""
    what = "starting background saves"
    with contextlib.ExitStack() as until_all_have_come:
        receptions: list[Reception] = []

        def open_door(places: list[list[str]]) -> Door:
            door, reception = until_all_have_come.enter_context(_opened([Place(*place) for place in places]))
            receptions.append(reception)
            return door

        door: Door = agreement.round(what, lambda: list(_place()), open_door)
        if not agreement.is_coordinator:
            return _come_in(agreement, what, door)
        doorman = _Doorman(receptions[0], agreement.world_size)
        try:
            doorman.start()
            agreement.round(what, lambda: None)
            return doorman.all_links()
        finally:
            doorman.end()


def _come_in(agreement: Agreement, what: str, door: Door) -> dict[int, socket.socket]:
    links: dict[int, socket.socket] = {}

    def call() -> None:
        links[COORDINATOR] = _call(door, agreement.rank)

    try:
        agreement.round(what, call)
    except BaseException:
        for link in links.values():
            link.close()
        raise
    return links


# ---------------------------------------------------------------- rank 0


class _Doorman(threading.Thread):
    """Takes the calls while rank 0 hears, in the round, whether all could make theirs."""

    def __init__(self, reception: Reception, world_size: int) -> None:
        super().__init__(name="hyper_parallel-doorman", daemon=True)
        self._reception = reception
        self._world_size = world_size
        self._links: dict[int, socket.socket] = {}
        self._end, self._say_end = socket.socketpair()

    def run(self) -> None:
        with self._reception:
            while len(self._links) < self._world_size - 1:
                caller = self._reception.next_caller(None, self._end.fileno())
                if caller is None:
                    return
                rank = caller.card.get("rank")
                if type(rank) is int and 0 < rank < self._world_size and rank not in self._links:
                    self._links[rank] = not_for_children(_kept_alive(caller.socket))
                else:
                    caller.socket.close()

    def all_links(self) -> dict[int, socket.socket]:
        """Those of all ranks, who have all said that they have made their call."""
        self.join(_PATIENCE)
        absent = sorted(set(range(1, self._world_size)) - set(self._links))
        if absent:
            raise CheckpointError(f"starting background saves failed: rank 0 lost the connections of ranks {absent}")
        links, self._links = self._links, {}
        return links

    def end(self) -> None:
        """Take no more calls; connections that nobody has asked for are closed."""
        self._say_end.close()
        if self.ident is not None:
            self.join()
        self._end.close()
        for link in self._links.values():
            link.close()


@contextlib.contextmanager
def _opened(places: list[Place]) -> Iterator[tuple[Door, Reception]]:
    secret = secrets.token_bytes(32)
    capacity = max(256, 2 * len(places))  # of callers that are half-way, strangers among them
    with contextlib.ExitStack() as opened:
        if len({place.host for place in places}) == 1:
            folder = tempfile.mkdtemp(prefix="hyper-parallel-")  # of mode 0700
            opened.callback(_remove, folder)
            listener = opened.enter_context(socket.socket(socket.AF_UNIX))
            with _short_name(folder) as name:
                listener.bind(name)
            listener.listen(capacity)
            door = Door(folder, "", 0, secret)
        else:
            listener, door = _listen({place.network for place in places}, capacity, secret)
            opened.enter_context(listener)
        not_for_children(listener)
        admits = _is_same_user if door.folder else None
        reception = Reception(listener, secret, _NAME, patience=_PATIENCE, capacity=capacity, admits=admits)
        yield door, opened.enter_context(reception)


def _remove(folder: str) -> None:
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, _SOCKET))
        os.rmdir(folder)


def _listen(networks: set[str], backlog: int, secret: bytes) -> tuple[socket.socket, Door]:
    """At the address by which the ranks know this one; at all where that name means another address elsewhere."""
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    family, _, _, _, found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    address = str(found[0])
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback and len(networks) > 1:
        address = ""
    try:
        listener = socket.create_server((address, 0), family=family, backlog=backlog)
    except OSError:  # an address that is translated on the way to this host
        listener = socket.create_server(("", 0), family=family, backlog=backlog)
    return listener, Door("", host, listener.getsockname()[1], secret)


# ---------------------------------------------------------------- the other ranks


def _call(door: Door, rank: int) -> socket.socket:
    for attempt in range(_ATTEMPTS):
        sock: socket.socket | None = None
        try:
            sock = not_for_children(_connected(door))
            introduce(sock, door.secret, _NAME, {"rank": rank}, admits=_is_same_user if door.folder else None)
            sock.settimeout(None)
            return _kept_alive(sock)
        except BaseException as error:
            if sock is not None:
                sock.close()
            if not isinstance(error, OSError):
                raise
            if isinstance(error, Refused) or attempt == _ATTEMPTS - 1:
                where = f"in '{door.folder}'" if door.folder else f"at {door.host}:{door.port}"
                raise ConnectionError(f"cannot reach rank 0 {where}: {error}") from error
        time.sleep(0.05 * 2**attempt)
    raise AssertionError("unreachable")


def _connected(door: Door) -> socket.socket:
    if not door.folder:
        return socket.create_connection((door.host, door.port), _PATIENCE)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(_PATIENCE)
        with _short_name(door.folder) as name:
            sock.connect(name)
        return sock
    except BaseException:
        sock.close()
        raise


def _kept_alive(sock: socket.socket) -> socket.socket:
    """Have the kernel find out when the other host is gone."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock


# ---------------------------------------------------------------- one host


def _place() -> Place:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        network = f"{boot} {os.readlink('/proc/self/ns/net')}"
        others = [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "user")]
        return Place(network, " ".join([network, *others, str(os.geteuid())]))
    except OSError:  # A system that does not say: nobody is known to be on the same one.
        unknown = secrets.token_hex(16)
        return Place(unknown, unknown)


def _is_same_user(sock: socket.socket) -> bool:
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(data)[1] == os.geteuid())


@contextlib.contextmanager
def _short_name(folder: str) -> Iterator[str]:
    """A name for the socket in a folder that is this user's alone: the path itself may be longer than sockets take."""
    file = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        facts = os.fstat(file)
        if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o077:
            raise ConnectionError(f"'{folder}' is not a folder that user {os.geteuid()} alone can enter")
        yield f"/proc/self/fd/{file}/{_SOCKET}"
    finally:
        os.close(file)
