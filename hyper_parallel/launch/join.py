"""Joining the world that this process was started in, whoever started it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

from hyper_parallel.launch.environments import Place, find_place
from hyper_parallel.launch.errors import report_errors
from hyper_parallel.launch.interfaces import address_towards, interface_of
from hyper_parallel.launch.roll_call import call_roll
from hyper_parallel.platform import get_platform

__all__ = ["join"]

_INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def join(*, timeout: timedelta | float | None = None, start_timeout: float = 300.0) -> Place:
    """Join the world of this process and say where in it this process is.

    Started by ``hyper-parallel launch``, torchrun, srun, mpirun or msrun, or with RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT set: that world. Started by nobody: a world of one, so that the same program runs alone. The network
    interface that leads to the meeting place is chosen unless GLOO_SOCKET_IFNAME (HCCL_IF_IP on Ascend) says which.
    ``timeout``, in seconds or as a timedelta, is that of the world's communication. A rank that has not come within
    ``start_timeout`` seconds is named on all that have. A world that was joined already stays as it is. An error that
    ends the process later is written down for the launcher.
    """
    report_errors()
    platform = get_platform()
    if _is_joined():
        rank, size = platform.get_rank(), platform.get_world_size()
        place = find_place()
        if place is not None and (place.rank, place.size) == (rank, size):
            return place
        return Place(rank, size, rank, None, "", 0, "this program")
    place = find_place() or _alone()
    if place.size > 1:
        _choose_interface(place)
    limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
    method = f"tcp://{f'[{place.address}]' if ':' in place.address else place.address}:{place.port}"
    if place.launcher in ("torchrun", "msrun"):
        method = "env://"  # Their own store and scheduler listen at the port; the platform knows what to do.
    elif place.size > 1:
        call_roll(place.rank, place.size, place.address, place.port, start_timeout)
    platform.init_process_group(init_method=method, timeout=limit, world_size=place.size, rank=place.rank)
    return place


def _is_joined() -> bool:
    try:
        get_platform().get_backend()
    except (RuntimeError, ValueError):
        return False
    return True


def _alone() -> Place:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Place(0, 1, 0, 1, "127.0.0.1", port, "nobody")


def _choose_interface(place: Place) -> None:
    """See Note [Why an interface is chosen]."""
    mine = address_towards(place.address, place.port)
    name = None if ":" in mine else interface_of(mine)
    if name is not None:
        for variable in _INTERFACES:
            os.environ.setdefault(variable, name)
    os.environ.setdefault("HCCL_IF_IP", mine)
