"""Random tables: valid ones are accepted and run on a transport that blocks; of damaged ones only those that still run.

A table is drawn as one sequence of computations and messages that respects what needs what; each rank has its part.
"""

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hyper_parallel.core.pipeline_parallel.action import Action, Kind, receiving, sending
from hyper_parallel.core.pipeline_parallel.check import check, find_faults
from hyper_parallel.core.pipeline_parallel.folding import batch_messages, fold_backward
from hyper_parallel.core.pipeline_parallel.messages import add_messages
from hyper_parallel.core.pipeline_parallel.sharding import add_sharding
from hyper_parallel.core.pipeline_parallel.simulate import Times, simulate
from hyper_parallel.core.pipeline_parallel.stage_map import StageMap
from hyper_parallel.core.pipeline_parallel.table import Table
from tests.pipeline_parallel.transport import run_blocking, run_plainly

only_on = "torch"  # no framework takes part


def random_table(random, has_messages):
    """A valid table on up to 4 ranks and 6 stages, on any ranks, with whole and split backwards."""
    ranks = random.randint(1, 4)
    owners = [*range(ranks), *(random.randrange(ranks) for _ in range(random.randint(0, 6 - ranks)))]
    random.shuffle(owners)
    count = random.randint(1, 4)
    table = Table(StageMap(tuple(owners)), count, ((),) * ranks)
    is_split = [random.random() < 0.5 for _ in owners]
    ready = [Action(Kind.F, 0, one) for one in range(count)]
    rows = [[] for _ in range(ranks)]
    while ready:
        node = ready.pop(random.randrange(len(ready)))
        if isinstance(node, Action):
            rows[owners[node.stage]].append(node)
            ready += _behind(table, node, is_split, has_messages)
        else:
            rows[owners[node.giver]].append(sending(node))
            rows[owners[node.taker]].append(receiving(node))
            ready.append(_taker(node, is_split))
    return replace(table, actions=tuple(map(tuple, rows)))


def _taker(value, is_split):
    backward = Kind.I if is_split[value.taker] else Kind.B
    return Action(Kind.F if value.is_forward else backward, value.taker, value.microbatch)


def _behind(table, step, is_split, has_messages):
    """What may follow a computation."""
    if step.kind is Kind.I:
        yield Action(Kind.W, step.stage, step.microbatch)
    if step.kind is Kind.F and step.stage == table.stages.last:
        yield Action(Kind.I if is_split[step.stage] else Kind.B, step.stage, step.microbatch)
    value = table.gives(step)
    if value is not None:
        yield value if has_messages and table.crosses(value) else _taker(value, is_split)


def _runs(table):
    return run_blocking(table) == run_plainly(table.stages.num_stages, table.microbatches, table.has_backward)


def _try_many(count, body):
    given(st.randoms(use_true_random=False))(
        settings(
            max_examples=count,
            derandomize=count < 1_000,  # at every change the same ones
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
        )(body)
    )()


def test_valid_tables_are_accepted_and_run(sweep):
    def body(random):
        table = random_table(random, has_messages=True)
        if random.random() < 0.3:
            table = batch_messages(table)
        if random.random() < 0.3:
            table = add_sharding(table, random.choice([None, 1, 2]), random.random() < 0.5)
        check(table)
        assert _runs(table)
        assert Table.parse(str(table)) == table

    _try_many(10_000 if sweep else 150, body)


def test_messages_are_placed_in_any_table(sweep):
    def body(random):
        table = random_table(random, has_messages=False)
        check(table)
        times = Times(*(random.choice([0, 0.1, 1, 1.2, 3]) for _ in range(4)))
        placed = add_messages(fold_backward(table, random.random() < 0.5), times)
        check(placed)
        assert _runs(placed)
        assert simulate(placed, times, blocking=True).makespan >= simulate(placed, times).makespan - 1e-9

    _try_many(2_000 if sweep else 100, body)


def test_damaged_tables_that_are_accepted_run(sweep):
    verdicts = set()

    def body(random):
        table = random_table(random, has_messages=True)
        rows = [list(row) for row in table.actions]
        for _ in range(random.randint(1, 3)):
            row = random.choice(rows)
            first, second = (random.randrange(len(row)) for _ in range(2))
            if random.random() < 0.5:  # neighbours: many of these still run
                second = min(first + 1, len(row) - 1)
            row[first], row[second] = row[second], row[first]
            if random.random() < 0.1:
                row.pop(first)
            if not row:
                return
        table = replace(table, actions=tuple(map(tuple, rows)))
        accepted = not find_faults(table)
        verdicts.add(accepted)
        if accepted:
            assert _runs(table)

    _try_many(2_000 if sweep else 100, body)
    assert verdicts == {True, False}
