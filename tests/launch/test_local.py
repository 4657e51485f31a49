"""The launcher and real processes that fail, are killed, are asked to stop, or do not listen. No framework in them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hyper_parallel.launch import RankFailure, StopRequest, run_local
from hyper_parallel.launch.environments import find_place
from tests.commands import command_environment

only_on = "torch"  # imports no framework: once is enough

PRELUDE = """
import os, pathlib, signal, sys, time
from hyper_parallel.launch import StopRequest, note_checkpoint, note_step
rank, attempt = int(os.environ["RANK"]), int(os.environ["HYPER_PARALLEL_ATTEMPT"])
here = pathlib.Path(os.environ["TEST_FOLDER"])
aside = here / f"aside-{rank}-{attempt}"
aside.write_text(str(os.getpid()))
aside.rename(here / f"pid-{rank}-{attempt}")  # whole, even if this rank is ended here
print(f"rank {rank} is here", flush=True)
def wait_for(path):
    while not path.exists():
        time.sleep(0.005)
"""
WAIT = "time.sleep(60)\n"
# One rank says that it has started, and another waits for that: starts may take seconds where the cores are busy.
TELL, HEAR = "(here / 'told').touch(); ", "wait_for(here / 'told'); "
TRAINER = """
with StopRequest() as stop:
    (here / f"ready-{rank}").touch()
    while stop.reason is None and not (here / "all-stop").exists():
        time.sleep(0.01)
    (here / "all-stop").touch()  # stands for the sum of flags
    stop.heard(1.0)
    print("saved because of", stop.reason, flush=True)
sys.exit(stop.exit_code)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A function that writes a script for ranks; its folder is in TEST_FOLDER."""
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "script.py").write_text(PRELUDE + text)
        return ["script.py"]

    return write


def _gone(folder):
    """Whether no rank that ever started is left."""
    pids = [int(path.read_text()) for path in folder.glob("pid-*")]
    return bool(pids) and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def _fail(command, nproc, **options):
    start = time.monotonic()
    with pytest.raises(RankFailure) as raised:
        run_local(command, nproc, **options)
    return str(raised.value), time.monotonic() - start


# ---------------------------------------------------------------- all goes well


def test_ranks_end_well_and_the_first_is_shown(script, tmp_path, capfd):
    command = script("print('no end of line', *sys.argv[1:], end='')\n")
    assert run_local([*command, "a", "b"], 3, folder="run") == 0
    assert capfd.readouterr().out == "rank 0 is here\nno end of line a b\n"
    for rank in range(3):
        text = (tmp_path / "run" / "logs" / f"rank-{rank}.txt").read_text()
        assert text == f"rank {rank} is here\nno end of line a b"


def test_ranks_know_their_place(script):
    command = script("import json; print(json.dumps(dict(os.environ)))\n")
    heard = {}
    status = run_local(
        command, 2, environment={"MORE": "1"}, on_line=lambda rank, line: heard.setdefault(rank, []).append(line)
    )
    assert status == 0
    assert [heard[rank][0] for rank in range(2)] == ["rank 0 is here", "rank 1 is here"]
    first, second = (json.loads(heard[rank][1]) for rank in range(2))
    places = [find_place(environment) for environment in (first, second)]
    assert [(p.rank, p.size, p.local_rank, p.local_size, p.launcher) for p in places] == [
        (0, 2, 0, 2, "hyper-parallel"),
        (1, 2, 1, 2, "hyper-parallel"),
    ]
    assert places[0].address == "127.0.0.1" and places[0].port == places[1].port
    assert (
        first["HYPER_PARALLEL_SECRET"] == second["HYPER_PARALLEL_SECRET"] and len(first["HYPER_PARALLEL_SECRET"]) == 64
    )
    assert first["MORE"] == "1"


def test_our_launcher_inside_of_slurm_and_torchrun_counts(script, monkeypatch):
    for name, value in {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_NODELIST": "n[1-4]",
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "7",
        "WORLD_SIZE": "9",
    }.items():
        monkeypatch.setenv(name, value)
    command = script("from hyper_parallel.launch import find_place; print(find_place())\n")
    heard = []
    assert run_local(command, 2, on_line=lambda rank, line: heard.append(line)) == 0
    assert sum("size=2" in line and "launcher='hyper-parallel'" in line for line in heard) == 2


FUNCTION = """
import hyper_parallel as hp

def work(folder, numbers):
    import os, pathlib
    (pathlib.Path(folder) / os.environ["RANK"]).write_text(str(sum(numbers)))

if __name__ == "__main__":
    hp.launch.run_local(work, 2, args=[".", [1, 2, 3]])
"""


def test_a_function_of_a_script(tmp_path):
    (tmp_path / "own.py").write_text(FUNCTION)
    done = subprocess.run([sys.executable, "own.py"], cwd=tmp_path, env=command_environment(), timeout=60)
    assert done.returncode == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["6", "6"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: run_local([], 1), "there is nothing to run; give a script"),
        (lambda: run_local(["nowhere.py"], 1), r"there is no script 'nowhere.py' here, in /"),
        (lambda: run_local(["./nowhere"], 1), r"cannot start './nowhere': No such file"),
        (lambda: run_local(["x"], 0), "nproc must be at least 1, got 0"),
        (lambda: run_local(["x"], 1, max_restarts=-1), "max_restarts must be at least 0, got -1"),
        (lambda: run_local(["x"], 1, hosts=2), 'must know where to meet; give master="host:port"'),
        (
            lambda: run_local(["x"], 1, hosts=2, host_rank=2, master="a:1"),
            "host_rank must be 0 to 1 with hosts=2",
        ),
        (
            lambda: run_local(["x"], 1, hosts=2, master="a"),
            'master must be "host:port", such as "node1:29500", got',
        ),
        (lambda: run_local(["x"], 1, stop_after="soon"), 'a length of time such as "11h50m"'),
        (lambda: run_local(["x"], 1, args=[1]), "args are for a function"),
        (lambda: run_local(lambda: 0, 1), "must be defined at the top of a module"),
        (lambda: run_local(_gone, 1, args=[object()]), "the arguments of _gone reach ranks as JSON"),
    ],
)
def test_mistakes_in_the_call(call, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ValueError, match=said):
        call()
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- deaths


def test_the_traceback_of_the_rank_that_failed_is_on_top(script, tmp_path):
    command = script(
        "note_step(41)\n"
        "class CommunicationError(RuntimeError): pass\n"
        f"if rank == 2:\n    {TELL}time.sleep(0.1); raise ValueError('the loss is not a number')\n"
        f"if rank == 1:\n    {HEAR}raise CommunicationError('rank 2 is gone')\n" + WAIT
    )
    text, seconds = _fail(command, 4, folder="run")
    lines = text.splitlines()
    assert re.fullmatch(r"rank 2 ended with status 1 at step 41 on host \S+; the other ranks were stopped", lines[0])
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[2].strip().startswith(f'File "{tmp_path / "script.py"}", line ') or "script.py" in lines[2]
    assert lines[-3] == "ValueError: the loss is not a number"
    assert lines[-2] == "others: rank 1 lost the connection, 2 ended when asked"
    assert lines[-1] == "logs: run/logs/rank-*.txt, of this one run/logs/rank-2.txt"
    report = json.loads((tmp_path / "run" / "logs" / "error-2.json").read_text())
    assert (report["rank"], report["step"], report["error"]) == (2, 41, "ValueError: the loss is not a number")
    assert abs(report["time"] - time.time()) < 60
    assert seconds < 10
    assert _gone(tmp_path)


def test_the_first_of_two_errors_is_the_cause(script):
    command = script(
        f"if rank == 0:\n    {HEAR}time.sleep(0.15)\n"  # behind the other's error
        f"else:\n    {TELL}\n"
        "raise ValueError(f'of rank {rank}')\n"
    )
    text, _ = _fail(command, 2)
    assert text.startswith("rank 1 ended with status 1") and "ValueError: of rank 1" in text
    assert "others: rank 0 ended with status 1" in text


def test_a_kill_comes_before_the_errors_it_causes(script, tmp_path):
    command = script(
        "note_step(7)\nprint('the last words', flush=True)\n"
        f"if rank == 1:\n    {TELL}time.sleep(0.05); os.kill(os.getpid(), signal.SIGKILL)\n"
        f"{HEAR}raise RuntimeError('connection closed by peer')\n"
    )
    text, _ = _fail(command, 2)
    assert text.startswith("rank 1 was ended by SIGKILL at step 7 on host ")
    assert "  rank 1: the last words\n" in text
    assert "connection closed" not in text
    assert "others: rank 0 ended with status 1" in text
    assert _gone(tmp_path)


def test_the_last_words_of_an_earlier_run_are_not_told(script, tmp_path):
    log = tmp_path / "run" / "logs" / "rank-0.txt"
    log.parent.mkdir(parents=True)
    log.write_text("earlier words\n")
    command = script("print('the last words', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(RankFailure, match="rank 0: the last words") as failure:
        run_local(command, 1, folder=tmp_path / "run")
    assert "earlier words" not in str(failure.value)
    assert log.read_text().startswith("earlier words\n")


def test_an_abort_behind_an_error_about_another_rank_is_an_echo(script):
    command = script(
        "class CommunicationError(RuntimeError): pass\n"
        f"if rank == 1:\n    {TELL}time.sleep(0.1); raise ValueError('the cause')\n"
        "import atexit; atexit.register(os.abort)\n"
        f"{HEAR}raise CommunicationError('rank 1 is gone')\n"
    )
    text, _ = _fail(command, 2)
    assert text.startswith("rank 1 ended with status 1") and "ValueError: the cause" in text
    assert "others: rank 0 lost the connection" in text


def test_logs_stay_after_a_failure_and_go_after_a_success(script, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    assert run_local(script(""), 1) == 0
    assert list((tmp_path / "temporary").iterdir()) == []
    text, _ = _fail(script("sys.exit(3)"), 1)
    assert text.startswith("rank 0 ended with status 3 on host ")
    (kept,) = (tmp_path / "temporary").iterdir()
    assert (kept / "rank-0.txt").read_text() == "rank 0 is here\n"


def test_a_rank_that_ignores_sigterm_is_killed_with_what_it_has_started(script, tmp_path):
    command = script(
        "import subprocess\n"
        "if rank == 0:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    child = subprocess.Popen(['sleep', '60'])\n"
        "    (here / 'pid-child').write_text(str(child.pid)); (here / 'ready').touch()\n" + "    " + WAIT + "\n"
        "while not (here / 'ready').exists(): time.sleep(0.01)\n"
        "raise ValueError('over')\n"
    )
    text, seconds = _fail(command, 2, end_seconds=0.5)
    assert "others: rank 0 did not end when asked and had to be killed" in text
    assert seconds < 10
    deadline = time.monotonic() + 5  # An orphan is reaped by init in its own time.
    while not _gone(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert _gone(tmp_path)


def test_a_crash_in_c_leaves_the_python_stack(script):
    text, _ = _fail(script("import ctypes\nctypes.string_at(0)\n"), 1)
    assert text.startswith("rank 0 was ended by SIGSEGV")
    assert "script.py" in text and "Fatal Python error: Segmentation fault" in text


def test_ranks_die_with_a_launcher_that_is_killed(script, tmp_path):
    command = script(WAIT)
    with _Launcher(tmp_path, command, "--nproc", "2") as launcher:
        launcher.wait_for("pid-0-0", "pid-1-0")
        launcher.process.kill()
        launcher.process.wait()
        deadline = time.monotonic() + 10
        while not _gone(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert _gone(tmp_path)


# ---------------------------------------------------------------- restarts


def test_ranks_are_started_again_from_the_last_checkpoint(script, tmp_path, capfd):
    command = script(
        "(here / f'port-{rank}-{attempt}').write_text(os.environ['MASTER_PORT'])\n"
        "if attempt < 2:\n    note_checkpoint(10 * (attempt + 1)); note_step(10 * attempt + 15)\n"
        "    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n    " + WAIT + "print('done')\n"
    )
    assert run_local(command, 2, max_restarts=2, folder="run") == 0
    shown = capfd.readouterr()
    assert (
        "rank 1 was ended by SIGKILL at step 15" in shown.err and "rank 1 was ended by SIGKILL at step 25" in shown.err
    )
    assert "starting all ranks again from the checkpoint of step 10, attempt 2 of 3" in shown.err
    assert "starting all ranks again from the checkpoint of step 20, attempt 3 of 3" in shown.err
    assert shown.out.count("rank 0 is here") == 3 and shown.out.endswith("done\n")
    log = (tmp_path / "run" / "logs" / "rank-0.txt").read_text()
    assert log.count("---- attempt ") == 2 and "---- attempt 3 ----\nrank 0 is here\ndone\n" in log
    ports = [{(tmp_path / f"port-{rank}-{attempt}").read_text() for rank in range(2)} for attempt in range(3)]
    assert [len(attempt) for attempt in ports] == [1, 1, 1]


def test_restarts_end_when_two_attempts_make_no_checkpoint(script, tmp_path):
    command = script("if attempt == 0: note_checkpoint(5)\nif attempt == 1: note_checkpoint(5)\nsys.exit(1)\n")
    text, _ = _fail(command, 1, max_restarts=9)
    assert text.endswith("not started again: 2 attempts in a row made no new checkpoint")
    assert sorted(path.name for path in tmp_path.glob("pid-*")) == ["pid-0-0", "pid-0-1", "pid-0-2"]


def test_without_any_checkpoint_there_are_two_attempts(script, tmp_path):
    _fail(script("sys.exit(1)\n"), 1, max_restarts=9)
    assert len(list(tmp_path.glob("pid-*"))) == 2


def test_restarts_are_counted(script, tmp_path):
    text, _ = _fail(script("note_checkpoint(attempt)\nsys.exit(1)\n"), 1, max_restarts=3)
    assert "not started again" not in text
    assert len(list(tmp_path.glob("pid-*"))) == 4


# ---------------------------------------------------------------- stopping


class _Launcher:
    """`hyper-parallel launch` as a process of its own, to send signals to."""

    def __init__(self, folder, command, *options):
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hyper_parallel.cli", "launch", "--folder", "run", *options, *command],
            cwd=folder,
            env=command_environment(TEST_FOLDER=str(folder)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.kill()
        self.process.communicate()

    def wait_for(self, *names):
        deadline = time.monotonic() + 30
        while not all((self.folder / name).exists() for name in names):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, f"no {names}"
            time.sleep(0.01)

    def end(self, timeout=20):
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 143)], ids=str
)
def test_a_signal_to_the_launcher_reaches_all_ranks(script, tmp_path, number, status):
    with _Launcher(tmp_path, script(TRAINER), "--nproc", "2") as launcher:
        launcher.wait_for("ready-0", "ready-1")
        launcher.process.send_signal(number)
        code, out, err = launcher.end()
    assert code == status, err
    assert f"saved because of {number.name}" in out
    for rank in range(2):
        assert f"saved because of {number.name}" in (tmp_path / "run" / "logs" / f"rank-{rank}.txt").read_text()
    assert _gone(tmp_path)


def test_a_signal_to_one_rank_stops_all(script, tmp_path):
    with _Launcher(tmp_path, script(TRAINER), "--nproc", "2") as launcher:
        launcher.wait_for("ready-0", "ready-1")
        os.kill(int((tmp_path / "pid-1-0").read_text()), signal.SIGTERM)
        code, out, err = launcher.end()
    assert code == 143, err
    assert "saved because of a request to another rank" in out


def test_a_signal_to_ranks_that_know_nothing_of_it_ends_them(script, tmp_path):
    with _Launcher(tmp_path, script(WAIT), "--nproc", "2") as launcher:
        launcher.wait_for("pid-0-0", "pid-1-0")
        launcher.process.send_signal(signal.SIGTERM)
        code, _, err = launcher.end()
    assert (code, err) == (143, "")
    assert _gone(tmp_path)


def test_a_rank_that_is_killed_by_sigterm_alone_is_a_failure(script, tmp_path):
    with _Launcher(tmp_path, script(WAIT), "--nproc", "2") as launcher:
        launcher.wait_for("pid-0-0", "pid-1-0")
        os.kill(int((tmp_path / "pid-1-0").read_text()), signal.SIGTERM)
        code, _, err = launcher.end()
    assert code == 1
    assert err.startswith("rank 1 was ended by SIGTERM on host ")


def test_a_second_ctrl_c_ends_at_once(script, tmp_path):
    command = script("with StopRequest():\n    (here / f'ready-{rank}').touch(); time.sleep(60); " + WAIT)
    with _Launcher(tmp_path, command, "--nproc", "2") as launcher:
        launcher.wait_for("ready-0", "ready-1")
        launcher.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert launcher.process.poll() is None
        launcher.process.send_signal(signal.SIGINT)
        code, _, _ = launcher.end(timeout=5)
    assert code == 130
    assert _gone(tmp_path)


def test_there_is_no_restart_after_a_signal(script, tmp_path):
    command = script("with StopRequest() as stop:\n    (here / f'ready-{rank}').touch()\n"
                     "    while stop.reason is None: time.sleep(0.01)\nraise ValueError('cannot save')\n")  # fmt: skip
    with _Launcher(tmp_path, command, "--max-restarts", "3") as launcher:
        launcher.wait_for("ready-0")
        launcher.process.send_signal(signal.SIGTERM)
        code, _, err = launcher.end()
    assert code == 1
    assert "ValueError: cannot save" in err
    assert len(list(tmp_path.glob("pid-*"))) == 1


def test_ranks_stop_before_the_limit_of_time(capfd):
    saves = 'trap "echo saved; exit 143" TERM; while :; do sleep 0.02; done'
    assert run_local(["sh", "-c", saves], 2, stop_after="1s") == 143
    shown = capfd.readouterr()
    assert (shown.err, shown.out) == ("stopping after 1 s\n", "saved\n")


def test_ranks_that_do_not_stop_are_ended_in_the_end():
    text, seconds = _fail(["sh", "-c", "trap '' TERM; sleep 60"], 1, stop_after=1, stop_seconds=0.3, end_seconds=0.2)
    assert text.startswith("rank 0 did not stop within 0.3 s of being asked to; ended")
    assert seconds < 10


@pytest.mark.parametrize("status", [130, 143])
def test_ranks_that_have_stopped_by_themselves_have_not_failed(status):
    assert run_local(["sh", "-c", f"exit {status}"], 2) == status


def test_a_mistake_in_the_command_is_exit_code_2(script, tmp_path):
    with _Launcher(tmp_path, ["nowhere.py"]) as launcher:
        code, out, err = launcher.end()
    assert (code, out) == (2, "")
    assert err.startswith("error: there is no script 'nowhere.py' here")


# ---------------------------------------------------------------- the rank's half


def test_a_stop_request_by_signal_time_and_hearsay():
    before = signal.getsignal(signal.SIGUSR1)
    with StopRequest() as stop:
        assert (stop.reason, stop.flag, stop.exit_code) == (None, 0.0, 0)
        assert not stop.heard(0.0)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.reason, stop.flag, stop.exit_code) == ("SIGUSR1", 1.0, 143)
    assert signal.getsignal(signal.SIGUSR1) is before
    with StopRequest(after=0.01) as stop:
        time.sleep(0.02)
        assert (stop.reason, stop.flag, stop.exit_code) == ("the limit of 0.01 s", 1.0, 143)
    with StopRequest() as stop:
        assert stop.heard(3.0)
        assert (stop.reason, stop.exit_code) == ("a request to another rank", 143)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert (stop.reason, stop.exit_code) == ("SIGINT", 130)
