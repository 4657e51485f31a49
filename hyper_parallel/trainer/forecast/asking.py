"""A forecast of a run, asked of a process of its own, so that whoever starts ranks loads no framework.

Note [The time of a forecast]
The process says what it knows as it knows it: the state of model and optimizer first, which is arithmetic, then the
peak of a step, from a dry run. It is ended when the time is up, and what was said counts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from glob import glob
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from hyper_parallel.trainer.config.known_model import runs_on_mindspore
from hyper_parallel.trainer.forecast.forecast import Forecast, fingerprint

if TYPE_CHECKING:
    from hyper_parallel.trainer.config.run_config import RunConfig

__all__ = ["forecast_run"]

_FRAMEWORK = "torch"  # of the tensors without memory, whatever the run is on
_TWIN = "by the model's twin on PyTorch: parameters and optimizer state are those of MindSpore, activations an estimate"
_SECONDS = 20.0


def forecast_run(
    config: RunConfig, world_size: int | None = None, local_size: int | None = None, seconds: float | None = _SECONDS
) -> Forecast:
    """What rank 0 of the run will need; nothing of it is started.

    ``world_size`` and ``local_size``, the ranks on this host, are those of the config unless a launcher knows better.
    What is not known after ``seconds`` stays unknown; None: as long as it takes.
    """
    size = world_size or config.world_size
    degrees = str(config.parallel.degrees.fit(size)).strip('"')
    forecast = Forecast(size, degrees, fingerprint=fingerprint(config))
    if importlib.util.find_spec(_FRAMEWORK) is None:
        return forecast.with_values({"note": "the dry run needs PyTorch: pip install 'hyper-parallel[torch]'"})
    is_twin = runs_on_mindspore()
    question = {
        "config": TypeAdapter(type(config)).dump_python(config, mode="json"),
        "world_size": size,
        "local_size": local_size or config.nproc,
        "is_the_run": not is_twin and config.model.build is None,  # a user's function may ask where it runs
        "device": "npu" if is_twin and glob("/dev/davinci*") else None,
    }
    out, error, is_late = _ask(json.dumps(question), seconds)
    for line in out.splitlines(keepends=True):
        if line.startswith("{") and line.endswith("\n"):
            forecast = forecast.with_values(json.loads(line))
    notes = [forecast.note, *([_TWIN] if is_twin else [])]
    if is_late:
        notes.append(f"not all was known after {seconds:.0f} s; hyper-parallel forecast takes its time")
    elif forecast.needed is None and not (forecast.note or forecast.refused):
        notes.append((error.strip().splitlines() or ["no answer"])[-1])
    return forecast.with_values({"note": "; ".join(filter(None, notes))})


def _ask(question: str, seconds: float | None) -> tuple[str, str, bool]:
    """(what was said, on the error channel, whether the time was up)."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment["HYPER_PARALLEL_PLATFORM"] = _FRAMEWORK
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), environment.get("PYTHONPATH", "")]))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "hyper_parallel.trainer.forecast.answer"],
            input=question,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as late:
        return _text(late.stdout), _text(late.stderr), True
    return done.stdout, done.stderr, False


def _text(found: Any) -> str:
    return found.decode(errors="replace") if isinstance(found, bytes) else found or ""
