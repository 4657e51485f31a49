"""The secret of a world, as the environment gives it: what is taken, and what is refused with which words."""

from __future__ import annotations

import os

import pytest

from hyper_parallel.platform.host.world_secret import find_secret

only_on = "torch"  # reads the environment and files, no framework takes part

GOOD = "0123456789abcdef"


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(GOOD + "\n")
    path.chmod(0o600)
    return path


def from_file(path):
    return find_secret({"HYPER_PARALLEL_SECRET_FILE": str(path)})


def test_a_secret_comes_from_a_variable_or_from_a_file(secret_file):
    assert find_secret({}) == b""
    assert find_secret({"HYPER_PARALLEL_SECRET": GOOD}) == GOOD.encode()
    assert from_file(secret_file) == GOOD.encode()  # The two agree: the end of the line does not count.
    secret_file.chmod(0o400)
    assert from_file(secret_file) == GOOD.encode()
    with pytest.raises(ValueError, match="both HYPER_PARALLEL_SECRET and HYPER_PARALLEL_SECRET_FILE are set"):
        find_secret({"HYPER_PARALLEL_SECRET": GOOD, "HYPER_PARALLEL_SECRET_FILE": str(secret_file)})


@pytest.mark.parametrize(
    ("secret", "problem"),
    [("", "is empty"), ("  \n", "is empty"), ("short", "has 5 bytes, which can be guessed"), ("x" * 5000, "more than")],
)
def test_what_keeps_nobody_out_is_no_secret(secret, problem, secret_file):
    with pytest.raises(ValueError, match=rf"HYPER_PARALLEL_SECRET .*{problem}.*secrets.token_hex") as raised:
        find_secret({"HYPER_PARALLEL_SECRET": secret})
    assert secret.strip() == "" or secret not in str(raised.value)
    secret_file.write_text(secret)
    with pytest.raises(ValueError, match=rf"HYPER_PARALLEL_SECRET_FILE=.*{problem}.*secrets.token_hex"):
        from_file(secret_file)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o777])
def test_a_file_that_others_can_use_is_refused(mode, secret_file):
    secret_file.chmod(mode)
    with pytest.raises(
        ValueError, match=rf"has the mode {mode:04o}, so that others can use it; run: chmod 600 .*secret"
    ):
        from_file(secret_file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(secret_file):
    os.chown(secret_file, 65534, 65534)
    with pytest.raises(ValueError, match="belongs to user 65534, who knows the secret and can change it"):
        from_file(secret_file)


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        from_file(tmp_path / "missing")
    with pytest.raises(ValueError, match="is not a regular file"):
        from_file(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="is not a regular file"):  # and is not waited for
        from_file(tmp_path / "pipe")
