"""Real processes that join the world of whoever started them, on both frameworks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from tests.commands import command_environment

PROGRAM = """
import os
import hyper_parallel as hp
place = hp.launch.join(timeout=60, start_timeout=float(os.environ.get("TEST_START", 60)))
again = hp.launch.join()
assert (again.rank, again.size) == (place.rank, place.size), "a second call changes nothing"
platform = hp.get_platform()
ranks = [None] * platform.get_world_size()
platform.all_gather_object(ranks, platform.get_rank())
print(place.rank, place.size, place.launcher, ranks, os.environ.get("GLOO_SOCKET_IFNAME"), flush=True)
platform.barrier()
platform.destroy_process_group()
"""


def _free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def _run(environments: list[dict[str, str]]) -> list[tuple[int, str]]:
    hidden = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GLOO_SOCKET", "HCCL_IF")
    plain = {name: value for name, value in command_environment().items() if not name.startswith(hidden)}
    plain["HYPER_PARALLEL_PLATFORM"] = os.environ["HYPER_PARALLEL_PLATFORM"]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=plain | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environment in environments
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


def _slurm(rank: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_JOB_ID": "77",
        "MASTER_PORT": PORT,
    }


def _open_mpi(rank: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_PORT": _PORT_OF_OPEN_MPI,
    }


PORT, _PORT_OF_OPEN_MPI = _free_port(), _free_port()


def test_alone():
    ((code, output),) = _run([{}])
    assert code == 0, output
    assert output.splitlines()[-1] == "0 1 nobody [0] None"


@pytest.mark.sweep("mindspore")
def test_by_the_variables_of_slurm():
    for rank, (code, output) in enumerate(_run([_slurm(rank) for rank in range(2)])):
        assert code == 0, output
        assert f"{rank} 2 srun [0, 1] lo" in output


@pytest.mark.sweep  # The variables themselves are in test_environments.py.
def test_by_the_variables_of_open_mpi():
    for rank, (code, output) in enumerate(_run([_open_mpi(rank) for rank in range(2)])):
        assert code == 0, output
        assert f"{rank} 2 Open MPI's mpirun [0, 1] lo" in output


def test_a_rank_that_does_not_come_is_named():
    ((code, output),) = _run([_slurm(0) | {"TEST_START": "0.5", "MASTER_PORT": _free_port()}])
    assert code == 1
    assert "TimeoutError: rank 1 of 2 has not come within 0.5 s" in output


@pytest.mark.sweep
@pytest.mark.parametrize("wrong", ["no.such.host.invalid"])
def test_a_name_that_does_not_resolve_is_an_error_on_every_rank_at_once(wrong):
    for code, output in _run([_slurm(rank) | {"MASTER_ADDR": wrong} for rank in range(2)]):
        assert code == 1
        assert f"the ranks are to meet at '{wrong}', a name that this host" in output
