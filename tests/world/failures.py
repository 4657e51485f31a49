"""What a failed call says: which ranks failed and how, each traceback and stack once, what the ranks printed."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.world.messages import Raised

_OUR_FRAME = re.compile(r'tests.world.worker\.py", line \d+ in (_run|_join|_call)$')
_MOST_OUTPUT = 20_000  # characters shown of what one rank printed


@dataclass
class Outcome:
    """How a call ended on each rank that did not come back with an answer of the right kind; all by rank."""

    raised: dict[int, Raised] = field(default_factory=dict)
    died: dict[int, int] = field(default_factory=dict)  # exit codes; minus the number for a signal
    silent: list[int] = field(default_factory=list)
    stacks: dict[int, str] = field(default_factory=dict)  # of silent ranks, and of died ones that left one
    printed: dict[int, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return bool(self.raised or self.died or self.silent)

    def names_raised(self, ranks: Iterable[int] | None = None) -> list[str]:
        """The names of the exceptions of these ranks (of all without), each once."""
        return list(dict.fromkeys(self.raised[rank].name for rank in (self.raised if ranks is None else ranks)))


class RanksFailed(AssertionError):
    """A call failed on a rank of a world. `outcome` has the parts of the message."""

    def __init__(self, headline: str, outcome: Outcome) -> None:
        super().__init__(headline + "\n" + "\n".join(_sections(outcome)))
        self.outcome = outcome


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"ranks {listed}" if len(runs) > 1 or runs[0][0] != runs[0][1] else f"rank {listed}"


def how_it_ended(exit_code: int) -> str:
    """`was killed by SIGSEGV`, `exited with code 3`."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def _sections(outcome: Outcome) -> Iterable[str]:
    ended = {rank: (code, _tidy(outcome.stacks.get(rank, ""))) for rank, code in outcome.died.items()}
    for (code, stack), ranks in _grouped(ended):
        yield _title(f"{name_ranks(ranks)} {how_it_ended(code)}")
        yield stack or "no stack was left"
    for frames, ranks in _grouped({rank: raised.frames for rank, raised in outcome.raised.items()}):
        yield _title(f"{name_ranks(ranks)} raised {' and '.join(outcome.names_raised(ranks))}")
        yield from filter(None, [frames.rstrip("\n")])
        messages = _grouped({rank: outcome.raised[rank].message for rank in sorted(ranks)})
        for message, of_ranks in messages:
            yield message if len(messages) == 1 else f"{name_ranks(of_ranks)}: {message}"
    for stack, ranks in _grouped({rank: _tidy(outcome.stacks.get(rank, "")) for rank in outcome.silent}):
        yield _title(f"{name_ranks(ranks)} had not answered")
        yield stack or "no stack: the process did not react to the signal that asks for it"
    for printed, ranks in _grouped({rank: text for rank, text in outcome.printed.items() if text.strip()}):
        yield _title(f"{name_ranks(ranks)} printed")
        yield printed.rstrip("\n") if len(printed) <= _MOST_OUTPUT else "[...]" + printed[-_MOST_OUTPUT:].rstrip("\n")


def _grouped(by_rank: dict) -> list[tuple]:
    """(value, ranks) for each distinct value, in the order of first appearance."""
    groups: dict = {}
    for rank, value in by_rank.items():
        groups.setdefault(value, []).append(rank)
    return list(groups.items())


def _title(text: str) -> str:
    return f"---- {text} ".ljust(100, "-")


def _tidy(stack: str) -> str:
    """Without what differs between equal stacks (thread ids), and without the frames below the test's own."""
    kept, hidden = [], False
    for line in re.sub(r"(?i)(thread) 0x[0-9a-f]+", r"\1", stack).splitlines():
        if not line.startswith("  "):
            hidden = line.startswith("Extension modules:")
        hidden = hidden or bool(_OUR_FRAME.search(line))
        if not hidden:
            kept.append(line)
    return "\n".join(kept).strip("\n")
