"""How many microbatches a step has where nobody says it: twice the ranks, at most the rows of the first batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.pipeline_parallel.tables import SCHEDULES, make_table
from hyper_parallel.core.pipeline_parallel.tables.counts import default_microbatches
from tests.frameworks import on_mindspore, ours
from tests.pipeline_parallel import training
from tests.world import run_on_ranks


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_takes_its_default(schedule: str) -> None:
    for ranks in (2, 3, 4):
        for rows in (None, 2 * ranks, 5 * ranks):
            assert default_microbatches(schedule, ranks, rows) == 2 * ranks
        for rows in range(1, 2 * ranks) if schedule != "dual_pipe_v" else ():
            assert default_microbatches(schedule, ranks, rows) == rows
            make_table(schedule, ranks, rows)


@pytest.mark.sweep
@run_on_ranks(4, timeout=300)
def test_the_largest_share_of_the_first_batch_decides() -> None:
    """Ranks along dp have three rows and two: all run three parts, in every later step too."""
    run = hp.parallelize(training.model_with_values(), "pp=2, dp_replicate=2", schedule="zb_h1")
    assert run.microbatches == 4
    alone = training.model_with_values()
    ids, labels = (ours(torch.tensor(one)) for one in training.values()[1:])
    for rows in (5, 11):
        mine = run.mine(range(rows))
        expected = alone(ids[:rows], labels[:rows])
        found = run.forward_backward(ids[mine.start : mine.stop], labels=labels[mine.start : mine.stop])
        np.testing.assert_allclose(
            training.values_of(found), training.values_of(expected), rtol=1e-5 if on_mindspore else 1e-12
        )
        assert run.microbatches == run.pipeline.table.microbatches == 3


@pytest.mark.sweep("mindspore")
@run_on_ranks(2, timeout=300)
def test_the_rows_of_the_first_batch_decide() -> None:
    run = hp.parallelize(training.model_with_values(), "pp=2", schedule="dual_pipe_v")
    alone = training.model_with_values()
    ids, labels = training.rows_of(run)
    refusal = (
        r"parallelize: dual_pipe_v on 2 ranks needs 4 microbatches or more, and the batch has 3 rows for them: give "
        r"larger batches, a schedule that takes any number \(1f1b, zb_h1, zbv\), or microbatches=4, of which"
    )
    with pytest.raises(ValueError, match=refusal):
        run.forward_backward(ids[:3], labels=labels[:3])
    said, unsaid = (hp.parallelize(training.model_with_values(), "pp=2", microbatches=one) for one in (4, None))
    for given, rows, parts in ((run, 4, 4), (said, 3, 4), (unsaid, 3, 3), (unsaid, 9, 3)):
        found = given.forward_backward(ids[:rows], labels=labels[:rows])
        expected = alone(ids[:rows], labels[:rows])
        np.testing.assert_allclose(training.values_of(found), training.values_of(expected), rtol=1e-5)
        assert given.microbatches == given.pipeline.table.microbatches == parts
