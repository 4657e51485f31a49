"""How many ways each axis of a run splits it: ``"dp_shard=4, tp=2"``."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

__all__ = ["AXES", "REST", "Degrees", "as_degrees"]

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # of the mesh, outermost first
MOST_RANKS = 1_000_000
REST = "rest"  # whatever the others leave of the world
_MOST_SUGGESTIONS = 4


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """The size of each axis; one of them may be ``"rest"``, what the others leave of the world.

    >>> Degrees(tp=2).fit(8)
    Degrees("dp_shard=4, tp=2")
    """

    pp: int | str = 1  # stages of the model, one after the other
    dp_replicate: int | str = 1  # copies of the model, each with its part of the batch
    dp_shard: int | str = REST  # parts of the batch among which parameters are sharded
    cp: int | str = 1  # parts of the sequence
    tp: int | str = 1  # parts of each layer
    ep: int | str = 1  # groups of experts, on ranks of dp_shard (and cp, tp)

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value == REST and name != "ep":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                allowed = "a whole number from 1" if name == "ep" else f"a whole number from 1, or {REST!r}"
                raise ValueError(f"degrees: {name}={value!r} must be {allowed}")
            if value > MOST_RANKS:
                raise ValueError(f"degrees: {name}={value} must be at most {MOST_RANKS:,} ranks")
        resting = [name for name in AXES if getattr(self, name) == REST]
        if len(resting) > 1:
            raise ValueError(
                f"degrees: {' and '.join(resting)} are both {REST!r}; only one can take what the others leave"
            )

    def fit(self, world_size: int) -> Degrees:
        """The same with a number for each axis, whose product is ``world_size``; an error with what would fit."""
        if world_size > MOST_RANKS:
            raise ValueError(f"degrees {self}: a world has at most {MOST_RANKS:,} ranks, got {world_size}")
        resting = [name for name in AXES if getattr(self, name) == REST]
        fixed = math.prod(getattr(self, name) for name in AXES if name not in resting)
        if (resting and world_size % fixed) or (not resting and fixed != world_size):
            raise ValueError(
                f"degrees {self}: {'a multiple of ' if resting else ''}{fixed} ranks, but the world has {world_size}; "
                f"what fits is {' or '.join(map(str, self._fitting(world_size)))}"
            )
        fitted = replace(self, **dict.fromkeys(resting, world_size // fixed))
        shared = fitted.sizes["dp_shard"] * fitted.sizes["cp"] * fitted.sizes["tp"]
        if shared % int(fitted.ep):
            raise ValueError(
                f"degrees {fitted}: ep={fitted.ep} must divide dp_shard x cp x tp = {shared}, the ranks of experts"
            )
        return fitted

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks along each axis of the mesh, outermost first."""
        if any(getattr(self, name) == REST for name in AXES):
            raise ValueError(f"degrees {self}: what {REST!r} is depends on the world; call fit(world_size)")
        return {name: int(getattr(self, name)) for name in AXES}

    def _fitting(self, world_size: int) -> list[Degrees]:
        """Degrees for that world that differ the least from these; what was not asked for stays 1."""
        asked = [name for name in AXES if getattr(self, name) not in (1, REST)] or ["dp_shard"]
        if "dp_shard" not in asked:
            asked.append("dp_shard")
        divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]

        def distance(sizes: tuple[int, ...]) -> tuple[float, ...]:
            wanted = [getattr(self, name) for name in asked]
            away = [
                0.0 if want == REST else abs(math.log2(size / want)) for size, want in zip(sizes, wanted, strict=True)
            ]
            changed = [name != "dp_shard" and one > 0 for name, one in zip(asked, away, strict=True)]
            return sum(changed), sum(away)

        combinations = [
            sizes for sizes in itertools.product(divisors, repeat=len(asked)) if math.prod(sizes) == world_size
        ]
        best = sorted(combinations, key=distance)[:_MOST_SUGGESTIONS]
        return [Degrees(**{"dp_shard": 1, **dict(zip(asked, sizes, strict=True))}) for sizes in best]

    def __str__(self) -> str:
        shown = [f"{name}={value}" for name, value in asdict(self).items() if value not in (1, REST)]
        return f'"{", ".join(shown) or "dp_shard=" + str(self.dp_shard)}"'

    def __repr__(self) -> str:
        return f"Degrees({self})"


def as_degrees(given: Any = None, **keywords: Any) -> Degrees:
    """Degrees from a text, a mapping, :class:`Degrees` or keywords; each axis may be given once.

    >>> as_degrees("tp=2, dp_shard=rest"), as_degrees({"cp": 2}, tp=2)
    (Degrees("tp=2"), Degrees("cp=2, tp=2"))
    """
    if isinstance(given, str):
        values: dict[str, Any] = _parsed(given)
    elif isinstance(given, Degrees):
        values = {field.name: getattr(given, field.name) for field in fields(given)}
        values = {name: value for name, value in values.items() if value != getattr(Degrees, name)}
    elif isinstance(given, Mapping):
        values = dict(given)
    elif given is None:
        values = {}
    else:
        raise TypeError(
            f'degrees must be a text such as "dp_shard=4, tp=2", a dict or hp.Degrees, not a {type(given).__name__}'
        )
    for name in values:
        _check_name(name)
    twice = sorted(values.keys() & keywords.keys())
    if twice:
        raise ValueError(f"degrees: {', '.join(twice)} is given twice, in {given!r} and as a keyword")
    values |= keywords
    if REST in values.values():
        values.setdefault("dp_shard", 1)
    return Degrees(**values)


def _parsed(text: str) -> dict[str, int | str]:
    values: dict[str, int | str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise ValueError(f'degrees {text!r}: {part!r} is not of the form axis=number, as in "dp_shard=4, tp=2"')
        _check_name(name)
        if name in values:
            raise ValueError(f"degrees {text!r}: {name} is given twice")
        values[name] = int(value) if value.isdecimal() else value
    return values


def _check_name(name: Any) -> None:
    names = [field.name for field in fields(Degrees)]
    if name not in names:
        near = difflib.get_close_matches(str(name), names, 1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"degrees: there is no axis {name!r}{hint} The axes are {', '.join(names)}")
