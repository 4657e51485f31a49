"""Which samples a step takes: one position for the whole run, equal on every rank.

Each rank takes its block of a batch (`numpy.array_split`), so the samples of a step do not depend on how many ranks
there are, and the position is all that a checkpoint has to hold.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hyper_parallel.data.shuffle import shuffled

__all__ = ["Order"]


class Order:
    """The sample numbers of each batch of a run, in turn; an epoch is shuffled anew, and a batch may lie in two.

    Iterating does not end, unless ``epochs`` says when; then the last batch holds what is left. ``position`` is the
    number of samples taken so far: inside the loop those of the present batch are taken. ``batch`` may be assigned to
    at any time. ``shuffle=False`` gives 0, 1, 2, ... in every epoch, ``wrap=False`` (for data that has an order of its
    own, as mixtures have) goes on counting behind the first.

    >>> order = Order(10, batch=4, seed=0, shuffle=False)
    >>> next(order).tolist(), next(order).tolist(), next(order).tolist(), order.position, order.step
    ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], 12, 3)
    """

    def __init__(
        self,
        num_samples: int,
        *,
        batch: int,
        seed: int = 0,
        position: int = 0,
        shuffle: bool = True,
        wrap: bool = True,
        epochs: int | None = None,
        fingerprint: str = "",
    ) -> None:
        self.num_samples = _at_least(1, num_samples, "num_samples")
        self.seed = operator.index(seed)
        self.shuffle = shuffle
        self.wrap = wrap
        self.epochs = None if epochs is None else _at_least(1, epochs, "epochs")
        self.fingerprint = fingerprint
        self.batch = batch
        self.position = _at_least(0, position, "position")
        self.step = -(-self.position // self.batch)

    @property
    def batch(self) -> int:
        """Samples that the next step takes, on all ranks together."""
        return self._batch

    @batch.setter
    def batch(self, num: int) -> None:
        num = _at_least(1, num, "batch")
        if num > self.num_samples and self.epochs is None:
            raise ValueError(
                f"a batch of {num} samples from data that has {self.num_samples} would hold some of them twice; give a "
                f"batch of at most {self.num_samples}, shorter samples, or more data"
            )
        self._batch = num

    @property
    def epoch(self) -> float:
        """How often the data has been gone through, as in 1.5."""
        return self.position / self.num_samples

    def numbers(self, start: int, count: int) -> np.ndarray:
        """The sample numbers at ``start``, ``start + 1``, ... of the run, whatever has been taken so far."""
        places = np.arange(start, start + count, dtype=np.int64)
        if not self.wrap:
            return places
        epochs, places = np.divmod(places, self.num_samples)
        if self.shuffle:
            for epoch in np.unique(epochs).tolist():
                inside = epochs == epoch
                places[inside] = shuffled(places[inside], self.num_samples, self.seed + epoch)
        return places

    def next_count(self, position: int) -> int:
        """How many samples the batch at a position has: ``batch``, fewer at the end of ``epochs``, 0 behind it."""
        if self.epochs is None:
            return self.batch
        return max(0, min(self.batch, self.epochs * self.num_samples - position))

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        count = self.next_count(self.position)
        if not count:
            raise StopIteration
        numbers = self.numbers(self.position, count)
        self.advance(count)
        return numbers

    def advance(self, count: int) -> None:
        """Say that a batch of ``count`` samples has been taken."""
        self.position += count
        self.step += 1

    def __len__(self) -> int:
        """Batches from the beginning to the end of ``epochs``, or of one epoch."""
        return -(-(self.epochs or 1) * self.num_samples // self.batch)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: how far the run is, and which data, seed and shuffling that refers to."""
        return {"position": self.position, "step": self.step, **self._identity()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken; data, seed and shuffling must be the same, the batch size need not."""
        missing = [name for name in ("position", "step", *self._identity()) if name not in state]
        if missing:
            raise ValueError(f"this is not the state of an order: it has no {', '.join(missing)}")
        for name, ours in self._identity().items():
            if state[name] != ours:
                raise ValueError(_CHANGED[name].format(saved=state[name], ours=ours, position=state["position"]))
        self.position = _at_least(0, state["position"], "position")
        self.step = _at_least(0, state["step"], "step")

    def _identity(self) -> dict[str, Any]:
        return {
            "num_samples": self.num_samples,
            "fingerprint": self.fingerprint,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }


_CHANGED = {
    "num_samples": "the data has changed: the run that was saved at sample {position} had {saved} samples, now there "
    "are {ours}, so samples would be lost or seen twice. Give the data and the length of that run, or begin a new one",
    "fingerprint": "the data has changed: the run that was saved at sample {position} had data {saved!r}, now it is "
    "{ours!r}, so samples would be lost or seen twice. Give the data, tokenizer and options of that run, or begin a "
    "new one",
    "seed": "the run that was saved at sample {position} had data seed {saved}, now it is {ours}, so samples would be "
    "lost or seen twice. Give seed={saved}",
    "shuffle": "the run that was saved at sample {position} had shuffle={saved}, now it is {ours}, so samples would be "
    "lost or seen twice. Give shuffle={saved}",
}


def _at_least(least: int, value: Any, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"Order: {name} must be a whole number, not {value!r}") from None
    if isinstance(value, bool) or number < least:
        empty = "; the data is empty" if name == "num_samples" and number == 0 else ""
        raise ValueError(f"Order: {name}={value!r} must be a whole number from {least}{empty}")
    return number
