"""Pickles in checkpoints of torch's that reach for classes and functions of the process, or for its memory and time."""

from __future__ import annotations

import builtins
import collections
import importlib
import pathlib
import pickle
import struct
import types
from typing import Any

import pytest

from tests.attacks.confined import run_confined
from tests.attacks.torch_samples import (
    MEMOIZE,
    a_pickle,
    called,
    named,
    number,
    read_metadata,
    read_object,
    recalled,
    tensor_pickle,
    text,
    write_object,
)

only_on = "torch"  # reads files; PyTorch writes some of them

_HERE = "tests.attacks.test_torch_pickles"
_SAMPLES = "tests.attacks.torch_samples"
_OURS = ("records", "pickle_cost", "pickle", "globals", "plain", "metadata", "archive")

# ---------------------------------------------------------------- classes and functions


def _facts(thing: Any) -> Any:
    """All that could be changed about a class or function, without its parts' parts."""
    if isinstance(thing, types.FunctionType):
        return thing.__code__, thing.__defaults__, thing.__kwdefaults__, id(thing.__globals__), dict(thing.__dict__)
    return dict(vars(thing)) if isinstance(thing, type) else None


def _reachable() -> dict[str, Any]:
    """Classes and functions that a pickle might reach: those named in it, and those of the reader itself."""
    modules = [builtins, collections, pathlib, types, pickle, importlib.import_module("_codecs")]
    foreign = "hyper_parallel.core.distributed_checkpoint.foreign"
    modules += [importlib.import_module(f"{foreign}.torch_pickles.torch_{name}") for name in _OURS]
    modules.append(importlib.import_module(f"{foreign}.torch_dcp"))
    things = {f"{module.__name__}.{name}": thing for module in modules for name, thing in vars(module).items()}
    facts = {name: _facts(thing) for name, thing in things.items()}
    for name, thing in things.items():
        if isinstance(thing, type) and thing.__module__.startswith("hyper_parallel"):
            facts |= {f"{name}.{method}": _facts(part) for method, part in vars(thing).items()}
    return {name: found for name, found in facts.items() if found is not None}


def attack_classes(folder: str, reader: str) -> dict[str, Any]:
    """What changed in the process by reading, and how the reading ended."""
    read = {"metadata": read_metadata, "object": read_object}[reader]
    path = pathlib.Path("a") / "b"
    before = _reachable()
    try:
        read(folder)
        ended = "taken"
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
    after = _reachable()
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return {"ended": ended, "changed": changed, "path": str(path), "new path": str(pathlib.Path("c/d"))}


def _given(target: bytes, *states: bytes) -> bytes:
    return a_pickle(target + b"".join(state + b"b" for state in states))


def _by_slots(**values: bytes) -> bytes:
    """The state (None, {...}): pickle's unpickler sets each as an attribute, of a class too."""
    return b"N}(" + b"".join(text(name) + value for name, value in values.items()) + b"u\x86"


_EVIL = text("evil")
_TARGETS = {
    "pathlib": named("pathlib", "PurePath"),
    "posix path": named("pathlib", "PosixPath"),
    "Counter": named("collections", "Counter"),
    "OrderedDict": named("collections", "OrderedDict"),
    "defaultdict": named("collections", "defaultdict"),
    "deque": named("collections", "deque"),
    "set": named("builtins", "set"),
    "list": named("builtins", "list"),
    "encode": named("_codecs", "encode"),
    "layout": named("torch.serialization", "_get_layout"),
    "tensor": named("torch._utils", "_rebuild_tensor_v2"),
    "parameter": named("torch._utils", "_rebuild_parameter"),
    "record": named("torch.distributed.checkpoint.metadata", "Metadata"),
    "enum": named("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    "storage": named("torch", "FloatStorage"),
    "dtype": named("torch", "float32"),
    "made path": called("pathlib", "PosixPath", text("x")),
    "made Counter": called("collections", "Counter", b"}"),
    "made OrderedDict": called("collections", "OrderedDict"),
    "made set": called("builtins", "set", b"]"),
    "made tuple": b")",
    "made dict": b"}",
}
_STATES = {
    "slots": _by_slots(
        _str=_EVIL, __str__=_EVIL, __fspath__=_EVIL, __defaults__=b")", __code__=b"N", __globals__=b"}", get=_EVIL
    ),
    "attributes": b"}(" + text("_str") + _EVIL + text("__init__") + _EVIL + text("make") + _EVIL + b"u",
    "setstate": b"}" + text("__setstate__") + _EVIL + b"s",
}


@pytest.mark.parametrize("reader", ["metadata", "object"])
def test_no_class_or_function_is_changed(tmp_path, reader):
    for what, target in _TARGETS.items():
        for how, state in _STATES.items():
            folder = tmp_path / f"{what} {how}"
            write_object(folder, _given(target, state))
            if reader == "metadata":
                (folder / ".metadata").write_bytes(_given(target, state))
    outcome = run_confined(f"{_HERE}:attack_many", str(tmp_path), reader, seconds=60, mebibytes=100)
    assert len(outcome.value) == len(_TARGETS) * len(_STATES)
    for name, found in outcome.value.items():
        assert found["changed"] == [] and (found["path"], found["new path"]) == ("a/b", "c/d"), (name, found)
        expected = "which does not belong into the metadata" if reader == "metadata" else "which must be allowed"
        is_record = name.startswith("record")
        assert expected in found["ended"] or (is_record and "expected" in found["ended"]), (name, found)


def attack_many(parent: str, reader: str) -> dict[str, Any]:
    return {path.name: attack_classes(str(path), reader) for path in pathlib.Path(parent).iterdir()}


def test_a_record_takes_attributes_once_and_nothing_else(tmp_path):
    record = named("torch.distributed.checkpoint.metadata", "Metadata") + b")\x81"
    for state, what in (
        (b"}b}b", "names a Metadata with attributes of its own"),
        (b"]b", "names a Metadata with attributes of its own"),
        (b"Na", "names a Metadata that is appended to"),
        (text("kind") + _EVIL + b"s", "names a Metadata whose items are set"),
        (b"(N\x90", "names a Metadata that is added to"),
        (b")R", "names a call of a Metadata"),
        (b")\x81", "names a new object of a Metadata"),
    ):
        (tmp_path / ".metadata").write_bytes(a_pickle(record + state))
        outcome = run_confined(f"{_SAMPLES}:read_metadata", str(tmp_path), seconds=10)
        assert outcome.error and what in outcome.error[1], (state, outcome)


def test_a_process_goes_on_as_before(tmp_path):
    """The attack as it was found: every path of the process was the attacker's."""
    state = _by_slots(_str=text(str(tmp_path)))
    metadata = a_pickle(named("pathlib", "PurePath") + state + b"b0" + called("collections", "OrderedDict"))
    (tmp_path / ".metadata").write_bytes(metadata)
    outcome = run_confined(f"{_HERE}:attack_classes", str(tmp_path), "metadata", seconds=10)
    assert outcome.value["changed"] == [] and outcome.value["new path"] == "c/d"
    assert "names PurePath with attributes of its own, which does not belong" in outcome.value["ended"]


# ---------------------------------------------------------------- memory and time


def _doubled(one: bytes, levels: int) -> bytes:
    """A value in a tuple twice, that in a tuple twice, and so on: small in memory."""
    parts = [one + MEMOIZE]
    for level in range(levels):
        parts.append(recalled(level) * 1 + b"\x86" + MEMOIZE)
    return b"".join(parts)


def _same_hash_ints(num: int, value: bytes = b"") -> bytes:
    return b"".join(number(place * ((1 << 61) - 1)) + value for place in range(1, num + 1))


def _same_hash_complex(num: int) -> bytes:
    """The hash of a complex number is that of its real part + 1000003 times that of its imaginary part."""
    pairs = (struct.pack(">d", -1000003.0 * place) + b"G" + struct.pack(">d", place) for place in range(1, num + 1))
    return b"".join(recalled(0) + b"G" + pair + b"\x86R" for pair in pairs)


def _bombs() -> dict[str, tuple[bytes, str]]:
    """By name a pickle, and what is said about it as an object."""
    complex_name = named("builtins", "complex") + MEMOIZE
    long_text = text("x" * 1_000_000) + MEMOIZE
    encode = named("_codecs", "encode") + MEMOIZE + text("latin1") + MEMOIZE
    again = recalled(1) + recalled(0) + recalled(2) + b"\x86R"
    ordered = named("collections", "OrderedDict") + MEMOIZE
    deque = named("collections", "deque") + MEMOIZE
    return {
        "bytearray of a number": (a_pickle(called("builtins", "bytearray", number(3 << 30))), "bytearray of 32212254"),
        "bytes of a number": (a_pickle(called("builtins", "bytes", number(3 << 30))), "bytes of 3221225472"),
        "list of a range": (
            a_pickle(called("builtins", "list", called("builtins", "range", b"K\0", number(1 << 40), b"K\1"))),
            "a call of list",
        ),
        "set of a range": (
            a_pickle(called("builtins", "set", called("builtins", "range", b"K\0", number(1 << 40), b"K\1"))),
            "set of a range",
        ),
        "deque of a range": (
            a_pickle(called("collections", "deque", called("builtins", "range", b"K\0", number(1 << 40), b"K\1"))),
            "deque of a range",
        ),
        "Counter of a text": (a_pickle(called("collections", "Counter", text("abc"))), "Counter of 'abc'"),
        "memo": (a_pickle(b"Nr" + struct.pack("<I", 1 << 27)), "place 134217728 of its memo"),
        "memo out of reach": (a_pickle(recalled(1 << 27)), "cut short or damaged"),
        "long number": (a_pickle(b"\x8b" + struct.pack("<I", (1 << 31) - 1) + b"1" * 100), "a number of 2147483647"),
        "number of a million bytes": (a_pickle(number(1 << 8_000_000)), "a number of 1000001 bytes"),
        "long bytes": (a_pickle(b"\x8e" + struct.pack("<Q", 1 << 60)), "go beyond its end"),
        "long text": (a_pickle(b"\x8d" + struct.pack("<Q", (1 << 64) - 1)), "go beyond its end"),
        "long bytearray": (a_pickle(b"\x96" + struct.pack("<Q", 1 << 40)), "go beyond its end"),
        "sets": (a_pickle(b"(" + b"\x8f" * 1_000_000 + b"t"), "make far more than any that torch writes"),
        "deques": (
            a_pickle(deque + b"(" + (recalled(0) + b")R") * 150_000 + b"t"),
            "make far more than any that torch writes",
        ),
        "OrderedDicts": (
            a_pickle(ordered + b"(" + (recalled(0) + b")R") * 150_000 + b"t"),
            "make far more than any that torch writes",
        ),
        "marks": (a_pickle(b"(" * 1_000_000), "parts nested 1000 deep"),
        "deep tuples": (a_pickle(b")" + b"\x85" * 1_000_000), "parts nested 200 deep"),
        "deep lists": (a_pickle(b"]" * 100_000 + b"a" * 99_999), "parts nested 200 deep"),
        "doubled": (a_pickle(_doubled(text("x"), 60)), "the same parts again and again"),
        "doubled text": (a_pickle(_doubled(text("x" * 100_000), 8)), "the same parts again and again"),
        "doubled key": (a_pickle(b"}" + _doubled(text("x"), 60) + b"Ns"), "a key of more than 20 parts"),
        "doubled key of a set": (a_pickle(b"\x8f(" + _doubled(text("x"), 60) + b"\x90"), "a key of more than 20 parts"),
        "doubled in a message": (a_pickle(called("collections", "Counter", _doubled(b"N", 60))), "Counter of a tuple"),
        "deep key": (a_pickle(b"})" + b"\x85" * 100_000 + b"Ns"), "a key of more than 20 parts"),
        "contains itself": (a_pickle(b"]" + MEMOIZE + recalled(0) + b"a"), "a list that contains itself"),
        "in two": (a_pickle(b"]" + MEMOIZE + b"}K\0" + recalled(0) + b"sa"), "a list that contains itself"),
        "same hash": (a_pickle(b"\x8f(" + _same_hash_ints(60_000) + b"\x90"), "more than 16 keys with the same hash"),
        "same hash of a dict": (
            a_pickle(b"}(" + _same_hash_ints(60_000, b"N") + b"u"),
            "more than 16 keys with the same hash",
        ),
        "same hash of complex": (
            a_pickle(b"(" + complex_name + b"\x8f(" + _same_hash_complex(20_000) + b"\x90t"),
            "more than 16 keys with the same hash",
        ),
        "a text encoded again": (
            a_pickle(b"(" + long_text + encode + again * 100_000 + b"t"),
            "make far more than any that torch writes",
        ),
        "a long key compared again": (
            a_pickle(b"\x8f(" + long_text + text("x" * 1_000_000) + MEMOIZE + recalled(1) * 300_000 + b"\x90"),
            "make far more than any that torch writes",
        ),
        "a set made of a list again": (
            a_pickle(
                b"(" + named("builtins", "set") + MEMOIZE + b"](" + b"K\1" * 50_000 + b"e\x85" + MEMOIZE
                + (recalled(0) + recalled(1) + b"R") * 50_000 + b"t"
            ),
            "make far more than any that torch writes",
        ),
        "key twice": (a_pickle(b"}(K\1NK\1Nu"), "is in a dict twice"),
        "duplicated": (a_pickle(b"N22"), "the opcode 0x32 of pickle's"),
        "extension": (a_pickle(b"\x82\1"), "the opcode 0x82 of pickle's"),
        "instance": (a_pickle(b"(iposix\nsystem\n"), "the opcode 0x69 of pickle's"),
        "new object with names": (a_pickle(b")" + b"}" + b"\x92"), "the opcode 0x92 of pickle's"),
        "protocol": (b"\x80\x06N.", "does not start like a pickle of protocol 2 to 5"),
        "old protocol": (b"(lp0\n.", "does not start like a pickle of protocol 2 to 5"),
        "persistent": (a_pickle(text("x") + b"Q"), "a tensor inside an object"),
        "a tensor": (tensor_pickle((1,), (1,)), "a tensor inside an object"),
        "a text for a codec": (a_pickle(called("_codecs", "encode", text("x"), text("zip"))), "_codecs.encode of 'x'"),
        "other names": (a_pickle(named("builtins", "eval")), "builtins.eval"),
        "names of another module": (a_pickle(named("hyper_parallel", "checkpoint")), "hyper_parallel.checkpoint"),
        "a function as a factory": (
            a_pickle(called("collections", "defaultdict", named("_codecs", "encode"))),
            "defaultdict of encode",
        ),
    }  # fmt: skip


_BOMBS = _bombs()


@pytest.mark.parametrize("bomb", _BOMBS)
def test_pickles_that_ask_for_much(tmp_path, bomb):
    data, expected = _BOMBS[bomb]
    write_object(tmp_path / "object", data)
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / ".metadata").write_bytes(data)
    limit = 50 + 40 * len(data) / 2**20
    folders = str(tmp_path / "object"), str(tmp_path / "metadata")
    (of_object, of_metadata) = run_confined(f"{_SAMPLES}:read_as_both", *folders, seconds=10, mebibytes=limit).value
    assert expected in of_object, of_object
    if of_object.startswith("CorruptCheckpointError"):
        assert f"the object 'thing' in '{tmp_path}/object/__0_0.distcp' cannot be loaded" in of_object
    assert of_metadata.startswith(f"CorruptCheckpointError: '{tmp_path}/metadata/.metadata'")
    assert len(of_metadata) < 1000
