"""The actions of a rank, one after the other, and nothing else: what they are and their order is the table's to say."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from hyper_parallel.core.pipeline_parallel.action import COMPUTED, SENDS, Action, Kind, Value
from hyper_parallel.core.pipeline_parallel.runtime.boundary import without_graph
from hyper_parallel.core.pipeline_parallel.runtime.messages import Messages
from hyper_parallel.core.pipeline_parallel.runtime.overlap import Overlap
from hyper_parallel.core.pipeline_parallel.runtime.sharded_stage import ShardedStages
from hyper_parallel.core.pipeline_parallel.runtime.stage_work import StageWork
from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.platform import get_platform

__all__ = ["PipelineError", "TableRun"]

_platform = get_platform()

_DOING = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradients",
    Kind.SEND_F: "sending the output",
    Kind.RECV_F: "receiving the input",
    Kind.SEND_B: "sending the gradient",
    Kind.RECV_B: "receiving the gradient",
    Kind.UNSHARD: "gathering the weights",
    Kind.RESHARD: "letting go of the weights",
    Kind.REDUCE: "reducing the gradients",
}


_PAIRS = ((Kind.F, Kind.B), (Kind.F, Kind.I))


class PipelineError(RuntimeError):
    """An action failed; the message says on which rank, stage and microbatch. What failed is its cause."""


class TableRun:
    """This rank's part of a table, once for each call of :meth:`run`."""

    def __init__(
        self,
        table: Table,
        place: int,
        stages: Mapping[int, StageWork],
        messages: Messages,
        sharded: ShardedStages | None = None,
        overlap: Overlap | None = None,
        replaced: Mapping[Kind, Callable[[Action, Callable[[], None]], None]] | None = None,
    ) -> None:
        """``place`` is the rank's place among the stages' ranks, ``overlap`` runs a forward and a backward at once.

        ``replaced`` has functions that are called in place of kinds of actions, with the action and what does it.
        """
        self.table, self.place, self._actions = table, place, table.actions[place]
        self._stages, self._messages, self._sharded, self._overlap = stages, messages, sharded, overlap
        self._split = {(step.stage, step.microbatch) for step in self._steps() if step.kind is Kind.I}
        #: Called with each action before it is done.
        self.observe: Callable[[Action], None] | None = None
        self._made: dict[Value, list[Any]] = {}  # by a stage of this rank, not yet sent or used
        self._does: dict[Kind, Callable[[Action], None]] = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._input_gradient,
            Kind.W: self._weight_gradients,
            Kind.SEND_F: self._send,
            Kind.SEND_B: self._send,
            Kind.RECV_F: lambda action: messages.receive(action.value),
            Kind.RECV_B: lambda action: messages.receive(action.value),
            Kind.UNSHARD: self._unshard,
            Kind.RESHARD: self._reshard,
            Kind.REDUCE: self._reduce,
        }
        for kind, function in (replaced or {}).items():
            self._does[kind] = functools.partial(_instead, function, self._does[kind])

    def _steps(self) -> Iterator[Action]:
        return (step for action in self._actions for step in action.steps)

    def run(self, signatures: Sequence[Hashable], device: Any) -> None:
        """Do all actions. forward and backward: the messages of the table, and the collectives of the stages."""
        self._messages.begin(self.table, signatures, device)
        if self._sharded is not None:
            self._sharded.begin()
        try:
            for line, action in enumerate(self._actions, 1):
                self._do(action, line)
            self._finish()
        except BaseException as error:
            self._give_up(error)
            raise

    def _do(self, action: Action, line: int) -> None:
        pair = self._pair(action)
        if pair is not None and self._overlap is not None:
            forward, backward = (functools.partial(self._step, step, action, line) for step in pair)
            self._overlap.both(forward, backward)
            return
        for step in action.steps:
            self._step(step, action, line)

    def _pair(self, action: Action) -> tuple[Action, Action] | None:
        """The forward and the backward of an OVERLAP of two stages: modules of one stage cannot be in both."""
        if self._overlap is None or len(action.parts) != 2 or len({step.stage for step in action.parts}) < 2:
            return None
        forward, backward = sorted(action.parts, key=lambda step: step.kind is not Kind.F)
        return (forward, backward) if (forward.kind, backward.kind) in _PAIRS else None

    def _step(self, step: Action, action: Action, line: int) -> None:
        if self.observe is not None:
            self.observe(step)
        try:
            with nullcontext() if self._overlap is None or step.kind not in COMPUTED else self._overlap.around():
                self._does[step.kind](step)
        except PipelineError:
            raise
        except Exception as error:
            raise self._named(error, step, action, line) from error

    def _named(self, error: Exception, step: Action, action: Action, line: int) -> PipelineError:
        doing = f"{_DOING[step.kind]} of stage {step.stage}"
        if step.microbatch is not None:
            doing += f", microbatch {step.microbatch}"
        rank = _platform.get_rank()
        return PipelineError(
            f"pipeline {self.table.name}: rank {rank} failed at {action} ({doing}; line {line} of rank {self.place} of "
            f"the table): {type(error).__name__}: {error}"
        )

    def _finish(self) -> None:
        try:
            self._messages.finish()
        except Exception as error:
            last = next(step for step in reversed(list(self._steps())) if step.kind in SENDS)
            raise PipelineError(
                f"pipeline {self.table.name}: rank {_platform.get_rank()} failed behind its last action, waiting until "
                f"what it sent has come ({last}, {_DOING[last.kind]} of stage {last.stage}): {type(error).__name__}: "
                f"{error}"
            ) from error

    def _give_up(self, error: BaseException) -> None:
        """Forget the step, and let the ranks that wait for this one know."""
        self._messages.tell_failure(str(error) or type(error).__name__)
        self._messages.forget()
        self._made = {}
        for stage in self._stages.values():
            stage.forget()
        if self._sharded is not None:
            self._sharded.forget()

    # ---------------------------------------------------------------- computations

    def _forward(self, step: Action) -> None:
        value, microbatch = self.table.needs(step), step.microbatch
        assert microbatch is not None
        received = [] if value is None else self._given(value)
        needs_grad = [] if value is None else [spec.needs_grad for spec in self._messages.specs_of(value)]
        outputs = self._stages[step.stage].forward(
            microbatch, received, needs_grad, (step.stage, microbatch) in self._split
        )
        handed_on = self.table.gives(step)
        if handed_on is not None:
            self._messages.note(handed_on, outputs)
            self._made[handed_on] = [without_graph(one) for one in outputs]

    def _backward(self, step: Action, keeps_weights: bool = False) -> None:
        value = self.table.needs(step)
        assert step.microbatch is not None
        gradients = None if value is None else self._given(value)
        found = self._stages[step.stage].backward(step.microbatch, gradients, keeps_weights)
        handed_on = self.table.gives(step)
        if handed_on is not None:
            self._made[handed_on] = found

    def _input_gradient(self, step: Action) -> None:
        self._backward(step, keeps_weights=True)

    def _weight_gradients(self, step: Action) -> None:
        assert step.microbatch is not None
        self._stages[step.stage].weight_gradients(step.microbatch)

    def _given(self, value: Value) -> list[Any]:
        """What another stage has made, of another rank or of this one."""
        return self._messages.take(value) if self.table.crosses(value) else self._made.pop(value)

    # ---------------------------------------------------------------- messages and weights

    def _send(self, step: Action) -> None:
        self._messages.send(step.value, self._made.pop(step.value))

    def _unshard(self, step: Action) -> None:
        if self._sharded is not None:
            self._sharded.unshard(step.stage)

    def _reshard(self, step: Action) -> None:
        if self._sharded is not None:
            self._sharded.reshard(step.stage)

    def _reduce(self, step: Action) -> None:
        if self._sharded is not None:
            self._sharded.reduce(step.stage, step.microbatch is None)


def _instead(function: Callable[..., None], does: Callable[[Action], None], action: Action) -> None:
    function(action, functools.partial(does, action))
