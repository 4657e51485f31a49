"""Where in the user's program something was asked for: for messages only, never to decide anything."""

from __future__ import annotations

import traceback

_NOT_THE_USERS = ("hyper_parallel", "torch", "mindspore", "contextlib", "functools")


def call_site() -> str:
    """``file:line`` of the innermost frame that is not this library's or a framework's."""
    for frame, line in traceback.walk_stack(None):
        if frame.f_globals.get("__name__", "").split(".")[0] not in _NOT_THE_USERS:
            return f"{frame.f_code.co_filename}:{line}"
    return "an unknown place"
