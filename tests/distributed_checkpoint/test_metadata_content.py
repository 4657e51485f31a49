"""Metadata and objects whose checksums are right and whose content is not: an error that says what, and no surprise."""

from __future__ import annotations

import contextlib
import copy
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel import checkpoint
from hyper_parallel.core.distributed_checkpoint.base.checksum import crc32c
from hyper_parallel.core.distributed_checkpoint.base.grids import contiguous_runs
from hyper_parallel.core.distributed_checkpoint.base.metadata import ChunkStorageMetadata, TensorProperties
from hyper_parallel.core.distributed_checkpoint.format.index_check import boxes_problem
from hyper_parallel.core.distributed_checkpoint.format.json_state import decode_object, encode_object
from hyper_parallel.core.distributed_checkpoint.planning.chunks import ObjectSpec
from hyper_parallel.core.distributed_checkpoint.planning.planner import WriteItemType
from hyper_parallel.core.distributed_checkpoint.tools.rewrite import LayoutsByName, Selection, write_checkpoint
from hyper_parallel.core.distributed_checkpoint.tools.tensor_source import open_source
from tests.frameworks import equal, ours

BOXES = [((0, 0), (1, 3)), ((1, 0), (3, 1)), ((1, 1), (3, 2))]  # of (4, 3), and no grid


class BoxesPlanner(checkpoint.StandardSavePlanner):
    """Writes tensors of two dims in boxes that are no grid."""

    needs_global_plan = True

    def __init__(self, boxes=BOXES, twice=False):
        super().__init__()
        self._boxes, self._twice = boxes, twice

    def build_local_plan(self):
        items = []
        for key, spec in self.specs.items():
            if isinstance(spec, ObjectSpec):
                items.append(checkpoint.WriteItem(checkpoint.MetadataIndex(key), WriteItemType.BYTE_IO))
            for offsets, sizes in self._boxes if not isinstance(spec, ObjectSpec) else ():
                chunk = ChunkStorageMetadata(offsets, sizes)
                data = {"chunk": chunk, "properties": TensorProperties(spec.dtype), "size": spec.shape}
                index = checkpoint.MetadataIndex(key, offsets)
                items.append(checkpoint.WriteItem(index, WriteItemType.TENSOR, data))
        return checkpoint.SavePlan(items * (2 if self._twice else 1))


def wanted():
    return {
        "a": torch.arange(12.0).reshape(4, 3),
        "b": torch.arange(10).bfloat16(),
        "scalar": torch.tensor(5, dtype=torch.int16),
        "none": torch.empty(0, 3),
        "note": {"step": 3, "array": np.arange(4)},
    }


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Two checkpoints: one cut by layouts, one in boxes of a planner's own; the body of each, and what it holds."""
    root = tmp_path_factory.mktemp("sound")
    checkpoint.save(ours(wanted()), checkpoint_id=root / "whole")
    source = open_source(root / "whole")
    layouts = LayoutsByName({"dp": 2, "tp": 2}, {"a": ["tp", "None"], "b": ["dp+tp"]})
    write_checkpoint(Selection(source), root / "cut", layouts_by_name=layouts, max_file_bytes=40)
    source.close()
    boxed = {"a": wanted()["a"], "note": wanted()["note"]}
    checkpoint.save(ours(boxed), checkpoint_id=root / "boxed", planner=BoxesPlanner())
    return [(path, body_of(path), state) for path, state in ((root / "cut", wanted()), (root / "boxed", boxed))]


def body_of(path):
    return json.loads((path / "metadata.json").read_bytes())["body"]


def write_body(path, text):
    if not isinstance(text, str):
        text = json.dumps(text)
    frame = '{"format":"hyper-parallel checkpoint","version":1,"crc32c":"%08x","body":%s}\n'
    (path / "metadata.json").write_text(frame % (crc32c(text.encode()), text))


def load_into_blank(path, state):
    target = {key: ours(torch.zeros_like(value)) if torch.is_tensor(value) else None for key, value in state.items()}
    checkpoint.load(target, checkpoint_id=path)
    for key, value in state.items():
        if torch.is_tensor(value):
            assert equal(target[key], value), key
        else:
            np.testing.assert_equal(target[key], value)


CASES = [
    (lambda b: b.pop("files"), "'files'.* are missing"),
    (lambda b: b.update(more=1), "'more'.* are not known"),
    (lambda b: b.update(world_size=0), "world_size: 0 is not a number of ranks"),
    (lambda b: b.update(tensors=[]), r"tensors: \[\] is not a dict"),
    (lambda b: b["files"][0].__setitem__(0, "../../etc/passwd"), "passwd' is not the name of a data file in the"),
    (lambda b: b["files"][0].__setitem__(0, "/etc/passwd"), "is not the name of a data file in the checkpoint"),
    (lambda b: b["files"].append(b["files"][0]), "names a file twice"),
    (lambda b: b["files"][0].__setitem__(2, -1), "-1 is not a size"),
    (lambda b: b["files"][0].__setitem__(2, b["files"][0][2] + 1), "nothing is said about the last 1 of the"),
    (lambda b: b["tensors"]["a"].update(shape=[-4, 3]), r"the tensor 'a': \[-4, 3\] is not a shape"),
    (lambda b: b["tensors"]["a"].update(shape=[4, True]), "is not a shape"),
    (lambda b: b["tensors"]["a"].update(shape=[10**30, 3]), "is not a shape"),
    (lambda b: b["tensors"]["a"].update(shape=[1 << 40, 3]), "the tensor 'a' ends at byte"),
    (lambda b: b["tensors"]["a"].update(dtype="float31"), "'float31' is not a dtype that this version knows"),
    (lambda b: b["tensors"]["a"].update(grid=[[0, 2, 2], [0]]), "does not split shape"),
    (lambda b: b["tensors"]["a"].update(grid=[[1, 2], [0]]), "does not split shape"),
    (lambda b: b["tensors"]["a"].update(grid=[[0, 4], [0]]), "does not split shape"),
    (lambda b: b["tensors"]["a"].update(boxes=[]), "has not one of 'grid' and 'boxes'"),
    (
        lambda b: b["tensors"]["a"].update(shape=[3000] * 5, grid=[list(range(3000))] * 5, layout=None),
        "is not a 'file'",
    ),
    (lambda b: b["tensors"]["a"].update(shape=[3000] * 8), "is not a shape that anything could have"),
    (lambda b: b["tensors"]["none"].update(shape=[0, 1 << 62, 1 << 62]), "is not a shape that anything could have"),
    (lambda b: b["tensors"]["a"].update(shape=[1] * 65), "is not a shape"),
    (lambda b: b["tensors"]["a"]["file"].pop(), "is not a 'file' for each of 2 chunks"),
    (lambda b: b["tensors"]["a"]["file"].__setitem__(0, 99), "is not a 'file' below"),
    (lambda b: b["tensors"]["a"]["start"].__setitem__(0, -8), "is not a 'start' below"),
    (lambda b: b["tensors"]["a"]["start"].__setitem__(0, 10**9), "leaves a gap before it"),
    (lambda b: b["tensors"]["a"]["crc32c"].__setitem__(0, 1 << 32), "is not a 'crc32c' below"),
    (lambda b: b["tensors"]["a"].update(layout=17), "17 is not one of the 2 layouts"),
    (lambda b: b["layouts"][0].update(mesh_shape=[0]), "is not the shape of a mesh"),
    (lambda b: b["layouts"][0].update(mesh_shape=[1 << 62] * 100_000), "is not the shape of a mesh"),
    (lambda b: b["layouts"][0].update(rank_list=[0, 0, 1, 2]), "are not the ranks of mesh"),
    (lambda b: b["layouts"][0].update(cuts=[[5]]), "do not shard over the axes"),
    (lambda b: b["layouts"][0].update(cuts=[[1], [1]]), "do not shard over the axes"),
    (lambda b: b["layouts"][0].update(partials=[{}, 1]), "is not one for each axis"),
    (lambda b: b["tensors"].update(note=b["tensors"]["a"]), "'note'.* are objects too"),
    (lambda b: b["objects"]["note"].update(length=-1), "-1 is not a 'length'"),
    (lambda b: b["objects"]["note"].update(start=b["objects"]["note"]["start"] + 1), "the object 'note' ends at byte"),
    (lambda b: b["objects"]["note"].update(encoding=3), "is not the name of an encoding"),
    (lambda b: b["objects"].update(other=b["objects"]["note"]), "overlaps what comes before it"),
    (lambda b: b["objects"].pop("note"), "nothing is said about"),
]


@pytest.mark.parametrize(("change", "said"), CASES)
def test_content_that_cannot_be_true(sound, change, said):
    path, body, state = sound[0]
    body = copy.deepcopy(body)
    change(body)
    write_body(path, body)
    try:
        with pytest.raises(checkpoint.CorruptCheckpointError, match=rf"metadata.json' cannot be true: .*{said}"):
            load_into_blank(path, state)
        (problem,) = checkpoint.verify(path)
        assert "cannot be true" in problem
    finally:
        write_body(path, sound[0][1])
    load_into_blank(path, state)


@pytest.mark.parametrize(
    "text", ["[" * 100_000 + "]" * 100_000, "1" * 5000, '{"world_size":NaN}', "null", '"\\ud800"', "[1,2"], ids=len
)
def test_json_that_is_not_a_body(sound, text):
    path, body, _ = sound[0]
    write_body(path, text)
    try:
        with pytest.raises(checkpoint.CorruptCheckpointError, match="cannot be true"):
            checkpoint.read_metadata(path)
    finally:
        write_body(path, body)


def test_boxes_that_do_not_cover():
    assert boxes_problem(BOXES, (4, 3)) == ""
    assert boxes_problem([((), ())], ()) == ""
    assert boxes_problem([], (0, 3)) == ""
    assert "covers 9 of the 12" in boxes_problem([BOXES[0], BOXES[2]], (4, 3))
    assert "overlap: at [0, 0] and at [0, 2]" in boxes_problem([*BOXES, ((0, 2), (2, 1))], (4, 3))
    assert "no part of shape [4, 3]" in boxes_problem([((3, 0), (2, 3))], (4, 3))
    assert "overlap" in boxes_problem([((), ()), ((), ())], ())


def test_runs_of_a_box():
    for shape, offsets, sizes in [
        ((4, 3, 5), (1, 0, 0), (2, 3, 5)),
        ((4, 3, 5), (1, 1, 0), (2, 2, 5)),
        ((4, 3, 5), (0, 1, 2), (4, 1, 2)),
        ((7,), (2,), (3,)),
        ((), (), ()),
        ((2, 2), (0, 0), (2, 2)),
    ]:
        whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        runs = list(contiguous_runs(shape, offsets, sizes))
        found = [element for start, length in runs for element in range(start, start + length)]
        box = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        assert found == box.reshape(-1).tolist()
    assert len(list(contiguous_runs((4, 3, 5), (1, 0, 0), (2, 3, 5)))) == 1


# ---------------------------------------------------------------- by chance


def places(value, at=()):
    """The paths of all values in a JSON document."""
    yield at
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*at, key))


def value_at(document, path):
    for key in path:
        document = document[key]
    return document


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 50)
    | st.sampled_from(
        [-(2**63), 2**31, 2**32, 2**63, 2**64, 10**100, 1.5, -0.0, 1e300, "", "../x", "/x", "\0", "float32"]
    )
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(st.data())
def test_any_change_of_the_content_is_harmless_or_an_error(sound, data):
    path, body, state = sound[data.draw(st.integers(0, 1))]
    changed = copy.deepcopy(body)
    all_places = list(places(body))[1:]
    for _ in range(data.draw(st.integers(1, 2))):
        *parent, key = data.draw(st.sampled_from(all_places))
        what = data.draw(st.sampled_from(["replace", "replace", "move", "remove", "repeat"]))
        try:
            container = value_at(changed, parent)
            if what == "replace":
                container[key] = data.draw(ANY)
            elif what == "move":
                container[key] = copy.deepcopy(value_at(body, data.draw(st.sampled_from(all_places))))
            elif what == "remove":
                del container[key]
            elif isinstance(container, list):
                container.append(container[key])
        except (LookupError, TypeError):
            pass  # The first change has taken that place away.
    write_body(path, changed)
    try:
        problems = checkpoint.verify(path)
        try:
            load_into_blank(path, state)
        except (checkpoint.CorruptCheckpointError, ValueError):  # and no other error
            return
        assert problems == []
    finally:
        write_body(path, body)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_any_change_of_an_object_is_another_object_or_an_error(data):
    value = {
        "t": (1, {2}, b"xy"),
        "a": np.arange(3),
        "w": ours(torch.arange(2.0)),
        "d": {1: 2.5, "k": float("nan")},
        "z": 1j,
    }
    text, _, blobs = encode_object(value, "x")[0].partition(b"\0")
    document = json.loads(text)
    *parent, key = data.draw(st.sampled_from(list(places(document))[1:]))
    value_at(document, parent)[key] = data.draw(
        ANY | st.sampled_from(["set", "deque", "range", "Counter", "size", "dtype", "tensor", "path", "defaultdict"])
    )
    with contextlib.suppress(checkpoint.CorruptCheckpointError):  # and no other error
        decode_object(json.dumps(document).encode() + b"\0" + blobs, "json", "x")


# ---------------------------------------------------------------- plans that make no checkpoint


@pytest.mark.parametrize(
    ("planner", "said"),
    [
        (BoxesPlanner(BOXES[:2]), r"'a' covers 6 of the 12 elements of shape \[4, 3\]"),
        (BoxesPlanner([*BOXES, ((0, 0), (2, 2))]), r"'a' has boxes that overlap: at \[0, 0\] and at"),
        (BoxesPlanner(twice=True), r"the chunk of 'a' at \[0, 0\]: rank 0 writes it, and rank 0 too"),
    ],
)
def test_a_global_plan_that_makes_no_checkpoint(tmp_path, planner, said):
    with pytest.raises(ValueError, match=f"build_global_plan gave a plan that cannot be saved: {said}"):
        checkpoint.save(ours({"a": wanted()["a"]}), checkpoint_id=tmp_path / "c", planner=planner)
    assert not (tmp_path / "c").exists()
