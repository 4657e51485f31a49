"""Which line of a program is running: for reports and messages only, never to decide anything."""

from __future__ import annotations

import traceback

# Not a program's own lines. Models, ours too, are: a line of theirs says what is being computed.
_MACHINERY = ("torch", "hyper_parallel", "contextlib", "functools")
_MODELS = "hyper_parallel.models."
_THE_RUN = "hyper_parallel.analysis."


def user_line() -> str:
    """``file:line`` of the innermost frame of the program or its model inside of a dry run.

    Where none is, as in an optimizer's step or behind the model's last line: of the library or of the optimizer.
    """
    behind = ""
    for frame, line in traceback.walk_stack(None):
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_THE_RUN):
            return behind
        place = f"{frame.f_code.co_filename}:{line}"
        if name.partition(".")[0] not in _MACHINERY or name.startswith(_MODELS):
            return place
        if not behind and name.startswith(("hyper_parallel.core.", "hyper_parallel.plans.", "torch.optim.")):
            behind = place
    return behind
