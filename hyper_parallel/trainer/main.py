"""What each rank of ``hyper-parallel train`` runs, and how they are started."""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from hyper_parallel.launch.environments import find_place
from hyper_parallel.launch.failures import RankFailure
from hyper_parallel.launch.local import run_local
from hyper_parallel.launch.signals import StopRequest
from hyper_parallel.trainer.config.known_model import known_model
from hyper_parallel.trainer.config.run_config import RunConfig
from hyper_parallel.trainer.config.showing import resolved_toml
from hyper_parallel.trainer.forecast import FORECAST_FILE, forecast_run
from hyper_parallel.trainer.opened_data import Asked, open_evaluation, open_training
from hyper_parallel.trainer.report.live import LIVE_VARIABLE, LiveLine
from hyper_parallel.trainer.report.page import write_failure
from hyper_parallel.trainer.schedule import num_steps

if TYPE_CHECKING:
    from hyper_parallel.trainer.config.loading import LoadedConfig

__all__ = ["RESOLVED_FILE", "run_rank", "start"]

RESOLVED_FILE = "resolved.toml"


def run_rank(config: str) -> None:
    """Train as the rank that the environment says this process is; its exit status is that of the run."""
    from hyper_parallel.trainer.trainer import Trainer

    result = Trainer(TypeAdapter(RunConfig).validate_json(config)).train()
    if result.exit_code:
        sys.exit(result.exit_code)


def start(loaded: LoadedConfig) -> int:
    """Train: as one rank where a launcher has started this process, else as all ranks of this host; the exit status."""
    config = loaded.config
    folder = Path(config.log.folder)
    text = config_text(config)
    place = find_place()
    if place is None and (status := _look_at_data(loaded)):
        return status
    if place is None or place.rank == 0:
        forecast = None
        if config.launch.forecast:
            forecast = forecast_run(config, *((place.size, place.local_size) if place is not None else ()))
            if forecast.refused:
                return _refused(loaded, *_key_and_rest(forecast.refused))
            print(forecast.table(), flush=True)
            if not forecast.fits:
                return 2
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if forecast is not None:
                (folder / FORECAST_FILE).write_text(json.dumps(forecast.as_data()), encoding="utf-8")
            (folder / RESOLVED_FILE).write_text(resolved_toml(loaded), encoding="utf-8")
        except OSError as error:
            return _refused(loaded, "log.folder", f"cannot be written to: {error.strerror}, got {str(folder)!r}")
    if place is not None:
        run_rank(text)
        return 0
    live = LiveLine(config.launch.host_rank * config.nproc) if sys.stdout.isatty() else None
    try:
        with live or nullcontext():
            return run_local(
                run_rank,
                config.nproc,
                args=[text],
                hosts=config.launch.hosts,
                host_rank=config.launch.host_rank,
                master=config.launch.master,
                folder=folder,
                max_restarts=config.launch.max_restarts,
                environment={} if live is None else {LIVE_VARIABLE: "1"},
                on_line=live,
            )
    except RankFailure as failure:
        if config.launch.host_rank == 0:
            write_failure(folder, str(failure))
        raise


def _look_at_data(loaded: LoadedConfig) -> int:
    """Open the data before ranks do, preparing it where it must be: 0, or the exit status to end with."""
    config = loaded.config
    vocabulary = known_model(config.model).vocab_size
    with StopRequest() as stop:
        key = "data.path" if config.data.paths else "data"
        try:
            data = open_training(config, stop)
            key = "eval.data" if config.eval.data is not None else "data.validation"
            validation = open_evaluation(config, stop)
            key = "data.tokenizer"
            for one in (data, validation):
                if one is not None and vocabulary is not None:
                    one.require_vocabulary(vocabulary[1])
            key = "train.batch"
            data.order(batch=config.train.batch, seed=config.train.seed)
            steps = num_steps(config.train, data.num_samples)
            late = {"schedule.warmup": config.schedule.warmup, "log.trace_step": config.log.trace_step or 0}
            key = next((one for one, step in late.items() if step > steps), "")
            # A run that goes on may have had other batches, and so more steps.
            if key and not config.checkpoint_folder.exists():
                raise ValueError(f"must be at most the steps of the run, {steps} for its epochs, got {late[key]}")
        except Asked:
            print(f"stopped by {stop.reason} before a step was made", flush=True)
        except (OSError, ValueError, RuntimeError) as error:
            return _refused(loaded, key, str(error))
        return stop.exit_code


def _key_and_rest(said: str) -> tuple[str, str]:
    """(the key that an error begins with, the rest); what names no key is about the model."""
    key, _, what = said.partition(": ")
    return (key, what) if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key) else ("model", said)


def _refused(loaded: LoadedConfig, key: str, what: str) -> int:
    """Say a mistake that only looking at the machine tells; the exit status."""
    print(f"{loaded.mistake(what, key)}\n1 mistake; nothing was started", file=sys.stderr, flush=True)
    return 2


def config_text(config: RunConfig) -> str:
    """A config as JSON, to be read by the ranks."""
    values: dict[str, Any] = TypeAdapter(RunConfig).dump_python(config, mode="json")
    return json.dumps(values)
