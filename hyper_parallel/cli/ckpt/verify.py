"""`hyper-parallel ckpt verify`: whether every byte of a checkpoint is as it was written."""

from collections.abc import Callable

import typer

from hyper_parallel.cli.ckpt.reading import Place, checkpoint_module, open_checkpoint, tensor_bytes
from hyper_parallel.cli.ckpt.terminal import progress_bar, say, shown_errors

_STEP = 16 << 20  # bytes that are read at a time

_STEP = 16 << 20  # bytes that are read at a time


def verify(place: Place) -> None:
    """Read every byte and compare it with the checksums; one line for each problem, and status 1, if there are any."""
    with shown_errors():
        source = checkpoint_module("tools.tensor_source")
        kind = source.kind_of(place)
        with progress_bar("verify") as progress:
            if kind == source.OURS:
                problems = checkpoint_module("format.stored_files").verify(place, progress=progress)
            else:
                problems = _read_everything(place, progress)
    for problem in problems:
        say(problem)
    if problems:
        raise typer.Exit(1)
    note = "" if kind == source.OURS else f" as far as can be told: {kind} files have no checksums"
    say(f"{place}: every byte is sound{note}")


def _read_everything(place: str, progress: Callable[[int, int], None]) -> list[str]:
    """For kinds without checksums: whether all that should be there is."""
    errors, split_box = checkpoint_module("base.errors"), checkpoint_module("tools.rewrite").split_box
    problems = []
    try:
        with open_checkpoint(place) as source:
            known = source.known()
            total, done = sum(tensor_bytes(*one) for one in known.values()), 0
            for name, one in known.items():
                try:
                    for box in source.boxes(name):
                        for offsets, sizes in split_box(box, tensor_bytes((), one[1]), _STEP):
                            source.view(name, offsets, sizes).tobytes()
                except errors.CorruptCheckpointError as error:
                    problems.append(str(error))
                done += tensor_bytes(*one)
                progress(done, total)
            for name in source.objects():
                try:
                    source.object_value(name)
                except errors.CorruptCheckpointError as error:
                    problems.append(str(error))
                except ValueError:
                    pass  # more than plain data: not loaded
    except errors.CorruptCheckpointError as error:
        problems.append(str(error))
    return problems
