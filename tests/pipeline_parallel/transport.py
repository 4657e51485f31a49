"""A table run for real: a thread for each rank, messages that block both ends until they meet, numbers through stages.

Stage s computes y = w_s * x * x with whole numbers. Outputs and gradients of the weights are compared with the same
chain on one thread, so a value that is used too early, twice or not at all shows.
"""

from __future__ import annotations

import threading

from hyper_parallel.core.pipeline_parallel.action import SENDS, Action, Kind
from hyper_parallel.core.pipeline_parallel.order import partner_of

PATIENCE = 20.0


class Meetings:
    """Where two ranks meet: both stand at the same messages, or both wait."""

    def __init__(self):
        self.changed = threading.Condition()
        self.there = {}  # (rank, partner) -> (messages, values brought)
        self.taken = {}
        self.failed = None

    def meet(self, rank, partner, messages, brought):
        """Bring values to a partner, and take what it brings."""
        with self.changed:
            self.there[rank, partner] = (messages, brought)
            self.changed.notify_all()
            if not self.changed.wait_for(lambda: self.failed or self._is_matched(rank, partner), PATIENCE):
                raise TimeoutError(f"rank {rank} waits for rank {partner} at {sorted(messages)}")
            if self.failed:
                raise self.failed
            if (rank, partner) in self.taken:
                return self.taken.pop((rank, partner))
            mine, others = self.there.pop((rank, partner)), self.there.pop((partner, rank))
            self.taken[partner, rank] = mine[1]
            self.changed.notify_all()
            return others[1]

    def _is_matched(self, rank, partner):
        if (rank, partner) in self.taken:
            return True
        other = self.there.get((partner, rank))
        return other is not None and other[0] == self.there[rank, partner][0]

    def fail(self, error):
        with self.changed:
            self.failed = self.failed or error
            self.changed.notify_all()


class Rank(threading.Thread):
    """Does its list of actions, nothing else."""

    def __init__(self, table, rank, meetings):
        super().__init__(daemon=True)
        self.table, self.rank, self.meetings = table, rank, meetings
        self.inputs, self.saved, self.kept, self.outputs = {}, {}, {}, {}
        self.given = {}
        self.gradients = dict.fromkeys(table.stages.stages_of(rank), 0)

    def run(self):
        try:
            for action in self.table.actions[self.rank]:
                if action.is_message:
                    self.exchange(action)
                else:
                    for step in action.steps:
                        getattr(self, step.kind.value)(step.stage, step.microbatch)
        except BaseException as error:
            self.meetings.fail(error)

    def exchange(self, action):
        brought = {step.value: self.given.pop(step.value) for step in action.steps if step.kind in SENDS}
        messages = frozenset(step.value for step in action.steps)
        came = self.meetings.meet(self.rank, partner_of(self.table, action, self.rank), messages, brought)
        self.inputs.update(came)

    def take(self, step, otherwise):
        value = self.table.needs(step)
        if value is None:
            return otherwise
        return (self.inputs if self.table.crosses(value) else self.given).pop(value)

    def F(self, stage, one):
        x = self.take(Action(Kind.F, stage, one), start(one))
        if self.table.has_backward:
            self.saved[stage, one] = x
        y = weight(stage) * x * x
        value = self.table.gives(Action(Kind.F, stage, one))
        if value is None:
            self.outputs[one] = y
        else:
            self.given[value] = y

    def I(self, stage, one):  # noqa: E743
        x = self.saved.pop((stage, one))
        above = self.take(Action(Kind.I, stage, one), 1)
        self.kept[stage, one] = (x, above)
        value = self.table.gives(Action(Kind.I, stage, one))
        if value is not None:
            self.given[value] = above * 2 * weight(stage) * x

    def W(self, stage, one):
        x, above = self.kept.pop((stage, one))
        self.gradients[stage] += above * x * x

    def B(self, stage, one):
        self.I(stage, one)
        self.W(stage, one)

    def UNSHARD(self, stage, one):
        pass

    RESHARD = REDUCE = UNSHARD


def weight(stage):
    return stage % 3 + 1


def start(one):
    return one + 2


def run_blocking(table):
    """(outputs, gradients of the weights) of a table on threads."""
    meetings = Meetings()
    ranks = [Rank(table, rank, meetings) for rank in range(table.num_ranks)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(2 * PATIENCE)
    if meetings.failed:
        raise meetings.failed
    assert not any(rank.saved or rank.kept or rank.given or rank.inputs for rank in ranks), "something was left over"
    return _merged(rank.outputs for rank in ranks), _merged(rank.gradients for rank in ranks)


def _merged(parts):
    return {key: value for part in parts for key, value in part.items()}


def run_plainly(stages, microbatches, has_backward):
    """The same numbers from one loop."""
    outputs, gradients = {}, dict.fromkeys(range(stages), 0)
    for one in range(microbatches):
        inputs = [start(one)]
        for stage in range(stages):
            inputs.append(weight(stage) * inputs[-1] ** 2)
        outputs[one] = inputs[-1]
        above = 1
        for stage in reversed(range(stages) if has_backward else ()):
            gradients[stage] += above * inputs[stage] ** 2
            above *= 2 * weight(stage) * inputs[stage]
    return outputs, gradients
