"""How the processes of a world find each other: a connection between every two of them, and who is who.

Note [Where the ranks meet]
    Rank 0 listens on MASTER_PORT, or on one of the ports after it when that one is taken (torchrun's own store has it).
    The others try these ports in turn, and who listens there must show that it is rank 0 of this world
    (``reception.py``). Rank 0 hands out everybody's card and a key made for this world. With the secret and that key
    each rank calls those below it and is called by those above it, on a port that it opened, on the address from which
    it reached rank 0. There is no scheduler process, and nothing is left listening once all have come.

Note [Who may join]
    Whoever knows the secret (``world_secret.py``). Where there is none, and the ranks meet on the loopback device, all
    processes of this user: other users of the host can reach the ports, but the system tells whose sockets are whose
    (``peer_user.py``). Where there is none and the ranks meet on a network, everybody who reaches it; rank 0 says so.
    A rank and a stranger that pretends to be rank 0 cannot be told apart by what they refuse, so a rank that is refused
    says so once and goes on looking until its time is over.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

from hyper_parallel.platform.host.cards import LISTED_CARD_BYTES, Card, receive_block, send_block
from hyper_parallel.platform.host.peer_user import can_tell_users, is_same_user
from hyper_parallel.platform.host.reception import Caller, Reception, Refused, introduce, unmapped
from hyper_parallel.platform.host.shared_segment import ProcessIdentity
from hyper_parallel.platform.host.world_secret import SECRET

__all__ = ["meet"]

_NUM_PORTS = 32  # tried from MASTER_PORT on
_BACKLOG = 1024  # more than the ranks: strangers wait in the same queue


def meet(
    rank: int, world_size: int, address: str, port: int, name: str, timeout: float, secret: bytes = b""
) -> tuple[dict[int, socket.socket], dict[int, Card]]:
    """A connection to every other rank, and everybody's card; see Note [Where the ranks meet]."""
    if world_size == 1:
        return {}, {}
    meeting = _Meeting(rank, world_size, address, port, f"{name}/{world_size}", timeout, secret)
    try:
        if rank == 0:
            meeting.host()
        else:
            meeting.join()
    except BaseException:
        for sock in meeting.sockets.values():
            sock.close()
        raise
    finally:
        if meeting.listener is not None:
            meeting.listener.close()
    for sock in meeting.sockets.values():
        sock.settimeout(None)
    return meeting.sockets, meeting.cards


class _Meeting:
    """One rank's way into its world."""

    def __init__(
        self, rank: int, world_size: int, address: str, port: int, name: str, timeout: float, secret: bytes
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.name = name
        self.secret = secret
        self.sockets: dict[int, socket.socket] = {}
        self.cards: dict[int, Card] = {}
        self.listener: socket.socket | None = None
        self._end = time.monotonic() + timeout
        self._timeout = timeout
        self._refusal = ""
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
        self._family, resolved = found[0], str(found[4][0])
        self._is_local = ipaddress.ip_address(unmapped(resolved).partition("%")[0]).is_loopback
        # A name of the loopback device may mean several addresses, and strangers may listen on the others.
        self._address = resolved if self._is_local else address
        self._ports = range(port, min(port + _NUM_PORTS, 65536))
        self._admits: Callable[[socket.socket], bool] | None = None
        if not secret and self._is_local and can_tell_users():
            self._admits = is_same_user

    # ---------------------------------------------------------------- rank 0

    def host(self) -> None:
        """Take everybody's card, hand out all of them; the connections stay."""
        self.warn_of_everybody()
        self.cards[0] = self._own_card(0)
        try:
            with self._reception(self._listening(), self.secret, self._admits) as reception:
                while len(self.sockets) < self.world_size - 1:
                    self._take_card(reception)
                    if len(self.sockets) == self.world_size - 1:
                        self._forget_the_dead()
        except (ValueError, TimeoutError) as error:
            # Nobody shall wait for a world that will not be.
            for sock in self.sockets.values():
                send_block(sock, {"refused": str(error)})
            raise
        key = os.urandom(32).hex()
        for sock in self.sockets.values():
            sock.settimeout(self._left("handing out the cards"))
            send_block(sock, {"key": key, "cards": [asdict(card) for card in self.cards.values()]})

    def warn_of_everybody(self) -> None:
        """Where nobody has to show who it is, the user must know."""
        if not self.secret and self._admits is None:
            who = "every user of this host" if self._is_local else "everybody who reaches this network"
            _warn(
                f"the ranks meet at {self._address}, port {self._ports[0]}, without a secret, so {who} can join and "
                f"run code in them; unless you trust all of these, set {SECRET} to one random text on all ranks"
            )

    def _take_card(self, reception: Reception) -> None:
        missing = [peer for peer in range(1, self.world_size) if peer not in self.sockets]
        caller = self._next(reception, f"rank 0 has not heard from rank(s) {missing} of a world of {self.world_size}")
        with contextlib.ExitStack() as unless_taken:
            unless_taken.callback(caller.socket.close)
            try:
                card = Card.read({**caller.card, "address": caller.address}, self.world_size)
            except ValueError as error:
                send_block(caller.socket, {"refused": f"its card is wrong: {error}"})
                return
            if card.rank in self.cards and (card.rank == 0 or not _has_ended(self.sockets[card.rank])):
                other = self.cards[card.rank]
                problem = (
                    f"two processes say that they are rank {card.rank}: process {other.process.pid} on {other.host} "
                    f"and process {card.process.pid} on {card.host}; give every process its own RANK"
                )
                send_block(caller.socket, {"refused": problem})
                raise ValueError(problem)
            unless_taken.pop_all()
        if card.rank in self.sockets:
            self.sockets[card.rank].close()
        self.sockets[card.rank], self.cards[card.rank] = caller.socket, card

    def _forget_the_dead(self) -> None:
        """Those that ended while others were awaited: they may be started again."""
        for rank in [rank for rank, sock in self.sockets.items() if _has_ended(sock)]:
            self.sockets.pop(rank).close()
            del self.cards[rank]

    def _listening(self) -> socket.socket:
        problem: OSError | None = None
        for port in self._ports:
            listener = socket.socket(self._family)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                # A world that meets on the loopback device is on one host, and nobody else shall reach it.
                listener.bind((self._address if self._is_local else "", port))
                listener.listen(_BACKLOG)
                return listener
            except OSError as error:
                listener.close()
                problem = error
        raise RuntimeError(f"rank 0 cannot listen on any of the ports {self._shown_ports()}: {problem}")

    # ---------------------------------------------------------------- the other ranks

    def join(self) -> None:
        """Find rank 0, give the own card, take all of them; then call those below and be called by those above."""
        self._find_rank_0()
        key = self.secret + self._take_cards()
        for peer in range(1, self.rank):
            self._call(peer, key)
        if self.listener is not None:
            with self._reception(self.listener, key) as reception:
                while len(self.sockets) < self.world_size - 1:
                    self._take_call(reception)

    def _find_rank_0(self) -> None:
        pause, patience = 0.02, 0.5
        while True:
            for port in self._ports:
                if self._is_rank_0(port, min(patience, max(self._end - time.monotonic(), 0.05))):
                    return
            if time.monotonic() > self._end:
                raise self._too_late(
                    f"rank {self.rank} found no rank 0 at {self._address}, ports {self._shown_ports()}; are "
                    "MASTER_ADDR and MASTER_PORT the same for all ranks?"
                )
            time.sleep(pause)
            pause, patience = min(pause * 1.5, 0.3), min(patience * 1.5, 5.0)

    def _is_rank_0(self, port: int, patience: float) -> bool:
        """Whether it is rank 0 that listens there and answers in time; then the two are connected.

        A rank 0 that is busy answers late: it is asked again, with more patience, when the other ports have been tried.
        """
        opened: list[socket.socket] = []
        try:
            opened.append(socket.create_connection((self._address, port), patience))
            if self.rank < self.world_size - 1:
                opened.append(_listen_beside(opened[0]))
            card = self._own_card(opened[1].getsockname()[1] if len(opened) > 1 else 0)
            introduce(opened[0], self.secret, self._name_of(0), asdict(card), admits=self._admits)
        except BaseException as error:
            for sock in opened:
                sock.close()
            if isinstance(error, Refused):
                self._say_refusal(f"rank {self.rank} looks for rank 0, and {error}")
            if isinstance(error, OSError):
                return False
            raise
        self.sockets[0] = opened[0]
        self.listener = opened[1] if len(opened) > 1 else None
        return True

    def _take_cards(self) -> bytes:
        """Everybody's card, and the key of this world."""
        most_bytes = LISTED_CARD_BYTES * (self.world_size + 1)
        try:
            answer = receive_block(self.sockets[0], most_bytes, self._end)
            if "refused" in answer:
                raise RuntimeError(f"rank {self.rank} cannot join the world: {answer['refused']}")
            cards = [Card.read(card, self.world_size) for card in answer["cards"]]
            self.cards = {card.rank: card for card in cards}
            if len(cards) != self.world_size or len(self.cards) != self.world_size:
                raise ValueError("not one card for each rank")
            return bytes.fromhex(answer["key"])
        except TimeoutError:
            raise self._too_late(f"rank {self.rank} met rank 0, but not all {self.world_size} ranks came") from None
        except (OSError, EOFError):
            raise RuntimeError(
                f"rank 0 ended while the world was being made; rank {self.rank} was waiting for it"
            ) from None
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise RuntimeError(f"rank {self.rank} cannot join the world: rank 0 sent wrong cards: {error}") from None

    def _call(self, peer: int, key: bytes) -> None:
        card = self.cards[peer]
        where = f"rank {peer} at {card.address}, port {card.port}"
        while True:
            left = self._left(f"rank {self.rank} was calling {where}")
            try:
                sock = socket.create_connection((card.address, card.port), left)
            except TimeoutError:
                continue
            except OSError as error:
                raise RuntimeError(
                    f"{where} cannot be reached by rank {self.rank}, or ended while the world was being made: {error}"
                ) from None
            try:
                introduce(sock, key, self._name_of(peer), {"rank": self.rank})
            except BaseException as error:
                sock.close()
                if isinstance(error, Refused):
                    raise RuntimeError(f"rank {self.rank} called {where}: {error}") from None
                if not isinstance(error, OSError):
                    raise
                time.sleep(0.02)  # It was sent away for a newer caller, or the rank has ended: the next call tells.
                continue
            self.sockets[peer] = sock
            return

    def _take_call(self, reception: Reception) -> None:
        missing = [peer for peer in range(self.rank + 1, self.world_size) if peer not in self.sockets]
        caller = self._next(reception, f"rank {self.rank}: rank(s) {missing} did not call within {self._timeout:g} s")
        rank = caller.card.get("rank")
        if type(rank) is int and rank in missing:
            self.sockets[rank] = caller.socket
        else:
            caller.socket.close()

    # ---------------------------------------------------------------- small things

    def _reception(
        self, listener: socket.socket, secret: bytes, admits: Callable[[socket.socket], bool] | None = None
    ) -> Reception:
        return Reception(
            listener,
            secret,
            self._name_of(self.rank),
            capacity=max(256, self.world_size),
            admits=admits,
            on_refusal=lambda what: self._say_refusal(f"rank {self.rank} sent somebody away: {what}"),
        )

    def _next(self, reception: Reception, waiting_for: str) -> Caller:
        try:
            caller = reception.next_caller(self._left(waiting_for))
        except TimeoutError:
            raise self._too_late(waiting_for) from None
        assert caller is not None
        return caller

    def _name_of(self, rank: int) -> str:
        """The name under which a rank of this world is called."""
        return f"{self.name}/rank {rank}"

    def _own_card(self, port: int) -> Card:
        return Card(self.rank, socket.gethostname(), "", port, ProcessIdentity.current())

    def _left(self, what: str) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise self._too_late(what)
        return left

    def _too_late(self, what: str) -> TimeoutError:
        return TimeoutError(f"joining the world took too long: {what}" + (self._refusal and f". {self._refusal}"))

    def _shown_ports(self) -> str:
        return f"{self._ports[0]} to {self._ports[-1]}"

    def _say_refusal(self, what: str) -> None:
        """Once, and in the error at the end: it may be a stranger, or a rank that was started otherwise."""
        if self._refusal:
            return
        advice = f"is {SECRET} the same on all ranks?"
        if self._admits is not None:
            advice = f"without {SECRET} all ranks of a host must run as one user; with it, all must have the same"
        self._refusal = f"{what}; {advice}"
        _print_line(self._refusal)


def _listen_beside(sock: socket.socket) -> socket.socket:
    """A listener on a free port of the address from which ``sock`` is connected."""
    listener = socket.socket(sock.family)
    try:
        name = sock.getsockname()
        listener.bind((name[0], 0, *name[2:]))
        listener.listen(_BACKLOG)
        return listener
    except BaseException:
        listener.close()
        raise


def _has_ended(sock: socket.socket) -> bool:
    """Whether the other end has closed the connection, before it was told anything."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


@functools.cache
def _warn(text: str) -> None:
    """Once in a process, however many worlds it joins."""
    _print_line(text)


def _print_line(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"hyper_parallel: {text}", file=sys.stderr, flush=True)
