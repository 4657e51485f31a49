"""The line of a run that a terminal shows: the last step, in place; everything else goes by above it."""

from __future__ import annotations

import re
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

__all__ = ["LIVE_VARIABLE", "LiveLine"]

LIVE_VARIABLE = "HYPER_PARALLEL_LIVE"  # set for ranks whose lines a terminal shows in place: they tell more of them
_STEP = re.compile(r"step +\d+/\d+ ")


class LiveLine:
    """What a launcher calls with every line of its ranks; those of ``rank`` are shown."""

    def __init__(self, rank: int = 0, console: Console | None = None) -> None:
        self._rank = rank
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, refresh_per_second=8, transient=False)
        self._last = Text()
        self._spinner = Spinner("dots", style="cyan")

    def __enter__(self) -> LiveLine:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.update(self._last)
        self._live.__exit__(kind, error, traceback)

    def __call__(self, rank: int, line: str) -> None:
        if rank != self._rank:
            return
        line = line.rstrip("\n")
        if _STEP.match(line):
            self._last = _coloured(line)
            self._spinner.update(text=self._last)
            self._live.update(self._spinner)
        else:
            self._console.print(Text(line))


def _coloured(line: str) -> Text:
    line = re.sub(r"  (norm|lr) \S+|(?<=step)  +", lambda found: "" if found[1] else " ", line)  # to fit 80 columns
    text = Text(line, style="dim", no_wrap=True, overflow="ellipsis")
    for pattern, style in ((r"step +\d+", "bold"), (r"loss [-+\d.e]+", "bold cyan"), (r"[\d,]+ tokens/s", "green")):
        text.highlight_regex(pattern, style)
    return text
