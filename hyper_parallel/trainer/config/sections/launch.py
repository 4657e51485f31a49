"""``[launch]``: how many processes, on which hosts, and when they stop."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic.dataclasses import dataclass

from hyper_parallel.trainer.config.section import STRICT, Bytes, Count, Duration, Flag, Problem, Section, Text, Whole

__all__ = ["LaunchConfig"]

_LAST_PORT = 65535


@dataclass(config=STRICT, kw_only=True, frozen=True)
class LaunchConfig(Section):
    """How many processes, on which hosts, and when they stop. Under torchrun, srun or mpirun those start processes."""

    nproc: Count | None = None
    """Processes on each host; without it, as many as the degrees of [parallel] ask for."""
    hosts: Count = 1
    """How many hosts take part; the same command is run on each."""
    host_rank: Whole = 0
    """Which of them this is, from 0; --host-rank on the command line."""
    master: Text | None = None
    """Where the ranks meet, "host:port": host 0's address and a free port of it; needed for several hosts."""
    max_restarts: Whole = 0
    """How often ranks are started again after one died, from the last checkpoint."""
    stop_after: Duration | None = None
    """Save and leave after this time, as "11h50m", before the scheduler's limit ends the job."""
    timeout: Duration = "10m"
    """How long a rank waits for another one before it gives up."""
    device_memory: Bytes | None = None
    """Memory for one rank, as "80GB": a run that needs more is not started; without it what the device has."""
    forecast: Flag = True
    """Whether memory is forecast before ranks start, by a process that takes as long to start as they do."""

    def problems(self) -> Iterator[Problem]:
        if self.host_rank >= self.hosts:
            yield Problem(
                ("host_rank", "hosts"), f"must be 0 to {self.hosts - 1} with hosts = {self.hosts}, got {self.host_rank}"
            )
        if self.hosts > 1 and self.master is None:
            yield Problem(
                ("master", "hosts"), f'is missing: {self.hosts} hosts must know where to meet, master = "host:port"'
            )
        if self.master is not None and not re.fullmatch(r"([^\s:]+|\[[0-9a-fA-F:]+\]):[1-9]\d{0,4}", self.master):
            yield Problem(("master",), f'must be "host:port", such as "node1:29500", got {self.master!r}')
        elif self.master is not None and int(self.master.rpartition(":")[2]) + self.max_restarts > _LAST_PORT:
            yield Problem(
                ("master", "max_restarts"),
                f"must have a port of at most {_LAST_PORT} - max_restarts = {_LAST_PORT - self.max_restarts}, for each "
                f"restart takes the next one, got {self.master!r}",
            )
