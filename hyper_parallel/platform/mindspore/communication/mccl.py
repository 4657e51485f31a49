"""MindSpore's own world on a CPU, joined beside ours when a program asks for the backend "mccl" by name."""

from __future__ import annotations

import socket
from datetime import timedelta

import mindspore.mint.distributed as distributed
import numpy as np

from hyper_parallel.platform.host.host_collectives import HostGroup
from hyper_parallel.platform.mindspore import private_api


def join(world: HostGroup, rank: int, world_size: int, address: str, timeout: timedelta) -> None:
    """Let MindSpore's functions of communication work too; every rank of the world calls it."""
    port = np.zeros(1, np.int64)
    if rank == 0:
        with socket.socket() as probe:
            probe.bind((address, 0))
            port[0] = probe.getsockname()[1]
    port = world.start_broadcast("init_process_group", port.view(np.uint8), 0)().view(np.int64)
    store = distributed.TCPStore(address, int(port[0]), world_size=world_size, is_master=rank == 0, timeout=timeout)
    private_api.join_mccl(store, rank, world_size, timeout)
    world.start_gather("barrier", np.empty(0, np.uint8))()  # nobody leaves before all have come
