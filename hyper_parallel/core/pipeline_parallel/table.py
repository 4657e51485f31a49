"""A table: what every rank does in one step of a pipeline, as data that does not change; its text, and its digest.

Note [The text of a table]
Lines ``stages:`` (the rank of each stage) and ``microbatches:``, then ``rank 0:`` with its actions in order, over as
many lines as one likes; ``#`` starts a comment. Places in a table are given as rank and line: the lines of a rank are
its actions, numbered from 1, as :meth:`Table.lines` prints them.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hyper_parallel.core.pipeline_parallel.action import Action, Kind, Value
from hyper_parallel.core.pipeline_parallel.stage_map import StageMap

_HEAD = re.compile(r"(name|stages|microbatches|rank\s+\d+)\s*:\s*(.*)")
_WIDTH = 120


@dataclass(frozen=True)
class Table:
    """What every rank does in one step: ``actions[rank]`` in order."""

    stages: StageMap
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    name: str = "table"

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"table {self.name}: {self.microbatches} microbatches; give at least 1")
        if len(self.actions) != self.stages.num_ranks:
            raise ValueError(
                f"table {self.name}: actions of {len(self.actions)} ranks, but the stages lie on "
                f"{self.stages.num_ranks}; give each rank its list"
            )

    @classmethod
    def parse(cls, text: str) -> Table:
        """The table that ``text`` writes; see Note [The text of a table].

        >>> print(Table.parse("stages: 0 1\\nmicrobatches: 1\\nrank 0: 0F0 0B0\\nrank 1: 1F0 1B0"))
        name: table
        stages: 0 1
        microbatches: 1
        rank 0: 0F0 0B0
        rank 1: 1F0 1B0
        """
        return _parse(text)

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return self.stages.num_ranks

    @cached_property
    def has_messages(self) -> bool:
        """Whether sends and receives are in it; without, a stage finds its input as soon as it is computed."""
        return any(action.is_message for _, _, action in self)

    @cached_property
    def has_backward(self) -> bool:
        """Whether anything but forwards is computed: not in a table for evaluation."""
        return any(step.kind in (Kind.B, Kind.I, Kind.W) for _, _, action in self for step in action.steps)

    @cached_property
    def has_reductions(self) -> bool:
        """Whether gradients are reduced over the data ranks."""
        return any(action.kind is Kind.REDUCE for _, _, action in self)

    @property
    def digest(self) -> bytes:
        """32 bytes that differ where tables differ, for ranks to compare before they start; the name does not count."""
        return hashlib.sha256(str(self).partition("\n")[2].encode()).digest()

    def needs(self, step: Action) -> Value | None:
        """What a computation takes from another stage."""
        assert step.microbatch is not None
        if step.kind is Kind.F and step.stage > 0:
            return Value(step.stage - 1, True, step.microbatch)
        if step.kind in (Kind.B, Kind.I) and step.stage < self.stages.last:
            return Value(step.stage, False, step.microbatch)
        return None

    def gives(self, step: Action) -> Value | None:
        """What a computation makes for another stage."""
        assert step.microbatch is not None
        if step.kind is Kind.F and step.stage < self.stages.last:
            return Value(step.stage, True, step.microbatch)
        if step.kind in (Kind.B, Kind.I) and step.stage > 0:
            return Value(step.stage - 1, False, step.microbatch)
        return None

    def crosses(self, value: Value) -> bool:
        """Whether giver and taker are on different ranks, so that a message is needed."""
        return self.stages.rank_of[value.giver] != self.stages.rank_of[value.taker]

    def lines(self, rank: int) -> str:
        """The actions of a rank, one a line, numbered as errors number them."""
        return "\n".join(f"{line:5d}  {action}" for line, action in enumerate(self.actions[rank], 1))

    def __iter__(self) -> Iterator[tuple[int, int, Action]]:
        """(rank, line from 0, action) of all."""
        for rank, actions in enumerate(self.actions):
            for line, action in enumerate(actions):
                yield rank, line, action

    def __str__(self) -> str:
        head = [f"name: {self.name}", f"stages: {' '.join(map(str, self.stages.rank_of))}"]
        rows = [
            textwrap.fill(
                f"rank {rank}: " + " ".join(map(str, actions)),
                _WIDTH,
                subsequent_indent=" " * 8,
                break_long_words=False,
                break_on_hyphens=False,
            )
            for rank, actions in enumerate(self.actions)
        ]
        return "\n".join([*head, f"microbatches: {self.microbatches}", *rows])


def _parse(text: str) -> Table:
    name, stages, microbatches = "table", None, None
    told: set[str] = set()
    ranks: dict[int, list[Action]] = {}
    rank: int | None = None
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        where = f"line {number} of the text"
        head = _HEAD.fullmatch(words)
        if head is not None and not head[1].startswith("rank"):
            rank = None
            if head[1] in told:
                raise ValueError(f"{where}: '{head[1]}:' is there twice; keep one of the lines")
            told.add(head[1])
            if head[1] == "name":
                name = head[2]
            elif head[1] == "stages":
                stages = _stages(head[2], where)
            else:
                microbatches = _count(head[2], where)
            continue
        if head is not None:
            rank, words = int(head[1].split()[1]), head[2]
            if rank in ranks:
                raise ValueError(
                    f"{where}: rank {rank} is there twice; write all its actions behind one 'rank {rank}:'"
                )
            ranks[rank] = []
        if rank is None:
            raise ValueError(
                f"{where}: {words!r} belongs to no rank; allowed are name:, stages:, microbatches: and 'rank 0:' with "
                "actions behind it"
            )
        for word in words.split():
            try:
                ranks[rank].append(Action.parse(word))
            except ValueError as error:
                raise ValueError(f"{where}, rank {rank} line {len(ranks[rank]) + 1}: {error}") from None
    if stages is None or microbatches is None:
        missing = "stages: 0 1" if stages is None else "microbatches: 4"
        raise ValueError(f"the text has no line {missing.split()[0]!r}; write one such as {missing!r}")
    if sorted(ranks) != list(range(stages.num_ranks)):
        wanted = ", ".join(f"rank {one}:" for one in range(stages.num_ranks))
        raise ValueError(
            f"the stages lie on {stages.num_ranks} ranks, but the text has actions of {sorted(ranks)}; write {wanted}"
        )
    num_actions = sum(map(len, ranks.values()))
    if microbatches > num_actions:
        raise ValueError(
            f"the text has {microbatches} microbatches and {num_actions} actions; every stage computes each "
            "microbatch: correct the line 'microbatches:'"
        )
    return Table(stages, microbatches, tuple(tuple(ranks[rank]) for rank in sorted(ranks)), name)


def _stages(words: str, where: str) -> StageMap:
    try:
        return StageMap(tuple(map(int, words.split())))
    except ValueError as error:
        reason = str(error) if str(error).startswith("stages") else f"{words!r} is no list of ranks; write stages: 0 1"
        raise ValueError(f"{where}: {reason}") from None


def _count(words: str, where: str) -> int:
    if not words.isdigit() or int(words) < 1:
        raise ValueError(f"{where}: {words!r} is no number of microbatches; write microbatches: 4")
    return int(words)
