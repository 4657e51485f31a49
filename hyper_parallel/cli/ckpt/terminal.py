"""What the commands print: texts, tables, sizes, progress, and errors as a line and a status."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from hyper_parallel.core.distributed_checkpoint.base.shown_text import spelled_out

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

_WIDEST = 120  # characters to which the cells of a column are filled up: one long name must not make all rows long


def say(text: str, err: bool = False) -> None:
    """Print one line. Names in a checkpoint may hold anything, also line breaks and what drives a terminal: what is not
    printable is spelled out."""
    typer.echo(spelled_out(text), err=err)


def say_json(value: Any) -> None:
    """Print a value for programs, in ASCII."""
    typer.echo(json.dumps(value, indent=2))


@contextmanager
def shown_errors() -> Iterator[None]:
    """Errors that a user can do something about are a line, and status 2."""
    try:
        yield
    except (OSError, ValueError, TypeError, RuntimeError, MemoryError) as error:
        say(f"error: {error or 'there is not enough memory'}", err=True)
        raise typer.Exit(2) from None


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on the terminal; nothing where the output is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def size_text(num_bytes: float) -> str:
    """As in 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def counted(count: int, what: str) -> str:
    """As in 2 tensors."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def print_table(rows: list[list[str]]) -> None:
    """Rows in columns of one width each."""
    rows = [[spelled_out(cell) for cell in row] for row in rows]
    widths = [max(min(len(row[column]), _WIDEST) for row in rows) for column in range(len(rows[0]))] if rows else []
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
