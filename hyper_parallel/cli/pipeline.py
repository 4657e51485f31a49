"""`hyper-parallel pipeline`: schedules of pipelines, drawn and proven without a framework."""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="pipeline",
    help="Schedules of pipelines, before anything is started.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def _commands() -> None:
    pass


@app.command("show")
def show(
    schedule: Annotated[
        str,
        typer.Argument(
            help="gpipe, 1f1b, interleaved, looped_bfs, zb_h1, zb_h2, zb1p, zbv, v_half, v_min, dual_pipe_v, or a file "
            "with a table."
        ),
    ],
    ranks: Annotated[int | None, typer.Option(help="Ranks of the pipeline. Default: 4.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Microbatches of a step. Default: 8.")] = None,
    stages_per_rank: Annotated[
        int | None, typer.Option(help="For interleaved, looped_bfs and zb1p. Default: 2.")
    ] = None,
    times: Annotated[
        str, typer.Option(help="Of one microbatch on one rank: forward, input gradient, weight gradient (, message).")
    ] = "1,1.2,.8",
    budget: Annotated[float | None, typer.Option(help="Chunks of activations that a rank may have alive.")] = None,
    width: Annotated[int, typer.Option(help="Letters in a line.")] = 120,
    svg: Annotated[Path | None, typer.Option(help="Draw the timeline into this file.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Print the table with its messages, as text to edit.")] = False,
) -> None:
    """Draw a schedule: who computes what when, the bubble, what is alive, and the proof that it ends.

    Status 1: the table is refused. Status 2: the question was not understood.
    """
    try:
        given, clock = _table(schedule, ranks, microbatches, stages_per_rank), _room("simulate").Times.parse(times)
        try:
            ready = _room("prepare").prepare(given, clock, budget=budget)
        except _room("faults").TableError as error:
            typer.echo(str(error))
            raise typer.Exit(1) from None
        timeline = _room("simulate").simulate(ready, clock)
        picture = importlib.import_module("hyper_parallel.drawing.timeline")
        if svg is not None:
            picture.TimelineDrawing(timeline).save(svg)
    except (OSError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(str(ready) if table else picture.text_of_timeline(timeline, width))
    if not table:
        typer.echo(_verdict(ready, budget))


def _room(name: str) -> Any:
    return importlib.import_module(f"hyper_parallel.core.pipeline_parallel.{name}")


def _table(schedule: str, ranks: int | None, microbatches: int | None, stages_per_rank: int | None) -> Any:
    path = Path(schedule)
    if not path.is_file():
        return _room("tables").make_table(
            schedule, 4 if ranks is None else ranks, 8 if microbatches is None else microbatches, stages_per_rank
        )
    if (ranks, microbatches, stages_per_rank) != (None, None, None):
        raise ValueError(
            f"{schedule} is a file, which says ranks, stages and microbatches itself; leave the options out"
        )
    try:
        return _room("table").Table.parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{schedule}: {error}") from None


def _verdict(table: Any, budget: float | None) -> str:
    count = sum(map(len, table.actions))
    within = "" if budget is None else f", at most {budget:g} chunks alive"
    return (
        f"checked, {count} actions: ends even if every send and receive blocks, each microbatch once and in order, "
        f"nothing used before it came{within}"
    )
