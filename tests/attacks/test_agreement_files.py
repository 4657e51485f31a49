"""Agreement through files (``use_collectives=False``) where somebody else puts files: none is run, nobody waits."""

from __future__ import annotations

import os
import pickle
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel import DeviceMesh, Layout, Replicate, Shard, init_device_mesh
from hyper_parallel.core.distributed_checkpoint.agreement import messages
from hyper_parallel.core.distributed_checkpoint.agreement.agreement import Report
from hyper_parallel.core.distributed_checkpoint.agreement.agreement_folder import AgreementFolder
from hyper_parallel.core.distributed_checkpoint.agreement.file_agreement import FileAgreement, Hello, Opening
from hyper_parallel.core.distributed_checkpoint.agreement.messages import MessageError, decode_message, encode_message
from hyper_parallel.core.distributed_checkpoint.background.writer_links import Door
from hyper_parallel.core.distributed_checkpoint.base.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.base.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StoredBytes,
    TensorProperties,
    TensorStorageMetadata,
)
from hyper_parallel.core.distributed_checkpoint.format.shard_file import RankReport, WrittenFile, WrittenItem
from hyper_parallel.core.distributed_checkpoint.load import Share, _ReadReport
from hyper_parallel.core.distributed_checkpoint.planning import planner
from hyper_parallel.core.distributed_checkpoint.planning.chunks import ObjectSpec, TensorSpec
from hyper_parallel.platform.shared.region import Region
from tests.attacks.confined import run_confined
from tests.attacks.mutations import damaged_bytes, damaged_data, try_all

only_on = "torch"  # files and plain data, no framework takes part

_LIMIT = 100 << 20
LONG = 60.0


class Gadget:
    """Pickled, it makes a file when it is read."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._file,)


def agree(directory: Path, num_ranks: int = 2, timeout: float = LONG, value: Any = 1) -> list[Any]:
    """What a round gives on each rank, or its error."""
    results: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            agreement = FileAgreement(directory, rank, num_ranks, timeout)
            try:
                results[rank] = agreement.round("counting", lambda: value, lambda values: values)
            finally:
                agreement.close()
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads), "a rank still waits"
    return results


# ---------------------------------------------------------------- the folder


def _writable_by_all(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def _writable_by_group(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)


def _of_another_user(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)


def _a_link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to("elsewhere")


def _a_link_to_nothing(folder: Path) -> None:
    folder.symlink_to("nowhere")


def _a_file(folder: Path) -> None:
    folder.touch()


REFUSED = {
    _writable_by_all: "has the mode 0777, so that others can write to it",
    _writable_by_group: "has the mode 0770, so that others can write to it",
    _of_another_user: r"belongs to user 12345, not to user \d+, who runs this rank",
    _a_link: "is a link or a file, not a folder",
    _a_link_to_nothing: "is a link or a file, not a folder",
    _a_file: "is a link or a file, not a folder",
}


@pytest.mark.parametrize("make", REFUSED)
def test_a_folder_that_others_can_change_is_refused_and_nothing_in_it_is_read(tmp_path, make):
    if make is _of_another_user and os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    folder, ran = tmp_path / ".c.save-agreement", tmp_path / "ran"
    make(folder)
    if folder.is_dir():
        for name in ("opening", "hello-1"):
            (folder / name).write_bytes(pickle.dumps(Gadget(ran)))
    started = time.monotonic()
    for error in agree(folder):
        assert isinstance(error, CheckpointError)
        with pytest.raises(
            CheckpointError, match=rf"'.*save-agreement', in which .*, {REFUSED[make]}; remove it, or leave use_collec"
        ):
            raise error
    assert time.monotonic() - started < 10
    assert not ran.exists()


def test_the_folder_and_its_files_are_this_users_alone_whatever_the_umask(tmp_path):
    folder = tmp_path / "a"
    before = os.umask(0)
    try:
        coordinator = FileAgreement(folder, 0, 2)
        other = FileAgreement(folder, 1, 2)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        messages = [path for path in folder.iterdir() if not path.name.startswith("alive")]
        assert len(messages) == 2 and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in messages)
    finally:
        os.umask(before)
    coordinator.close()
    other.close()


def test_what_no_agreement_has_written_stays(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir(mode=0o700)
    for name in ("notes.txt", "report-1", "opening\n", "hello-x", "verdict-ab-1-1.bak"):
        (folder / name).write_text("precious")
    (folder / "alive-folder").mkdir()
    assert agree(folder) == [[1, 1]] * 2
    assert {path.name for path in folder.iterdir()} == {
        *("notes.txt", "report-1", "opening\n", "hello-x", "verdict-ab-1-1.bak", "alive-folder")
    }


# ---------------------------------------------------------------- files in it


def _pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Gadget(path.parent.parent / "ran")))


def _garbage(path: Path) -> None:
    path.write_bytes(os.urandom(1000))


def _empty(path: Path) -> None:
    path.touch()


def _deep(path: Path) -> None:
    path.write_bytes(b"[" * 1_000_000)


def _other_record(path: Path) -> None:
    path.write_bytes(encode_message(Report(1)))


def _outside(path: Path) -> None:
    hello = Hello("../../victim", Path("/proc/sys/kernel/random/boot_id").read_text().strip(), True)
    path.write_bytes(encode_message(Opening(hello, {1: hello}) if path.name == "opening" else hello))


def _huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "victim")


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


PLANTED = (_pickle, _garbage, _empty, _deep, _other_record, _outside, _huge, _fifo, _link, _endless)


@pytest.mark.parametrize("name", ["opening", "hello-1"])
@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_hello_or_opening_is_passed_over(tmp_path, plant, name):
    folder, victim = tmp_path / "a", tmp_path / "victim"
    folder.mkdir(mode=0o700)
    victim.write_text("precious")
    plant(folder / name)
    assert agree(folder) == [[1, 1]] * 2
    assert not (tmp_path / "ran").exists()
    assert victim.read_text() == "precious"
    assert not folder.exists()


def _a_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("plant", [*(plant for plant in PLANTED if plant is not _other_record), _a_folder])
def test_a_planted_report_or_verdict_is_an_error_that_names_the_file(tmp_path, plant):
    """By somebody of the same user, who has seen the number of the meeting."""
    (tmp_path / "victim").write_text("precious")
    folder = tmp_path / "a"
    coordinator = FileAgreement(folder, 0, 2, LONG)
    number = coordinator._own.number
    plant(folder / f"report-{number}-1-1")
    other = FileAgreement(folder, 1, 2, 0.2)
    with pytest.raises(CheckpointError, match=rf"counting failed on rank 1: MessageError: '.*report-{number}-1-1'"):
        coordinator.round("counting", lambda: 0)
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "victim").read_text() == "precious"
    coordinator._timeout = 0.0
    coordinator.close()
    other.close()

    folder = tmp_path / "b"
    other = FileAgreement(folder, 1, 2, LONG)
    coordinator = FileAgreement(folder, 0, 2, LONG)
    number = coordinator._own.number
    coordinator._folder.put("opening", Opening(coordinator._own, {1: other._own}))
    plant(folder / f"verdict-{number}-1-1")
    with pytest.raises(CheckpointError, match=rf"MessageError: '.*verdict-{number}-1-1'"):
        other.round("counting", lambda: 0)
    other.close()
    coordinator.close()


# ---------------------------------------------------------------- what is said


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"), rank_list=range(6), init_backend=False)


def samples() -> list[Any]:
    """One of each kind of message."""
    layouts = (Layout.from_placements(_mesh(), (Shard(1), Replicate()), 2),)
    index = MetadataIndex("layer.0.weight", (0, 4), 1)
    chunk = ChunkStorageMetadata((0, 4), (8, 4))
    tensor = planner.TensorWriteData(chunk, TensorProperties("bfloat16", True), (8, 8))
    items = [
        planner.WriteItem(index, planner.WriteItemType.TENSOR, tensor),
        planner.WriteItem(MetadataIndex("step"), planner.WriteItemType.BYTE_IO, None, {"a": 1}),
    ]
    reads = [planner.ReadItem(planner.LoadItemType.TENSOR, index, (0, 0), index, (1, 0), (2, 2))]
    metadata = Metadata(
        {
            "layer.0.weight": TensorStorageMetadata(TensorProperties(), (8, 8), [chunk], layouts[0].to_dict()),
            "step": BytesStorageMetadata("json", 4),
        },
        {"any": ("plain", {"data", 2}, frozenset([3]), b"\0\1", float("inf"), -1.5, None)},
        {index: StoredBytes("file", 0, 64, 77)},
        6,
        1,
    )
    files, written = (
        [WrittenFile("abc", 100, 64, 5)],
        [WrittenItem(0, 0, 64, 9, None), WrittenItem(0, 64, 4, 9, "json")],
    )
    hello = Hello("0123456789abcdef", "host", True)
    return [
        Report(RankReport(files, written)),
        Report(None, "saving failed", True),
        Report((b"f" * 16, (None, ("lost", "why"), True), "name")),
        Report({"w": TensorSpec((8, 8), "float32", layouts, (0, 3), True), "step": ObjectSpec()}),
        Report(("name", None, planner.SavePlan(items, None, {("a", 1): [2]}))),
        Report(planner.LoadPlan(reads)),
        Report(_ReadReport(7, [Share(0, 1, (0, 0), (2, 2), 99)], False)),
        Report([Region((0, 4), (8, 4))]),
        Report(metadata),
        Report(Door("", "host", 1234, b"s" * 32)),
        hello,
        Opening(hello, {1: hello, 2: hello._replace(is_locked=False)}),
    ]


def test_every_kind_of_message_arrives_as_it_was():
    for sample in samples():
        found = decode_message(encode_message(sample))
        assert found == sample and type(found) is type(sample)
        assert repr(found) == repr(sample)
    known = {name for names in messages._RECORDS.values() for name in names}
    told = b"".join(map(encode_message, samples())).decode()
    assert {name for name in known if f'"$":"{name}"' in told} == known, "there is a sample of each record"


class Foreign:
    """A planner's own object."""


def test_what_no_message_may_hold_is_an_error_on_all_ranks_that_says_what_to_do(tmp_path):
    said = (
        r"a tests.attacks.test_agreement_files.Foreign cannot be sent to other ranks without a process group: only "
        r"plain data and this library's own records can; leave use_collectives at True"
    )
    for error in agree(tmp_path / "a", 3, value={"plan": [Foreign()]}):
        with pytest.raises(CheckpointError, match=rf"counting failed on ranks 1, 2: TypeError: {said}"):
            raise error
    endless: list[Any] = []
    endless.append(endless)
    for value in (endless, 10**5000, planner.SavePlan([Foreign()]), type("Report", (), {})()):
        with pytest.raises(TypeError, match="cannot be sent to other ranks"):
            encode_message(value)


@pytest.mark.parametrize(
    "text",
    [
        '{"$":"posix.system","is":["true"]}',
        '{"$":"Gadget","is":[]}',
        '{"$":"__class__","is":[]}',
        '{"$":"Report","is":[]}',
        '{"$":"Report","is":[1,2,3]}',
        '{"$":"Report","is":{"value":1}}',
        '{"$":"Report"}',
        '{"$":["Report"],"is":[]}',
        '{"$":"Hello","is":["0123456789abcdef","host",1]}',
        '{"$":"Opening","is":[{"$":"Report","is":[1,null,false]},{}]}',
        '{"$":"WriteItemType","is":["device"]}',
        '{"$":"dict","is":[[[1],2]]}',
        '{"$":"set","is":[[1]]}',
        '{"$":"bytes","is":"!"}',
        '{"$":"Layout","is":[{"device_type":"cpu","mesh_shape":[1000000000,1000],"mesh_dim_names":null,"rank_list":[0],'
        '"cuts":[[0]],"partials":[null,null]}]}',
        "1" * 5000,
    ],
)
def test_bytes_that_are_no_message_are_refused(text):
    with pytest.raises(MessageError, match="what was read is no message of a rank"):
        decode_message(text.encode())


# ---------------------------------------------------------------- damaged in every way


def try_damaged_messages(folder: str, num: int) -> dict[str, int]:
    texts = [encode_message(sample) for sample in samples()]
    inputs = [*damaged_bytes(texts, num // 2), *map(_json, damaged_data([_parsed(text) for text in texts], num // 2))]
    return try_all(iter(inputs), decode_message, (MessageError,), folder, _LIMIT)


def try_damaged_files(folder: str, num: int) -> dict[str, int]:
    hello, opening = (encode_message(sample) for sample in samples()[-2:])
    place = AgreementFolder(Path(folder) / "agreement", "0123456789abcdef")
    place.make()

    def read(data: bytes) -> None:
        place.put_encoded("opening", data)
        place.put_encoded("hello-1", data)
        for rank in (0, 1):
            agreement = FileAgreement(place.path, rank, 2, 0.0)
            agreement._heard()
            agreement.close()
            os.unlink(place.path / f"alive-{rank}-{agreement._number}")

    return try_all(damaged_bytes([hello, opening], num), read, (CheckpointError,), folder, _LIMIT)


def _json(value: Any) -> bytes:
    return messages.json.dumps(value).encode()


def _parsed(data: bytes) -> Any:
    return messages.json.loads(data)


@pytest.mark.parametrize(("reader", "quick"), [("try_damaged_messages", 4000), ("try_damaged_files", 400)])
def test_damaged_messages_are_read_or_refused(tmp_path, sweep, reader, quick):
    num = 10_000 if sweep else quick
    (tmp_path / "work").mkdir()
    outcome = run_confined(f"{__name__}:{reader}", str(tmp_path / "work"), num, seconds=300)
    assert outcome.error is None, outcome.error
    assert outcome.value["taken"] + outcome.value["refused"] == num
    assert outcome.value["refused"] > num / 10 or reader == "try_damaged_files"
