"""The figures of a forecast: bytes on one rank by kind, what there is room for, and what would make it fit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from hyper_parallel.analysis.byte_sizes import byte_text

if TYPE_CHECKING:
    from hyper_parallel.trainer.config.run_config import RunConfig

__all__ = ["FORECAST_FILE", "Forecast", "fingerprint"]

FORECAST_FILE = "forecast.json"
_FULL = 0.92  # of a device: the rest is for its runtime, communication buffers and fragmentation


@dataclass(frozen=True)
class Forecast:
    """Bytes on rank 0. What is None is not known: the dry run was not made, ``note`` says why."""

    world_size: int
    degrees: str
    num_parameters: int | None = None  # of the whole model
    parameters: int | None = None
    gradients: int | None = None
    optimizer_state: int | None = None
    largest_gather: int | None = None  # of the parameters of one unit, whole
    activations: int | None = None  # at the peak, with what is temporary
    logits: int | None = None  # of one micro-batch, one copy; part of the activations
    peak: int | None = None  # of a step, everything together
    peak_place: str = ""
    device_memory: int | None = None  # for one rank
    device_memory_is: str = ""  # in words
    change: str = ""  # the cheapest that would make it fit
    note: str = ""
    refused: str = ""  # why the model cannot be built or split as the config says; "": it can
    fingerprint: str = ""  # of the config

    @property
    def state(self) -> int | None:
        """What stays between steps, and the gradients that come with each: a lower bound of the peak."""
        found = (self.parameters, self.gradients, self.optimizer_state)
        return None if None in found else sum(one for one in found if one is not None)

    @property
    def needed(self) -> int | None:
        """The peak, or where that is not known the state."""
        return self.peak if self.peak is not None else self.state

    @property
    def fits(self) -> bool:
        """Whether it is not known to exceed the device, or to be refused."""
        return not self.refused and (
            self.needed is None or self.device_memory is None or self.needed <= self.device_memory
        )

    def verdict(self) -> str:
        """Whether it fits, in one line; and if not, what to change."""
        what = "the peak" if self.peak is not None else "the state alone"
        if self.refused:
            return f"forecast: this run cannot start: {self.refused}"
        if self.needed is None:
            return f"forecast: not made, {self.note}"
        if self.device_memory is None:
            return f"forecast: {what} is {byte_text(self.needed)} a rank; give launch.device_memory to compare it with"
        room = f"{byte_text(self.device_memory)} ({self.device_memory_is})"
        if not self.fits:
            over = byte_text(self.needed - self.device_memory)
            change = self.change or "nothing that was tried makes it fit: take more ranks, or a smaller model"
            needed = byte_text(self.needed)
            return f"forecast: does not fit: {what} of rank 0 is {needed}, {over} more than {room}; {change}"
        if self.needed > _FULL * self.device_memory:
            return f"forecast: fits barely: {what} is {byte_text(self.needed)} of {room}"
        return f"forecast: fits: {what} is {byte_text(self.needed)} of {room}"

    def table(self) -> str:
        """All figures, a line each."""
        if self.needed is None:
            return self.verdict()
        rows = [
            ("parameters", self.parameters, ""),
            ("gradients", self.gradients, ""),
            ("optimizer state", self.optimizer_state, ""),
            ("largest gather", self.largest_gather, "parameters of one unit, whole"),
            ("activations", self.activations, "at the peak, with temporaries"),
            ("logits", self.logits, "of one micro-batch, part of the activations"),
            ("peak of a step", self.peak, self.peak_place),
        ]
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        lines = [f"memory of a rank, {ranks} ({self.degrees})"]
        for name, size, meaning in rows:
            text = "not known" if size is None else byte_text(size)
            lines.append(f"  {name:<16} {text:>10}  {meaning}".rstrip())
        return "\n".join([*lines, *([self.note] if self.note else []), self.verdict()])

    def as_data(self) -> dict[str, Any]:
        """Plain data for ``metrics.jsonl``, with what follows from it."""
        return {**asdict(self), "state": self.state, "fits": self.fits}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Forecast:
        return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})

    def with_values(self, values: Mapping[str, Any]) -> Forecast:
        """The same with some figures."""
        return replace(self, **values)


def fingerprint(config: RunConfig) -> str:
    """Equal for equal configs."""
    values = TypeAdapter(type(config)).dump_python(config, mode="json")
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
