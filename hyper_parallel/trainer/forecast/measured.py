"""A forecast beside what the run has measured: of rank 0, after its second step.

Note [What is compared]
The state is arithmetic on both sides: the bytes of the parameters and of what the optimizer keeps. The peak is that of
the device's allocator where there is one. A CPU has none that can be asked: there the growth of the process's resident
memory since its model had values is compared with the forecast's peak without the parameters. It includes what the
framework itself takes in its first steps, tens of megabytes, so it says nothing about small models, and the event says
so.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.analysis.byte_sizes import byte_text
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.forecast.forecast import FORECAST_FILE, Forecast, fingerprint

if TYPE_CHECKING:
    from hyper_parallel.trainer.config.run_config import RunConfig
    from hyper_parallel.trainer.trainer import Trainer

__all__ = ["MeasuredForecast"]

_STATE_BOUND, _PEAK_BOUND = 0.05, 0.25
_LEAST_GROWTH = 10**9  # bytes, below which a process's own memory hides that of the model
_STEPS = 2


class MeasuredForecast:
    """The forecast that was made of this run, if one was, and what became of it."""

    def __init__(self, config: RunConfig, trainer: Trainer) -> None:
        self._trainer, self._first = trainer, trainer.run.step
        self.forecast = _read(Path(config.log.folder) / FORECAST_FILE, fingerprint(config))
        self._resident = _resident_bytes()

    def is_due(self, step: int) -> bool:
        return self.forecast is not None and self.forecast.needed is not None and step == self._first + _STEPS

    def compare(self) -> dict[str, Any]:
        """The event: state and peak, each with forecast, measured, error, and whether it is within its bound."""
        assert self.forecast is not None
        said = self.forecast
        found: dict[str, Any] = {}
        if said.parameters is not None and said.optimizer_state is not None:
            found["state"] = _beside(said.parameters + said.optimizer_state, self._state(), _STATE_BOUND)
        if said.peak is None or said.parameters is None:
            return found
        platform = get_platform()
        if platform.get_device_type() != "cpu":
            found["peak"] = _beside(said.peak, platform.peak_memory(), _PEAK_BOUND)
            found["peak_is"] = "the most that the device's allocator has given out"
        elif self._resident is not None:
            growth = platform.peak_memory() - self._resident
            found["peak"] = _beside(said.peak - said.parameters, growth, _PEAK_BOUND)
            found["peak_is"] = "growth of the process's resident memory since its parameters had values"
            if said.peak - said.parameters < _LEAST_GROWTH:
                found["peak"]["within"] = None
                found["peak_is"] += "; too little to tell from what the framework takes for itself"
        return found

    def _state(self) -> int:
        platform, trainer = get_platform(), self._trainer
        total = 0
        for parameter in trainer.run.parameters():
            total += _bytes_of(parameter)
            if platform.requires_grad(parameter):
                slots = platform.optimizer_slots(trainer.optimizer, parameter).values()
                total += sum(_bytes_of(slot) for slot in slots if platform.is_tensor(slot))
        return total


def line_of(compared: dict[str, Any]) -> str:
    """The comparison in words."""
    parts = []
    for name in ("state", "peak"):
        if name in compared:
            one = compared[name]
            judged = {True: "", False: f", more than {one['bound']:.0%} off", None: ", not judged"}[one["within"]]
            measured, said = byte_text(one["measured"]), byte_text(one["forecast"])
            parts.append(f"{name} {measured}, forecast {said} ({one['error']:+.1%}{judged})")
    return f"forecast and measured: {'; '.join(parts)}"


def _beside(forecast: int, measured: int, bound: float) -> dict[str, Any]:
    error = forecast / max(1, measured) - 1
    return {"forecast": forecast, "measured": measured, "error": error, "bound": bound, "within": abs(error) <= bound}


def _bytes_of(tensor: Any) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return math.prod(local.shape) * get_platform().get_element_size(local)


def _read(path: Path, expected: str) -> Forecast | None:
    """That of this very config; another run's may lie there."""
    try:
        found = Forecast.from_data(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.fingerprint == expected else None


def _resident_bytes() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
