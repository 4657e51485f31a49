"""Two hosts: ranks meet over a network, a death on one ends and restarts both, a pulled cable ends both in time."""

from __future__ import annotations

import time

import pytest

from tests.launch.two_hosts import TwoHosts

PROGRAM = """
import os, pathlib, signal, sys, time
import hyper_parallel as hp

place = hp.launch.join(timeout=float(os.environ.get("TEST_TIMEOUT", 60)))
platform = hp.get_platform()
group = platform.create_group(list(range(place.size)))
attempt = int(os.environ["HYPER_PARALLEL_ATTEMPT"])

def total(number):
    return int(platform.all_reduce(platform.full((1,), number), group)[0])

print("sum", total(place.rank + 1), "by", os.environ["GLOO_SOCKET_IFNAME"], "attempt", attempt, flush=True)
if "TEST_KILL" in os.environ and attempt == 0:
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    total(1)
if "TEST_LOOP" in os.environ:
    pathlib.Path(os.environ["TEST_LOOP"], f"looping-{place.rank}").touch()
    for step in range(100000):
        hp.launch.note_step(step)
        total(1)
platform.destroy_process_group()
"""


@pytest.fixture
def hosts():
    made = TwoHosts()
    try:
        if made.refused:
            pytest.skip(made.refused)
        yield made
    finally:
        made.close()


@pytest.fixture
def program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def _end(processes, seconds):
    outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.sweep("mindspore")
def test_ranks_of_two_hosts_meet_and_start_again_after_a_death_on_one(hosts, program):
    ends = _end([hosts.launch(host, program, "--max-restarts", "1", TEST_KILL="1") for host in range(2)], 150)
    for host, (code, output) in enumerate(ends):
        assert code == 0, output
        assert "starting all ranks again from the last checkpoint, if any, attempt 2 of 2" in output
        if host == 0:  # Only a host's first rank is shown, and that is all it has here.
            assert f"sum 3 by {hosts.links[0]} attempt 0" in output
        assert f"sum 3 by {hosts.links[host]} attempt 1" in output
    assert "rank 1 was ended by SIGKILL on host " in ends[1][1]
    assert "rank 0 ended with status 1 on host " in ends[0][1]


@pytest.mark.sweep  # On one host it is in test_join.py.
def test_a_name_that_does_not_resolve_ends_both_sides(hosts, program):
    start = time.monotonic()
    for code, output in _end([hosts.launch(host, program, master="nohost.invalid:29511") for host in range(2)], 120):
        assert code == 1, output
        assert "the ranks are to meet at 'nohost.invalid', a name that this host" in output
    assert time.monotonic() - start < 100


@pytest.mark.sweep
@pytest.mark.sweep("mindspore")
def test_a_link_that_goes_down_ends_both_sides_in_time(hosts, program, tmp_path):
    processes = [hosts.launch(host, program, TEST_LOOP=str(tmp_path), TEST_TIMEOUT="4") for host in range(2)]
    deadline = time.monotonic() + 100
    while not all((tmp_path / f"looping-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes), _end(processes, 10)
        time.sleep(0.05)
    hosts.cut_link()
    start = time.monotonic()
    for rank, (code, output) in enumerate(_end(processes, 90)):
        assert code == 1, output
        assert f"rank {rank} ended with status 1 at step " in output
    assert time.monotonic() - start < 60  # 4 s, and what ending takes on a busy machine
