"""Reading a model's structure: which layers are cut by outputs, which by inputs, what stays whole.

Note [Declared, then names, then sizes]
In the blocks of a model (the members of its module lists) linear layers come in pairs: the first is cut by its outputs,
the second by its inputs, and what lies between is cut and needs no communication. The model's config may declare which
is which (``declared.py``), else well-known names say it. Where a name is not known, the sizes do: inside one part of a
block, the last layer that leads back to the width of the block is cut by inputs, and those that start from that width
by outputs. A layer of a block that fits neither stops the plan, by name: the user decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from hyper_parallel.plans.adapters import adapted_path, without_adapters
from hyper_parallel.plans.declared import COLUMN, ROW, WHOLE, Declaration, read_declaration
from hyper_parallel.plans.layers import below, is_below, own_weights, sizes_of
from hyper_parallel.plans.structure import list_members, mixtures_in, outermost_of, read_ends
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
    everything = dict(get_platform().get_cells_and_names(model))
    modules = without_adapters(everything)
    skipped = frozenset(path for path in modules if _is_kept(path, keep_whole))
    declaration = read_declaration(modules)
    roles = Roles(blocks=list_members(modules))
    outermost = outermost_of(roles.blocks)
    for block in outermost or [""]:
        _read_block(block, modules, roles, skipped, declaration, keep_whole, refuse=bool(outermost))
    _leave_out_shared(roles, modules)
    taken = (*skipped, *roles.columns, *roles.rows)
    roles.vocabularies, roles.heads = read_ends(model, modules, roles.blocks, taken)
    for name in ("columns", "rows", "attentions", "vocabularies", "heads"):
        setattr(roles, name, [adapted_path(path, everything) for path in getattr(roles, name)])
    roles.fused = {adapted_path(path, everything): parts for path, parts in roles.fused.items()}
    return roles


def _leave_out_shared(roles: Roles, modules: Mapping[str, Any]) -> None:
    """A weight that one layer would have cut by outputs and another by inputs stays whole in both."""
    platform = get_platform()
    columns, rows = (
        {path: id(platform.own_parameters(modules[path])["weight"]) for path in paths}
        for paths in (roles.columns, roles.rows)
    )
    both = set(columns.values()) & set(rows.values())
    roles.columns = [path for path, weight in columns.items() if weight not in both]
    roles.rows = [path for path, weight in rows.items() if weight not in both]


def _is_kept(path: str, keep_whole: Iterable[str]) -> bool:
    return any(_is_inside(path, pattern) for pattern in keep_whole)


def _is_inside(path: str, pattern: str) -> bool:
    names = path.split(".")
    return any(_names_match(names[:count], pattern.split(".")) for count in range(1, len(names) + 1))


def _names_match(names: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_names_match(names[start:], patterns[1:]) for start in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], patterns[0]) and _names_match(names[1:], patterns[1:])


def _read_block(
    block: str,
    modules: Mapping[str, Any],
    roles: Roles,
    skipped: frozenset[str],
    declaration: Declaration,
    keep_whole: Iterable[str],
    refuse: bool,
) -> None:
    """Sort the linear layers of one block; see Note [Declared, then names, then sizes]."""
    platform = get_platform()
    inside = [path for path in [block, *below(block, modules)] if path not in skipped]
    roles.mixtures += mixtures_in(inside, modules, declaration)
    roles.attentions += [path for path in inside if type(modules[path]).__name__ == "MultiheadAttention"]
    taken = [*roles.mixtures, *roles.attentions]
    linears = [
        path
        for path in inside
        if platform.linear_weight_dims(modules[path]) is not None and not any(is_below(path, other) for other in taken)
    ]
    described = [path for path in declaration.parts if is_below(path, block)]
    known = {path: declaration.roles.get(path) or _role_by_name(path, block) for path in linears}
    known |= {
        path: WHOLE for path in linears if known[path] is None and any(is_below(path, part) for part in described)
    }
    by_size: list[str] = []
    if not (linears and all(known.values()) and {COLUMN, ROW} <= set(known.values())):
        unknown = {_group_of(path, block) for path in linears if known[path] is None}
        is_declared = any(path in declaration.roles for path in linears)
        by_size = [path for path in linears if not is_declared or _group_of(path, block) in unknown]
    columns, rows = _roles_by_size(block, by_size, modules, refuse) if by_size else ([], [])
    columns += [path for path in linears if path not in by_size and known[path] == COLUMN]
    rows += [path for path in linears if path not in by_size and known[path] == ROW]
    roles.columns += columns
    roles.rows += rows
    roles.fused |= {path: parts for path in columns if (parts := _fused_parts(path, rows, modules))}
    roles.parts += sorted({_part_of(path, block) for path in columns} - {block}, key=inside.index)
    if refuse:
        _refuse_other_weights(inside, [*taken, *described], modules, keep_whole)


def _role_by_name(path: str, block: str) -> str | None:
    names = path.removeprefix(f"{block}.").split(".")
    for count in (2, 1):
        name = ".".join(names[-count:])
        if name in _COLUMN_NAMES:
            return COLUMN
        if name in _ROW_NAMES:
            return ROW
        if name in _WHOLE_NAMES:
            return WHOLE
    return None


def _fused_parts(path: str, rows: list[str], modules: Mapping[str, Any]) -> dict[str, int] | None:
    """The projections that a layer computes at once, by its name and the width that the layer behind it takes."""
    platform = get_platform()
    parent, _, name = path.rpartition(".")
    names = _FUSED_NAMES.get(name)
    behind = [sizes_of(row, modules)[0] for row in rows if row.rpartition(".")[0] == parent]
    if names is None or len(behind) != 1 or not platform.asks_subclasses or not platform.linear_function(modules[path]):
        return None
    if platform.has_no_memory(
        platform.own_parameters(modules[path])["weight"]
    ):  # initial values are made for the whole
        return None
    total, width = sizes_of(path, modules)[1], behind[0]
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


def _group_of(path: str, block: str) -> str:
    """The part of a block that a layer is in; ``""`` for the block itself."""
    inner = path.removeprefix(f"{block}.") if block else path
    return inner.split(".")[0] if "." in inner else ""


def _roles_by_size(
    block: str, linears: list[str], modules: Mapping[str, Any], refuse: bool
) -> tuple[list[str], list[str]]:
    columns: list[str] = []
    rows: list[str] = []
    groups: dict[str, list[str]] = {}
    for path in linears:
        groups.setdefault(_group_of(path, block), []).append(path)
    groups = _joined(groups, modules)
    for paths in groups.values():
        found = _pairs(paths, modules)
        if found is None:
            if refuse:
                to_replicate = _misfits(block, paths, modules)
                first = to_replicate[0]
                listed = ", ".join("{} ({} -> {})".format(path, *sizes_of(path, modules)) for path in paths)
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
    by_size = sorted(paths, key=lambda path: math.prod(sizes_of(path, modules)))
    for count in range(1, min(3, len(paths) - 1)):
        for left_out in itertools.combinations(by_size, count):
            if _pairs([path for path in paths if path not in left_out], modules) is not None:
                return list(left_out)
    around = [path for path in below(block, modules) if all(is_below(one, path) for one in paths)]
    return around[-1:] or paths


def _joined(groups: dict[str, list[str]], modules: Mapping[str, Any]) -> dict[str, list[str]]:
    """Parts with a single layer each, of which one leads into the next, made one part."""
    joined: dict[str, list[str]] = {}
    last = None
    for name, paths in groups.items():
        lone = last is not None and len(paths) == 1 and len(joined[last]) == 1
        if lone and sizes_of(joined[last][0], modules)[1] == sizes_of(paths[0], modules)[0]:  # type: ignore[index]
            joined[last] += paths  # type: ignore[index]
            last = None
        else:
            joined[name] = list(paths)
            last = name
    return joined


def _pairs(paths: list[str], modules: Mapping[str, Any]) -> tuple[list[str], list[str]] | None:
    """(columns, rows) of the layers of one part; None where they do not fit."""
    sizes = {path: sizes_of(path, modules) for path in paths}
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


def _refuse_other_weights(
    inside: list[str], taken: list[str], modules: Mapping[str, Any], keep_whole: Iterable[str]
) -> None:
    platform = get_platform()
    for path in inside:
        module = modules[path]
        if any(path == other or is_below(path, other) for other in taken):
            continue
        if platform.linear_weight_dims(module) is not None or platform.is_embedding_module(module):
            continue
        weights = [name for name in own_weights(module) if not _is_kept(f"{path}.{name}", keep_whole)]
        if weights:
            has_layers = any(platform.linear_weight_dims(modules[one]) is not None for one in below(path, modules))
            raise _Unreadable(
                f"plans.for_model: cannot tell how to shard {path!r}, a {type(module).__name__} with weights of its "
                f"own ({', '.join(weights)})",
                [f"{path}.{name}" for name in weights] if has_layers else [path],
            )


def _starred(path: str) -> str:
    return ".".join("*" if name.isdigit() else name for name in path.split("."))
