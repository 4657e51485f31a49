"""Lines of a program that ask for the rank in a dry run: what they make of the answer, another rank may not do.

The library asks too, but only for what ``rank_questions.py`` knows. So the question is whose line asks, and where it
was asked is all that the stack is read for.
"""

from __future__ import annotations

import traceback

from hyper_parallel.platform.shared.membership import Member

_LIBRARY = "hyper_parallel."
_MODELS = "hyper_parallel.models."  # a model is a program, ours too
_DOORS = {"get_rank", "get_local_rank", "get_coordinate", "get_group_local_rank", "asked_rank", "_told"}


class RankSpy:
    """The lines, as ``file:line``, in which a program asked ``member`` for its rank."""

    def __init__(self, member: Member) -> None:
        self.lines: dict[str, None] = {}
        member.when_asked = self._told

    def _told(self) -> None:
        for frame, line in traceback.walk_stack(None):
            name = frame.f_globals.get("__name__", "")
            is_library = name.startswith(_LIBRARY) and not name.startswith(_MODELS)
            if is_library and frame.f_code.co_name in _DOORS:
                continue
            if not is_library:
                self.lines[f"{frame.f_code.co_filename}:{line}"] = None
            return

    def note(self) -> str:
        """What the report says of them; empty where there are none."""
        if not self.lines:
            return ""
        asks = "ask" if len(self.lines) > 1 else "asks"
        return (
            f"{', '.join(self.lines)} {asks} for the rank: ranks may differ, and no two are taken for alike. The "
            "figures hold for this rank only; run each that matters with rank= (--rank), or all with dry_run_classes "
            "(--all-classes)"
        )
