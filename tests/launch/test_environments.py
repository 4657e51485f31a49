"""What launchers say about a process, by the variables that they set."""

from __future__ import annotations

import socket

import pytest

from hyper_parallel.launch.environments import Place, find_place, first_host
from hyper_parallel.launch.interfaces import address_towards, interface_of

only_on = "torch"  # imports no framework: once is enough

BY_HAND = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "5"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[03-04],gpu1",
    "SLURM_JOB_ID": "41000",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "job@1",
}
MSRUN = {
    "MS_ROLE": "MS_WORKER",
    "MS_WORKER_NUM": "2",
    "MS_NODE_ID": "1",
    "MS_SCHED_HOST": "h",
    "MS_SCHED_PORT": "8118",
}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, None),
        (BY_HAND, Place(1, 4, 1, None, "a", 5, "RANK and WORLD_SIZE")),
        (
            BY_HAND | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
            Place(1, 4, 0, 2, "a", 5, "torchrun"),
        ),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Place(0, 1, 0, None, "127.0.0.1", 29500, "RANK and WORLD_SIZE")),
        (SLURM, Place(5, 8, 1, None, "node03", 16000, "srun")),
        (SLURM | {"MASTER_ADDR": "b", "MASTER_PORT": "7"}, Place(5, 8, 1, None, "b", 7, "srun")),
        ({name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}, None),  # a batch script
        (SLURM | BY_HAND | {"TORCHELASTIC_RUN_ID": "x"}, Place(1, 4, 1, None, "a", 5, "torchrun")),
        (MSRUN, Place(1, 2, 1, None, "h", 8118, "msrun")),
        (MSRUN | {"MS_ROLE": "MS_SCHED"}, None),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            Place(1, 2, 1, 2, "127.0.0.1", 29500, "mpirun (PMI)"),
        ),
    ],
)
def test_each_launcher(variables, place):
    assert find_place(variables) == place


def test_ranks_of_one_job_of_open_mpi_meet_at_one_port_of_their_host():
    first, second = (find_place(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": rank}) for rank in "01")
    assert (first.address, first.port) == (second.address, second.port)
    assert first.address == "127.0.0.1" and 15000 <= first.port < 35000
    assert first.port != find_place(OPEN_MPI | {"PMIX_NAMESPACE": "job@2"}).port


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        (SLURM | {"RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "a"}, "rank 1 of 8 according to RANK and WORLD_SIZE "),
        (BY_HAND | {"RANK": "4"}, "RANK=4 and WORLD_SIZE=4: ranks are 0 to 3"),
        (BY_HAND | {"WORLD_SIZE": "four"}, "WORLD_SIZE='four', which is not a number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "set MASTER_ADDR to the name of rank 0's host"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "Open MPI's mpirun started rank 1 of 2 on several hosts"),
        ({"PMI_RANK": "0"}, "the environment does not say PMI_SIZE"),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, "has no name; set MASTER_ADDR"),
    ],
)
def test_what_does_not_fit_is_said(variables, problem):
    with pytest.raises(ValueError, match=problem.replace("(", r"\(")):
        find_place(variables)


def test_lists_of_hosts():
    assert [first_host(text) for text in ("a", "a,b", "a-[1,3]", "n[001-128]-x[2]", "a1.b.c,d")] == [
        "a",
        "a",
        "a-1",
        "n001-x2",
        "a1.b.c",
    ]


def test_the_way_to_the_meeting_place():
    assert address_towards("127.0.0.1", 9) == "127.0.0.1"
    assert interface_of("127.0.0.1") == dict(socket.if_nameindex())[1]
    assert interface_of("192.0.2.1") is None
    with pytest.raises(ValueError, match=r"meet at 'no.such.host.invalid', a name that this host .* set MASTER_ADDR"):
        address_towards("no.such.host.invalid", 9)
