"""What a rank does in a step of a pipeline, one action at a time, and how an action is written: ``3F2``.

``3F2`` is the forward of microbatch 2 on stage 3, ``3B2`` its whole backward, ``3I2`` the gradient of its input,
``3W2`` those of the weights. ``3SEND_F2`` sends the output of stage 3 to stage 4, ``4RECV_F2`` takes it there;
``4SEND_B2`` sends the gradient of stage 4's input to stage 3, ``3RECV_B2`` takes it there. ``3UNSHARD`` gathers the
weights of stage 3, ``3RESHARD`` lets them go, ``3REDUCE`` reduces their gradients over the data ranks, ``3REDUCE2``
those of one microbatch. ``3F2+4B1`` is an OVERLAP: two actions at once, of computation or of messages to one rank.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import NamedTuple


class Kind(enum.Enum):
    """The kinds of actions; the value is the word in the text of a table."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 the field's letter
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE"
    OVERLAP = "OVERLAP"

    __hash__ = object.__hash__  # Members are one object each; Enum's own is a Python call, and tables are long.


COMPUTED = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
MESSAGES = SENDS | RECEIVES
_WITHOUT_MICROBATCH = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE})
_WORDS = re.compile(r"(\d+)([A-Z]+(?:_[A-Z]+)?)(\d*)")

ALLOWED = (
    "allowed are F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B with stage and microbatch (3F2, 3SEND_F2), UNSHARD, "
    "RESHARD, REDUCE with the stage (3UNSHARD), and two at once (3F2+4B1)"
)


class Value(NamedTuple):
    """What crosses from a stage to the next, or the gradient that comes back: ``boundary`` b lies behind stage b."""

    boundary: int
    is_forward: bool
    microbatch: int

    @property
    def giver(self) -> int:
        """The stage that computes it."""
        return self.boundary if self.is_forward else self.boundary + 1

    @property
    def taker(self) -> int:
        """The stage that needs it."""
        return self.boundary + 1 if self.is_forward else self.boundary

    def tag(self, microbatches: int) -> int:
        """The number of its message; no two messages of a step share one."""
        return (2 * self.boundary + (not self.is_forward)) * microbatches + self.microbatch


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one rank; ``parts`` are the two of an OVERLAP, whose own stage is that of the first.

    >>> Action(Kind.F, 3, 2), Action.parse("3F2+4B1").parts
    (3F2, (3F2, 4B1))
    """

    kind: Kind
    stage: int
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    @classmethod
    def overlap(cls, *parts: Action) -> Action:
        """Several actions at once: computation, or messages (one batch of them)."""
        kinds = {part.kind for part in parts}
        if len(parts) < 2 or not (kinds <= COMPUTED or kinds <= MESSAGES):
            raise ValueError(
                f"{'+'.join(map(str, parts))!r} cannot run at once: an OVERLAP is two or more of F, B, I, W, or two or "
                "more of SEND_F, RECV_F, SEND_B, RECV_B"
            )
        return cls(Kind.OVERLAP, parts[0].stage, parts[0].microbatch, parts)

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that ``text`` writes."""
        if "+" in text:
            return cls.overlap(*(cls.parse(part) for part in text.split("+")))
        found = _WORDS.fullmatch(text)
        word = found[2] if found else ""
        if found is None or word not in Kind.__members__ or word == "OVERLAP":
            raise ValueError(f"{text!r} is no action; {ALLOWED}")
        kind = Kind[word]
        if not found[3] and kind not in _WITHOUT_MICROBATCH:
            raise ValueError(f"{text!r} has no microbatch; write {text}0 for the first")
        if found[3] and kind in (Kind.UNSHARD, Kind.RESHARD):
            raise ValueError(f"{text!r}: weights serve all microbatches; write {found[1]}{word}")
        return cls(kind, int(found[1]), int(found[3]) if found[3] else None)

    @property
    def steps(self) -> tuple[Action, ...]:
        """The parts of an OVERLAP, else the action itself."""
        return self.parts or (self,)

    @property
    def is_message(self) -> bool:
        """Whether it sends or receives."""
        return self.steps[0].kind in MESSAGES

    @property
    def is_computed(self) -> bool:
        """Whether it is work of the device: F, B, I, W, or several of these."""
        return self.steps[0].kind in COMPUTED

    @property
    def value(self) -> Value:
        """What a message carries."""
        assert self.kind in MESSAGES and self.microbatch is not None
        behind = self.kind in (Kind.SEND_F, Kind.RECV_B)
        is_forward = self.kind in (Kind.SEND_F, Kind.RECV_F)
        return Value(self.stage if behind else self.stage - 1, is_forward, self.microbatch)

    def __str__(self) -> str:
        if self.parts:
            return "+".join(map(str, self.parts))
        return f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"

    __repr__ = __str__


def sending(value: Value) -> Action:
    """The message as its sender writes it."""
    return Action(Kind.SEND_F if value.is_forward else Kind.SEND_B, value.giver, value.microbatch)


def receiving(value: Value) -> Action:
    """The message as its receiver writes it."""
    return Action(Kind.RECV_F if value.is_forward else Kind.RECV_B, value.taker, value.microbatch)
