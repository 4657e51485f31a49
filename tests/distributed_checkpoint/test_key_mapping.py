"""Mappings of names and shapes: each rule against the plain computation, both ways, and what a wrong rule says."""

import itertools
import math

import numpy as np
import pytest

from hyper_parallel.core.distributed_checkpoint.foreign.folder_files import assemble, fill_box
from hyper_parallel.core.distributed_checkpoint.foreign.key_mapping import KeyMapping

only_on = "torch"  # once is enough: no framework takes part


def _values(shape, seed):
    return np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32)


class _Source:
    """Arrays in place of files."""

    def __init__(self, arrays):
        self.arrays = arrays

    def read(self, name, offsets, out):
        box = tuple(slice(at, at + size) for at, size in zip(offsets, out.shape, strict=True))
        assert self.arrays[name][box].shape == out.shape
        out[...] = self.arrays[name][box]


class _Entry:
    def __init__(self, shape):
        self.shape, self.dtype = shape, "float32"


def _known(arrays):
    return {name: (array.shape, "float32") for name, array in arrays.items()}


def _check_both_ways(rules, files, ours):
    """``ours`` is what the files are to become; every box of it, and the files from it again."""
    mapping = KeyMapping(rules)
    mapped = mapping.from_files(_known(files))
    assert mapped.our_shapes == {name: array.shape for name, array in ours.items()}
    pieces = mapped.by_our_name()
    for name, expected in ours.items():
        assert sum(math.prod(p.our_sizes) for p in pieces[name]) == expected.size
        ranges = [{(0, size), (0, size // 2), (size // 2, size), (max(size - 1, 0), size)} for size in expected.shape]
        for box in itertools.product(*ranges):
            got = np.zeros([end - start for start, end in box], np.uint32)
            fill_box(got, tuple(start for start, _ in box), pieces[name], _Source(files).read)
            assert np.array_equal(got, expected[tuple(slice(*side) for side in box)]), (name, box)
    back = mapping.to_files(_known(ours))
    kept = {name: array for name, array in files.items() if name not in mapped.dropped}
    assert back.file_shapes == {name: array.shape for name, array in kept.items()}
    for name, found in back.by_file_name().items():
        assert np.array_equal(assemble(_Entry(back.file_shapes[name]), found, ours), kept[name]), name
    assert sorted(name for group in back.groups for name in group) == sorted(ours)


def test_rename_transpose_and_drop():
    files = {
        "model.embed.weight": _values((5, 3), 0),
        "model.layers.0.up.weight": _values((4, 3), 1),
        "model.layers.11.up.weight": _values((2, 7), 2),
        "model.layers.0.conv": _values((2, 3, 4), 3),
        "model.scalar": _values((), 4),
        "model.layers.0.rotary.inv_freq": _values((2,), 5),
        "other": _values((1, 0), 6),
    }
    rules = [
        {"files": "**.inv_freq", "drop": True},
        {"files": "model.layers.*.up.weight", "ours": "blocks.*.up", "transpose": [1, 0]},
        {"files": "model.layers.*.conv", "ours": "blocks.*.conv", "transpose": [2, 0, 1]},
        {"files": "other", "ours": "other"},  # not a part of what the next one stands for on our side
        {"files": "model.**", "ours": "**"},
    ]
    ours = {
        "embed.weight": files["model.embed.weight"],
        "blocks.0.up": files["model.layers.0.up.weight"].T,
        "blocks.11.up": files["model.layers.11.up.weight"].T,
        "blocks.0.conv": files["model.layers.0.conv"].transpose(2, 0, 1),
        "scalar": files["model.scalar"],
        "other": files["other"],
    }
    _check_both_ways(rules, files, ours)


@pytest.mark.parametrize("transpose", [None, [1, 0]])
@pytest.mark.parametrize("groups", [1, 2])
def test_join_and_split(groups, transpose):
    """Queries, keys and values in one matrix on one side, in three on the other."""
    parts = {f"l.3.{n}": _values((rows, 5), i) for i, (n, rows) in enumerate((("q", 8), ("k", 2), ("v", 2)))}
    turned = [part.T if transpose else part for part in parts.values()]
    by_group = [np.split(part, groups, axis=0) for part in parts.values()]
    fused = np.concatenate([group[g] for g in range(groups) for group in by_group], axis=0)
    rule = {"join": 0, "sizes": [4, 1, 1], "groups": groups}
    joined_rule = {**rule, "files": ["l.*.q", "l.*.k", "l.*.v"], "ours": "h.*.qkv"}
    split_rule = {**rule, "ours": ["l.*.q", "l.*.k", "l.*.v"], "files": "h.*.qkv"}
    if transpose:
        files = dict(zip(parts, turned, strict=True))
        _check_both_ways([{**joined_rule, "transpose": transpose}], files, {"h.3.qkv": fused})
        _check_both_ways([{**split_rule, "transpose": transpose}], {"h.3.qkv": fused.T}, parts)
    else:
        _check_both_ways([joined_rule], parts, {"h.3.qkv": fused})
        _check_both_ways([split_rule], {"h.3.qkv": fused}, parts)


@pytest.mark.parametrize("stack", [0, 1, 2])
@pytest.mark.parametrize("transpose", [None, [1, 0]])
def test_stack(stack, transpose):
    experts = [_values((3, 4), i) for i in range(12)]  # 12: the number is a number, not a text
    mine = [e.T if transpose else e for e in experts]
    extra = {"transpose": transpose} if transpose else {}
    single = {f"layer.7.expert.{i}.w": e for i, e in enumerate(experts)}
    rule = {"files": "layer.*.expert.{n}.w", "ours": "layer.*.w", "stack": stack, **extra}
    _check_both_ways([rule], single, {"layer.7.w": np.stack(mine, axis=stack)})
    rule = {"ours": "layer.*.expert.{n}.w", "files": "layer.*.w", "stack": stack, **extra}
    ours = {name: e.T if transpose else e for name, e in single.items()}
    _check_both_ways([rule], {"layer.7.w": np.stack(experts, axis=stack)}, ours)


@pytest.mark.parametrize("join", [0, 1, 2])
@pytest.mark.parametrize("stack", [0, 1, 2])
def test_stack_and_join(stack, join):
    """Gate and up matrices of all experts in one tensor."""
    if join == stack:
        return
    inner = join - (join > stack)
    gates, ups = [[_values((4, 4), 10 * k + i) for i in range(3)] for k in range(2)]
    files = {f"e.{i}.gate": g for i, g in enumerate(gates)} | {f"e.{i}.up": u for i, u in enumerate(ups)}
    whole = np.stack([np.concatenate(pair, axis=inner) for pair in zip(gates, ups, strict=True)], axis=stack)
    rule = {"files": ["e.{n}.gate", "e.{n}.up"], "ours": "gate_up", "stack": stack, "join": join}
    _check_both_ways([rule], files, {"gate_up": whole})


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"files": "a", "ours": "b", "rotate": 1}, r"rule 0 of the mapping, .* unknown \['rotate'\]; a rule has drop"),
        ({"files": "a"}, "'ours' must be a name or a list"),
        ({"files": ["a", "b"], "ours": "c"}, "a list of names needs 'join'"),
        ({"files": "a", "ours": "c", "join": 0}, "'join' a list of names"),
        ({"files": ["a", "b"], "ours": ["c", "d"], "join": 0}, "one of the sides must be a single name"),
        ({"files": "a.*", "ours": "b"}, r"the same \* and \*\*"),
        ({"files": "a", "ours": "b", "transpose": [1, 1]}, "must name every dim once"),
        ({"files": ["a", "b"], "ours": "c", "join": 0, "sizes": [1]}, "1 'sizes' for 2 names"),
        ({"files": "a.{n}", "ours": "b"}, "'stack' goes with {n}"),
        ({"files": "a", "ours": "b", "stack": 0}, "'stack' goes with {n}"),
        ({"files": "a", "ours": "b", "groups": 2}, "'groups' is a count that goes with 'join'"),
        ({"files": "a", "ours": "b", "drop": True}, "a rule that drops has nothing but"),
        ("a", "rule 0 of the mapping, 'a': unknown a; a rule has"),
        ({"files": 1, "ours": "b"}, "'files' must be a name or a list"),
        ({"files": "a", "ours": "b", "transpose": "10"}, "'transpose' must be a list of dims"),
        ({"files": ["a", "b"], "ours": "c", "join": "0"}, "'join' must be a dim, 0 or more"),
        ({"files": ["a", "b"], "ours": "c", "join": -1}, "'join' must be a dim, 0 or more"),
        ({"files": ["a", "b"], "ours": "c", "join": 0, "sizes": [0, 0]}, "'sizes' must be a list of sizes"),
        ({"files": ["a", "b"], "ours": "c", "join": 0, "groups": 0}, "'groups' must be a count"),
    ],
)
def test_wrong_rules(rule, said):
    with pytest.raises(ValueError, match=said):
        KeyMapping([rule])


@pytest.mark.parametrize("rules", [{"files": "a", "ours": "b"}, "a", 3])
def test_what_is_no_list_of_rules(rules):
    with pytest.raises(ValueError, match="a mapping is a list of rules, got"):
        KeyMapping(rules)


@pytest.mark.parametrize(
    ("rule", "files", "ours"),
    [
        ({"files": ["q", "k"], "ours": "qk", "join": 2}, ("q", "k"), ("qk",)),
        ({"files": "e.{n}", "ours": "e", "stack": 3}, ("e.0", "e.1"), ("e",)),
    ],
)
def test_dims_that_there_are_not(rule, files, ours):
    mapping, shaped = KeyMapping([rule]), ((4, 4), "float32")
    key = "join" if "join" in rule else "stack"
    for function, names in ((mapping.from_files, files), (mapping.to_files, ours)):
        with pytest.raises(ValueError, match=rf"'{key}' names a dim that there is not: '.*' has shape \(4, 4\)"):
            function(dict.fromkeys(names, shaped))


def test_files_that_do_not_fit_the_rules():
    qkv = KeyMapping([{"files": ["q", "k"], "ours": "qk", "join": 0}])
    with pytest.raises(ValueError, match=r"found \['q'\] but not \['k'\]"):
        qkv.from_files({"q": ((2, 2), "float32")})
    with pytest.raises(ValueError, match=r"must have one dtype, got float32 of \['q'\], bfloat16 of \['k'\]"):
        qkv.from_files({"q": ((2, 2), "float32"), "k": ((2, 2), "bfloat16")})
    with pytest.raises(ValueError, match="cannot be joined along dim 0"):
        qkv.from_files({"q": ((2, 2), "float32"), "k": ((2, 3), "float32")})
    with pytest.raises(ValueError, match=r"dim 0 of shape \(5, 2\) is not divisible into 1 times \[1, 1\]"):
        qkv.to_files({"qk": ((5, 2), "float32")})
    experts = KeyMapping([{"files": "e.{n}", "ours": "e", "stack": 0}])
    with pytest.raises(ValueError, match=r"but not \['e.1'\]"):
        experts.from_files({"e.0": ((2,), "float32"), "e.2": ((2,), "float32")})
    told = r"found \['e.0', 'e.1', 'e.2', 'e.3'\] and 2 more but not \['e.5', 'e.6', 'e.7', 'e.8'\]$"
    with pytest.raises(ValueError, match=told):  # at once
        experts.from_files({f"e.{number}": ((2,), "float32") for number in (*range(5), 999_999_999)})
    assert set(experts.from_files({"e.0": ((2,), "float32"), "e.01": ((2,), "float32")}).our_shapes) == {"e", "e.01"}
    with pytest.raises(
        ValueError, match=r"to stack have different shapes: \(3,\) of \['e.2'\], \(2,\) of \['e.0', 'e.1'\]"
    ):
        experts.from_files({"e.0": ((2,), "float32"), "e.1": ((2,), "float32"), "e.2": ((3,), "float32")})
    with pytest.raises(ValueError, match="names that no rule fits: 'b' is made twice"):
        KeyMapping([{"files": "a", "ours": "b"}]).from_files({"a": ((2,), "float32"), "b": ((2,), "float32")})
