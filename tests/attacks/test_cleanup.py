"""What a save removes besides its own files: nothing. Copies in progress, links, folders of others, killed saves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time

import numpy as np
import pytest

from hyper_parallel import checkpoint
from hyper_parallel.core.distributed_checkpoint.storage import cleanup, filesystem
from hyper_parallel.core.distributed_checkpoint.storage.file_locks import hold_lock, is_held
from hyper_parallel.core.distributed_checkpoint.storage.file_names import is_data_file, new_save_name, save_of
from hyper_parallel.core.distributed_checkpoint.storage.save_marks import SaveMark
from tests.distributed_checkpoint.test_kills import end_of, start_child
from tests.distributed_checkpoint.versions import save_version, stray_files, version_of

only_on = "torch"  # moves and removes files, the framework takes no part


def names(path):
    return sorted(os.listdir(path))


def in_a_killed_process(module, name, work, *args, after=False):
    """Call ``work`` in a process of its own, which is killed where it calls ``module.name``, or after that call."""

    def run():
        called = getattr(module, name)

        def die(*args, **kwargs):
            if after:
                called(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(module, name, die)
        work(*args)

    assert end_of(start_child(run)) == -signal.SIGKILL


def killed_save(directory, name, version, moment):
    """A save that is killed after the call ``FileSystemWriter.<moment>``."""
    in_a_killed_process(checkpoint.FileSystemWriter, moment, save_version, directory, name, version, after=True)


def test_a_copy_whose_metadata_has_not_come_yet_is_left_alone(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    save_version(elsewhere, "step-1", 1)
    runs = tmp_path / "runs"
    copy = runs / "copy"
    copy.mkdir(parents=True)
    for file in (elsewhere / "step-1").glob("*.safetensors"):
        shutil.copy2(file, copy)
    linked = tmp_path / "linked"
    shutil.copytree(copy, linked)
    (runs / "link").symlink_to(linked)
    for version in (2, 3):
        save_version(runs, "step-2", version)
    for path in (copy, linked):
        shutil.copy2(elsewhere / "step-1" / "metadata.json", path)
        assert version_of(path) == 1


@pytest.mark.parametrize("moment", ["write_file", "commit"])
def test_a_copy_of_a_folder_with_a_killed_save_is_left_alone(tmp_path, moment):
    save_version(tmp_path, "step-1", 1)
    killed_save(tmp_path, "step-1", 2, moment)
    assert len([name for name in names(tmp_path / "step-1") if name.endswith(".saving")]) == 1
    shutil.copytree(tmp_path / "step-1", tmp_path / "copy")
    shutil.copytree(tmp_path / "step-1", tmp_path / "links", copy_function=os.link)
    before = names(tmp_path / "copy")
    # While it is copied the metadata may be missing; then nothing says which of the files are wanted.
    for copy in ("copy", "links"):
        (tmp_path / copy / "metadata.json").rename(tmp_path / f"{copy}.metadata")
    save_version(tmp_path, "step-3", 3)
    for copy in ("copy", "links"):
        (tmp_path / f"{copy}.metadata").rename(tmp_path / copy / "metadata.json")
        assert names(tmp_path / copy) == before
        assert version_of(tmp_path / copy) == (2 if moment == "commit" else 1)
    assert stray_files(tmp_path / "step-1") == [], "what the killed save has left is gone"
    assert version_of(tmp_path / "step-1") == (2 if moment == "commit" else 1)
    # A save into the copy itself takes no interest in them either.
    save_version(tmp_path, "copy", 4)
    assert version_of(tmp_path / "copy") == 4


@pytest.mark.parametrize("moment", ["begin", "write_file", "flush", "commit"])
@pytest.mark.parametrize("older", [False, True])
def test_whatever_a_killed_save_has_left_goes(tmp_path, moment, older):
    if older:
        save_version(tmp_path, "step-1", 1)
    killed_save(tmp_path, "step-1", 2, moment)
    assert stray_files(tmp_path)
    save_version(tmp_path, "step-2", 3)
    assert stray_files(tmp_path) == []
    if moment == "commit" or older:
        assert version_of(tmp_path / "step-1") == (2 if moment == "commit" else 1)
    else:
        assert not (tmp_path / "step-1").exists()


def test_metadata_that_cannot_be_read_at_the_moment_names_everything(tmp_path):
    killed_save(tmp_path, "step-1", 2, "commit")
    metadata = tmp_path / "step-1" / "metadata.json"
    before = names(tmp_path / "step-1")
    content = metadata.read_bytes()
    metadata.rename(tmp_path / "kept")
    for disguise in (
        lambda: os.mkfifo(metadata),
        lambda: metadata.symlink_to("/dev/zero"),
        lambda: metadata.symlink_to("nowhere"),
        lambda: metadata.mkdir(),
        lambda: (metadata.touch(), os.truncate(metadata, 1 << 40)),
    ):
        disguise()
        save_version(tmp_path, "step-2", 3)
        assert names(tmp_path / "step-1") == before
        metadata.rmdir() if metadata.is_dir() and not metadata.is_symlink() else metadata.unlink()
    metadata.write_bytes(content)
    save_version(tmp_path, "step-2", 3)
    assert version_of(tmp_path / "step-1") == 2
    assert stray_files(tmp_path / "step-1") == []


def test_what_is_copied_over_the_files_of_a_replaced_checkpoint_stays(tmp_path):
    save_version(tmp_path, "step-1", 1)
    shutil.copytree(tmp_path / "step-1", tmp_path / "backup" / "step-1")
    # Killed after the commit, before it has removed what it replaced: see the moment in the writer.
    in_a_killed_process(filesystem, "remove_files", save_version, tmp_path, "step-1", 2)
    assert version_of(tmp_path / "step-1") == 2
    for file in (tmp_path / "backup" / "step-1").glob("*.safetensors"):  # somebody goes back to the older one
        os.unlink(tmp_path / "step-1" / file.name)
        shutil.copy2(file, tmp_path / "step-1")
    save_version(tmp_path, "step-3", 3)
    shutil.copy2(tmp_path / "backup" / "step-1" / "metadata.json", tmp_path / "step-1")
    assert version_of(tmp_path / "step-1") == 1


def test_marks_that_others_made_say_nothing(tmp_path):
    sister = tmp_path / "sister"
    sister.mkdir()
    save = new_save_name()
    data, mark = f"{save}-r00000-000.safetensors", f".{save}.saving"
    (sister / data).write_bytes(b"x")
    folder = os.stat(sister).st_ino
    secret = tmp_path / "secret"
    secret.write_bytes(b"kept")

    def forged(content):
        (sister / mark).write_bytes(content)
        return True

    right = json.dumps({"folder": folder, "mark": 0}).encode()
    for make in (
        lambda: forged(b""),
        lambda: forged(b"{}\n"),
        lambda: forged(right + b"\n"),
        lambda: forged(b"[" * 100_000 + b"\n"),
        lambda: forged(b"\xff\n"),
        lambda: os.mkfifo(sister / mark),
        lambda: (sister / mark).symlink_to(secret),
        lambda: (sister / mark).mkdir(),
    ):
        make()
        save_version(tmp_path, "step-1", 1)
        assert names(sister) == [mark, data]
        (sister / mark).rmdir() if (sister / mark).is_dir() else (sister / mark).unlink()
    assert secret.read_bytes() == b"kept"
    # and one that is right goes, with what it marks: a link there is removed, not what it leads to
    (sister / data).unlink()
    (sister / data).symlink_to(secret)
    os.close(SaveMark(sister, save)._lock)
    save_version(tmp_path, "step-1", 1)
    assert not sister.exists()
    assert secret.read_bytes() == b"kept"


def test_a_folder_named_like_an_agreement_keeps_its_other_files(tmp_path):
    mine = tmp_path / ".x.save-agreement"
    mine.mkdir()
    kept = ["thesis.txt", "report-final", "opening\n", "hello-", "verdict-1", "alive-1.bak"]
    for name in kept:
        (mine / name).write_text("x")
    (mine / "folder").mkdir()
    (mine / "folder" / "opening").write_text("x")
    gone = [
        "alive-0-0123456789abcdef",
        "opening",
        "hello-1",
        "report-0123456789abcdef-1-1",
        ".opening.0123456789abcdef",
    ]
    for name in gone:
        (mine / name).write_text("x")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "alive-0-0123456789abcdef").write_text("x")
    (tmp_path / ".y.load-agreement").symlink_to(outside)
    save_version(tmp_path, "step-1", 1)
    assert names(mine) == sorted([*kept, "folder"])
    assert names(mine / "folder") == ["opening"]
    assert names(outside) == ["alive-0-0123456789abcdef"]
    for name in kept:
        (mine / name).unlink()
    shutil.rmtree(mine / "folder")
    (mine / gone[0]).write_text("x")
    lock = hold_lock(mine / gone[0])
    save_version(tmp_path, "step-1", 1)
    assert names(mine) == [gone[0]], "one of its ranks lives"
    os.close(lock)
    save_version(tmp_path, "step-1", 1)
    assert not mine.exists()


def test_what_is_no_file_is_held(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    (tmp_path / "file").touch()
    assert is_held(tmp_path / "fifo") and is_held(tmp_path / "link") and is_held(tmp_path)
    assert not is_held(tmp_path / "file") and not is_held(tmp_path / "none")


def test_a_line_break_at_the_end_makes_another_name(tmp_path):
    save = "0" * 20
    for name in (f"{save}-r00000-000.safetensors", f".{save}.saving", f".{save}.metadata"):
        assert save_of(name) == save and save_of(f"{name}\n") is None
    assert not is_data_file(f"{save}-r00000-000.safetensors\n")
    assert not is_data_file(f"{save}-r0000\N{ARABIC-INDIC DIGIT ONE}-000.safetensors")


# ---------------------------------------------------------------- dropping old checkpoints


def test_folders_with_other_metadata_are_no_checkpoints(tmp_path):
    save_version(tmp_path, "step-1", 1)
    sound = (tmp_path / "step-1" / "metadata.json").read_bytes()
    for number, content in enumerate((b"{}", b"", b"null", b'{"format":"mine"}')):
        (tmp_path / f"other-{number + 5}").mkdir()
        (tmp_path / f"other-{number + 5}" / "metadata.json").write_bytes(content)
    for name, make in (("device-10", "/dev/zero"), ("loop-11", "metadata.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.json").symlink_to(make)
    (tmp_path / "fifo-12").mkdir()
    os.mkfifo(tmp_path / "fifo-12" / "metadata.json")
    assert checkpoint.checkpoints(tmp_path) == [tmp_path / "step-1"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"
    for number, content in enumerate(
        (sound[:-2], sound[:-2] + b"\n\n", sound.replace(b'"world_size":1', b'"world_size":2'))
    ):
        (tmp_path / f"damaged-{number + 20}").mkdir()
        (tmp_path / f"damaged-{number + 20}" / "metadata.json").write_bytes(content)
    shutil.copytree(tmp_path / "step-1", tmp_path / "cut-30")
    (data,) = (tmp_path / "cut-30").glob("*.safetensors")
    os.truncate(data, data.stat().st_size - 1)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"
    save_version(tmp_path, "step-2", 2)
    before = names(tmp_path)
    assert checkpoint.keep_last(tmp_path, 2) == []
    assert checkpoint.keep_last(tmp_path, 1) == [tmp_path / "step-1"]
    assert names(tmp_path) == sorted(set(before) - {"step-1"}), "folders of others, and newer ones, are not removed"


def test_a_removal_that_is_killed_is_finished_by_the_next_save(tmp_path):
    save_version(tmp_path, "step-1", 1)
    save_version(tmp_path, "step-2", 2)
    in_a_killed_process(cleanup, "remove_files", checkpoint.keep_last, tmp_path, 1)
    assert stray_files(tmp_path)
    save_version(tmp_path, "step-3", 3)
    assert stray_files(tmp_path) == []
    assert names(tmp_path) == ["step-2", "step-3"]


def test_the_latest_of_hundreds_is_found_fast(tmp_path):
    checkpoint.save({"w": np.zeros(3)}, checkpoint_id=tmp_path / "step-0")
    for step in range(1, 400):
        shutil.copytree(tmp_path / "step-0", tmp_path / f"step-{step}")
    start = time.monotonic()
    for _ in range(5):
        assert checkpoint.latest(tmp_path) == tmp_path / "step-399"
    assert (time.monotonic() - start) / 5 < 0.5


# ---------------------------------------------------------------- ranks that come late


def test_a_rank_that_writes_after_its_save_has_failed_leaves_nothing(tmp_path):
    save = new_save_name()
    coordinator, late = checkpoint.FileSystemWriter(), checkpoint.FileSystemWriter()
    for writer in (coordinator, late):
        writer.open(tmp_path / "step-1")
    coordinator.begin(save)
    late.write_file(f"{save}-r00001-000.safetensors", [b"x"])

    def content():
        yield b"x"
        coordinator.end()

    with pytest.raises(OSError, match=r"-r00001-001.safetensors': the save has failed meanwhile, without this rank"):
        late.write_file(f"{save}-r00001-001.safetensors", content())
    with pytest.raises(FileNotFoundError, match=r"saving', which other ranks have written, cannot be found"):
        (tmp_path / "step-1").mkdir(exist_ok=True)
        late.write_file(f"{save}-r00001-002.safetensors", [b"x"])
    assert names(tmp_path / "step-1") == []
