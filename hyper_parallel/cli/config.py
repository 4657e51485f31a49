"""`hyper-parallel config` and `hyper-parallel schema`: a run's config checked and shown before anything starts."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one value of the config; may be repeated."),
]
NprocOption = Annotated[int | None, typer.Option("--nproc", help="Processes on each host: launch.nproc.")]
HostsOption = Annotated[int | None, typer.Option("--hosts", help="How many hosts take part: launch.hosts.")]
HostRankOption = Annotated[int | None, typer.Option("--host-rank", help="Which host this is: launch.host_rank.")]
MasterOption = Annotated[str | None, typer.Option("--master", help="Where ranks meet, host:port: launch.master.")]


def config(
    path: Annotated[Path, typer.Argument(help="The config, run.toml.")],
    sets: SetOption = None,
    nproc: NprocOption = None,
    hosts: HostsOption = None,
    host_rank: HostRankOption = None,
    master: MasterOption = None,
) -> None:
    """Check a config and show every value with where it is from: a line of a file, an option, or the default.

    What is printed is a config too. With mistakes, all of them are printed and the exit status is 2.
    """
    loaded = load_or_exit(path, sets or (), {"nproc": nproc, "hosts": hosts, "host_rank": host_rank, "master": master})
    room: Any = importlib.import_module("hyper_parallel.trainer.config")
    typer.echo(room.resolved_toml(loaded), nl=False)


def schema() -> None:
    """Print the JSON schema of a config, for editors: hyper-parallel schema > schema.json."""
    room: Any = importlib.import_module("hyper_parallel.trainer.config")
    typer.echo(json.dumps(room.config_schema(), indent=2))


def load_or_exit(path: Path, sets: Sequence[str], launch: Mapping[str, Any]) -> Any:
    """The checked config; with mistakes they are printed and the exit status is 2. ``launch``: keys of that section."""
    room: Any = importlib.import_module("hyper_parallel.trainer.config")
    options = {
        f"--{key.replace('_', '-')}": (f"launch.{key}", value) for key, value in launch.items() if value is not None
    }
    try:
        return room.load_config(path, sets, options)
    except room.ConfigError as error:
        typer.echo(str(error), err=True)
        count = len(error.mistakes)
        typer.echo(f"{count} mistake{'s' * (count > 1)}; nothing was started", err=True)
        raise typer.Exit(2) from None
