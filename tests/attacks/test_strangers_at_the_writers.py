"""Strangers where the writer processes of ranks are connected and started: none gets in, is run, or holds a save up."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel import checkpoint as ckpt
from hyper_parallel.core.distributed_checkpoint import async_save as async_save_module
from hyper_parallel.core.distributed_checkpoint.agreement.agreement import Report
from hyper_parallel.core.distributed_checkpoint.agreement.file_agreement import FileAgreement
from hyper_parallel.core.distributed_checkpoint.agreement.messages import MAX_MESSAGE_BYTES, MessageError
from hyper_parallel.core.distributed_checkpoint.background import writer_handle, writer_links, writer_process
from hyper_parallel.core.distributed_checkpoint.background.writer_links import connect_writers
from hyper_parallel.core.distributed_checkpoint.base.errors import LostRankError
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.host.reception import Refused, introduce
from tests.attacks.confined import run_confined
from tests.attacks.mutations import damaged_bytes, try_all
from tests.attacks.strangers import LONG, STRANGERS, as_another_user, listening_ports, no_new_files
from tests.attacks.test_agreement_files import Gadget, samples

only_on = "torch"  # sockets, files and processes; no framework takes part

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
_LENGTH = struct.Struct("<Q")


@pytest.fixture(autouse=True)
def no_file_is_left_open():
    get_platform()  # imports the framework, before files and paths change
    async_save_module._finish_all()
    with no_new_files():
        yield
        async_save_module._finish_all()


@pytest.fixture
def on_several_hosts(monkeypatch):
    """Every process counts as one on a host of its own."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    place = writer_links._place
    numbers = iter(range(1000))
    monkeypatch.setattr(writer_links, "_place", lambda: place()._replace(host=f"host {next(numbers)}"))


def connect(folder: Path, num_ranks: int) -> list[dict[int, socket.socket]]:
    """The connections of all ranks, which are threads here."""

    def run(rank: int) -> dict[int, socket.socket]:
        agreement = FileAgreement(folder / "agreement", rank, num_ranks, LONG)
        with contextlib.closing(agreement):
            return connect_writers(agreement)

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


def assert_connected(links: list[dict[int, socket.socket]]) -> None:
    """Each writer hears who it should hear; then the connections are closed."""
    assert sorted(links[0]) == list(range(1, len(links)))
    for rank, others in enumerate(links[1:], 1):
        (other,) = others.values()
        for sender, receiver in ((other, links[0][rank]), (links[0][rank], other)):
            writer_process._send_plain(sender, Report(rank))
            assert writer_process._receive_plain(receiver) == Report(rank)
    for sock in (sock for found in links for sock in found.values()):
        sock.close()


def while_the_door_is_open(monkeypatch, act: Any) -> list[Any]:
    """Have rank 1 do ``act(door)`` before it calls; what came of it."""
    results: list[Any] = []
    call = writer_links._call

    def call_later(door, rank):
        if rank == 1:
            results.append(act(door))
        return call(door, rank)

    monkeypatch.setattr(writer_links, "_call", call_later)
    return results


# ---------------------------------------------------------------- one host


def test_on_one_host_the_door_is_in_a_folder_that_nobody_else_can_enter_and_that_does_not_stay(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 50)))
    (tmp_path / ("long" * 50)).mkdir()
    ports = listening_ports()

    def look(door):
        facts = os.stat(door.folder)
        assert (stat.S_IMODE(facts.st_mode), facts.st_uid) == (0o700, os.geteuid())
        return door, listening_ports()

    results = while_the_door_is_open(monkeypatch, look)
    assert_connected(connect(tmp_path, 3))
    ((door, ports_meanwhile),) = results
    assert ports_meanwhile == ports, "there is no TCP"
    assert os.path.dirname(door.folder) == str(tmp_path / ("long" * 50))
    assert not os.path.lexists(door.folder)


@needs_root
def test_another_user_gets_neither_to_the_door_nor_through_it(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent != Path(parent.root) and parent.stat().st_uid == 0:
            parent.chmod(parent.stat().st_mode | 0o111)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def knock(door) -> bool:
        """Whether this one was taken for a rank."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(LONG)
            try:
                sock.connect(f"{door.folder}/{writer_links._SOCKET}")
                introduce(sock, door.secret, writer_links._NAME, {"rank": 1})
            except (PermissionError, Refused):
                return False
        return True

    def try_as_another_user(door):
        with as_another_user(lambda: knock(door)) as answer:
            first = answer()
        os.chmod(door.folder, 0o777)  # somebody's mistake: the kernel is asked who it is
        os.chmod(f"{door.folder}/{writer_links._SOCKET}", 0o777)
        with as_another_user(lambda: knock(door)) as answer:
            second = answer()
        os.chmod(door.folder, 0o700)
        return first, second

    results = while_the_door_is_open(monkeypatch, try_as_another_user)
    assert_connected(connect(tmp_path, 3))
    assert results == [(b"n", b"n")]


def test_a_door_in_a_folder_that_others_can_enter_is_not_used(tmp_path):
    tmp_path.chmod(0o711)
    with (
        pytest.raises(ConnectionError, match=r"is not a folder that user \d+ alone can enter"),
        writer_links._short_name(str(tmp_path)),
    ):
        raise AssertionError
    (tmp_path / "link").symlink_to(".")
    with pytest.raises(NotADirectoryError), writer_links._short_name(str(tmp_path / "link")):
        raise AssertionError


# ---------------------------------------------------------------- several hosts


def test_strangers_at_the_port_hold_nobody_up_and_do_not_get_in(tmp_path, monkeypatch, on_several_hosts):
    with contextlib.ExitStack() as stay:

        def storm(door):
            assert door.folder == ""
            for number in range(70):
                stranger = STRANGERS[number % len(STRANGERS)]
                stay.enter_context(contextlib.closing(stranger(door.port, writer_links._NAME)))
            return door.port

        results = while_the_door_is_open(monkeypatch, storm)
        started = time.monotonic()
        links = connect(tmp_path, 4)
        assert time.monotonic() - started < 10
        assert_connected(links)
    assert results[0] not in listening_ports(), "the door is closed"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", results[0]), LONG)


def test_a_stranger_that_comes_first_as_rank_1_is_sent_away_and_none_of_its_words_is_run(
    tmp_path, monkeypatch, on_several_hosts
):
    """The attack that was found: token and rank first, then a pickle."""
    ran = tmp_path / "ran"

    def come_first(door):
        with socket.create_connection(("127.0.0.1", door.port), LONG) as sock:
            word = pickle.dumps(Gadget(ran))
            sock.sendall(struct.pack("<16sI", bytes(16), 1) + _LENGTH.pack(len(word)) + word)
            with contextlib.suppress(ConnectionResetError):
                return sock.recv(1)

    results = while_the_door_is_open(monkeypatch, come_first)
    assert_connected(connect(tmp_path, 3))
    assert results in ([b""], [None]), "it was hung up on"
    assert not ran.exists()


@pytest.mark.parametrize("rank", [0, -1, 3, 2**70, True, "1", None, [1], 1.0])
def test_callers_are_taken_once_for_ranks_that_there_are(tmp_path, monkeypatch, rank):
    def call_as(door):
        with writer_links._connected(door) as sock:
            introduce(sock, door.secret, writer_links._NAME, {"rank": rank})
            return sock.recv(1)

    results = while_the_door_is_open(monkeypatch, call_as)
    assert_connected(connect(tmp_path, 3))
    assert results == [b""], "it was hung up on"


def test_a_second_call_as_the_same_rank_does_not_take_the_place_of_the_first(tmp_path, monkeypatch):
    call = writer_links._call
    extra = []

    def call_twice(door, rank):
        first = call(door, rank)
        if rank == 1:
            # On a slow machine the door may be closed already, which is an error of the same kind.
            with contextlib.suppress(OSError), writer_links._connected(door) as sock:
                introduce(sock, door.secret, writer_links._NAME, {"rank": 1})
                extra.append(sock.recv(1))
        else:
            time.sleep(0.5)  # The door stays open meanwhile.
        return first

    monkeypatch.setattr(writer_links, "_call", lambda door, rank: call_twice(door, rank))
    assert_connected(connect(tmp_path, 3))
    assert extra in ([], [b""])


def test_a_rank_that_cannot_call_is_an_error_on_all_and_leaves_nothing(tmp_path, monkeypatch, on_several_hosts):
    monkeypatch.setattr(writer_links, "_ATTEMPTS", 2)
    connected = writer_links._connected

    def fail(door):
        if threading.current_thread().name.endswith("_1"):
            raise ConnectionRefusedError(111, "Connection refused")
        return connected(door)

    monkeypatch.setattr(writer_links, "_connected", fail)
    errors = []

    def run(rank):
        threading.current_thread().name = f"rank_{rank}"
        with contextlib.closing(FileAgreement(tmp_path / "agreement", rank, 3, LONG)) as agreement:
            try:
                connect_writers(agreement)
            except Exception as error:
                errors.append(str(error))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))
    assert len(errors) == 3
    for error in errors:
        assert "starting background saves failed on rank 1: ConnectionError: cannot reach rank 0 at 127.0.0.1:" in error


# ---------------------------------------------------------------- what writers say to each other


def test_what_is_no_message_of_a_writer_loses_that_writer_and_is_not_run(tmp_path):
    ran = tmp_path / "ran"
    word = pickle.dumps(Gadget(ran))
    for data, how in (
        (_LENGTH.pack(len(word)) + word, r"says what nobody can follow \(what was read is no message"),
        (_LENGTH.pack(2**63), r"says what nobody can follow \(a message of 9223372036854775808 bytes is refused"),
        (_LENGTH.pack(1) + b"1", r"says what nobody can follow \(a int is no report\)"),
        (_LENGTH.pack(100) + b"1", "is gone"),
        (b"", "is gone"),
    ):
        here, there = socket.socketpair()
        there.sendall(data)
        there.close()
        agreement = writer_process.WriterAgreement(0, {1: here}, 2)
        with pytest.raises(LostRankError, match=rf"writes the checkpoint for rank 1 {how}"):
            agreement._receive(1)
        assert here.fileno() == -1
    assert not ran.exists()


def try_damaged_messages(folder: str, num: int) -> dict[str, int]:
    texts = [writer_process.encode_message(sample) for sample in samples()]
    framed = [_LENGTH.pack(len(text)) + text for text in texts]

    def read(data: bytes) -> None:
        here, there = socket.socketpair()
        with here, there:
            there.sendall(data)
            there.shutdown(socket.SHUT_WR)
            writer_process._receive_plain(here)

    return try_all(damaged_bytes(framed, num), read, (MessageError, EOFError), folder, 100 << 20)


def test_damaged_messages_of_writers_are_read_or_refused(tmp_path, sweep):
    num = 10_000 if sweep else 3000
    (tmp_path / "work").mkdir()
    outcome = run_confined(f"{__name__}:try_damaged_messages", str(tmp_path / "work"), num, seconds=300)
    assert outcome.error is None, outcome.error
    assert outcome.value["refused"] > num / 2
    assert MAX_MESSAGE_BYTES <= 1 << 28


# ---------------------------------------------------------------- how writers are started


def _writer_pid() -> int:
    (found,) = async_save_module._Background._all.values()
    return found._process.pid


def test_the_command_line_and_the_environment_of_a_writer_hold_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HYPER_PARALLEL_SECRET", "a secret of the world")
    drawn = []
    token_bytes = writer_links.secrets.token_bytes
    monkeypatch.setattr(writer_links.secrets, "token_bytes", lambda num: drawn.append(token_bytes(num)) or drawn[-1])
    agreements = [FileAgreement(tmp_path / "agreement", rank, 2, LONG) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        writers = list(pool.map(writer_handle.WriterProcess, agreements))
        list(pool.map(FileAgreement.close, agreements))
    (secret,) = [found for found in drawn if len(found) == 32]
    try:
        for writer in writers:
            writer.start_job({"failure": "there is nothing to write"})
        for writer in writers:
            for name in ("cmdline", "environ"):
                text = Path(f"/proc/{writer.pid}/{name}").read_bytes()
                assert secret not in text and secret.hex().encode() not in text
                assert b"a secret of the world" not in text and b"HYPER_PARALLEL_SECRET" not in text
            assert writer.wait(LONG)
            assert "there is nothing to write" in str(writer.answer)
            rows = [line.split() for line in Path(f"/proc/{writer.pid}/net/tcp").read_text().splitlines()[1:]]
            listening = {row[9] for row in rows if row[3] == "0A"}
            assert not listening & {os.readlink(file)[8:-1] for file in Path(f"/proc/{writer.pid}/fd").iterdir()}
    finally:
        for writer in writers:
            writer.close()


_PLANTED = ("sitecustomize", "usercustomize", "json", "numpy", "resource", "hyper_parallel", "encodings", "struct")


def test_a_writer_takes_no_module_from_where_the_rank_happens_to_be(tmp_path, monkeypatch):
    for folder in (tmp_path, tmp_path / "relative", tmp_path / "c"):
        folder.mkdir(exist_ok=True)
        for name in _PLANTED:
            (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((".", "relative", "", str(tmp_path / "c"))))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "json.py"))
    monkeypatch.setattr(sys, "path", ["", ".", "relative", *sys.path, Path(tmp_path), b"c", "c"])
    ckpt.async_save({"x": 1}, checkpoint_id="c", no_dist=True).result()
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    assert ckpt.verify(tmp_path / "c") == []


def test_the_start_of_a_writer_asks_no_class_that_a_checkpoint_can_have_touched(monkeypatch):
    def touched(*args: Any) -> str:
        raise AssertionError("a path was asked for its name")

    for kind in (pathlib.PurePath, pathlib.PurePosixPath, pathlib.Path, pathlib.PosixPath):
        for name in ("__str__", "__fspath__", "resolve", "parents"):
            if name in vars(kind):
                monkeypatch.setattr(kind, name, touched)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    here, there = socket.socketpair()
    process = writer_handle._start(there)
    here.close()
    there.close()
    assert process.wait(LONG) == 0, "it came up, heard nothing, and ended"


@pytest.mark.parametrize("python", ["", "python", "./python", "/nowhere/python", "/tmp"])
def test_without_a_python_to_start_the_save_fails_and_says_so(tmp_path, monkeypatch, python):
    monkeypatch.setattr(writer_handle, "_PYTHON", python)
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: started.append(args))
    handle = ckpt.async_save({"x": 1}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(
        ckpt.CheckpointError, match=rf"cannot be started: sys.executable is '{python}', which is no pro"
    ):
        handle.result()
    assert not started
