"""Messages between the stages of a step: who gets them, under which tag, and how long their memory lives.

Note [Memory of messages]
A receive gets its memory when it is posted, one action ahead of its data, and gives it to the stage that uses it. What
is sent is held until the peer has it: a handle that is dropped cancels its message on some backends. Not all backends
say when that is, but the table does: what a peer sends behind the action that used a message tells that it had it.

Note [Headers]
What a boundary carries is told once for each signature of the inputs, which both sides know, by a header before the
first message that has it; the sender makes sure that later ones are the same. Messages whose sizes differ are cut
short without a word, or end the process, on some backends: so sizes are never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import astuple, replace
from typing import Any

from hyper_parallel.core.dtensor.comm_recorder import attributed
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.pipeline_parallel.action import COMPUTED, SENDS, Value
from hyper_parallel.core.pipeline_parallel.runtime.boundary import (
    TensorSpec,
    describe,
    described,
    distributed,
    empty_block,
)
from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.platform import get_platform

__all__ = ["Messages"]

_platform = get_platform()
_MOST_TENSORS = 64  # that cross a boundary together
_HEADER = "header of a pipeline boundary"


class Messages:
    """The messages of this rank's stages; see Note [Memory of messages].

    ``group`` has a rank for each place of the table, ``stage_mesh`` the ranks of one stage, None where its tensors are
    plain. ``guess(value)`` says what crosses where nobody answers: in a silent world.
    """

    def __init__(
        self,
        group: Any,
        stage_mesh: DeviceMesh | None,
        guess: Callable[[Value], Sequence[TensorSpec]] | None = None,
    ) -> None:
        self._group, self._ranks = group, _platform.get_process_group_ranks(group)
        self._stage_mesh, self._guess = stage_mesh, guess
        self._specs: dict[tuple[int, Hashable], tuple[TensorSpec, ...]] = {}
        self._told: set[tuple[int, Hashable]] = set()
        self._sent: dict[Value, list[tuple[Any, Any]]] = {}  # with the memory, which handles need not hold
        self._coming: dict[Value, list[tuple[Any, Any]]] = {}
        self._table: Any = None
        self._had_before: dict[Value, tuple[Value, ...]] = {}
        self._signatures: Sequence[Hashable] = ()
        self._device: Any = None

    def begin(self, table: Table, signatures: Sequence[Hashable], device: Any) -> None:
        """A step of ``table`` begins, whose microbatches have these ``signatures``."""
        if table is not self._table:
            self._table, self._had_before = table, _had_before(table)
        self._signatures, self._device = signatures, device

    def forget_specs(self) -> None:
        """Tell everything again: nobody knows what this step's inputs look like."""
        self._specs, self._told = {}, set()

    def specs_of(self, value: Value) -> tuple[TensorSpec, ...]:
        """What crosses, once a header was sent or has come."""
        return self._specs[value.boundary, self._signatures[value.microbatch]]

    # ---------------------------------------------------------------- sending

    def note(self, value: Value, tensors: Sequence[Any]) -> None:
        """Remember what a stage hands on, to another rank or to the next stage of this one."""
        key = (value.boundary, self._signatures[value.microbatch])
        specs = tuple(map(describe, tensors))
        if len(specs) > _MOST_TENSORS:
            raise ValueError(f"stage {value.giver} hands {len(specs)} tensors on; at most {_MOST_TENSORS} cross")
        known = self._specs.setdefault(key, specs)
        if len(specs) == len(known) == 1 and known[0].needs_grad:
            specs = (replace(specs[0], needs_grad=True),)  # a stage that was frozen since leaves its gradient
        if known != specs:
            raise RuntimeError(
                f"stage {value.giver} hands on {described(specs)} for microbatch {value.microbatch}, and "
                f"{described(known)} before for inputs of the same shapes; what crosses may depend on the shapes of "
                "the inputs alone"
            )

    def send(self, value: Value, tensors: Sequence[Any]) -> None:
        """Start to send what a stage has made.

        forward: a message for each tensor to the rank of the next stage; the gradient comes back as a message.
        """
        peer = self._peer(value.taker)
        blocks = [_platform.detached(tensor) for tensor in tensors]
        if value.is_forward:
            self._tell(value, peer)
        sent = self._sent[value] = []
        for place, block in enumerate(blocks):
            tag = self._tag(value, place)
            sent.append((block, attributed(self._reason(value), _platform.isend, block, peer, self._group, tag)))

    def _tell(self, value: Value, peer: int) -> None:
        key = (value.boundary, self._signatures[value.microbatch])
        if key not in self._told and self._guess is None:
            self._told.add(key)
            header = repr(key[1]), [astuple(spec) for spec in self._specs[key]]
            attributed(_HEADER, _platform.send_object_list, [header], peer, self._group)

    # ---------------------------------------------------------------- receiving

    def receive(self, value: Value) -> None:
        """Post the receives of what another rank makes."""
        peer = self._peer(value.giver)
        if value.is_forward:
            self._learn(value, peer)
        coming = []
        for place, spec in enumerate(self._crossing(value)):
            block = empty_block(spec, self._stage_mesh, self._device)
            tag = self._tag(value, place)
            coming.append((block, attributed(self._reason(value), _platform.irecv, block, peer, self._group, tag)))
        self._coming[value] = coming

    def _learn(self, value: Value, peer: int) -> None:
        key = (value.boundary, self._signatures[value.microbatch])
        if key in self._specs:
            return
        if self._guess is not None:
            self._specs[key] = tuple(self._guess(value))
            return
        box: list[Any] = [None]
        attributed(_HEADER, _platform.recv_object_list, box, peer, self._group)
        signature, specs = box[0]
        if signature != repr(key[1]):
            raise RuntimeError(
                f"stage {value.giver} was given {signature} for microbatch {value.microbatch}, and stage {value.taker} "
                f"{key[1]!r}: give all ranks of a pipeline the same rows"
            )
        self._specs[key] = tuple(TensorSpec(*fields) for fields in specs)

    def take(self, value: Value) -> list[Any]:
        """What has come, distributed as it was on the other side; waits for it."""
        tensors = []
        for spec, (block, handle) in zip(self._crossing(value), self._coming.pop(value), strict=True):
            handle.wait()
            tensors.append(distributed(block, spec, self._stage_mesh))
        for sent in self._had_before[value]:
            self._let_go(sent)
        return tensors

    def _crossing(self, value: Value) -> list[TensorSpec]:
        """All that crosses forward; on the way back what needs a gradient."""
        return [spec for spec in self.specs_of(value) if value.is_forward or spec.needs_grad]

    # ---------------------------------------------------------------- ends

    def finish(self) -> None:
        """Wait until the peers have all that was sent: tags are used again in the next step."""
        for value in list(self._sent):
            self._let_go(value)

    def _let_go(self, value: Value) -> None:
        for _, handle in self._sent.pop(value, ()):
            handle.wait()

    def tell_failure(self, why: str) -> None:
        """Let the ranks that wait for this one raise, with the reason, where the platform can."""
        _platform.leave_by_failure(self._group, why)

    def forget(self) -> None:
        """Let go of what an interrupted step has left."""
        self._sent, self._coming = {}, {}

    def _peer(self, stage: int) -> int:
        return self._ranks[self._table.stages.rank_of[stage]]

    def _tag(self, value: Value, place: int) -> int:
        return 1 + value.tag(self._table.microbatches) * _MOST_TENSORS + place  # objects travel under tag 0

    def _reason(self, value: Value) -> str:
        what = "activations" if value.is_forward else "gradients"
        return f"{what} from stage {value.giver} to stage {value.taker}"


def _had_before(table: Table) -> dict[Value, tuple[Value, ...]]:
    """For each message what its receiver had sent to its sender that the sender has used before."""
    found: dict[Value, tuple[Value, ...]] = {}
    for actions in table.actions:
        used: dict[int, list[Value]] = {}
        for step in (step for action in actions for step in action.steps):
            if step.kind in SENDS:
                found[step.value] = tuple(used.pop(table.stages.rank_of[step.value.taker], ()))
            elif step.kind in COMPUTED:
                value = table.needs(step)
                if value is not None and table.crosses(value):
                    used.setdefault(table.stages.rank_of[value.giver], []).append(value)
    return found
