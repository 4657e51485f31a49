"""Configs that are hardly TOML: read as far as they can be, and refused with what is wrong."""

from __future__ import annotations

import time

import pytest

from hyper_parallel.trainer.config import ConfigError, load_config

only_on = "torch"  # imports no framework: once is enough

GOOD = '[model]\nname = "llama-demo"\n[train]\nsteps = 40\nbatch = 8\n'  # what a case adds begins in line 6
JOINED = "data.isolate=false"  # which that model needs


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def _mistakes(text, *sets):
    with open("run.toml", "w") as file:
        file.write(text)
    with pytest.raises(ConfigError) as raised:
        load_config("run.toml", [JOINED, *sets])
    return [str(mistake) for mistake in raised.value.mistakes]


ODD = {
    "a number of 5000 digits": (f"[train.x]\nx = {'9' * 5000}\n", "7: is not TOML: Exceeds the limit (4300 digits)"),
    "a folder with a name that no folder has": (
        '[log]\nfolder = "a\\u0000b"\n',
        '7: log.folder: must be a text without NUL, got "a\\u0000b"',
    ),
    "a path that is too long": (
        f'[checkpoint]\nresume = "{"x" * 300}"\n',
        "7: checkpoint.resume: must be 'auto', 'never' or the folder of a checkpoint, got 'xxx",
    ),
    "a folder that is a file": ('[log]\nfolder = "run.toml"\n', "7: log.folder: must be a folder that can be made; '/"),
    "a folder below a file": (
        '[checkpoint]\nfolder = "run.toml/a/b"\n',
        "7: checkpoint.folder: must be a folder that can be made; '/",
    ),
    "a key with a line in it": ('[parallel]\n"a\\nb" = 3\n', '7: parallel."a\\nb": no such key; the keys of'),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_values(case):
    added, said = ODD[case]
    (found,) = _mistakes(GOOD + added)
    assert found.startswith(f"run.toml:{said}")


DEEP = "has tables or lists in each other, more than 32 deep"
UNREADABLE = {
    "bytes": (b"[train]\n\xff", "run.toml: cannot be read: byte 0xff in line 2 is no UTF-8; save it as UTF-8"),
    "lists in lists": (f"x = {'[' * 200}{']' * 200}".encode(), f"run.toml: {DEEP}"),
    "lists in lists, without end": (b"x = " + b"[" * 5000, f"run.toml: {DEEP}"),
    "tables in tables": (b".".join([b"a"] * 3000) + b" = 1", f"run.toml: {DEEP}"),
    "a line of parents": (b'extends = "0.toml"', "31.toml:1: extends: is the end of a line of"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_an_unreadable_file(tmp_path, case):
    content, said = UNREADABLE[case]
    for number in range(40):
        (tmp_path / f"{number}.toml").write_text(f'extends = "{number + 1}.toml"\n')
    (tmp_path / "run.toml").write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load_config("run.toml")
    assert said in str(raised.value)


def test_a_file_without_end():
    with pytest.raises(ConfigError, match="/dev/zero: cannot be read: it has more than 16 MiB"):
        load_config("/dev/zero")
    assert (
        "there is no file '/dev/zero'"
        in _mistakes(GOOD.replace('name = "llama-demo"', 'hugging_face = "/dev/zero"'))[0]
    )


def test_a_file_of_windows_is_read(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_config("run.toml", [JOINED]).config.train.steps == 40


def test_lines_are_found_behind_a_list_of_thousands_of_lines():
    long = "[optimizer]\nno_decay = [  # ]\n" + "'a\"[', # [\n" * 4000 + '"""\n]"""""]\nlr = -1\n'
    before = time.process_time()
    assert _mistakes(GOOD + long)[0].startswith("run.toml:4010: optimizer.lr: must be above 0")
    assert time.process_time() - before < 2


def test_given_values_are_said_to_be_given():
    assert _mistakes(GOOD, "train.steps.x=3", "a.b.c=1", "log.folder=\udcff") == [
        "--set: must be UTF-8, got 'log.folder=\\udcff'",
        "--set: train.steps: must be a whole number, got { x = 3 }",
        "--set: a: no such key; the keys of a config are model, data, train, optimizer, schedule, parallel, precision, "
        "recompute, checkpoint, eval, log, launch",
    ]
    assert _mistakes(GOOD, ".".join("a" * 40) + "=1")[0].startswith(f"--set: {DEEP}")
