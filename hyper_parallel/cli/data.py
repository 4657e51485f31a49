"""`hyper-parallel data`: prepare data once, and look at samples as they are trained on."""

import importlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

app = typer.Typer(
    name="data",
    help="Prepare data, and look at it as it is trained on.",
    no_args_is_help=True,
    add_completion=False,
)

_Paths = Annotated[
    list[str] | None, typer.Argument(help="Files or folders, or a run.toml whose [data] is meant. None: --kind corpus.")
]
_Kind = Annotated[
    str | None, typer.Option(help="corpus, text, chat, tokens or synthetic. Default: chat or text, by path.")
]
_Tokenizer = Annotated[str | None, typer.Option(help='"bytes", a tokenizer.json, or the folder that has one.')]
_Length = Annotated[int | None, typer.Option(help="Tokens of a sample.")]
_ChatTemplate = Annotated[str | None, typer.Option(help='"chatml", a Jinja file, or "none".')]
_Packing = Annotated[bool | None, typer.Option(help="Several conversations in one sample, kept apart.")]
_Isolate = Annotated[bool | None, typer.Option(help="Keep documents from seeing each other.")]
_TooLong = Annotated[str | None, typer.Option(help="error or truncate: conversations longer than a sample.")]
_TextField = Annotated[str | None, typer.Option(help="The field of a record that has the text.")]
_Cache = Annotated[str | None, typer.Option(help="The folder for prepared data.")]


@app.command()
def prepare(
    paths: _Paths = None,
    kind: _Kind = None,
    tokenizer: _Tokenizer = None,
    length: _Length = None,
    chat_template: _ChatTemplate = None,
    packing: _Packing = None,
    isolate: _Isolate = None,
    too_long: _TooLong = None,
    text_field: _TextField = None,
    cache: _Cache = None,
) -> None:
    """Turn text and conversations into token files, once; the same data and options find them again.

    Status 2: it could not be done, and why.
    """
    options = {name: value for name, value in locals().items() if name != "paths"}
    with _shown_errors():
        config = _config(paths or [], options)
        with _progress() as progress:
            folders = importlib.import_module("hyper_parallel.data.preparing.prepare").prepare(
                config, progress=progress
            )
            check = importlib.import_module("hyper_parallel.data.preparing.cache").check_folder
            for folder in folders:
                check(folder, thorough=True)
        data = _open(config)
    for line in data.describe().splitlines():
        typer.echo(line)
    for folder in folders:
        typer.echo(str(folder))


@app.command()
def show(
    paths: _Paths = None,
    kind: _Kind = None,
    tokenizer: _Tokenizer = None,
    length: _Length = None,
    chat_template: _ChatTemplate = None,
    packing: _Packing = None,
    isolate: _Isolate = None,
    too_long: _TooLong = None,
    text_field: _TextField = None,
    cache: _Cache = None,
    num: Annotated[int, typer.Option("--num", "-n", min=1, help="How many samples.")] = 1,
    first: Annotated[int, typer.Option(min=0, help="The position in the run of the first of them.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the order of samples.")] = 0,
) -> None:
    """Print samples in the order of a run: trained tokens green (between ⟦ and ⟧ where there are no colours).

    Status 2: it could not be done, and why.
    """
    options = {name: value for name, value in locals().items() if name not in ("paths", "num", "first", "seed")}
    with _shown_errors():
        config = _config(paths or [], options)
        with _progress() as progress:
            data = _open(config, seed, progress)
        show_sample = importlib.import_module("hyper_parallel.data.showing").show_sample
        numbers = data.order(batch=1, seed=seed).numbers(first, num).tolist()
        console = Console(soft_wrap=True)
        typer.echo(data.describe())
        for place, number in enumerate(numbers, first):
            batch = data.collate([number])
            typer.echo(
                f"-- sample {place} of the run, number {number} of the data: {batch.num_tokens} tokens, "
                f"{batch.num_trained} of them trained"
            )
            console.print(show_sample(data, data.sample(number), marks=not console.is_terminal))


def _config(paths: list[str], options: dict[str, Any]) -> Any:
    room = importlib.import_module("hyper_parallel.data.config")
    pydantic = importlib.import_module("pydantic")
    given: dict[str, Any] = {}
    if len(paths) == 1 and paths[0].endswith(".toml"):
        given = _read_toml(Path(paths[0]))
    elif paths:
        given = {"path": tuple(paths), "kind": "text"}
        if all(_has_conversations(path) for path in paths):
            given["kind"] = "chat"
    given |= {name: value for name, value in options.items() if value is not None}
    try:
        return pydantic.TypeAdapter(room.DataConfig).validate_json(json.dumps(given))
    except pydantic.ValidationError as error:
        wrong = [": ".join(filter(None, (".".join(map(str, one["loc"])), one["msg"]))) for one in error.errors()]
        raise ValueError("; ".join(wrong)) from None


def _has_conversations(path: str) -> bool:
    """Whether the first record of a file is one."""
    records = importlib.import_module("hyper_parallel.data.preparing.records")
    file = Path(path)
    if not file.is_file() or not records.is_records(file):
        return False
    record = next(records.read_records(file), None)
    return record is not None and not {"messages", "prompt"}.isdisjoint(record.fields)


def _read_toml(path: Path) -> dict[str, Any]:
    """[data] of a config and of those that it extends."""
    room = "hyper_parallel.trainer.config"
    layers = importlib.import_module(f"{room}.toml_layers").file_layers(path)
    values, _ = importlib.import_module(f"{room}.merging").merge(
        layers, importlib.import_module(f"{room}.run_config").RunConfig
    )
    data = values.get("data", {})
    if not isinstance(data, dict):
        raise ValueError(f"{path}: data must be a section, [data]")
    return data


def _open(config: Any, seed: int = 0, progress: Any = None) -> Any:
    return importlib.import_module("hyper_parallel.data.opening").open_data(config, seed=seed, progress=progress)


@contextmanager
def _shown_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
