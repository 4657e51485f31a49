"""`hyper-parallel report`: the page about a run, or about two beside each other, from their folders."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer


def report(
    folders: Annotated[list[Path], typer.Argument(help="The folder of a run, or of two to compare.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to write it; else report.html, or comparison.html, in the folder."),
    ] = None,
) -> None:
    """Write the page about a run, while it goes on or after it: verdict, config, curves, memory, communication, a
    timeline. With two folders, one page about both: their losses on one chart and the largest difference.
    """
    if len(folders) > 2:
        typer.echo(f"report takes one folder, or two to compare; got {len(folders)}", err=True)
        raise typer.Exit(2)
    room: Any = importlib.import_module("hyper_parallel.trainer.report.page")
    try:
        path = room.write_report(folders, output)
    except (ValueError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    typer.echo(str(path))
