"""Processes that are killed while they save, at any moment, and disks that are full: the last good checkpoint stays."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import resource
import select
import signal
import sys
import time
import traceback
from pathlib import Path

import pytest

from hyper_parallel import checkpoint
from tests.distributed_checkpoint.versions import save_version, state_of, stray_files, version_of

only_on = "torch"  # saves are made by forks of a rank, which MindSpore's threads do not survive; files are the same

_PACKAGE = os.path.dirname(sys.modules[checkpoint.save.__module__].__file__)
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000


def start_child(function, *args):
    """Run a function in a forked process; gives its pid once it has started."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.write(writing, b".")
            function(*args)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    select.select([reading], [], [])
    os.close(reading)
    return pid


def end_of(pid):
    """How a child ended: its exit code, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def save_and_die_at(directory, name, version, moment, in_commit=False, counted=None):
    """Save, and be killed before line number ``moment`` of the package, or since the commit began; or count lines.

    The counts go to the file ``counted``: of all lines, and of those since the commit began.
    """
    lines = lines_in_commit = 0

    def trace(frame, event, argument):
        nonlocal lines, lines_in_commit
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line":
            lines += 1
            lines_in_commit += bool(lines_in_commit) or frame.f_code.co_name == "commit"
            if (lines_in_commit if in_commit else lines) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    save_version(directory, name, version)
    sys.settrace(None)
    if counted is not None:
        Path(counted).write_text(f"{lines} {lines_in_commit}")


def forget_committed(path):
    """Remove a checkpoint if there is one; what killed saves have left there stays."""
    if (path / "metadata.json").exists():
        named = json.loads((path / "metadata.json").read_bytes())["body"]["files"]
        for name in ("metadata.json", *(file[0] for file in named)):
            (path / name).unlink()


def kill_many(directory, num_kills):
    """Many kills, half of them between two lines of the program and half at any time; one into an old name or a new."""
    root = Path(directory)
    save_version(directory, "step-1", 1)
    assert end_of(start_child(save_and_die_at, directory, "step-0", 0, None, False, f"{directory}/lines")) == 0
    num_lines, num_in_commit = map(int, (root / "lines").read_text().split())
    (root / "lines").unlink()
    start = time.monotonic()
    assert end_of(start_child(save_version, directory, "step-0", 0)) == 0
    duration = time.monotonic() - start
    pick = random.Random(7)
    moments = [(pick.randint(1, num_lines), False) for _ in range(num_kills * 3 // 10)]
    moments += [
        (1, True),
        (num_in_commit, True),
        *((pick.randint(1, num_in_commit), True) for _ in range(num_kills // 5 - 2)),
    ]
    outcomes = []
    known = 1
    for number in range(num_kills):
        version = number + 2
        name = "step-1" if number % 2 else "step-2"
        forget_committed(root / "step-2")
        if number < len(moments):
            pid = start_child(save_and_die_at, directory, name, version, *moments[number])
        else:
            pid = start_child(save_version, directory, name, version)
            time.sleep(pick.random() * duration)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended = end_of(pid)
        assert ended in (0, -signal.SIGKILL)
        found = version_of(root / "step-1")
        if name == "step-1":
            assert found in (known, version)
            outcomes.append(found == version)
            known = found
        else:
            assert found == known
            committed = (root / "step-2" / "metadata.json").exists()
            assert not committed or version_of(root / "step-2") == version
            assert checkpoint.latest(directory) == root / ("step-2" if committed else "step-1")
            outcomes.append(committed)
        if ended == 0:
            assert outcomes[-1]
    forget_committed(root / "step-2")
    save_version(directory, "step-3", 99)
    assert stray_files(directory) == []
    assert version_of(root / "step-3") == 99
    return outcomes


def test_kills_leave_the_old_checkpoint_or_the_new_one(worlds, tmp_path):
    num_kills = 50 if worlds.sweep else 16
    (outcomes,) = worlds(1, timeout=300).run(kill_many, str(tmp_path), num_kills)
    assert len(outcomes) == num_kills
    assert not all(outcomes[: num_kills // 2])
    assert any(outcomes[: num_kills // 2])


# ---------------------------------------------------------------- full disks


def mount_small_disk(directory):
    """Put a tmpfs of half a mebibyte there, seen by this process only, if the machine lets us."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS) != 0:
        return False
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except OSError:
        return False
    return libc.mount(b"tmpfs", directory.encode(), b"tmpfs", 0, b"size=512k") == 0


def save_on_a_full_disk(directory):
    """Save small, then more than fits; a private tmpfs where one may be mounted, else a limit on the size of files."""
    if not mount_small_disk(directory):
        resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, 256 << 10))
    path = Path(directory) / "step-1"
    save_version(directory, "step-1", 1)
    for name in ("step-1", "step-2"):
        with pytest.raises(OSError, match=r"cannot write the checkpoint file '.*step-\d/.*': (No space left|File too)"):
            checkpoint.save(state_of(2, size=1 << 20), checkpoint_id=f"{directory}/{name}", no_dist=True)
    assert version_of(path) == 1
    assert os.listdir(directory) == ["step-1"]
    assert stray_files(directory) == []
    save_version(directory, "step-1", 3)
    assert version_of(path) == 3


def tell_outcome(function, outcome, *args):
    """Write to the file ``outcome`` what went wrong, if anything did."""
    with open(outcome, "w") as file:
        try:
            function(*args)
        except BaseException:
            traceback.print_exc(file=file)
            raise


def fill_disk(directory, outcome):
    code = end_of(start_child(tell_outcome, save_on_a_full_disk, outcome, directory))
    return code, Path(outcome).read_text()


def test_a_full_disk_leaves_the_old_checkpoint(worlds, tmp_path):
    (tmp_path / "disk").mkdir()
    ((code, outcome),) = worlds(1, timeout=120).run(fill_disk, str(tmp_path / "disk"), str(tmp_path / "outcome"))
    assert code == 0, outcome
