"""What a check says: equal, or the first number that differs, on which ranks, and what that looks like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

__all__ = ["Difference", "Verdict", "ratio_of"]

_EXACT = 1e-6
_NEAR = 1e-3  # a factor that is none


@dataclass(frozen=True)
class Difference:
    """A number of one rank that is not that of one process; ``ratio``: it is this many times as large, all over."""

    name: str
    rank: int
    error: float
    ratio: float | None = None

    def as_data(self) -> dict[str, Any]:
        return asdict(self)


def ratio_of(found: np.ndarray, expected: np.ndarray) -> float | None:
    """The factor between two arrays, if there is one; 0 where nothing was found.

    >>> ratio_of(np.array([2.0, -4.0]), np.array([1.0, -2.0])), ratio_of(np.array([1.0, 0.0]), np.array([1.0, 1.0]))
    (2.0, None)
    """
    norm = float(np.vdot(expected, expected).real)
    if not norm or not np.isfinite(found).all():
        return None
    factor = float(np.vdot(expected, found).real) / norm
    rest = float(np.abs(found - factor * expected).max(initial=0))
    return round(factor, 9) if rest <= _EXACT * float(np.abs(expected).max()) else None


@dataclass(frozen=True)
class Verdict:
    """Of a whole check."""

    title: str
    world_size: int
    num_steps: int
    sizes: Mapping[str, int]  # of the axes
    microbatches: int
    num_compared: int
    largest: float
    differences: Sequence[Difference] = field(default=())

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The one to look at: of the first step that differs the loss, else the gradient nearest to it, else the rest.

        Backward begins at the loss, and what is wrong there makes all behind it wrong: the last parameter in the
        order of the model is the first one reached.
        """
        if not self.differences:
            return None
        for step in range(1, self.num_steps + 1):
            here = [one for one in self.differences if one.name.startswith(f"{step}/")]
            for kind in ("loss", "gradient", "norm"):
                found = [one for one in here if one.name.split("/")[1] == kind]
                if found:
                    last = found[-1].name if kind == "gradient" else found[0].name
                    return next(one for one in found if one.name == last)
        return self.differences[0]

    def ranks_of(self, name: str) -> list[int]:
        return sorted({one.rank for one in self.differences if one.name == name})

    def text(self) -> str:
        """A few lines."""
        first = self.first
        if first is None:
            return (
                f"{self.title}\nequal: {self.num_compared} losses, gradients, norms and weights of {self.num_steps} "
                f"steps on every rank; the largest difference is {self.largest:.1e}"
            )
        others = len({one.name for one in self.differences}) - 1
        ranks = self.ranks_of(first.name)
        where = "every rank" if len(ranks) == self.world_size else f"rank{'s' * (len(ranks) > 1)} "
        where += "" if len(ranks) == self.world_size else ", ".join(map(str, ranks))
        lines = [self.title, f"different: {_words(first.name)}, on {where}: off by {first.error:.1e} of its size"]
        cause = self._cause(first, ranks)
        lines += [f"likely: {cause}"] if cause else []
        return "\n".join([*lines, *([f"and {others} more numbers differ"] if others else [])])

    def _cause(self, first: Difference, ranks: Sequence[int]) -> str:
        alone = "the other ranks are right, so it is what these do by themselves"
        only = "" if len(ranks) == self.world_size else f"; {alone}"
        if first.ratio is None or abs(first.ratio - 1) < _NEAR:
            if first.name.endswith("/loss") and first.name.startswith("1/"):
                return "the forward pass differs, before any gradient: look at the plan, at masks and at positions"
            return alone if only else ""
        factor = first.ratio
        if factor == 0:
            return f"nothing arrives there: a reduction or an edge of the graph is missing{only}"
        axes = [name for name, size in self.sizes.items() if size > 1 and abs(factor - size) < _EXACT * size]
        if abs(factor - self.microbatches) < _EXACT * factor and self.microbatches > 1:
            axes.append("micro-batches")
        if axes and not only:
            return f"exactly {factor:g} times too large: summed over {' or '.join(axes)} of which each had the whole"
        inverse = [name for name, size in self.sizes.items() if size > 1 and abs(factor * size - 1) < _EXACT]
        if inverse and not only:
            return f"exactly 1/{1 / factor:g} of it: a mean over {' or '.join(inverse)} where a sum was meant"
        return f"exactly {factor:g} times what one process has{only}"


def _words(name: str) -> str:
    parts = name.split("/", 2)
    if parts[0] == "weight":
        return f"the weight {'/'.join(parts[1:])} after the last step"
    if parts[1] == "gradient":
        return f"the gradient of {parts[2]} in step {parts[0]}"
    return f"the {'gradient norm' if parts[1] == 'norm' else parts[1]} of step {parts[0]}"
