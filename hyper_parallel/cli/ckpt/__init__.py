"""`hyper-parallel ckpt`: look into checkpoints, check, compare and convert them. No model, no process group, and, but
for objects that have to be translated, no framework.

Exit status: 0 when all is well, 1 when `verify` or `diff` has found something, 2 when the command could not be done.
"""

import typer

from hyper_parallel.cli.ckpt.convert import convert
from hyper_parallel.cli.ckpt.diff import diff
from hyper_parallel.cli.ckpt.ls import ls
from hyper_parallel.cli.ckpt.reshard import reshard
from hyper_parallel.cli.ckpt.show import show
from hyper_parallel.cli.ckpt.verify import verify

app = typer.Typer(
    name="ckpt",
    help="Look into checkpoints, check, compare and convert them.",
    no_args_is_help=True,
    add_completion=False,
)
for command in (ls, show, verify, diff, convert, reshard):
    app.command()(command)
