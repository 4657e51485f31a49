"""`hyper-parallel dry-run`: what one rank of a planned job needs, found before it is started."""

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

_FRAMEWORK = "torch"  # of the tensors without memory, whatever the job will run on


def dry_run(
    model: Annotated[
        str,
        typer.Argument(help="A size (llama-70b), a Hugging Face config.json, or module:function, which builds one."),
    ],
    degrees: Annotated[
        str, typer.Option("--degrees", "-d", help="How many ranks share what: 'dp_shard=4, cp=2, tp=8'.")
    ] = "dp_shard=1",
    world_size: Annotated[int | None, typer.Option(help="Ranks in all; those not named are dp_shard.")] = None,
    rank: Annotated[int, typer.Option(help="The rank to run.")] = 0,
    all_classes: Annotated[bool, typer.Option("--all-classes", help="One rank of each class of ranks alike.")] = False,
    batch: Annotated[int, typer.Option(help="Sequences of a step on this rank.")] = 1,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    microbatches: Annotated[
        int | None, typer.Option(help="Parts in which these run, one after the other. Default: 1; with pp 2 x pp.")
    ] = None,
    schedule: Annotated[str, typer.Option(help="With pp: the schedule, as `pipeline show` draws it.")] = "1f1b",
    stages_per_rank: Annotated[int | None, typer.Option(help="With pp: for schedules that take any number.")] = None,
    stages: Annotated[str | None, typer.Option(help="With pp: blocks of each stage, '3,5'. Default: balanced.")] = None,
    balance: Annotated[str, typer.Option(help="With pp: time or bytes, by which stages are balanced.")] = "time",
    attention: Annotated[str, typer.Option(help="With cp: ring, ulysses, gather, hybrid or auto.")] = "auto",
    order: Annotated[str, typer.Option(help="With cp: contiguous, zigzag or striped.")] = "contiguous",
    dtype: Annotated[
        str | None, typer.Option(help="Of the parameters: float32, bfloat16. Default: the config's.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="Of the computation: bf16, fp16. Default: dtype.")] = None,
    sequence_parallel: Annotated[
        bool | None, typer.Option(help="Cut activations between the halves of a block. Default: yes.")
    ] = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="Compute each block again in backward.")] = False,
    offload: Annotated[
        bool, typer.Option("--offload", help="Parameters, gradients and optimizer state in host memory.")
    ] = False,
    optimizer: Annotated[str, typer.Option(help="adamw, adam, sgd, adagrad, rmsprop, adafactor or none.")] = "adamw",
    device: Annotated[str, typer.Option(help="cpu, cuda or npu: whose kernels and rounding are meant.")] = "cpu",
    device_memory: Annotated[str | None, typer.Option(help="80GB: exit with status 1 if the peak exceeds it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page to this file.")] = None,
) -> None:
    """Run one rank of a job without memory: peak by kind, collectives by axis and cause, operations.

    Status 1: the job does not fit --device-memory. Status 2: the question was not understood.
    """
    options = {
        name: value
        for name, value in locals().items()
        if name not in ("model", "degrees", "rank", "all_classes", "as_json", "html")
    }
    try:
        options["stages"] = _numbers(stages)
        reports = _ask(model, degrees, options, None if all_classes else rank)
        if html is not None:
            page = importlib.import_module("hyper_parallel.analysis.report_page").page
            html.write_text(page(reports), encoding="utf-8")
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps([report.as_data() for report in reports], indent=2))
    else:
        for report in reports:
            _show(report)
    if not all(report.fits for report in reports):
        raise typer.Exit(1)


def _numbers(listed: str | None) -> list[int] | None:
    try:
        return None if listed is None else [int(number) for number in listed.split(",")]
    except ValueError:
        raise ValueError(f"--stages {listed!r} is not a list of numbers of blocks; write --stages 3,5") from None


def _ask(model: str, degrees: str, options: dict[str, Any], rank: int | None) -> list[Any]:
    if importlib.util.find_spec(_FRAMEWORK) is None:
        raise RuntimeError("the dry run needs PyTorch; run: pip install 'hyper-parallel[torch]'")
    os.environ["HYPER_PARALLEL_PLATFORM"] = _FRAMEWORK
    if ":" in model and "" not in sys.path:
        sys.path.insert(0, "")  # module:function of the folder that the command is run in
    room = importlib.import_module("hyper_parallel.analysis.dry_run")
    if rank is None:
        return list(room.dry_run_classes(model, degrees, **options))
    return [room.dry_run(model, degrees, rank=rank, **options)]


def _show(report: Any) -> None:
    room = importlib.import_module("hyper_parallel.analysis.report_text")
    console = Console()
    if not console.is_terminal:
        typer.echo(f"{report}\n")
        return
    console.print(Text(room.headline(report), style="bold"))
    console.print(Text(room.job_line(report), style="dim"))
    tone = "" if report.device_memory is None else "green" if report.fits else "red"
    console.print(Text(report.verdict(), style=tone))
    for note in report.notes:
        console.print(Text(note, style="yellow"))
    for caption, columns, rows in room.tables(report):
        table = Table(*columns, title=Text(caption), title_justify="left", title_style="bold")
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
