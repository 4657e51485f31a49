"""Several sources in given proportions, without state: sample n knows its source and its number there.

Note [Who serves sample n]
Weights become whole parts of a period of at most 10,000 samples. Which source serves
which place of the period is Tijdeman's assignment: among the sources that are owed something, the one whose next
sample is due first. At no place is a source more than one sample ahead of or behind its share. Sample n is
then place n % period, and its number within the source is counted by the same table: nothing has to be gone through.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hyper_parallel.data.config import LARGEST_WEIGHT
from hyper_parallel.data.dataset import Dataset, fingerprint_of
from hyper_parallel.data.order import Order
from hyper_parallel.data.sample import Sample
from hyper_parallel.data.shuffle import shuffled

__all__ = ["Mixture", "assign"]

_PARTS = 10_000
_SEEDS_APART = 0x5851F42D4C957F2D  # between sources: far more than there are epochs


def assign(weights: Sequence[float]) -> np.ndarray:
    """The source of each place of a period: as even as can be, in proportion to the weights.

    >>> assign([2, 1]).tolist()
    [0, 1, 0]
    """
    parts = _whole_parts(weights)
    period, num = sum(parts), len(parts)
    if num == 1:
        return np.zeros(1, np.int64)
    # Everything times period * (2 num - 2), to stay in whole numbers.
    scale = 2 * num - 2
    owed, places = [0] * num, np.empty(period, np.int64)
    for place in range(period):
        due = [
            ((period * (scale - 1) - owed[source]) / part, source)
            for source, part in enumerate(parts)
            if owed[source] + part * scale >= period
        ]
        chosen = min(due)[1]
        places[place] = chosen
        for source, part in enumerate(parts):
            owed[source] += part * scale
        owed[chosen] -= period * scale
    return places


def _whole_parts(weights: Sequence[float]) -> list[int]:
    for number, weight in enumerate(weights):
        if not 0 < weight <= LARGEST_WEIGHT:
            raise ValueError(
                f"mixture: the weight of source {number} is {weight!r}; weights must be above 0 and at most "
                f"{LARGEST_WEIGHT:g}"
            )
    total = math.fsum(weights)
    if total <= _PARTS and all(weight == int(weight) for weight in weights):
        divisor = math.gcd(*(int(weight) for weight in weights))
        return [int(weight) // divisor for weight in weights]
    exact = [weight / total * _PARTS for weight in weights]
    parts = [math.floor(part) for part in exact]
    by_rest = sorted(range(len(parts)), key=lambda source: (parts[source] - exact[source], source))
    for source in by_rest[: _PARTS - sum(parts)]:
        parts[source] += 1
    for number, part in enumerate(parts):
        if not part:
            raise ValueError(
                f"mixture: source {number} has weight {weights[number]!r} of {total:g}, less than 1 in {_PARTS}; leave "
                "it out, or give it more"
            )
    divisor = math.gcd(*parts)
    return [part // divisor for part in parts]


class Mixture(Dataset):
    """Samples of several datasets by weight, each shuffled by itself and begun again when it is through.

    ``num_samples`` is how many it takes until every source has been gone through once. Sample numbers do not end there.
    """

    def __init__(
        self, datasets: Sequence[Dataset], weights: Sequence[float], *, seed: int, names: Sequence[str] = ()
    ) -> None:
        if not datasets or len(datasets) != len(weights):
            raise ValueError(f"mixture: {len(datasets)} sources and {len(weights)} weights; give a weight for each")
        self.datasets = list(datasets)
        self.names = list(names) or [f"source {number}" for number in range(len(datasets))]
        self.seed = seed
        self._places = assign(weights)
        self._parts = np.bincount(self._places, minlength=len(datasets))
        counted = np.zeros(len(datasets), np.int64)
        self._within = np.empty(len(self._places), np.int64)
        for place, source in enumerate(self._places.tolist()):
            self._within[place] = counted[source]
            counted[source] += 1
        period = len(self._places)
        self.num_samples = max(
            math.ceil(data.num_samples * period / int(part)) for data, part in zip(datasets, self._parts, strict=True)
        )
        self.vocab_size = max(data.vocab_size for data in datasets)
        self.length = max(data.length for data in datasets)
        self.is_packed = any(data.is_packed for data in datasets)
        self.pad_to = datasets[0].pad_to
        self.fingerprint = fingerprint_of(self._parts.tolist(), *(data.fingerprint for data in datasets))

    def places(self, numbers: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(sources, numbers of the samples there) of samples."""
        turns, places = np.divmod(np.asarray(numbers, np.int64), len(self._places))
        sources = self._places[places]
        inside = turns * self._parts[sources] + self._within[places]
        for source in np.unique(sources).tolist():
            of_source = np.flatnonzero(sources == source)
            num = self.datasets[source].num_samples
            epochs, inside[of_source] = np.divmod(inside[of_source], num)
            for epoch in np.unique(epochs).tolist():
                now = of_source[epochs == epoch]
                inside[now] = shuffled(inside[now], num, self.seed + source * _SEEDS_APART + epoch)
        return sources, inside

    def sample(self, number: int) -> Sample:
        return self.samples([number])[0]

    def samples(self, numbers: Sequence[int] | np.ndarray) -> list[Sample]:
        sources, inside = self.places(numbers)
        found: list[Any] = [None] * len(sources)
        for source in np.unique(sources).tolist():
            of_source = np.flatnonzero(sources == source).tolist()
            for place, sample in zip(of_source, self.datasets[source].samples(inside[of_source]), strict=True):
                found[place] = sample
        return found

    def order(self, *, batch: int, seed: int, position: int = 0, epochs: int | None = None) -> Order:
        if seed != self.seed:
            raise ValueError(f"mixture: opened with seed {self.seed}, so its order has that seed, not {seed}")
        return Order(
            self.num_samples,
            batch=batch,
            seed=seed,
            position=position,
            shuffle=False,
            wrap=False,
            epochs=epochs,
            fingerprint=self.fingerprint,
        )

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.datasets[0].decode(ids)

    def describe(self) -> str:
        period = len(self._places)
        shares = [f"{name} {part / period:.2%}" for name, part in zip(self.names, self._parts.tolist(), strict=True)]
        lines = [f"mixture of {len(self.datasets)}: {', '.join(shares)}; {self.num_samples} samples until all are seen"]
        return "\n".join([*lines, *(f"  {n}: {d.describe()}" for n, d in zip(self.names, self.datasets, strict=True))])
