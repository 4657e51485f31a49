"""Objects as bytes, and the bits of a tensor."""

from __future__ import annotations

import collections
import math
import pathlib

import numpy as np
import pytest
import torch

from hyper_parallel import checkpoint
from hyper_parallel.core.distributed_checkpoint.format.json_state import decode_object, encode_object
from hyper_parallel.core.distributed_checkpoint.planning.flatten import flatten
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import Platform
from tests.frameworks import equal, on_mindspore, ours, theirs

VALUES = [
    *(None, True, 0, -(2**100), 1.5, -0.0, math.inf, -math.inf, "", "\0ü$", b"", b"\0\xff", bytearray(b"ab")),
    *((1, (2, [3])), {"a"}, frozenset({1.5}), {}, [], {"$": "tuple"}, {"a": {"$": 1}}, 1 + 2j),
    {1: "int", "1": "str", None: 0, (1, 2): [3], b"k": {"deep": {2.5: ()}}},
    range(1, 9, 2),
    slice(None, 3),
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.Counter("hello"),
    collections.deque([1, 2], maxlen=5),
    collections.defaultdict(list, {"a": [1]}),
    pathlib.Path("a/b"),
    ours(torch.bfloat16),
    *(() if on_mindspore else (torch.Size([2, 3]),)),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_objects_come_back_as_they_were(value):
    data, encoding = encode_object(value, "x")
    assert encoding == "json"
    back = decode_object(data, encoding, "x")
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_integers_of_more_digits_than_python_prints():
    value = [10**5000, {"a": -(7**9000)}]
    assert decode_object(*encode_object(value, "x"), "x") == value


def test_arrays_and_odd_floats_come_back_bit_for_bit():
    nan = np.frombuffer(b"\x01\x00\x00\x00\x00\x00\xf8\xff", "<f8")
    value = {
        "nan": float(nan[0]),
        "arrays": [np.arange(6).astype(dtype).reshape(2, 3) for dtype in ("u1", "<f2", ">i4", "c16", "?")],
        "text": np.array(["a", "bcd"]),
        "time": np.array(["2020-01-01"], "M8[D]"),
        "scalars": (np.float32(1.5), np.int64(-1), np.bool_(True)),
        "empty": np.zeros((0, 3)),
        "order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "tensors": (*ours((torch.arange(3).bfloat16(), torch.tensor(True), torch.empty(0, 2))), nan),
    }
    back = decode_object(*encode_object(value, "x"), "x")
    assert np.float64(back["nan"]).tobytes() == nan.tobytes()
    np.testing.assert_equal(back["arrays"], value["arrays"])
    assert [array.dtype for array in back["arrays"]] == [array.dtype for array in value["arrays"]]
    for name in ("text", "time", "empty", "order"):
        np.testing.assert_array_equal(back[name], value[name])
        assert back[name].dtype == value[name].dtype
    assert back["scalars"] == value["scalars"]
    assert [type(scalar) for scalar in back["scalars"]] == [np.float32, np.int64, np.bool_]
    back["arrays"][0][0, 0] = 9  # they can be written to
    for mine, given in zip(back["tensors"][:3], value["tensors"][:3], strict=True):
        assert equal(mine, given)
        assert mine.dtype == given.dtype


class Own:
    def __eq__(self, other):
        return isinstance(other, Own)

    __hash__ = None


def test_what_json_cannot_hold_is_an_error_or_a_pickle_by_choice(tmp_path):
    state = {"a": {"b": [Own()]}}
    with pytest.raises(
        TypeError, match=r"'a'\['b'\]\[0\] holds a .*\.Own, which cannot .* without pickle.*allow_pickle=True"
    ):
        checkpoint.save(state, checkpoint_id=tmp_path / "x")
    assert not (tmp_path / "x").exists()
    planner = checkpoint.StandardSavePlanner(allow_pickle=True)
    checkpoint.save(state | {"n": 1}, checkpoint_id=tmp_path / "x", planner=planner)
    target = {"a": None, "n": None}
    with pytest.raises(ValueError, match=r"'a' was saved as a pickle, .*allow_pickle=True"):
        checkpoint.load(target, checkpoint_id=tmp_path / "x")
    checkpoint.load(target, checkpoint_id=tmp_path / "x", planner=checkpoint.StandardLoadPlanner(allow_pickle=True))
    assert target == state | {"n": 1}


@pytest.mark.parametrize(
    "value", [Own(), np.array([None]), [np.zeros(2, [("a", "i4")])], {"f": print}, (np.ma.array([1]),)]
)
def test_other_kinds_are_refused(value):
    with pytest.raises(TypeError, match=r"'x'(\[0\]|\['f'\])? holds a"):
        encode_object(value, "x")


def test_a_value_that_holds_itself_is_refused():
    value: list = []
    value.append(value)
    with pytest.raises(ValueError, match="'x' contains itself or is nested too deeply"):
        encode_object(value, "x")
    with pytest.raises(ValueError, match="'x' contains itself or is nested too deeply"):
        flatten({"w": torch.ones(1), "x": value})


@pytest.mark.parametrize("data", [b"", b"{", b'{"$":"what","items":[]}', b'{"$":"bytes","at":[0,9]}', b'{"$":"set"}'])
def test_bytes_that_are_no_object(data):
    with pytest.raises(checkpoint.CorruptCheckpointError, match="the object 'x' cannot be decoded"):
        decode_object(data, "json", "x")


def test_a_platform_without_its_own_way_to_the_bits_has_numpys():
    platform = get_platform()
    for values in ours((torch.tensor([1.5, -2.0]), torch.tensor(7), torch.tensor([True, False]), torch.zeros(0, 2))):
        raw = Platform.raw_array(platform, values)
        np.testing.assert_array_equal(raw, platform.raw_array(values))
        target = ours(torch.zeros_like(theirs(values)))
        Platform.set_raw(platform, target, raw)
        assert equal(target, values)
    with pytest.raises(TypeError, match="dtype bfloat16 has no raw bits on this platform"):
        Platform.raw_array(platform, ours(torch.zeros(2).bfloat16()))
