"""`hyper-parallel ckpt diff`: what differs between two checkpoints."""

import typer

from hyper_parallel.cli.ckpt.reading import Place, checkpoint_module, open_checkpoint
from hyper_parallel.cli.ckpt.terminal import AsJson, print_table, progress_bar, say, say_json, shown_errors


def diff(first: Place, second: Place, as_json: AsJson = False) -> None:
    """Show what differs between two checkpoints, of any kinds; status 1 if anything does."""
    with (
        shown_errors(),
        open_checkpoint(first) as one,
        open_checkpoint(second) as other,
        progress_bar("compare") as progress,
    ):
        found = list(checkpoint_module("tools.compare").compare(one, other, progress))
    if as_json:
        say_json([difference._asdict() for difference in found])
    elif found:
        print_table([[name, what] for name, what in found])
    else:
        say("no differences")
    if found:
        raise typer.Exit(1)
