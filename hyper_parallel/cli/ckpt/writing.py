"""What the commands that write a checkpoint share: their options, and that nothing is replaced unasked."""

from typing import Annotated

import typer

from hyper_parallel.cli.ckpt.reading import checkpoint_module, is_whole


def _bytes(text: str) -> int:
    """512, 64KiB, 200MiB, 5GiB."""
    number = text.rstrip("KMGTiBkmgtb ")
    unit = text[len(number) :].strip().upper().replace("IB", "").replace("B", "")
    powers = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
    try:
        size = int(float(number) * 1024 ** powers[unit])
    except (ValueError, KeyError):
        raise typer.BadParameter(f"{text!r} is not a size such as 200MiB") from None
    if size < 1:
        raise typer.BadParameter("must be at least 1 byte")
    return size


Destination = Annotated[str, typer.Argument(help="The folder to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that is there.")]
FileSize = Annotated[int | None, typer.Option("--max-file-size", parser=_bytes, help="As in 200MiB.", metavar="SIZE")]


def check_free(destination: str, overwrite: bool) -> None:
    """An error where a checkpoint would be replaced without leave."""
    is_url = checkpoint_module("storage.storage").storage_for(destination) == "fsspec"
    is_taken = (
        is_whole(destination) if is_url else checkpoint_module("tools.tensor_source").kind_of(destination) is not None
    )
    if is_taken and not overwrite:
        raise ValueError(f"there is a checkpoint at '{destination}' already; pass --overwrite to replace it")
