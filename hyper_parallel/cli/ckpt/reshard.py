"""`hyper-parallel ckpt reshard`: a checkpoint written again sharded as on another mesh."""

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from hyper_parallel.cli.ckpt.reading import Place, checkpoint_module, open_checkpoint
from hyper_parallel.cli.ckpt.terminal import counted, progress_bar, say, shown_errors
from hyper_parallel.cli.ckpt.writing import Destination, FileSize, Overwrite, check_free


def reshard(
    source: Place,
    destination: Destination,
    mesh: Annotated[str, typer.Option(help="The axes of the mesh, as in 'dp=2,tp=4'.")],
    shard: Annotated[
        list[str] | None,
        typer.Option(
            "--shard",
            "--cut",
            help="The mesh axes that shard each dim, as in 'layers.*.weight=tp,None' or '**=dp+tp'. Repeatable.",
        ),
    ] = None,
    max_file_size: FileSize = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a checkpoint again, sharded as a job on the mesh would shard it. Any checkpoint loads under any layout
    without this; it makes the reads of that job contiguous."""
    with shown_errors():
        check_free(destination, overwrite)
        rewrite = checkpoint_module("tools.rewrite")
        with open_checkpoint(source) as opened, progress_bar("reshard") as progress:
            layouts = rewrite.LayoutsByName(_mesh(mesh), _each_once(_shard(text) for text in shard or ()))
            options = {} if max_file_size is None else {"max_file_bytes": max_file_size}
            selection = rewrite.Selection(opened)
            written = rewrite.write_checkpoint(
                selection, destination, layouts_by_name=layouts, progress=progress, **options
            )
    say(f"{destination}: {counted(written, 'tensor')} written")


def _mesh(text: str) -> dict[str, int]:
    axes = [part.partition("=") for part in text.split(",")]
    if not all(name and size.isdecimal() for name, _, size in axes):
        raise ValueError(f"--mesh {text!r} is not of the form 'dp=2,tp=4'")
    return _each_once((name, int(size)) for name, _, size in axes)


def _each_once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"'{name}' is given twice; give it once")
        found[name] = value
    return found


def _shard(text: str) -> tuple[str, list[str]]:
    pattern, equals, aliases = text.rpartition("=")
    if not equals or not pattern:
        raise ValueError(
            f"--shard {text!r} is not of the form 'name=axis,axis', one for each dim, 'None' for one not sharded"
        )
    return pattern, aliases.split(",") if aliases else []
