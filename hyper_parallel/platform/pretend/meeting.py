"""Where the ranks of a world of threads meet: each brings what it gives to a collective, and waits for the others.

A collective of a group has a number: the first, the second, ... that this rank has begun in it. Ranks that meet under
one number must be about to do the same; the one that comes and does something else raises, and so do those that wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from hyper_parallel.platform.checks.collective_checks import disagreement, disagreement_text, short, spell_call
from hyper_parallel.platform.pretend.turns import Turns

_ORDINALS = {2: "2nd", 3: "3rd"}
GroupKey = tuple[tuple[int, ...], int]  # the ranks, and how many groups of these ranks its members had made before


def _spell(key: GroupKey) -> str:
    ranks, number = key
    return f"the group {short(ranks)}" + (
        f" (the {_ORDINALS.get(number, f'{number}th')} of these ranks)" if number > 1 else ""
    )


class _Slot:
    """One collective: what each rank is about to do and what it gives, by its place in the group."""

    __slots__ = ("calls", "given", "num_left", "problem", "results")

    def __init__(self) -> None:
        self.calls: dict[int, dict[str, Any]] = {}
        self.given: dict[int, Any] = {}
        self.results: dict[str, Any] = {}  # what the first that finished has computed for all
        self.num_left = 0
        self.problem: str | None = None


class MeetingPlace:
    """All collectives and messages in flight in one world."""

    def __init__(self) -> None:
        self.turns: Turns | None = None  # of the run that is going on
        self._slots: dict[tuple[GroupKey, int], _Slot] = {}
        self._mail: dict[tuple[GroupKey, int, int, int], deque[tuple[dict[str, Any], Any]]] = {}

    def begun_by_some(self) -> str:
        """The collectives that not all ranks came to and the messages that nobody received, a line each."""
        lines = []
        for (key, number), slot in self._slots.items():
            for place, call in slot.calls.items() if len(slot.calls) < len(key[0]) else ():
                lines.append(f"  rank {key[0][place]}: {spell_call(call)}, number {number} in {_spell(key)}")
        for (key, source, _, _), box in self._mail.items():
            lines += [f"  rank {key[0][source]}: {spell_call(call)}" for call, _ in box]
        self._slots.clear()
        self._mail.clear()
        return "\n".join(lines)

    # ---------------------------------------------------------------- collectives

    def come(self, key: GroupKey, number: int, place: int, call: dict[str, Any], given: Any) -> _Slot:
        """Bring ``given`` to a collective; raises if the ranks that came before are about to do something else."""
        ranks = key[0]
        slot = self._slots.setdefault((key, number), _Slot())
        slot.calls[place], slot.given[place] = call, given
        problem = disagreement(slot.calls, len(ranks))
        if problem is not None:
            by_rank = {ranks[other]: slot.calls[other] for other in sorted(slot.calls)}
            slot.problem = disagreement_text(problem, by_rank, ranks)
            raise RuntimeError(slot.problem)
        return slot

    def is_complete(self, key: GroupKey, slot: _Slot) -> bool:
        """Whether all have come, or one disagrees."""
        return slot.problem is not None or len(slot.calls) == len(key[0])

    def wait(self, key: GroupKey, number: int, place: int, slot: _Slot, has_limit: bool) -> None:
        """Wait until all have come."""
        assert self.turns is not None
        ranks = key[0]

        def describe() -> str:
            absent = [rank for other, rank in enumerate(ranks) if other not in slot.calls]
            return f"{spell_call(slot.calls[place])}, number {number} in {_spell(key)}, waits for {absent}"

        came = self.turns.wait_until(ranks[place], lambda: self.is_complete(key, slot), describe, has_limit)
        if slot.problem is not None:
            raise RuntimeError(slot.problem)
        if not came:
            raise RuntimeError(f"Timed out on rank {ranks[place]}: {describe()}")

    def leave(self, key: GroupKey, number: int, slot: _Slot) -> None:
        """This rank has taken its result; the last one clears up."""
        slot.num_left += 1
        if slot.num_left == len(key[0]):
            del self._slots[key, number]

    # ---------------------------------------------------------------- messages

    def post(self, key: GroupKey, source: int, target: int, tag: int, call: dict[str, Any], given: Any) -> None:
        """Leave a message; a sender does not wait."""
        self._mail.setdefault((key, source, target, tag), deque()).append((call, given))

    def sender(self, key: GroupKey, source: int | None, target: int, tag: int) -> int | None:
        """The place of who has left a message: ``source`` or, for None, the first of all."""
        sources = range(len(key[0])) if source is None else (source,)
        return next((one for one in sources if self._mail.get((key, one, target, tag))), None)

    def receive(
        self, key: GroupKey, source: int | None, target: int, tag: int, call: dict[str, Any], has_limit: bool
    ) -> tuple[int, dict[str, Any], Any]:
        """The place of the sender, its call and what it gave, as soon as it is there."""
        assert self.turns is not None
        ranks = key[0]

        def describe() -> str:
            whom = "any rank" if source is None else f"rank {ranks[source]}"
            return f"{spell_call(call)} in {_spell(key)} waits for a message from {whom}"

        def has_come() -> bool:
            return self.sender(key, source, target, tag) is not None

        if not self.turns.wait_until(ranks[target], has_come, describe, has_limit):
            raise RuntimeError(f"Timed out on rank {ranks[target]}: {describe()}")
        found = self.sender(key, source, target, tag)
        assert found is not None
        return found, *self._mail[key, found, target, tag].popleft()

    def let_others_run(self, rank: int, is_complete: Callable[[], bool]) -> bool:
        """Whether an operation is complete; if not, the others have run meanwhile."""
        assert self.turns is not None
        if not is_complete():
            self.turns.let_others_run(rank)
        return is_complete()
