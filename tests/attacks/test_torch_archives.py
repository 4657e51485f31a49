"""Archives in torch's checkpoints that unfold into more than their file, or are none that torch writes."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile

import pytest
import torch

from tests.attacks.confined import run_confined
from tests.attacks.torch_samples import (
    DATA_FILE,
    a_pickle,
    an_archive,
    number,
    tensor_pickle,
    text,
    write_checkpoint,
    write_object,
    write_tensor,
)

only_on = "torch"  # reads files; PyTorch writes some of them

_SAMPLES = "tests.attacks.torch_samples"


def _refusal(function: str, folder, *args, mebibytes: float = 60) -> str:
    outcome = run_confined(f"{_SAMPLES}:{function}", str(folder), *args, seconds=10, mebibytes=mebibytes)
    assert outcome.error is not None and outcome.error[0] == "CorruptCheckpointError", outcome
    assert f"'{folder / DATA_FILE}'" in outcome.error[1]
    return outcome.error[1]


def _whole(num: int = 4, **more: bytes) -> bytes:
    return an_archive({"data.pkl": tensor_pickle((num,), (1,)), "data/0": bytes(4 * num), **more})


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_a_deflated_pickle_is_not_inflated(tmp_path, allow_pickle):
    """A member of 50 KB that would take 50 MB: as an object, also where the user allows pickles, and as a tensor."""
    data = a_pickle(b"C\0" + text("x" * 50_000_000) + b"\x86")
    write_object(tmp_path / "object", data, zipfile.ZIP_DEFLATED)
    assert (tmp_path / "object" / DATA_FILE).stat().st_size < 100_000
    refusal = _refusal("read_object", tmp_path / "object", allow_pickle, mebibytes=20)
    assert "cannot be loaded: 'data.pkl' is compressed or encrypted" in refusal
    archive = an_archive({"data.pkl": data, "data/0": bytes(4)}, zipfile.ZIP_DEFLATED)
    write_tensor(tmp_path / "tensor", (1,), archive)
    assert "'data.pkl' is compressed or encrypted" in _refusal("read_tensor", tmp_path / "tensor")


def test_a_long_pickle_of_a_tensor_is_not_read(tmp_path):
    write_tensor(tmp_path, (4,), an_archive({"data.pkl": b"x" * 50_000_000, "data/0": bytes(16)}))
    assert "its pickle has 50000000 bytes, more than 65536" in _refusal("read_tensor", tmp_path, mebibytes=20)


_LARGE = 1 << 29  # elements: 2 GiB
_ROWS, _WINDOWS = (1 << 15, 1 << 14), (1 << 14, 1 << 15)
_TENSORS = {
    "stride 0": ((_LARGE,), tensor_pickle((_LARGE,), (0,)), 4, "are not the 2147483648 of shape"),
    "stride 0 of rows": (_ROWS, tensor_pickle(_ROWS, (0, 1)), 4 << 14, "the 65536 bytes of its storage are not"),
    "overlapping windows": (_WINDOWS, tensor_pickle(_WINDOWS, (1, 1)), 1 << 18, "the 262144 bytes of its storage"),
    "scattered": ((2,), tensor_pickle((2,), (1 << 20,)), 8 << 20, "are not the 8 of shape [2]"),
    "cut short": ((8,), tensor_pickle((8,), (1,)), 16, "it is cut short"),
    "behind its end": ((4,), tensor_pickle((4,), (1,), offset=1), 16, "it is cut short"),
    "far stride": ((2,), tensor_pickle((2,), (1 << 62,)), 16, "it is cut short"),
    "another shape": ((4,), tensor_pickle((2, 2), (2, 1)), 16, "it has shape [2, 2] and dtype float32, unlike"),
    "another dtype": ((4,), tensor_pickle((4,), (1,), kind="IntStorage"), 16, "dtype int32, unlike the metadata"),
    "negative stride": ((4,), tensor_pickle((4,), (-1,)), 16, "holds a tensor of a StoragePart, 0, [4], [-1]"),
    "negative offset": ((4,), tensor_pickle((4,), (1,), offset=-1), 16, "holds a tensor of a StoragePart, -1"),
    "no storage": ((4,), tensor_pickle((4,), (1,), kind="Size"), 16, "its pickle holds a storage of Size"),
    "no tensor": ((4,), a_pickle(number(5)), 16, "its pickle holds something else"),
}


@pytest.mark.parametrize("kind", _TENSORS)
def test_tensors_that_their_storage_cannot_hold(tmp_path, kind):
    shape, data_pkl, num_bytes, expected = _TENSORS[kind]
    _write_with_hole(tmp_path, shape, data_pkl, num_bytes)
    refusal = _refusal("read_tensor", tmp_path)
    assert expected in refusal and "'w' at [0" in refusal


def _write_with_hole(folder, shape, data_pkl: bytes, num_bytes: int) -> None:
    """A tensor in an archive that has a hole of 4 GiB in front of its directory, which takes no space on the disk: as
    far as the metadata can tell, there is room for every shape."""
    archive = an_archive({"data.pkl": data_pkl, "data/0": bytes(num_bytes)})
    *_, num, size, start, _ = struct.unpack("<4s4H2LH", archive[-22:])
    hole = 4 << 30
    entries, end_at = archive[start : start + size], hole + size
    end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, num, num, size, hole)
    end += struct.pack("<4sLQL", b"PK\6\7", 0, end_at, 1)
    end += struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, num, num, size, 0xFFFFFFFF, 0)
    place = (DATA_FILE, 0, end_at + len(end))
    write_checkpoint(folder, archive[:start], tensors={"w": (shape, [((0,) * len(shape), shape, place)])})
    with open(folder / DATA_FILE, "r+b") as file:
        file.seek(hole)
        file.write(entries + end)


def _patched(archive: bytes, at: int, form: str, *values: int) -> bytes:
    at += len(archive) if at < 0 else 0
    patch = struct.pack(form, *values)
    return archive[:at] + patch + archive[at + len(patch) :]


def _archives() -> dict[str, tuple[bytes, str]]:
    whole = _whole()
    (start,) = struct.unpack_from("<L", whole, len(whole) - 6)
    written = io.BytesIO()
    torch.save(torch.zeros(4), written)
    real = written.getvalue()
    many = _whole(**{f"x{n}": b"" for n in range(20_000)})
    long_name = _whole(**{"x" * 100: b""})
    return {
        "nothing": (b"", "no archive"),
        "no archive": (b"x" * 100, "it does not end like an archive of torch's"),
        "many members": (many, "a directory of 20002 members"),
        "a comment": (an_archive({"data.pkl": b""}, comment=b"PK\5\6" + bytes(30)), "it does not end like an archive"),
        "twice": (_whole(**{"data.pkl!": tensor_pickle((4,), (1,))}), "it has two members 'data.pkl'"),
        "no pickle": (an_archive({"data/0": bytes(16)}), "it has no member 'data.pkl'"),
        "no storage": (an_archive({"data.pkl": tensor_pickle((4,), (1,))}), "it has no member 'data/0'"),
        "more members than there are": (_patched(long_name, -12, "<H", 5), "its directory is cut short"),
        "far directory": (_patched(whole, -6, "<L", 1 << 31), "is not what torch writes"),
        "long directory": (_patched(whole, -10, "<L", 1 << 31), "is not what torch writes"),
        "encrypted": (_patched(whole, start + 8, "<H", 1), "'data.pkl' is compressed or encrypted"),
        "checksum": (_patched(whole, start + 16, "<L", 1), "the checksum of its pickle"),
        "long member": (_patched(whole, start + 20, "<2L", 1 << 31, 1 << 31), "'data.pkl' is not in it"),
        "large numbers that are not there": (
            _patched(whole, start + 20, "<2L", 0xFFFFFFFF, 0xFFFFFFFF),
            "its pickle",
        ),
        "far member": (_patched(whole, start + 42, "<L", 1 << 31), "'data.pkl' is not in it"),
        "a member in the directory": (_patched(whole, start + 42, "<L", start), "'data.pkl' is not in it"),
        "long name": (_patched(whole, start + 28, "<H", 0xFFFF), "its directory is damaged"),
        "end of 64 bits elsewhere": (_patched(real, -34, "<Q", 0), "its end is not where it says"),
        "end of 64 bits far away": (_patched(real, -34, "<Q", (1 << 64) - 1), "its end is not where it says"),
        "end of 64 bits damaged": (_patched(real, -98, "<L", 0), "its end is damaged"),
        "far directory of 64 bits": (_patched(real, -50, "<Q", (1 << 64) - 1), "is not what torch writes"),
        "long directory of 64 bits": (_patched(real, -58, "<Q", 1 << 63), "is not what torch writes"),
        "many members of 64 bits": (_patched(real, -66, "<Q", 1 << 63), "is not what torch writes"),
    }  # fmt: skip


def read_many(parent: str) -> dict[str, str]:
    """How each checkpoint in a folder is refused."""
    import os

    from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
    from tests.attacks.torch_samples import read_tensor

    refusals = {}
    for name in os.listdir(parent):
        try:
            refusals[name] = f"taken: {read_tensor(os.path.join(parent, name))}"
        except CorruptCheckpointError as error:
            refusals[name] = str(error)
    return refusals


def test_archives_that_torch_does_not_write(tmp_path):
    samples = _archives()
    for name, (archive, _) in samples.items():
        place = (DATA_FILE, 0, max(len(archive), 16))
        write_checkpoint(tmp_path / name, archive.ljust(16, b"x"), tensors={"w": ((4,), [((0,), (4,), place)])})
    outcome = run_confined("tests.attacks.test_torch_archives:read_many", str(tmp_path), seconds=20, mebibytes=50)
    assert outcome.value.keys() == samples.keys()
    for name, refusal in outcome.value.items():
        assert f"'w' at [0] in '{tmp_path / name / DATA_FILE}' is not a tensor that torch wrote: " in refusal, refusal
        assert samples[name][1] in refusal, (name, refusal)


def test_a_tensor_in_an_archive_made_by_hand(tmp_path):
    """The samples above differ in one thing from what is read well."""
    write_tensor(tmp_path, (4,), _whole())
    assert run_confined(f"{_SAMPLES}:read_tensor", str(tmp_path), seconds=10).value == 4


def test_an_allowed_pickle_is_bounded_by_its_file_and_named_in_errors(tmp_path):
    write_object(tmp_path, pickle.dumps([1, 2]))
    assert run_confined(f"{_SAMPLES}:read_object", str(tmp_path), True, seconds=10).value == "list"
    write_object(tmp_path, a_pickle(b"\x8e" + struct.pack("<Q", 1 << 60)))
    refusal = _refusal("read_object", tmp_path, True)
    assert f"the object 'thing' in '{tmp_path / DATA_FILE}' cannot be loaded: MemoryError" in refusal
    place = (DATA_FILE, 0, 1 << 40)
    write_checkpoint(tmp_path, b"x" * 100, objects={"thing": place})
    assert "is cut short" in _refusal("read_object", tmp_path, True)
    with open(tmp_path / DATA_FILE, "r+b") as file:
        file.truncate(1 << 40)
    assert "it does not end like an archive of torch's" in _refusal("read_object", tmp_path, True)
