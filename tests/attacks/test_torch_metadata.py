"""Metadata of torch's checkpoints that cannot be true, and what may stand in the place of its files."""

from __future__ import annotations

import os
import pickle

import pytest

from tests.attacks.confined import run_confined
from tests.attacks.torch_samples import (
    DATA_FILE,
    MEMOIZE,
    a_pickle,
    an_archive,
    named,
    number,
    recalled,
    tensor_pickle,
    text,
    write_checkpoint,
    write_tensor,
)

only_on = "torch"  # reads files; PyTorch writes some of them

_SAMPLES = "tests.attacks.torch_samples"


def _refusal(function: str, folder, seconds: float = 10, mebibytes: float = 60) -> str:
    outcome = run_confined(f"{_SAMPLES}:{function}", str(folder), seconds=seconds, mebibytes=mebibytes)
    assert outcome.error is not None and outcome.error[0] == "CorruptCheckpointError", outcome
    return outcome.error[1]


def _place(number: int = 0, length: int = 1 << 20):
    return DATA_FILE, number << 20, length


_HUGE = 1 << 62
_BAD_TENSORS = {
    "huge": ((_HUGE, _HUGE), [((0, 0), (_HUGE, _HUGE), _place())], "which no tensor has"),
    "huge and empty": ((_HUGE, 0, _HUGE), [], "which no tensor has"),
    "larger than its file": ((1 << 40,), [((0,), (1 << 40,), _place())], "is stored in 1048576 bytes"),
    "beyond 64 bits": ((1 << 64,), [((0,), (1 << 64,), _place())], "for a shape or for offsets"),
    "negative": ((-4,), [((0,), (-4,), _place())], "for a shape or for offsets"),
    "negative offset": ((4,), [((-4,), (8,), _place())], "for a shape or for offsets"),
    "true": ((True,), [((0,), (True,), _place())], "for a shape or for offsets"),
    "float": ((4.0,), [((0,), (4.0,), _place())], "for a shape or for offsets"),
    "list": ([4], [((0,), (4,), _place())], "for a shape or for offsets"),
    "33 dims": ((1,) * 33, [((0,) * 33, (1,) * 33, _place())], "at most 32 dims"),
    "other dims": ((4, 4), [((0,), (4,), _place())], "has shape [4, 4] and a chunk at [0] of size [4]"),
    "no chunks": ((4,), [], "0 chunks of 'w' do not cover shape [4]"),
    "a hole": ((4,), [((0,), (3,), _place())], "1 chunks of 'w' do not cover shape [4], each element once"),
    "outside": ((4,), [((2,), (4,), _place())], "do not cover"),
    "an overlap": ((4,), [((0,), (3,), _place()), ((1,), (3,), _place(1))], "2 chunks of 'w' do not cover shape [4]"),
    "an overlap and a hole": (
        (4, 4),
        [((0, 0), (2, 4), _place()), ((1, 0), (1, 4), _place(1)), ((3, 0), (1, 4), _place(2))],
        "3 chunks of 'w' do not cover shape [4, 4]",
    ),
    "stored nowhere": ((4,), [((0,), (2,), _place()), ((2,), (2,), None)], "more chunks than the 1 that are stored"),
    "shared bytes": (
        (4,),
        [((0,), (2,), _place()), ((2,), (2,), (DATA_FILE, 1000, 1000))],
        f"share bytes of the file '{DATA_FILE}'",
    ),
    "the same bytes": ((4,), [((0,), (2,), _place()), ((2,), (2,), _place())], "share bytes of the file"),
    "negative place": ((4,), [((0,), (4,), (DATA_FILE, -1, 100))], "is at -1 with length 100"),
    "negative length": ((4,), [((0,), (4,), (DATA_FILE, 100, -1))], "is at 100 with length -1"),
    "far place": ((4,), [((0,), (4,), (DATA_FILE, 1 << 63, 100))], "of its file"),
    "transformed": ((4,), [((0,), (4,), (DATA_FILE, 0, 100, ["zip"]))], "is stored transformed"),
    "absolute": ((4,), [((0,), (4,), ("/etc/passwd", 0, 100))], "the file '/etc/passwd', which is no name of a file"),
    "above": ((4,), [((0,), (4,), ("..", 0, 100))], "which is no name of a file"),
    "another folder": ((4,), [((0,), (4,), ("../x", 0, 100))], "which is no name of a file"),
    "no name": ((4,), [((0,), (4,), ("", 0, 100))], "which is no name of a file"),
    "NUL": ((4,), [((0,), (4,), ("a\0b", 0, 100))], "which is no name of a file"),
    "two lines": ((4,), [((0,), (4,), ("a\nb", 0, 100))], "the file 'a\\nb', which is no name of a file"),
    "long name": ((4,), [((0,), (4,), ("x" * 256, 0, 100))], "which is no name of a file"),
    "bytes for a name": ((4,), [((0,), (4,), (b"x", 0, 100))], "which is no name of a file"),
}


def _write_bad(folder, kind: str) -> None:
    shape, chunks, _ = _BAD_TENSORS[kind]
    write_checkpoint(folder, tensors={"w": (shape, chunks)})


def read_many(parent: str) -> dict[str, str]:
    """How each checkpoint in a folder is refused."""
    from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
    from tests.attacks.torch_samples import read_metadata

    refusals = {}
    for name in os.listdir(parent):
        try:
            refusals[name] = f"taken: {read_metadata(os.path.join(parent, name))}"
        except CorruptCheckpointError as error:
            refusals[name] = str(error)
    return refusals


def test_tensors_that_cannot_be(tmp_path):
    for kind in _BAD_TENSORS:
        _write_bad(tmp_path / kind, kind)
    outcome = run_confined("tests.attacks.test_torch_metadata:read_many", str(tmp_path), seconds=20, mebibytes=50)
    assert outcome.value.keys() == _BAD_TENSORS.keys()
    for kind, refusal in outcome.value.items():
        assert f"'{tmp_path / kind}/.metadata' is not the metadata of a torch checkpoint: " in refusal, (kind, refusal)
        assert _BAD_TENSORS[kind][2] in refusal and len(refusal) < 500, (kind, refusal)


def test_thousands_of_chunks_in_a_bad_order_take_no_time(tmp_path):
    """Strips along both dims, which any sweep compares with each other; read again box by box, and as a whole."""
    num = 2000
    boxes = [((at, 0), (1, num)) for at in range(num)] + [((num, at), (num, 1)) for at in range(num)]
    tensors = {"w": ((2 * num, num), [(*box, _place(place)) for place, box in enumerate(boxes)])}
    write_checkpoint(tmp_path / "whole", tensors=tensors)
    outcome = run_confined(f"{_SAMPLES}:read_metadata", str(tmp_path / "whole"), seconds=10, mebibytes=60)
    assert outcome.value == ["w"]
    assert "is cut short" in _refusal("read_tensor", tmp_path / "whole", mebibytes=100)
    boxes[5] = (4, 1), (1, num - 1)
    tensors = {"w": ((2 * num, num), [(*box, _place(place)) for place, box in enumerate(boxes)])}
    write_checkpoint(tmp_path / "overlap", tensors=tensors)
    assert f"the {2 * num} chunks of 'w' do not cover" in _refusal("read_metadata", tmp_path / "overlap")


def test_a_list_of_chunks_that_many_tensors_share(tmp_path):
    """Chunks without elements need no place: a hundred thousand of them under a hundred thousand names."""
    folder = "torch.distributed.checkpoint.metadata"
    chunk = named(folder, "ChunkStorageMetadata") + b")\x81}(" + text("offsets") + b"K\0\x85"
    chunk += text("sizes") + b"K\0\x85ub" + MEMOIZE
    chunks = b"](" + chunk + recalled(0) * 100_000 + b"e" + MEMOIZE
    properties = named(folder, "TensorProperties") + b")\x81" + named("torch", "float32") + b"\x85b" + MEMOIZE
    tensor = named(folder, "TensorStorageMetadata") + b")\x81}(" + text("chunks") + chunks
    tensor += text("properties") + properties + text("size") + b"K\0\x85ub" + MEMOIZE
    names = b"".join(text(str(place)) + recalled(3) for place in range(100_000))
    described = text("state_dict_metadata") + b"}(" + text("w") + tensor + names + b"u"
    metadata = named(folder, "Metadata") + b")\x81}(" + described + text("storage_data") + b"}ub"
    (tmp_path / ".metadata").write_bytes(a_pickle(metadata))
    assert "more chunks than the 0 that are stored" in _refusal("read_metadata", tmp_path, mebibytes=150)


def test_what_is_not_as_torch_has_it(tmp_path):
    """Records of another kind, names that are none, and values where records belong."""
    folder = "torch.distributed.checkpoint.metadata"
    record = named(folder, "Metadata") + b")\x81"
    for body, expected in (
        (b"N", "it has None where Metadata is expected"),
        (named(folder, "StorageMeta") + b")\x81}b", "it has a StorageMeta where Metadata is expected"),
        (record, "it has a Metadata where Metadata is expected"),
        (record + b"}b", "storage_data is None, not a dict"),
        (record + b"}(" + text("storage_data") + b"}" + text("state_dict_metadata") + b"]ub", "is a list, not a dict"),
        (
            record + b"}(" + text("storage_data") + b"}" + text("state_dict_metadata") + b"}K\1Nsub",
            "1 is not the name of a tensor or an object",
        ),
        (
            record + b"}(" + text("storage_data") + b"}K\1Ns" + text("state_dict_metadata") + b"}ub",
            "it has 1 where MetadataIndex is expected",
        ),
        (number(5) * 2, "it ends before what it has begun"),
        (b"(", "it ends before what it has begun"),
        (b"\x86", "cut short or damaged"),
        (b"X\1\0\0\0\xff", "cut short or damaged"),
    ):
        (tmp_path / ".metadata").write_bytes(a_pickle(body))
        assert expected in _refusal("read_metadata", tmp_path), body


def test_names_of_tensors_in_messages_stay_on_one_line(tmp_path):
    name = "a\n\x1b[2J" + "x" * 5000
    write_checkpoint(tmp_path, tensors={name: ((4,), [])})
    refusal = _refusal("read_metadata", tmp_path)
    assert "a\\n\\x1b[2Jxxx" in refusal and refusal.isprintable() and len(refusal) < 700


# ---------------------------------------------------------------- files


def _put(kind: str, path) -> None:
    path.unlink()
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["a FIFO", "a folder", "a device"])
def test_what_is_no_file(tmp_path, kind):
    write_tensor(tmp_path / "data", (1,), an_archive({"data.pkl": tensor_pickle((1,), (1,)), "data/0": b"abcd"}))
    _put(kind, tmp_path / "data" / DATA_FILE)
    expected = f"'{tmp_path / 'data' / DATA_FILE}' is {kind} where a file is expected; it is not read"
    assert _refusal("read_tensor", tmp_path / "data") == expected
    write_tensor(tmp_path / "metadata", (1,), b"")
    _put(kind, tmp_path / "metadata" / ".metadata")
    assert f".metadata' is {kind} where a file is expected" in _refusal("read_tensor", tmp_path / "metadata")


def test_large_files_are_not_read_for_nothing(tmp_path):
    """A metadata file and a data file of 1 TiB each, which take no space on the disk."""
    write_tensor(tmp_path, (1,), an_archive({"data.pkl": tensor_pickle((1,), (1,)), "data/0": b"abcd"}))
    with open(tmp_path / DATA_FILE, "r+b") as file:
        file.truncate(1 << 40)
    outcome = run_confined(f"{_SAMPLES}:read_tensor", str(tmp_path), seconds=10, mebibytes=30)
    assert outcome.value == 1
    write_checkpoint(tmp_path, tensors={"w": ((1 << 36,), [((0,), (1 << 36,), (DATA_FILE, 0, 1 << 40))])})
    with open(tmp_path / DATA_FILE, "r+b") as file:
        file.truncate(1 << 40)
    assert "is not a tensor that torch wrote: it does not end like an archive" in _refusal("read_tensor", tmp_path)
    with open(tmp_path / ".metadata", "r+b") as file:
        file.truncate(1 << 40)
    assert f"has {1 << 40} bytes, and such a file has no more than {1 << 30}" in _refusal("read_tensor", tmp_path)


def test_links_are_followed_to_files(tmp_path):
    """People link the files of a checkpoint to save space."""
    write_tensor(tmp_path / "there", (1,), an_archive({"data.pkl": tensor_pickle((1,), (1,)), "data/0": b"abcd"}))
    (tmp_path / "here").mkdir()
    for name in (".metadata", DATA_FILE):
        (tmp_path / "here" / name).symlink_to(tmp_path / "there" / name)
    assert run_confined(f"{_SAMPLES}:read_tensor", str(tmp_path / "here"), seconds=10).value == 1
    (tmp_path / "there" / DATA_FILE).unlink()
    assert f"'{tmp_path / 'here' / DATA_FILE}' is missing" in _refusal("read_tensor", tmp_path / "here")


def test_metadata_of_20000_tensors_is_read_in_a_moment(tmp_path):
    chunks = {f"layers.{n}.weight": ((8, 16), [((0, 0), (8, 16), _place(n))]) for n in range(20_000)}
    write_checkpoint(tmp_path, tensors=chunks)
    size = (tmp_path / ".metadata").stat().st_size
    assert pickle.loads((tmp_path / ".metadata").read_bytes()).state_dict_metadata.keys() == chunks.keys()
    outcome = run_confined(f"{_SAMPLES}:read_metadata", str(tmp_path), seconds=10, mebibytes=16 * size / 2**20)
    assert outcome.value == list(chunks)
