"""`hyper-parallel ckpt convert`: a checkpoint in another format, with other names or a part of them."""

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from hyper_parallel.cli.ckpt.reading import Place, checkpoint_module, open_checkpoint
from hyper_parallel.cli.ckpt.terminal import counted, progress_bar, say, shown_errors
from hyper_parallel.cli.ckpt.writing import Destination, FileSize, Overwrite, check_free

Only = Annotated[list[str] | None, typer.Option(help="Only names that fit, as in 'model.**'. May be given repeatedly.")]
Strip = Annotated[str, typer.Option(help="A prefix to take off the names, as in 'model.'.")]


class Kind(str, Enum):
    """What to convert to."""

    ours = "hyper-parallel"
    hugging_face = "hugging-face"


def convert(
    source: Place,
    destination: Destination,
    to: Annotated[Kind, typer.Option(help="The kind to write.")] = Kind.ours,
    mapping: Annotated[Path | None, typer.Option(help="A JSON file of rules for names and shapes.")] = None,
    only: Only = None,
    strip: Strip = "",
    max_file_size: FileSize = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load pickled objects, which runs the code in them.")
    ] = False,
    skip_objects: Annotated[bool, typer.Option("--skip-objects", help="Leave objects out.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Convert between kinds: torch or Hugging Face to ours, any to Hugging Face."""
    with shown_errors():
        check_free(destination, overwrite)
        rewrite = checkpoint_module("tools.rewrite")
        with open_checkpoint(source) as opened, progress_bar("convert") as progress:
            selection = rewrite.Selection(opened, only or (), strip)
            options: dict[str, Any] = {"mapping": _rules(mapping), "progress": progress}
            if max_file_size is not None:
                options["max_file_bytes"] = max_file_size
            if to is Kind.hugging_face:
                written = rewrite.write_folder(selection, destination, **options)
            else:
                objects = "skip" if skip_objects else "pickle" if allow_pickle else "plain"
                written = rewrite.write_checkpoint(selection, destination, objects=objects, **options)
    if to is Kind.hugging_face and selection.object_names and not skip_objects:
        say(
            f"left out {counted(len(selection.object_names), 'object')}: a Hugging Face folder holds tensors only",
            err=True,
        )
    say(f"{destination}: {counted(written, 'tensor')} written")


def _rules(mapping: Path | None) -> Any:
    if mapping is None:
        return None
    try:
        return json.loads(mapping.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file '{mapping}' with a mapping") from None
    except ValueError as error:
        raise ValueError(f"'{mapping}' is not JSON: {error}") from None
