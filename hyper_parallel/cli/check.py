"""`hyper-parallel check`: whether the layout of a config gives the numbers of one process."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from hyper_parallel.cli.config import NprocOption, SetOption, load_or_exit


def check(
    path: Annotated[Path, typer.Argument(help="The config, run.toml.")],
    sets: SetOption = None,
    nproc: NprocOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are compared.")] = 3,
    keep_sizes: Annotated[bool, typer.Option("--keep-sizes", help="Do not shrink the model.")] = False,
) -> None:
    """Train a few steps at shrunk widths in float64, in one process and under the config's degrees, and compare.

    Losses, gradients, gradient norms and weights. The exit status is 0 if all are equal, 1 if one differs: the first
    is named. 2: a mistake in the config, or a run that cannot be shrunk.
    """
    config = load_or_exit(path, sets or (), {"nproc": nproc}).config
    room: Any = importlib.import_module("hyper_parallel.trainer.check")
    try:
        verdict = room.check_run(config, steps=steps, keep_sizes=keep_sizes)
    except (ValueError, TypeError) as error:
        typer.echo(f"check: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(verdict.text())
    if not verdict.equal:
        raise typer.Exit(1)
