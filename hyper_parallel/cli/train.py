"""`hyper-parallel train`: a run from its config, on this host, on several, or under another launcher."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from hyper_parallel.cli.config import (
    HostRankOption,
    HostsOption,
    MasterOption,
    NprocOption,
    SetOption,
    config,
    load_or_exit,
)


def train(
    path: Annotated[Path, typer.Argument(help="The config, run.toml.")],
    sets: SetOption = None,
    nproc: NprocOption = None,
    hosts: HostsOption = None,
    host_rank: HostRankOption = None,
    master: MasterOption = None,
    show: Annotated[bool, typer.Option("--print", help="Show every value with its origin, and start nothing.")] = False,
) -> None:
    """Train the model of a config. The exit status is 0 when the run is complete, 1 after an error, 2 for a mistake in
    the config (nothing is started then), and 130 or 143 when it was asked to stop: its state is saved.
    """
    if show:
        config(path, sets, nproc, hosts, host_rank, master)
        return
    loaded = load_or_exit(path, sets or (), {"nproc": nproc, "hosts": hosts, "host_rank": host_rank, "master": master})
    main: Any = importlib.import_module("hyper_parallel.trainer.main")
    launch: Any = importlib.import_module("hyper_parallel.launch")
    try:
        status = main.start(loaded)
    except KeyboardInterrupt:  # before there were ranks
        raise typer.Exit(130) from None
    except launch.RankFailure as failure:
        typer.echo(str(failure), err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(status)
