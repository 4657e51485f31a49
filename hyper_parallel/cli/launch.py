"""`hyper-parallel launch`: a script as many ranks, on one host or several, with a clear end if one dies."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer


def launch(
    command: Annotated[
        list[str],
        typer.Argument(help="A Python script and its arguments, -m module, or any command; put -- before options."),
    ],
    nproc: Annotated[int, typer.Option(help="Processes on each host.")] = 1,
    hosts: Annotated[int, typer.Option(help="How many hosts take part; run the same command on each.")] = 1,
    host_rank: Annotated[int, typer.Option(help="Which of them this is, from 0.")] = 0,
    master: Annotated[str | None, typer.Option(help="Where ranks meet: host 0's address and a free port, a:p.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Keep the output of ranks here, in logs/rank-N.txt.")] = None,
    max_restarts: Annotated[int, typer.Option(help="Start all ranks again after one died, so often.")] = 0,
    stop_after: Annotated[str | None, typer.Option(help="Ask the ranks to stop after this time: 11h50m.")] = None,
) -> None:
    """Run a script as many ranks on this host, and end all of them clearly when one dies.

    The exit status is 0 when all ranks ended well, 1 when one died, 2 for a mistake in this command, and 130 or 143
    when Ctrl-C, SIGTERM, SIGUSR1 or --stop-after asked the ranks to stop and they did.
    """
    room: Any = importlib.import_module("hyper_parallel.launch")
    try:
        status = room.run_local(
            command,
            nproc,
            hosts=hosts,
            host_rank=host_rank,
            master=master,
            folder=folder,
            max_restarts=max_restarts,
            stop_after=stop_after,
        )
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except room.RankFailure as failure:
        typer.echo(str(failure), err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(status)
