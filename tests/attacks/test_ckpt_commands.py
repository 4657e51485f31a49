"""`hyper-parallel ckpt` on checkpoints of strangers: their names forge no line of the output and drive no terminal."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hyper_parallel.cli.main import app
from hyper_parallel.core.distributed_checkpoint.base.checksum import crc32c
from tests.attacks.confined import run_confined
from tests.attacks.mutations import damaged_bytes, damaged_data, try_all
from tests.attacks.test_metadata import body_of, framed, gridded, layout, sample_folder
from tests.attacks.test_safetensors_folders import content_of, entry, sound_folder

only_on = "torch"  # reads files, no framework takes part

_HOSTILE = [
    "w\nok: every byte is sound",
    "w\r\x1b[2J\x1b]0;title\x07",
    "w\u202egnp.exe\u2066",
    "w\x9b31m\x85\u2028\u2029",
    "w\ud800",
    "\x00\x7f\u200b",
]
_LIMIT = 100 << 20


def run(*arguments):
    """The status and the lines of a command, which must be safe to show."""
    result = CliRunner().invoke(app, ["ckpt", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    lines = result.output.removesuffix("\n").split("\n")
    assert all(line.isprintable() for line in lines), lines
    return result.exit_code, lines


def ours(path: Path, name: str, sound: bool = True) -> Path:
    """A checkpoint with one tensor, one object and a layout of these names; or one whose tensor is damaged."""
    path.mkdir()
    data = bytes(8) + b"\1\2\3\4" + b'"x\\n"'
    body = body_of(data_bytes=9, layouts=[layout(mesh_dim_names=[name], cuts=[[0]], device_type=name)])
    body["tensors"][name] = gridded(crc32c=[crc32c(data[8:12]) if sound else 0], layout=0)
    body["objects"][f"{name}."] = {"file": 0, "start": 4, "length": 5, "crc32c": crc32c(data[12:]), "encoding": "json"}
    body["objects"][f"{name}.."] = {"file": 0, "start": 9, "length": 0, "crc32c": 0, "encoding": name}
    (path / body["files"][0][0]).write_bytes(data)
    (path / "metadata.json").write_bytes(framed(body))
    return path


def hub(path: Path, name: str) -> Path:
    path.mkdir()
    (path / "model.safetensors").write_bytes(content_of({name: entry([1], 0, 4)}, bytes(4)))
    return path


@pytest.mark.parametrize("name", _HOSTILE, ids=range(len(_HOSTILE)))
def test_names_stay_in_their_lines(tmp_path, name):
    mine, damaged, theirs = ours(tmp_path / "a", name), ours(tmp_path / "b", name, False), hub(tmp_path / "c", name)
    assert run("verify", mine) == (0, [f"{mine}: every byte is sound"])
    status, lines = run("verify", damaged)
    assert status == 1 and len(lines) == 1 and "is damaged" in lines[0]
    for place, num_lines in ((mine, 4), (theirs, 2)):
        status, lines = run("show", place)
        assert status == 0 and len(lines) == num_lines
        assert all(line.startswith("  ") for line in lines[1:])
    status, lines = run("ls", tmp_path)
    assert status == 0 and len(lines) == 4
    status, lines = run("diff", mine, theirs)
    assert status == 1 and all("in the" in line for line in lines)
    for command in (("show", mine, "--json"), ("diff", mine, theirs, "--json"), ("ls", tmp_path, "--json")):
        status, lines = run(*command)
        assert json.loads("\n".join(lines)) and "".join(lines).isascii()
    status, lines = run("convert", mine, tmp_path / "copy", "--mapping", "/dev/null")
    assert status == 2 and len(lines) == 1
    status, lines = run("convert", mine, tmp_path / "copy")
    assert status == 0 and run("diff", mine, tmp_path / "copy")[0] == 0
    status, lines = run("reshard", mine, tmp_path / "cut", "--mesh", "tp=2", "--shard", "none=tp")
    assert status == 2 and len(lines) == 1, lines
    status, lines = run("convert", theirs, tmp_path / "copy", "--only", name, "--strip", name, "--overwrite")
    assert status in (0, 2) and len(lines) == 1


def test_folders_and_indexes_of_any_name(tmp_path):
    folder = tmp_path / "runs"
    (folder / "x\n2 checkpoints, all sound\x1b[1m").mkdir(parents=True)
    ours(folder / "x\n2 checkpoints, all sound\x1b[1m" / "step-1", "w")
    hub(folder / "step\r-2", "w")
    (folder / "broken\n-3").mkdir()
    (folder / "broken\n-3" / "metadata.json").write_text("\n{}")
    status, lines = run("ls", folder)
    assert status == 0 and len(lines) == 3
    sound_folder(tmp_path / "hub")
    index = tmp_path / "hub" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a\nb": "x\n.safetensors"}}))
    for command in ("show", "verify"):
        status, lines = run(command, tmp_path / "hub")
        assert status in (1, 2) and len(lines) == 1 and "x\\n.safetensors" in lines[0]


def test_long_names_do_not_multiply(tmp_path):
    path = tmp_path / "hub"
    path.mkdir()
    names = ["x" * 100_000, *(f"w{number}" for number in range(2000))]
    header = {name: entry([1], 4 * number, 4 * number + 4) for number, name in enumerate(names)}
    (path / "model.safetensors").write_bytes(content_of(header, bytes(4 * len(names))))
    status, lines = run("show", path)
    assert status == 0 and sum(map(len, lines)) < 1_000_000


@pytest.mark.parametrize("command", ["ls", "show", "verify", "diff", "convert", "reshard"])
def test_what_is_no_file_ends_a_command(tmp_path, command):
    for number, (name, make) in enumerate(
        itertools.product(
            ("metadata.json", "model.safetensors", "model.safetensors.index.json"),
            (os.mkfifo, lambda path: os.symlink("/dev/zero", path), os.mkdir, lambda path: os.symlink(path, path)),
        )
    ):
        place = tmp_path / str(number)
        place.mkdir()
        (place / "a.safetensors").write_bytes(b"")
        make(place / name)
        further = {"diff": [place], "convert": [tmp_path / "to"], "reshard": [tmp_path / "to", "--mesh", "tp=2"]}
        status, lines = run(command, place, *further.get(command, []))
        assert status in ((0,) if command == "ls" else (1, 2)), (name, lines)
        assert command != "ls" or "unreadable" in lines[1], lines


def test_a_large_object_is_not_read_to_show_its_beginning(tmp_path):
    outcome = run_confined(f"{__name__}:show_large_object", str(tmp_path))
    assert outcome.error is None and outcome.value[0] == 0
    assert "<large, not loaded>" in outcome.value[1][1]


def show_large_object(folder: str):
    length = 1 << 40
    stored = {"file": 0, "start": 0, "length": length, "crc32c": 0, "encoding": "json"}
    body = body_of(objects={"a": stored}, data_bytes=length)
    (Path(folder) / "metadata.json").write_bytes(framed(body))
    (Path(folder) / body["files"][0][0]).touch()
    os.truncate(Path(folder) / body["files"][0][0], length + 8)
    return run("show", folder)


# ---------------------------------------------------------------- by chance


def fuzz_commands(num: int, folder: str) -> dict[str, int]:
    """Every command on damaged folders of two kinds, in one process."""
    sample = sample_folder(folder)
    theirs = sound_folder(Path(folder) / "hub")
    sound = shutil.copytree(sample, Path(folder) / "sound")
    body = json.loads((sample / "metadata.json").read_bytes())["body"]
    index = theirs / "model.safetensors.index.json"
    bodies = (("ours", framed(changed)) for changed in damaged_data([body], num // 2))
    weights = json.loads(index.read_bytes())
    indexes = (("index", json.dumps(changed).encode()) for changed in damaged_data([weights], num // 4))
    file = theirs / "model-1.safetensors"
    files = (("file", changed) for changed in damaged_bytes([file.read_bytes()], num - num // 2 - num // 4))
    places = {"ours": sample / "metadata.json", "index": index, "file": file}
    commands = itertools.cycle(["show", "verify", "diff", "ls", "convert", "to-hub"])
    taken = {"ours": sample, "index": theirs, "file": theirs}

    class Refused(Exception):
        pass

    def read(data):
        kind, content = data
        kept = places[kind].read_bytes()
        places[kind].write_bytes(content)
        place, command, to = taken[kind], next(commands), Path(folder) / "to"
        arguments = {
            "diff": ["diff", place, sound],
            "convert": ["convert", place, to],
            "to-hub": ["convert", place, to, "--to", "hugging-face"],
        }
        try:
            status, _ = run(*arguments.get(command, [command, place]))
        finally:
            places[kind].write_bytes(kept)
            shutil.rmtree(to, ignore_errors=True)
        if status:
            raise Refused

    inputs = itertools.chain(bodies, indexes, files)
    return try_all(inputs, read, (Refused,), folder, _LIMIT)


def test_any_damage_ends_with_a_status(tmp_path, sweep):
    folder = tmp_path / "work"
    folder.mkdir()
    num = 3000 if sweep else 120
    outcome = run_confined(
        f"{__name__}:fuzz_commands", num, str(folder), seconds=900 if sweep else 60, framework="torch"
    )
    assert outcome.error is None, outcome.error
    assert outcome.value["taken"] + outcome.value["refused"] == num
    print(f"commands: {outcome.value}, {outcome.grown:.1f} MiB")
