"""Objects that a stranger wrote: JSON that decodes to another object or is refused, in bounded time and memory."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import numpy as np
import torch

from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.format.json_state import decode_object, encode_object
from hyper_parallel.platform import get_platform
from tests.attacks.confined import run_confined
from tests.attacks.mutations import damaged_bytes, damaged_data, try_all

only_on = "torch"  # objects are alike everywhere, but for the tensors among them

get_platform()  # here, so that its memory does not count as that of an attack
_LIMIT = 100 << 20


def read_object_bombs() -> list[str]:
    blob = bytes(1 << 20)
    modulus = (1 << 61) - 1
    bombs = {
        "the same bytes for many": [{"$": "bytes", "at": [0, len(blob)]}] * 10_000,
        "the same bytes for many arrays": [{"$": "ndarray", "dtype": "|u1", "shape": [1 << 20], "at": [0, 1 << 20]}]
        * 999,
        "elements of no bytes": {"$": "ndarray", "dtype": "|V0", "shape": [1 << 62], "at": [0, 0]},
        "a dtype that is a shape": {"$": "ndarray", "dtype": "(1000000,1000000)f4", "shape": [0], "at": [0, 0]},
        "a dtype that is a list": {"$": "ndarray", "dtype": [["a", "f4"]], "shape": [0], "at": [0, 0]},
        "a dtype of objects": {"$": "ndarray", "dtype": "|O8", "shape": [1], "at": [0, 8]},
        "a large shape": {"$": "ndarray", "dtype": "<f4", "shape": [2**62, 2**62], "at": [0, 0]},
        "many dims": {"$": "ndarray", "dtype": "<f4", "shape": [1] * 100_000, "at": [0, 4]},
        "less than nothing": {"$": "bytes", "at": [5, -5]},
        "a tensor of a large shape": {"$": "tensor", "dtype": "float32", "shape": [2**62, 2**62], "at": [0, 0]},
        "a dtype that is none": {"$": "dtype", "text": "load"},
        "keys of one hash": {"$": "set", "items": [number * modulus for number in range(50_000)]},
        "names of one hash": {"$": "dict", "items": [[number * modulus, 0] for number in range(50_000)]},
    }
    problems = []
    for name, value in bombs.items():
        start = time.process_time()
        try:
            decode_object(json.dumps(value).encode() + b"\0" + blob, "json", "x")
            problems.append(f"{name}: taken")
        except CorruptCheckpointError:
            pass
        if (took := time.process_time() - start) > 1:
            problems.append(f"{name}: {took:.1f} s")
    for name, text in {"deep": b"[" * 500_000, "twice": b'{"a":1,"a":2}', "not a number": b"NaN", "empty": b""}.items():
        try:
            decode_object(text, "json", "x")
            problems.append(f"{name}: taken")
        except CorruptCheckpointError:
            pass
    return problems


def test_objects_that_are_bombs():
    outcome = run_confined(f"{__name__}:read_object_bombs", seconds=60, framework="torch")
    assert outcome.error is None and outcome.value == []


def test_objects_are_still_what_they_were():
    value = {1: {2, 3}, "keys": frozenset(range(5000)), -1: {-1, -2}, "bytes": [b"ab", bytearray(b"cd")], "none": set()}
    data, encoding = encode_object(value, "x")
    assert decode_object(data, encoding, "x") == value


def fuzz_objects(num: int, folder: str) -> dict[str, int]:
    value = {"t": (1, {2}, b"xy", 2**9000), "a": np.arange(3), "w": torch.arange(2.0), "d": {1: 2.5, "k": float("nan")}}
    value |= {"z": 1j, "r": range(3), "s": torch.Size([1, 2]), "p": Path("x"), "dtype": torch.float32}
    text, _, blobs = encode_object(value, "x")[0].partition(b"\0")
    texts = (json.dumps(changed).encode() + b"\0" + blobs for changed in damaged_data([json.loads(text)], num // 2))
    raw = damaged_bytes([text + b"\0" + blobs], num - num // 2)
    inputs = itertools.chain(texts, raw)
    return try_all(inputs, lambda data: decode_object(data, "json", "x"), (CorruptCheckpointError,), folder, _LIMIT)


def test_any_damage_is_harmless_or_found(tmp_path, sweep):
    folder = tmp_path / "work"
    folder.mkdir()
    num = 10_000 if sweep else 2000
    arguments = {"seconds": 900 if sweep else 60, "framework": "torch"}
    outcome = run_confined(f"{__name__}:fuzz_objects", num, str(folder), **arguments)
    assert outcome.error is None, outcome.error
    assert outcome.value["taken"] + outcome.value["refused"] == num
    assert min(outcome.value.values()) > num // 10
    print(f"objects: {outcome.value}, {outcome.grown:.1f} MiB")
