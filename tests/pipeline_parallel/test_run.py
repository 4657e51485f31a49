"""Our Llama through `hp.parallelize(..., pp=n)` on both frameworks: every schedule trains as PyTorch in one piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.pipeline_parallel import Table
from hyper_parallel.platform import get_platform
from tests.frameworks import on_mindspore, ours
from tests.pipeline_parallel import training
from tests.pipeline_parallel.training import check, in_one_piece, in_stages
from tests.world import run_on_ranks

# By number of ranks: schedule and microbatches; fewer than ranks, as many, more, and one more than a multiple.
_CASES = {
    2: [
        ("1f1b", 1),
        ("gpipe", 5),
        ("interleaved", 4),
        ("looped_bfs", 3),
        ("zb_h1", 5),
        ("zb_h2", 4),
        ("zb1p", 2),
        ("zbv", 5),
        ("v_half", 4),
        ("v_min", 5),
        ("dual_pipe_v", 5),
    ],
    4: [
        ("1f1b", 3),
        ("1f1b", 9),
        ("gpipe", 2),
        ("interleaved", 8),
        ("looped_bfs", 5),
        ("zb_h1", 4),
        ("zb_h2", 7),
        ("zb1p", 4),
        ("zbv", 8),
        ("v_half", 8),
        ("v_min", 9),
        ("dual_pipe_v", 9),
    ],
}
_SMALL = {2: ("1f1b", "zb_h1", "zbv", "dual_pipe_v"), 4: ("1f1b", "interleaved")}
if on_mindspore:  # where ranks are processes: what the neutral half gives is tried on PyTorch
    _SMALL |= {2: ("zbv",), 4: ()}


@run_on_ranks(2, 4, timeout=1500)
def test_every_schedule_trains_as_one_piece(sweep: bool) -> None:
    ranks = get_platform().get_world_size()
    want = {tied: in_one_piece(tied) for tied in (True, False)}
    assert want[True][0][-1] < want[True][0][0]
    for number, (schedule, microbatches) in enumerate(_CASES[ranks]):
        if sweep or schedule in _SMALL[ranks]:
            for tied in (True, False) if sweep else (number % 2 == 0,):
                got = in_stages(f"pp={ranks}", tied, schedule=schedule, microbatches=microbatches)
                check(got, want[tied])


@pytest.mark.sweep("mindspore")
@run_on_ranks(2, timeout=400)
def test_recomputed_blocks_split_backward_and_accumulation() -> None:
    check(
        in_stages("pp=2", True, zero_every=2, schedule="zb_h1", microbatches=3, recompute="full"),
        in_one_piece(True, zero_every=2),
    )


@pytest.mark.sweep("mindspore")
@run_on_ranks(4, timeout=600)
def test_stages_with_the_other_parallelisms(sweep: bool) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("pp=2, tp=2", {"schedule": "zbv", "microbatches": 5}),
        ("pp=2, dp_shard=2", {"schedule": "zb_h1", "microbatches": 3}),
    ]
    if not on_mindspore or sweep:
        cases += [
            ("pp=2, tp=2", {"schedule": "1f1b", "microbatches": 3, "sequence_parallel": False}),
            ("pp=2, dp_shard=2", {"schedule": "zbv", "microbatches": 4, "recompute": "full"}),
            ("pp=2, dp_replicate=2", {"schedule": "zb_h1", "microbatches": 3, "recompute": "full"}),
            ("pp=2, cp=2", {"schedule": "1f1b", "microbatches": 3}),
        ]
    want = {tied: in_one_piece(tied) for tied in (True, False)}
    for number, (degrees, options) in enumerate(cases):
        for tied in (True, False) if sweep else (number % 2 == 0,):
            check(in_stages(degrees, tied, **options), want[tied])


@pytest.mark.sweep("mindspore")
@run_on_ranks(2, timeout=300)
def test_evaluation_and_outputs_before_training_and_between() -> None:
    run = hp.parallelize(training.model_with_values(), "pp=2", schedule="zbv", microbatches=3)
    alone = training.model_with_values()
    ids, labels = training.rows_of(run)
    platform = get_platform()
    for _ in range(2):
        with platform.no_grad():
            expected = training.values_of(alone(ids))
        found = run(ids)
        assert (found is None) is (3 not in run.pipeline.stages.stages)
        if found is not None:
            np.testing.assert_allclose(training.values_of(found), expected, atol=1e-5 if on_mindspore else 1e-12)
        before = run.loss_of(ids, labels=labels)
        after = run.forward_backward(ids, labels=labels)
        np.testing.assert_allclose(training.values_of(before), training.values_of(after), rtol=1e-6)
        run.zero_grad()


@pytest.mark.sweep("mindspore")
@run_on_ranks(2, timeout=300)
def test_lengths_and_rows_that_change_from_step_to_step() -> None:
    run = hp.parallelize(training.model_with_values(), "pp=2", schedule="1f1b", microbatches=3)
    alone = training.model_with_values()
    ids, labels = training.rows_of(run)
    for rows, length in ((11, 9), (4, 5), (2, 9), (11, 5)):
        given = ids[:rows, :length], labels[:rows, :length]
        expected = alone(*given)
        found = run.forward_backward(*given)
        np.testing.assert_allclose(training.values_of(found), training.values_of(expected), rtol=1e-5, atol=1e-7)


@pytest.mark.sweep("mindspore")
@run_on_ranks(2, timeout=300)
def test_a_loss_that_counts_what_the_model_gives() -> None:
    """The number of targets is known on the last stage alone, and all stages divide by it."""

    def loss(outputs: Any, batch: Any) -> tuple[Any, Any]:
        kept = outputs[..., :3]
        return (kept * kept).sum(), kept.shape[0] * 2.0

    def train(degrees: str, **options: Any) -> tuple[float, dict[str, np.ndarray]]:
        run = hp.parallelize(training.model_with_values(), degrees, loss=loss, **options)
        ids, _ = training.rows_of(run)
        value = run.forward_backward(ids)
        named = {name: training.values_of(get_platform().get_grad(one)) for name, one in run.named_parameters()}
        return float(training.values_of(value)), named

    alone = training.model_with_values()
    _, inputs, _ = training.values()
    ids = ours(torch.tensor(inputs))
    total, count = loss(alone(ids), None)
    get_platform().backward(total / count)
    expected = {name: training.values_of(get_platform().get_grad(one)) for name, one in _named(alone)}
    value, gradients = train("pp=2", microbatches=3)
    np.testing.assert_allclose(value, training.values_of(total / count), rtol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=1e-5 if on_mindspore else 1e-12, err_msg=name)


def _named(model: Any) -> Any:
    return get_platform().parameters_dict(model).items()


@pytest.mark.sweep("mindspore")
@run_on_ranks(2, timeout=300)
def test_a_table_written_by_hand() -> None:
    table = Table.parse(
        """
        name: by hand
        stages: 0 1
        microbatches: 2
        rank 0: 0F0 0F1 0I0 0B1 0W0
        rank 1: 1F0 1I0 1F1 1W0 1B1
        """
    )
    check(in_stages("pp=2", schedule=table), in_one_piece())


@run_on_ranks(2)
def test_what_cannot_be_asked_for() -> None:
    model = training.model_with_values()
    for options, said in (
        ({"schedule": "1f2b"}, r"there is no schedule '1f2b'; there are gpipe, 1f1b, .* did you mean 1f1b\?"),
        ({"schedule": "dual_pipe_v", "microbatches": 2}, "dual_pipe_v: 2 microbatches do not work, .*; give 4"),
        ({"stages": [3, 3, 3]}, r"stages=\[3, 3, 3\] are 3 stages, and the schedule has 2; give the number of blocks"),
        ({"stages": "4,5"}, "stages='4,5': give the number of blocks of each stage, such as"),
        ({"stages": [3, 3]}, r"stages=\[3, 3\] are 6 blocks, and Llama has 9"),
        ({"schedule": "interleaved", "stages_per_rank": 5, "microbatches": 2}, "10 stages of Llama, which has 9"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            hp.parallelize(model, "pp=2", **options)
    rank = get_platform().get_rank()
    run = hp.parallelize(model, "pp=2", schedule="1f1b", microbatches=2 + rank)
    ids, labels = training.rows_of(run)
    with pytest.raises(RuntimeError, match=r"different tables \(rank 0: 1f1b, .* 2 microbatches, .*; rank 1: .* 3"):
        run.forward_backward(ids, labels)
