"""The dry run of a pipeline: each rank alone, without memory, does what it does among others."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.models.sizes import model_size
from hyper_parallel.testing import threads
from tests.world import small_or_sweep

only_on = "torch"  # the dry run is PyTorch's on both

_BATCH, _LENGTH = 4, 30
_CASES = {
    "pp=2, tp=2": {"schedule": "zbv", "microbatches": 3},
    "pp=2, dp_shard=2": {"schedule": "interleaved", "stages_per_rank": 2, "microbatches": 2},
    "pp=2, cp=2": {"schedule": "1f1b", "microbatches": 3},
    "pp=4": {"schedule": "zb_h1", "microbatches": 4},
}


def _really(degrees: str, options: dict) -> tuple[Counter, int]:
    model = hp.models.Llama(model_size("llama-demo")).bfloat16()
    run = hp.parallelize(model, degrees, **options)
    ids = torch.zeros(_BATCH, _LENGTH, dtype=torch.long)
    run.forward_backward(ids, ids)
    run.zero_grad()
    with hp.CommRecorder() as recorder:
        run.forward_backward(ids, ids)
    held = [one.to_local() if isinstance(one, hp.DTensor) else one for one in run.parameters()]
    return Counter((one.op, one.num_bytes) for one in recorder.records), sum(one.nbytes for one in held)


@pytest.mark.parametrize("degrees", small_or_sweep(_CASES, ["pp=2, tp=2"]))
def test_collectives_and_parameters_are_those_of_the_real_ranks(degrees: str) -> None:
    options = _CASES[degrees]
    expected = threads(4).run(_really, degrees, options)
    for rank in (0, 3):
        report = hp.dry_run("llama-demo", degrees, rank=rank, batch=_BATCH, length=_LENGTH, optimizer=None, **options)
        counts, held = expected[rank]
        assert report.num_collectives == sum(counts.values())
        assert report.peak_by_kind["parameters"] == held


def test_stages_are_classes_of_their_own_and_early_ones_keep_more() -> None:
    reports = hp.dry_run_classes("llama-demo", "pp=2, tp=2", batch=4, length=32, microbatches=4)
    assert [report.ranks for report in reports] == [(0, 1), (2, 3)]
    first, last = (report.peak_by_kind["activations"] for report in reports)
    assert first > 1.4 * last  # two microbatches in flight, and one
    with pytest.raises(ValueError, match=r"there is no schedule 'zbw'; .* did you mean zbv\?"):
        hp.dry_run("llama-demo", "pp=2", schedule="zbw")
