"""What stands under a file's name may be no file: it is refused at once, and nothing waits."""

from __future__ import annotations

import os
import socket

import pytest

from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.base.regular_files import open_regular, read_regular
from tests.attacks.confined import run_confined

only_on = "torch"  # reads files, no framework takes part

_MODULE = "tests.attacks.test_regular_files"


def read_at_most(path: str, limit: int) -> int:
    return len(read_regular(path, limit))


def _make(kind: str, path) -> None:
    if kind == "a folder":
        path.mkdir()
    elif kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        here = os.getcwd()
        with socket.socket(socket.AF_UNIX) as server:
            os.chdir(path.parent)  # The path of a socket must be short.
            try:
                server.bind(path.name)
            finally:
                os.chdir(here)


@pytest.mark.parametrize("kind", ["a folder", "a FIFO", "a device", "a socket"])
def test_what_is_no_file_is_refused_without_waiting(tmp_path, kind):
    _make(kind, tmp_path / "x")
    (tmp_path / "link").symlink_to(tmp_path / "x")
    for name in ("x", "link"):
        outcome = run_confined(f"{_MODULE}:read_at_most", str(tmp_path / name), 1000, seconds=10, mebibytes=20)
        expected = f"'{tmp_path / name}' is {kind} where a file is expected; it is not read"
        assert outcome.error == ("CorruptCheckpointError", expected)


def test_a_larger_file_than_allowed_is_not_read(tmp_path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    outcome = run_confined(f"{_MODULE}:read_at_most", str(tmp_path / "sparse"), 1 << 20, seconds=10, mebibytes=20)
    assert outcome.error is not None and outcome.error[0] == "CorruptCheckpointError"
    assert f"has {1 << 40} bytes, and such a file has no more than {1 << 20}" in outcome.error[1]
    (tmp_path / "kernel").symlink_to("/proc/self/pagemap")  # says that it is regular and empty, and never ends
    assert read_regular(tmp_path / "kernel", 1 << 20) == b""


def test_names_and_links(tmp_path):
    (tmp_path / "whole").write_bytes(b"abc")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to("../whole")  # as in the cache of the Hugging Face hub
    assert read_regular(tmp_path / "folder" / "link", 3) == b"abc"
    with open_regular(str(tmp_path / "whole")) as file:
        assert file.read() == b"abc"
    with pytest.raises(CorruptCheckpointError, match="has 3 bytes, and such a file has no more than 2"):
        read_regular(tmp_path / "whole", 2)
    (tmp_path / "dangling").symlink_to("nothing")
    for name, what in (("nothing", "does not exist"), ("whole/x", "does not exist"), ("dangling", "leads nowhere")):
        with pytest.raises(FileNotFoundError, match=f"{name}' {what}"):
            open_regular(tmp_path / name)
    (tmp_path / "round").symlink_to("round")
    for name in ("a\0b", "\ud800", "x" * 300, "round"):
        with pytest.raises(CorruptCheckpointError, match=r"cannot be (the name of )?a file: "):
            open_regular(f"{tmp_path}/{name}")
