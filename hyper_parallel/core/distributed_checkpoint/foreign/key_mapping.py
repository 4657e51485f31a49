"""How the tensors of files are called and cut elsewhere, as data: rename, transpose, join, split, stack, interleave.

A mapping is a list of rules, plain dicts that can be kept in a JSON file. ``files`` is how the files call a tensor,
``ours`` how the program does:

    [{"files": "model.embed_tokens.weight", "ours": "embedding.weight"},
     {"files": "model.layers.*.mlp.up_proj.weight", "ours": "layers.*.up", "transpose": [1, 0]},
     {"files": ["model.layers.*.self_attn.q_proj.weight", "model.layers.*.self_attn.k_proj.weight",
                "model.layers.*.self_attn.v_proj.weight"],
      "ours": "layers.*.qkv.weight", "join": 0, "sizes": [32, 8, 8]},
     {"files": "model.layers.*.experts.{n}.w1.weight", "ours": "layers.*.experts.w1", "stack": 0},
     {"files": "**.rotary_emb.inv_freq", "drop": true}]

- ``*`` is one part of a name, ``**`` any number of parts; what they stand for is the same on both sides, in order.
- ``transpose`` is the order of the files' dims in ours.
- ``join`` is the dim (of ours) along which a list of tensors on one side is one tensor on the other. Their shares are
  equal, or as ``sizes`` says, in any unit (numbers of heads, for instance). With ``groups`` the joined tensor holds a
  share of each tensor in turn, that many times: a query-key-value matrix kept head by head.
- ``stack`` is the dim of the stacked tensor along which tensors numbered by ``{n}`` on one side are one on the other.
- ``drop``: tensors of the files that we have no use for.

The first rule that fits a name is taken; a name that no rule fits is the same on both sides.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Shape = tuple[int, ...]

_KEYS = {"files", "ours", "transpose", "join", "sizes", "groups", "stack", "drop"}
_LISTED = 4
_TOKEN = re.compile(r"\*\*|\*|\{n\}")


class Piece(NamedTuple):
    """A box of a tensor of the files that is a box of one of ours.

    ``dims`` has for each dim of ours the dim of the files, or None where ours is stacked; the files' dims that are not
    in it are stacked there. A stacked dim of a box has size 1.
    """

    file_name: str
    file_offsets: Shape
    our_name: str
    our_offsets: Shape
    our_sizes: Shape
    dims: tuple[int | None, ...]

    @property
    def file_sizes(self) -> Shape:
        """The size of the box in the files."""
        sizes = [1] * len(self.file_offsets)
        for dim, size in zip(self.dims, self.our_sizes, strict=True):
            if dim is not None:
                sizes[dim] = size
        return tuple(sizes)


@dataclass
class Mapped:
    """The result of a mapping: shapes and dtypes by name on both sides, the pieces, and the names to drop.

    ``dtypes`` are those that were given, carried over; ``groups`` are sets of our names that share tensors of files.
    """

    file_shapes: dict[str, Shape] = field(default_factory=dict)
    our_shapes: dict[str, Shape] = field(default_factory=dict)
    file_dtypes: dict[str, str] = field(default_factory=dict)
    our_dtypes: dict[str, str] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    groups: list[tuple[str, ...]] = field(default_factory=list)

    def by_our_name(self) -> dict[str, list[Piece]]:
        found: dict[str, list[Piece]] = {name: [] for name in self.our_shapes}
        for piece in self.pieces:
            found[piece.our_name].append(piece)
        return found

    def by_file_name(self) -> dict[str, list[Piece]]:
        found: dict[str, list[Piece]] = {name: [] for name in self.file_shapes}
        for piece in self.pieces:
            found[piece.file_name].append(piece)
        return found


Known = Mapping[str, tuple[Shape, str]]  # name -> (shape, dtype)


class KeyMapping:
    """A checked list of rules; see the top of this file."""

    def __init__(self, rules: Iterable[Mapping[str, Any]] = ()) -> None:
        if isinstance(rules, (Mapping, str)) or not isinstance(rules, Iterable):
            raise ValueError(f"a mapping is a list of rules, got {rules!r}")
        self.rules = [_Rule(number, rule) for number, rule in enumerate(rules)]

    @classmethod
    def of(cls, mapping: KeyMapping | Iterable[Mapping[str, Any]] | None) -> KeyMapping:
        """A mapping as it is, or made from rules; None keeps all names."""
        return mapping if isinstance(mapping, KeyMapping) else cls(mapping or ())

    def from_files(self, known: Known) -> Mapped:
        """Our tensors, given those of the files."""
        return self._apply(known, "files")

    def to_files(self, known: Known) -> Mapped:
        """The files' tensors, given ours."""
        return self._apply(known, "ours")

    def _apply(self, known: Known, side: str) -> Mapped:
        mapped = Mapped()
        taken: dict[tuple[int, tuple[str, ...]], dict[tuple[int, int], str]] = {}
        for name in known:
            for rule in self.rules:
                place = rule.place_of(name, side)
                if place is not None:
                    if rule.drop:
                        mapped.dropped.append(name)
                    else:
                        number, wild, index = place
                        taken.setdefault((rule.number, wild), {})[number, index] = name
                    break
            else:
                taken[-1, (name,)] = {(0, 0): name}
        for (rule_number, wild), names in taken.items():
            rule = self.rules[rule_number] if rule_number >= 0 else _SAME
            rule.add(mapped, side, wild, names, known)
        return mapped


class _Rule:
    def __init__(self, number: int, rule: Mapping[str, Any]) -> None:
        self.number = number
        self.where = f"rule {number} of the mapping, {rule!r}" if number >= 0 else "names that no rule fits"
        if not isinstance(rule, Mapping) or not _KEYS.issuperset(rule):
            unknown = sorted(set(rule) - _KEYS) if isinstance(rule, Mapping) else rule
            raise ValueError(f"{self.where}: unknown {unknown}; a rule has {', '.join(sorted(_KEYS))}")
        self.drop = bool(rule.get("drop", False))
        self.names = {"files": self._list(rule, "files"), "ours": [] if self.drop else self._list(rule, "ours")}
        self._check_numbers(rule)
        self.transpose = tuple(rule["transpose"]) if rule.get("transpose") is not None else None
        self.join: int | None = rule.get("join")
        self.stack: int | None = rule.get("stack")
        self.groups = rule.get("groups", 1)
        self.patterns = {side: [_pattern(name) for name in names] for side, names in self.names.items()}
        many = max(self.names.values(), key=len)
        self.sizes = list(rule["sizes"]) if rule.get("sizes") is not None else [1] * len(many)
        self._check(rule, many)

    def _list(self, rule: Mapping[str, Any], side: str) -> list[str]:
        names = rule.get(side)
        names = [names] if isinstance(names, str) else names
        if not names or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{self.where}: {side!r} must be a name or a list of names")
        return list(names)

    def _check_numbers(self, rule: Mapping[str, Any]) -> None:
        for key in ("join", "stack", "groups"):
            value = rule.get(key)
            if value is not None and (type(value) is not int or value < (key == "groups")):
                raise ValueError(
                    f"{self.where}: {key!r} must be {'a count' if key == 'groups' else 'a dim, 0 or more'}"
                )
        for key in ("transpose", "sizes"):
            value = rule.get(key)
            is_list = isinstance(value, Sequence) and all(type(one) is int and one >= 0 for one in value)
            if value is not None and not (is_list and (key == "transpose" or sum(value) > 0)):
                raise ValueError(f"{self.where}: {key!r} must be a list of {'dims' if key == 'transpose' else 'sizes'}")

    def _check(self, rule: Mapping[str, Any], many: list[str]) -> None:
        if self.drop:
            if set(rule) - {"files", "drop"}:
                raise ValueError(f"{self.where}: a rule that drops has nothing but 'files'")
            return
        if self.transpose is not None and sorted(self.transpose) != list(range(len(self.transpose))):
            raise ValueError(f"{self.where}: 'transpose' must name every dim once, as [1, 0] does")
        if min(len(names) for names in self.names.values()) > 1:
            raise ValueError(f"{self.where}: one of the sides must be a single name")
        if (len(many) > 1) != (self.join is not None):
            raise ValueError(f"{self.where}: a list of names needs 'join', and 'join' a list of names")
        if len(self.sizes) != len(many):
            raise ValueError(f"{self.where}: {len(self.sizes)} 'sizes' for {len(many)} names")
        if self.groups < 1 or (self.groups > 1 and self.join is None):
            raise ValueError(f"{self.where}: 'groups' is a count that goes with 'join'")
        numbered = [side for side, names in self.names.items() if any("{n}" in name for name in names)]
        if (len(numbered) == 1) != (self.stack is not None) or len(numbered) > 1:
            raise ValueError(f"{self.where}: 'stack' goes with {{n}} in the names of one side")
        for names in self.names.values():
            if sum("{n}" in name for name in names) not in (0, len(names)) or any(n.count("{n}") > 1 for n in names):
                raise ValueError(f"{self.where}: {{n}} must be in every name of a side, once")
        wild = {tuple(t for t in _TOKEN.findall(name) if t != "{n}") for names in self.names.values() for name in names}
        if len(wild) > 1:
            raise ValueError(f"{self.where}: all names must have the same * and ** in the same order")
        self.stacked_side = {"files": "ours", "ours": "files"}[numbered[0]] if numbered else None
        self.joined_side = None if self.join is None else ("ours" if len(self.names["files"]) > 1 else "files")

    def place_of(self, name: str, side: str) -> tuple[int, tuple[str, ...], int] | None:
        """(which of the rule's names, what * stood for, the number that {n} stood for), or None."""
        for number, (pattern, tokens) in enumerate(self.patterns[side]):
            match = pattern.fullmatch(name)
            if match:
                found = list(zip(tokens, match.groups(), strict=True))
                index = next((int(text) for token, text in found if token == "{n}"), 0)
                return number, tuple(text for token, text in found if token != "{n}"), index
        return None

    def add(self, mapped: Mapped, side: str, wild: tuple[str, ...], names: dict, known: Known) -> None:
        """Add the tensors of one use of the rule: ``names`` are those that were found, by their place."""
        other = _other(side)
        count = self._count(side, other, names, known)
        shape_of: dict[str, dict[tuple[int, int], Shape]] = {"files": {}, "ours": {}}
        absent = (
            _fill(name, wild, index)
            for number, name in enumerate(self.names[side])
            for index in range(count if self.stacked_side == other else 1)
            if (number, index) not in names
        )
        missing = list(itertools.islice(absent, _LISTED))  # a number in a damaged name may be large
        if missing:
            raise ValueError(f"{self.where}: found {_some(names.values())} but not {_some(missing)}")
        shape_of[side] = {place: known[name][0] for place, name in names.items()}
        dtypes = {name: known[name][1] for name in names.values()}
        if len(set(dtypes.values())) > 1:
            raise ValueError(f"{self.where}: tensors that become one must have one dtype, got {_one_of_each(dtypes)}")
        dtype = known[next(iter(names.values()))][1]
        parts = self._part_shapes(side, shape_of[side], count, names)
        for number in range(len(self.names[other])):
            for index in range(count if self.stacked_side == side else 1):
                shape_of[other][number, index] = self._assembled(other, parts, number, count)
        for one, shapes, dtypes in (
            ("files", mapped.file_shapes, mapped.file_dtypes),
            ("ours", mapped.our_shapes, mapped.our_dtypes),
        ):
            for (number, index), shape in shape_of[one].items():
                name = _fill(self.names[one][number], wild, index)
                if name in shapes:
                    raise ValueError(f"{self.where}: '{name}' is made twice; another rule or tensor makes it too")
                shapes[name], dtypes[name] = shape, dtype
        mapped.groups.append(tuple(_fill(self.names["ours"][n], wild, i) for n, i in sorted(shape_of["ours"])))
        self._add_pieces(mapped, wild, parts, count)

    def _count(self, side: str, other: str, names: dict, known: Known) -> int:
        """How many tensors are stacked."""
        if self.stack is None:
            return 1
        if self.stacked_side == other:
            return max(index for _, index in names) + 1
        for name in names.values():
            self._require_dim("stack", self.stack, name, known[name][0], len(known[name][0]))
        shapes = {known[name][0][self.stack] for name in names.values()}
        if len(shapes) > 1:
            raise ValueError(f"{self.where}: tensors with different numbers of parts: {shapes}")
        return shapes.pop()

    def _require_dim(self, key: str, dim: int, name: str, shape: Shape, end: int) -> None:
        if dim >= end:
            raise ValueError(f"{self.where}: {key!r} names a dim that there is not: '{name}' has shape {shape}")

    # A part is the common unit of both sides: one of the joined tensors, one of the stacked, in the order of our dims.
    def _part_shapes(self, side: str, shapes: dict, count: int, names: dict) -> list[Shape]:
        found: dict[int, Shape] = {}
        for (number, index), shape in shapes.items():
            part = list(shape)
            if self.stack is not None and self.stacked_side == side:
                del part[self.stack]
            if side == "files" and self.transpose is not None:
                if len(part) != len(self.transpose):
                    raise ValueError(
                        f"{self.where}: '{names[number, index]}' has shape {shape}, which cannot be turned"
                    )
                part = [part[dim] for dim in self.transpose]
            name = names[number, index]
            if self.join is not None:
                self._require_dim("join", self._join_dim(), name, shape, len(part))
            if self.stack is not None:
                self._require_dim("stack", self.stack, name, shape, len(part) + 1)
            if found.setdefault(number, tuple(part)) != tuple(part):
                different = _one_of_each({names[place]: shape for place, shape in shapes.items() if place[0] == number})
                raise ValueError(f"{self.where}: the tensors to stack have different shapes: {different}")
        if self.joined_side != side:
            return [found[number] for number in sorted(found)]
        dim = self._join_dim()
        whole = found[0]
        unit, left = divmod(whole[dim], sum(self.sizes) * self.groups)
        if left:
            raise ValueError(
                f"{self.where}: dim {dim} of shape {whole} is not divisible into {self.groups} times {self.sizes}"
            )
        return [(*whole[:dim], unit * size * self.groups, *whole[dim + 1 :]) for size in self.sizes]

    def _join_dim(self) -> int:
        """The joined dim, counted in a part: without the stacked dim."""
        assert self.join is not None
        is_after = self.stack is not None and self.stacked_side == "ours" and self.join > self.stack
        return self.join - 1 if is_after else self.join

    def _assembled(self, side: str, parts: list[Shape], number: int, count: int) -> Shape:
        """The shape of a tensor on one side."""
        shape = list(parts[number] if self.joined_side != side else parts[0])
        if self.joined_side == side:
            dim = self._join_dim()
            others = {(*part[:dim], *part[dim + 1 :]) for part in parts}
            if len(others) > 1:
                raise ValueError(f"{self.where}: tensors of shapes {parts} cannot be joined along dim {dim}")
            shape[dim] = sum(part[dim] for part in parts)
        if side == "files" and self.transpose is not None:
            shape = [shape[self.transpose.index(dim)] for dim in range(len(shape))]
        if self.stack is not None and self.stacked_side == side:
            shape.insert(self.stack, count)
        return tuple(shape)

    def _add_pieces(self, mapped: Mapped, wild: tuple[str, ...], parts: list[Shape], count: int) -> None:
        at = 0
        if self.groups > 1 and any(part[self._join_dim()] % self.groups for part in parts):
            raise ValueError(f"{self.where}: parts of shapes {parts} cannot be split into {self.groups} groups")
        for number, part in enumerate(parts):
            for index in range(count):
                for group in range(self.groups):
                    mapped.pieces.append(self._piece(wild, parts, number, index, group, at))
            if self.join is not None:
                at += part[self._join_dim()] // self.groups

    def _piece(self, wild: tuple[str, ...], parts: list[Shape], number: int, index: int, group: int, at: int) -> Piece:
        part = parts[number]
        sizes = list(part)
        offsets = {"files": [0] * len(part), "ours": [0] * len(part)}
        if self.join is not None:
            dim = self._join_dim()
            sizes[dim] = part[dim] // self.groups
            whole = sum(p[dim] for p in parts) // self.groups
            joined, single = offsets[self.joined_side], offsets[_other(self.joined_side)]  # type: ignore[index]
            joined[dim] = group * whole + at
            single[dim] = group * sizes[dim]
        order = self.transpose if self.transpose is not None else tuple(range(len(part)))
        dims: list[int | None] = list(order)
        in_files = [offsets["files"][order.index(dim)] for dim in range(len(part))]
        in_ours = offsets["ours"]
        if self.stack is not None and self.stacked_side == "ours":
            in_ours.insert(self.stack, index)
            sizes.insert(self.stack, 1)
            dims.insert(self.stack, None)
        elif self.stack is not None:
            in_files.insert(self.stack, index)
            dims = [dim + 1 if dim >= self.stack else dim for dim in order]
        name_of = {
            side: _fill(
                self.names[side][0 if self.joined_side in (side, None) else number],
                wild,
                index if self.stacked_side == _other(side) else 0,
            )
            for side in ("files", "ours")
        }
        return Piece(name_of["files"], tuple(in_files), name_of["ours"], tuple(in_ours), tuple(sizes), tuple(dims))


def _some(names: Iterable[str]) -> str:
    found = sorted(names)
    return f"{found[:_LISTED]}" + (f" and {len(found) - _LISTED} more" if len(found) > _LISTED else "")


def _one_of_each(kinds: Mapping[str, Any]) -> str:
    """A name of each kind, the rarest kind first."""
    names: dict[Any, list[str]] = {}
    for name, kind in kinds.items():
        names.setdefault(kind, []).append(name)
    return ", ".join(f"{kind} of {_some(found)}" for kind, found in sorted(names.items(), key=lambda one: len(one[1])))


def _other(side: str | None) -> str:
    return "ours" if side == "files" else "files"


def _pattern(name: str) -> tuple[re.Pattern[str], list[str]]:
    text, end = "", 0
    tokens = []
    for match in _TOKEN.finditer(name):
        text += re.escape(name[end : match.start()])
        text += {"**": "(.+)", "*": r"([^.]+)", "{n}": r"(0|[1-9][0-9]{0,8})"}[match[0]]
        tokens.append(match[0])
        end = match.end()
    return re.compile(text + re.escape(name[end:])), tokens


def name_pattern(pattern: str) -> re.Pattern[str]:
    """A pattern of names with ``*`` for one part and ``**`` for any number of parts."""
    return _pattern(pattern)[0]


def _fill(name: str, wild: Sequence[str], index: int) -> str:
    remaining = iter(wild)
    return _TOKEN.sub(lambda match: str(index) if match[0] == "{n}" else next(remaining), name)


_SAME = _Rule(-1, {"files": "**", "ours": "**"})
