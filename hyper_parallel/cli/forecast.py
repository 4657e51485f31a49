"""`hyper-parallel forecast`: what a rank of a run will need, and whether it fits, before anything is started."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hyper_parallel.cli.config import NprocOption, SetOption, load_or_exit


def forecast(
    path: Annotated[Path, typer.Argument(help="The config, run.toml.")],
    sets: SetOption = None,
    nproc: NprocOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Say what a rank will need: parameters, gradients, optimizer state, gathers, activations, and the peak of a step.

    The exit status is 0 if it fits (or nothing is known to compare with), 2 if it does not: train would not start it.
    """
    config = load_or_exit(path, sets or (), {"nproc": nproc}).config
    room: Any = importlib.import_module("hyper_parallel.trainer.forecast")
    found = room.forecast_run(config, seconds=None)
    typer.echo(json.dumps(found.as_data(), indent=2) if as_json else found.table())
    if not found.fits:
        raise typer.Exit(2)
