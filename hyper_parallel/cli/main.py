"""The application behind `hyper-parallel`: global options, and the commands that live in the files next to this one."""

from typing import Annotated

import typer

from hyper_parallel import __version__
from hyper_parallel.cli.check import check
from hyper_parallel.cli.ckpt import app as ckpt
from hyper_parallel.cli.config import config, schema
from hyper_parallel.cli.data import app as data
from hyper_parallel.cli.doctor import doctor
from hyper_parallel.cli.dry_run import dry_run
from hyper_parallel.cli.forecast import forecast
from hyper_parallel.cli.launch import launch
from hyper_parallel.cli.pipeline import app as pipeline
from hyper_parallel.cli.report import report
from hyper_parallel.cli.train import train

app = typer.Typer(
    name="hyper-parallel",
    help="Train one model on many devices, on PyTorch or MindSpore.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command("doctor")(doctor)
app.command("dry-run")(dry_run)
app.command("config")(config)
app.command("schema")(schema)
app.command("check")(check)
app.command("forecast")(forecast)
app.command("train")(train)
app.command("report")(report)
app.command("launch")(launch)
app.add_typer(ckpt)
app.add_typer(data)
app.add_typer(pipeline)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hyper-parallel {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


def run() -> None:
    """The console script."""
    app(prog_name="hyper-parallel")
