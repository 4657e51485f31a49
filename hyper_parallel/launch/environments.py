"""Who am I, according to whoever started this process: one table of launchers and the variables that they set.

Note [Which launcher counts]
----------------------------
Launchers are nested: ``srun`` starts a ``torchrun`` on each host, which starts the ranks. The innermost one knows the
ranks, so torchrun and our own launcher come before all others. A program that sets RANK and WORLD_SIZE by hand under
another launcher must say what that one says: a RANK that was left from another job would otherwise put two processes on
one place.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["Place", "find_place", "first_host"]

_FIRST_PORT, _NUM_PORTS = 15000, 20000  # below those that the kernel gives to connections
_DEFAULT_PORT = 29500


@dataclass(frozen=True)
class Place:
    """Where a process stands in its world, and where the world meets."""

    rank: int
    size: int
    local_rank: int
    local_size: int | None  # None: the launcher does not say
    address: str
    port: int
    launcher: str


def find_place(environment: Mapping[str, str] | None = None) -> Place | None:
    """The place that the environment gives this process; None where no launcher has started it."""
    variables = os.environ if environment is None else environment
    found = [place for read in _READERS if (place := read(variables)) is not None]
    if not found:
        return None
    first = found[0]
    if first.launcher in ("torchrun", "hyper-parallel"):
        return first
    for other in found[1:]:
        if (other.rank, other.size) != (first.rank, first.size):
            raise ValueError(
                f"this process is rank {first.rank} of {first.size} according to {first.launcher} and rank "
                f"{other.rank} of {other.size} according to {other.launcher}; unset the variables of the one that did "
                "not start it"
            )
    return first


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables[name]
    if not re.fullmatch(r"\d+", text.strip()):
        raise ValueError(f"the environment says {name}={text!r}, which is not a number")
    return int(text)


def _place(
    variables: Mapping[str, str],
    launcher: str,
    rank: str,
    size: str,
    local_rank: str | None,
    local_size: str | None,
    address: str | None,
    port: int | None,
) -> Place:
    """From the names of variables; the address and port may also be given by hand."""
    missing = [name for name in (rank, size) if name not in variables]
    if missing:
        raise ValueError(f"{launcher} started this process, but the environment does not say {', '.join(missing)}")
    number, count = _number(variables, rank), _number(variables, size)
    if number >= count:
        raise ValueError(f"the environment says {rank}={number} and {size}={count}: ranks are 0 to {count - 1}")
    address = variables.get("MASTER_ADDR", address)
    if address is None:
        raise ValueError(
            f"{launcher} started rank {number} of {count} on several hosts and does not say where they meet; set "
            "MASTER_ADDR to the name of rank 0's host"
        )
    given = variables.get("MASTER_PORT")
    return Place(
        rank=number,
        size=count,
        local_rank=_number(variables, local_rank) if local_rank and local_rank in variables else number,
        local_size=_number(variables, local_size) if local_size and local_size in variables else None,
        address=address,
        port=_number(variables, "MASTER_PORT") if given is not None else port or _DEFAULT_PORT,
        launcher=launcher,
    )


def _port_of(job: str) -> int:
    """The same for all ranks of a job, another for most other jobs of the host."""
    return _FIRST_PORT + (int(job) if job.isdigit() else zlib.crc32(job.encode())) % _NUM_PORTS


# ---------------------------------------------------------------- launchers


def _by_torchrun(variables: Mapping[str, str]) -> Place | None:
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return None
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in variables else "RANK and WORLD_SIZE"
    if "HYPER_PARALLEL_LAUNCHER" in variables:
        launcher = "hyper-parallel"
    alone = "127.0.0.1" if variables["WORLD_SIZE"].strip() == "1" else None
    return _place(variables, launcher, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", alone, None)


def _by_slurm(variables: Mapping[str, str]) -> Place | None:
    # A batch script has SLURM_PROCID too, without being a rank: only srun makes a step.
    hosts = variables.get("SLURM_STEP_NODELIST")
    if hosts is None or "SLURM_PROCID" not in variables:
        return None
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    port = _port_of(variables.get("SLURM_JOB_ID", "0"))
    return _place(variables, "srun", "SLURM_PROCID", size, "SLURM_LOCALID", None, first_host(hosts), port)


def _by_open_mpi(variables: Mapping[str, str]) -> Place | None:
    if "OMPI_COMM_WORLD_RANK" not in variables:
        return None
    size, local = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"
    here = "127.0.0.1" if variables.get(size) == variables.get(local) else None
    job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid") or ""
    names = ("OMPI_COMM_WORLD_RANK", size, "OMPI_COMM_WORLD_LOCAL_RANK", local)
    return _place(variables, "Open MPI's mpirun", *names, here, _port_of(job) if job else None)


def _by_pmi(variables: Mapping[str, str]) -> Place | None:
    if "PMI_RANK" not in variables:
        return None
    local = "MPI_LOCALNRANKS"
    here = "127.0.0.1" if variables.get("PMI_SIZE") == variables.get(local) else None
    return _place(variables, "mpirun (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", local, here, None)


def _by_msrun(variables: Mapping[str, str]) -> Place | None:
    if variables.get("MS_ROLE") != "MS_WORKER":
        return None
    rank = "RANK_ID" if "RANK_ID" in variables else "MS_NODE_ID"
    port = _number(variables, "MS_SCHED_PORT") if "MS_SCHED_PORT" in variables else None
    address = variables.get("MS_SCHED_HOST")
    return _place(variables, "msrun", rank, "MS_WORKER_NUM", "LOCAL_RANK", "LOCAL_WORLD_SIZE", address, port)


_READERS: tuple[Callable[[Mapping[str, str]], Place | None], ...] = (
    _by_torchrun,
    _by_slurm,
    _by_open_mpi,
    _by_pmi,
    _by_msrun,
)


def first_host(hosts: str) -> str:
    """The first name of a list of hosts as Slurm writes it.

    >>> first_host("node[07-12,20],gpu3"), first_host("gpu3,node1"), first_host("r[1-2]n[05,09]-ib")
    ('node07', 'gpu3', 'r1n05-ib')
    """
    name = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts.strip())
    if name is None:
        raise ValueError(f"the list of hosts {hosts!r} has no name; set MASTER_ADDR to the name of rank 0's host")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", name[0])
