"""Reading a model's structure: which layers are cut by outputs, which by inputs, what stays whole.

Note [Names first, then sizes]
In the blocks of a model (the members of its module lists) linear layers come in pairs: the first is cut by its outputs,
the second by its inputs, and what lies between is cut and needs no communication. Well-known names say which is which.
Where a name is not known, the sizes do: inside one part of a block, the last layer that leads back to the width of the
block is cut by inputs, and those that start from that width by outputs. A layer of a block that fits neither stops the
plan, by name: the user decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from hyper_parallel.platform import get_platform

# fmt: off
_COLUMN_NAMES = frozenset((
    "q_proj", "k_proj", "v_proj", "query", "key", "value", "q", "k", "v", "q_lin", "k_lin", "v_lin", "wq", "wk", "wv",
    "qkv_proj", "qkv", "Wqkv", "query_key_value", "c_attn", "q_attn",
    "gate_proj", "up_proj", "gate_up_proj", "gate", "up", "w1", "w3",
    "fc1", "c_fc", "fc_in", "dense_h_to_4h", "wi", "wi_0", "wi_1", "linear1", "lin1", "intermediate.dense",
    "q_b_proj", "kv_b_proj",
))
_ROW_NAMES = frozenset((
    "o_proj", "out_proj", "o", "out_lin", "c_proj", "attention.dense", "self_attention.dense", "output.dense", "output",
    "down_proj", "down", "w2", "fc2", "fc_out", "dense_4h_to_h", "wo", "linear2", "lin2",
))
# Layers to a narrow width that all heads share: each rank has the whole of them.
_WHOLE_NAMES = frozenset(("q_a_proj", "kv_a_proj", "kv_a_proj_with_mqa"))
# fmt: on
# Layers that compute several projections at once, which the code behind them takes apart; their parts, in order.
_FUSED_NAMES = {
    **dict.fromkeys(("c_attn", "qkv_proj", "qkv", "Wqkv"), ("query", "key", "value")),
    "gate_up_proj": ("gate", "up"),
}
# Parts whose steps depend on values, by the end of their class's name: every rank computes them on whole tensors.
_MIXTURES = ("MoeBlock", "MoE", "Moe", "SparseMLP")


@dataclass
class Roles:
    """Paths of modules by what a plan does with them."""

    blocks: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)  # whose input all columns inside share
    columns: list[str] = field(default_factory=list)
    fused: dict[str, dict[str, int]] = field(default_factory=dict)  # of the columns: names and widths of the parts
    rows: list[str] = field(default_factory=list)
    attentions: list[str] = field(default_factory=list)  # of the framework's own kind, with one weight for q, k and v
    mixtures: list[str] = field(default_factory=list)
    vocabularies: list[str] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)


BY_HAND = "write a plan by hand, a dict from paths to ColwiseParallel() and RowwiseParallel()"


class PlanError(ValueError):
    """No plan could be made; the message names the module that stopped it."""


class _Unreadable(Exception):
    """Why a block cannot be read, and the modules that would have to stay whole."""

    def __init__(self, reason: str, to_replicate: list[str]) -> None:
        super().__init__(reason)
        self.to_replicate = to_replicate


def read_roles(model: Any, keep_whole: Iterable[str]) -> Roles:
    """The roles of the modules of ``model``; those that match ``keep_whole`` have none."""
    first, answer = None, list(keep_whole)
    while True:
        try:
            roles = _read_roles(model, answer)
        except _Unreadable as unreadable:
            first = first or unreadable
            answer += dict.fromkeys(_starred(path) for path in unreadable.to_replicate)
            continue
        if first is None:
            return roles
        what = "it" if len(answer) == 1 else "what cannot be told"
        advice = f"Leave {what} replicated with keep_whole={answer}, or write its styles into the plan"
        raise PlanError(f"{first}. {advice if roles.columns or roles.attentions else f'Nothing else can: {BY_HAND}'}")


def _read_roles(model: Any, keep_whole: Iterable[str]) -> Roles:
    platform = get_platform()
    modules = dict(platform.get_cells_and_names(model))
    kept = [path for path in modules if any(_is_inside(path, pattern) for pattern in keep_whole)]
    skipped = frozenset(kept)
    roles = Roles(blocks=[path for path in modules if _is_list_member(path, modules)])
    outermost = [path for path in roles.blocks if not any(_is_below(path, other) for other in roles.blocks)]
    for block in outermost or [""]:
        _read_block(block, modules, roles, skipped, refuse=bool(outermost))
    _read_ends(model, modules, roles, skipped)
    return roles


def _is_inside(path: str, pattern: str) -> bool:
    names = path.split(".")
    return any(_names_match(names[:count], pattern.split(".")) for count in range(1, len(names) + 1))


def _names_match(names: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_names_match(names[start:], patterns[1:]) for start in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], patterns[0]) and _names_match(names[1:], patterns[1:])


def _is_list_member(path: str, modules: Mapping[str, Any]) -> bool:
    parent, _, name = path.rpartition(".")
    return name.isdigit() and type(modules[parent]).__name__ in ("ModuleList", "CellList")


def _is_below(path: str, other: str) -> bool:
    return path.startswith(f"{other}.") if other else bool(path)


def _below(path: str, modules: Mapping[str, Any]) -> list[str]:
    return [other for other in modules if _is_below(other, path)]


def _read_block(block: str, modules: Mapping[str, Any], roles: Roles, skipped: frozenset[str], refuse: bool) -> None:
    """Sort the linear layers of one block; see Note [Names first, then sizes]."""
    platform = get_platform()
    inside = [path for path in [block, *_below(block, modules)] if path not in skipped]
    roles.mixtures += [
        path
        for path in inside
        if (type(modules[path]).__name__.endswith(_MIXTURES) or f"{path}.experts" in modules)
        and any(
            platform.linear_weight_dims(modules[other]) is None and _weights(modules[other])
            for other in _below(path, modules)
        )
    ]
    roles.attentions += [path for path in inside if type(modules[path]).__name__ == "MultiheadAttention"]
    taken = [*roles.mixtures, *roles.attentions]
    linears = [
        path
        for path in inside
        if platform.linear_weight_dims(modules[path]) is not None and not any(_is_below(path, other) for other in taken)
    ]
    named = {path: _role_by_name(path, block) for path in linears}
    if linears and all(named.values()) and {"column", "row"} <= set(named.values()):
        columns = [path for path in linears if named[path] == "column"]
        rows = [path for path in linears if named[path] == "row"]
    else:
        columns, rows = _roles_by_size(block, linears, modules, refuse)
    roles.columns += columns
    roles.rows += rows
    roles.fused |= {path: parts for path in columns if (parts := _fused_parts(path, rows, modules))}
    roles.parts += sorted({_part_of(path, block) for path in columns} - {block}, key=inside.index)
    if refuse:
        _refuse_other_weights(inside, taken, modules)


def _role_by_name(path: str, block: str) -> str | None:
    names = path.removeprefix(f"{block}.").split(".")
    for count in (2, 1):
        name = ".".join(names[-count:])
        if name in _COLUMN_NAMES:
            return "column"
        if name in _ROW_NAMES:
            return "row"
        if name in _WHOLE_NAMES:
            return "whole"
    return None


def _fused_parts(path: str, rows: list[str], modules: Mapping[str, Any]) -> dict[str, int] | None:
    """The projections that a layer computes at once, by its name and the width that the layer behind it takes."""
    platform = get_platform()
    parent, _, name = path.rpartition(".")
    names = _FUSED_NAMES.get(name)
    behind = [_sizes(row, modules)[0] for row in rows if row.rpartition(".")[0] == parent]
    if names is None or len(behind) != 1 or not platform.asks_subclasses or not platform.linear_function(modules[path]):
        return None
    if platform.has_no_memory(
        platform.own_parameters(modules[path])["weight"]
    ):  # initial values are made for the whole
        return None
    total, width = _sizes(path, modules)[1], behind[0]
    if f"{parent}.q_attn" in modules:  # a cross-attention, whose queries come from elsewhere
        names = names[1:]
    if len(names) == 2:
        return dict.fromkeys(names, width) if total == 2 * width else None
    shared = (total - width) // 2  # keys and values may have fewer heads
    fits = shared > 0 and width + 2 * shared == total and width % shared == 0
    return dict(zip(names, (width, shared, shared), strict=True)) if fits else None


def _part_of(path: str, block: str) -> str:
    """The module directly around a layer, which all its neighbours get their input from."""
    parent = path.rpartition(".")[0]
    return parent if parent.startswith(block) else block


def _sizes(path: str, modules: Mapping[str, Any]) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer."""
    dims = get_platform().linear_weight_dims(modules[path])
    assert dims is not None, f"{path} is not a linear layer"
    outputs, inputs = dims
    shape = get_platform().own_parameters(modules[path])["weight"].shape
    return shape[inputs], shape[outputs]


def _roles_by_size(
    block: str, linears: list[str], modules: Mapping[str, Any], refuse: bool
) -> tuple[list[str], list[str]]:
    columns: list[str] = []
    rows: list[str] = []
    groups: dict[str, list[str]] = {}
    for path in linears:
        inner = path.removeprefix(f"{block}.") if block else path
        groups.setdefault(inner.split(".")[0] if "." in inner else "", []).append(path)
    groups = _joined(groups, modules)
    for paths in groups.values():
        found = _pairs(paths, modules)
        if found is None:
            if refuse:
                to_replicate = _misfits(block, paths, modules)
                first = to_replicate[0]
                listed = ", ".join("{} ({} -> {})".format(path, *_sizes(path, modules)) for path in paths)
                raise _Unreadable(
                    f"plans.for_model: cannot tell how to shard {first!r}, a {type(modules[first]).__name__}: "
                    f"the linear layers beside each other, {listed}, make no pair of which one's outputs are the "
                    "other's inputs",
                    to_replicate,
                )
            continue
        columns += found[0]
        rows += found[1]
    return columns, rows


def _misfits(block: str, paths: list[str], modules: Mapping[str, Any]) -> list[str]:
    """The fewest and smallest layers without which the others make pairs; else the module around them, or all."""
    by_size = sorted(paths, key=lambda path: math.prod(_sizes(path, modules)))
    for count in range(1, min(3, len(paths) - 1)):
        for left_out in itertools.combinations(by_size, count):
            if _pairs([path for path in paths if path not in left_out], modules) is not None:
                return list(left_out)
    around = [path for path in _below(block, modules) if all(_is_below(one, path) for one in paths)]
    return around[-1:] or paths


def _joined(groups: dict[str, list[str]], modules: Mapping[str, Any]) -> dict[str, list[str]]:
    """Parts with a single layer each, of which one leads into the next, made one part."""
    joined: dict[str, list[str]] = {}
    last = None
    for name, paths in groups.items():
        lone = last is not None and len(paths) == 1 and len(joined[last]) == 1
        if lone and _sizes(joined[last][0], modules)[1] == _sizes(paths[0], modules)[0]:  # type: ignore[index]
            joined[last] += paths  # type: ignore[index]
            last = None
        else:
            joined[name] = list(paths)
            last = name
    return joined


def _pairs(paths: list[str], modules: Mapping[str, Any]) -> tuple[list[str], list[str]] | None:
    """(columns, rows) of the layers of one part; None where they do not fit."""
    sizes = {path: _sizes(path, modules) for path in paths}
    width = sizes[paths[0]][0]
    last = paths[-1]
    starts = [path for path in paths[:-1] if sizes[path][0] == width]
    if len(paths) > 1 and len(starts) == len(paths) - 1 and sizes[last][1] == width:
        between = sizes[last][0]
        if all(sizes[path][1] % between == 0 or between % sizes[path][1] == 0 for path in starts):
            return starts, [last]
    columns, rows = [], []  # a chain: each second layer leads on from the first
    place = 0
    while place + 1 < len(paths):
        first, second = paths[place], paths[place + 1]
        if sizes[first][1] != sizes[second][0]:
            return None
        columns.append(first)
        rows.append(second)
        place += 2
    return (columns, rows) if columns and place == len(paths) else None


def _weights(module: Any) -> list[str]:
    """Names of the module's own parameters with more than one dim."""
    return [name for name, parameter in get_platform().own_parameters(module).items() if parameter.ndim > 1]


def _refuse_other_weights(inside: list[str], taken: list[str], modules: Mapping[str, Any]) -> None:
    platform = get_platform()
    for path in inside:
        module = modules[path]
        if any(path == other or _is_below(path, other) for other in taken):
            continue
        if platform.linear_weight_dims(module) is not None or platform.is_embedding_module(module):
            continue
        weights = _weights(module)
        if weights:
            raise _Unreadable(
                f"plans.for_model: cannot tell how to shard {path!r}, a {type(module).__name__} with weights of its "
                f"own ({', '.join(weights)})",
                [path],
            )


def _starred(path: str) -> str:
    return ".".join("*" if name.isdigit() else name for name in path.split("."))


def _read_ends(model: Any, modules: Mapping[str, Any], roles: Roles, skipped: frozenset[str]) -> None:
    """The embedding of the vocabulary and the head: a Hugging Face model tells, others are read by size."""
    platform = get_platform()
    path_of = {id(module): path for path, module in modules.items()}

    def told(method: str) -> str | None:
        try:
            module = getattr(model, method)()
        except (AttributeError, NotImplementedError):
            return None
        return path_of.get(id(module))

    def outside(path: str) -> bool:
        return path not in skipped and not any(_is_below(path, block) for block in roles.blocks)

    embeddings = [path for path in modules if platform.is_embedding_module(modules[path]) and outside(path)]
    vocabulary = told("get_input_embeddings")
    tables = {path: platform.own_parameters(modules[path])[platform.weight_name(modules[path])] for path in embeddings}
    if vocabulary is None and embeddings:
        vocabulary = max(embeddings, key=lambda path: tables[path].shape[0])
    if vocabulary in tables:
        tied = [path for path in embeddings if tables[path] is tables[vocabulary]]
        roles.vocabularies += tied  # an encoder and a decoder may look up in one table
    head = told("get_output_embeddings")
    if head is None and vocabulary in tables:
        size = tables[vocabulary].shape[0]
        fitting = [
            path
            for path in modules
            if platform.linear_weight_dims(modules[path]) is not None and outside(path) and path
            if path not in (*roles.columns, *roles.rows) and _sizes(path, modules)[1] == size
        ]
        head = fitting[-1] if fitting else None
    if head is not None and platform.linear_weight_dims(modules[head]) is not None and outside(head):
        roles.heads.append(head)
