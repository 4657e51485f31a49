"""Modules of your own under `PipelineStage` and schedules by name: the gradients of the same modules in a row."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.frameworks import models, ours, theirs
from tests.world import run_on_ranks

_LIMIT = 1e-5


class _Part(models.Module):  # type: ignore[name-defined, misc]
    """Two tensors come and go, one of them without a gradient; the last part gives a loss and what it is of."""

    def __init__(self, number: int, num_parts: int) -> None:
        super().__init__()
        self.number, self.num_parts = number, num_parts
        self.layer = models.fill(models.linear(4, 4), seed=number)

    def forward(self, x: Any, scale: Any = None, labels: Any = None) -> Any:
        y = self.layer(x)
        if scale is not None:
            y = y * scale
        if self.number < self.num_parts - 1:
            return y * y, x[:, :1] if self.number == 0 else scale
        return ((y - labels) ** 2).sum(), y


def _batch(rows: int) -> tuple[Any, Any]:
    made = torch.Generator().manual_seed(0)
    return tuple(ours(torch.rand((rows, 4), generator=made)) for _ in range(2))  # type: ignore[return-value]


def _in_a_row(parts: list[_Part], x: Any, labels: Any) -> tuple[float, np.ndarray]:
    given: tuple[Any, ...] = (x,)
    for part in parts[:-1]:
        given = part(*given)
    loss, outputs = parts[-1](*given, labels=labels)
    get_platform().backward(loss)
    return float(theirs(loss)), theirs(outputs).detach().numpy()


def _gradient(parameter: Any) -> np.ndarray:
    return theirs(get_platform().get_grad(parameter)).numpy()


def _stages(count: int, **options: Any) -> list[hp.PipelineStage]:
    rank, ranks = get_platform().get_rank(), get_platform().get_world_size()
    return [hp.PipelineStage(_Part(index, count), index, count, **options) for index in range(rank, count, ranks)]


def _run(schedule: Any, x: Any, labels: Any) -> Any:
    last = schedule.table.stages.last in schedule.stages
    return schedule.run(*((x,) if 0 in schedule.stages else ()), **({"labels": labels} if last else {}))


@run_on_ranks(2, timeout=300)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "split", "overlapped"])
def test_gradients_of_the_modules_in_a_row(name: str) -> None:
    per_rank = 1 if name in ("gpipe", "1f1b") else 2
    count = 2 * per_rank
    stages = _stages(count)
    make: Any = {"gpipe": hp.ScheduleGPipe, "1f1b": hp.Schedule1F1B}.get(name, hp.ScheduleInterleaved1F1B)
    options = {"split": {"enable_dxdw_split": True}, "overlapped": {"overlap_b_f": True}}
    schedule = make(stages, 4, **options.get(name, {}))
    parts = [_Part(index, count) for index in range(count)]
    x, labels = _batch(8)
    for _ in range(2):  # gradients are added up
        loss, outputs = _in_a_row(parts, x, labels)
        found = _run(schedule, x, labels)
        assert (found is None) is (get_platform().get_rank() == 0)
        if found is not None:
            assert found[0].shape == (4,) and abs(float(theirs(found[0]).sum()) - loss) < _LIMIT * loss
            np.testing.assert_allclose(theirs(found[1]).numpy(), outputs, rtol=_LIMIT, atol=1e-6)
    for stage in stages:
        for one, other in zip(
            get_platform().parameters_dict(stage.submodule).values(),
            get_platform().parameters_dict(parts[stage.stage_index]).values(),
            strict=True,
        ):
            np.testing.assert_allclose(_gradient(one), _gradient(other), rtol=_LIMIT, atol=1e-6)
    with get_platform().no_grad():
        again = _run(schedule, x, labels)
    if again is not None:
        np.testing.assert_allclose(theirs(again[1]).numpy(), outputs, rtol=_LIMIT, atol=1e-6)
    kinds = [step.meta_type for step in itertools.chain(*schedule.exec_order.values())]
    assert (hp.MetaStepType.BWD_WEIGHT in kinds) is (name == "split")
    assert (hp.MetaStepType.OVERLAP_B_F in kinds) is (name == "overlapped")


@run_on_ranks(2, timeout=300)
def test_sizes_that_change_and_shared_parameters() -> None:
    rank = get_platform().get_rank()
    part = _Part(rank, 2)
    if rank == 1:
        models.fill(part.layer, seed=7)  # copies take the values of the first stage
    shared = [hp.SharedParameterInfo(one, 1 - rank) for one in get_platform().parameters_dict(part).values()]
    stage = hp.PipelineStage(part, rank, 2, dyn_shape=True, shared_parameters=shared)
    schedule = hp.Schedule1F1B(stage, 3, args_batch_dim=hp.BatchDimSpec.from_tuple((0,)), output_concat_dim=0)
    parts = [_Part(0, 2), _Part(1, 2)]
    parts[1].layer = parts[0].layer
    for rows in (7, 4, 3):
        x, labels = _batch(rows)
        _, outputs = _in_a_row(parts, x, labels)
        found = _run(schedule, x, labels)
        if found is not None:
            assert found[1].shape == (rows, 4)
            np.testing.assert_allclose(theirs(found[1]).numpy(), outputs, rtol=_LIMIT, atol=1e-6)
    for one, other in zip(
        get_platform().parameters_dict(part).values(), get_platform().parameters_dict(parts[0]).values(), strict=True
    ):
        np.testing.assert_allclose(_gradient(one), _gradient(other), rtol=_LIMIT, atol=1e-5)


@run_on_ranks(2, timeout=300)
def test_functions_in_place_of_steps() -> None:
    schedule = hp.ScheduleGPipe(_stages(2), 2)
    seen: list[Any] = []

    def forward(step: hp.MetaStep, context: hp.PipelineContext) -> None:
        seen.append((step.stage_index, step.micro_index, sorted(context.kwargs)))
        context.default()

    schedule.register_custom_function(hp.MetaStepType.FWD, forward)
    _run(schedule, *_batch(4))
    rank = get_platform().get_rank()
    assert seen == [(rank, number, ["labels"] if rank else []) for number in range(2)]
    with pytest.raises(ValueError, match=r"OVERLAP_F_B is several steps at once; name one of FWD, BWD"):
        schedule.register_custom_function(hp.MetaStepType.OVERLAP_F_B, forward)


@run_on_ranks(2)
def test_what_cannot_be_asked_for() -> None:
    rank = get_platform().get_rank()
    part = _Part(rank, 2)
    for make, said in (
        (lambda: hp.PipelineStage(3, 0, 2), "submodule is a int, not a module"),
        (lambda: hp.PipelineStage(part, 2, 2), "stage 2 of 2; count from 0"),
        (lambda: hp.PipelineStage(part, 0, 3, dst_stage=2), "dst_stage=2 of stage 0: stages are a chain"),
        (lambda: hp.Schedule1F1B(_stages(4), 4), "4 stages, and its table has 2 on 2 ranks"),
        (
            lambda: hp.Schedule1F1B(hp.PipelineStage(part, 1 - rank, 2), 2),
            rf"rank {rank} gives the stages \[{1 - rank}\], and the table has \[{rank}\] there",
        ),
        (lambda: hp.ScheduleInterleaved1F1B(_stages(4), 4, swap=True), "swap is not there; recompute blocks"),
        (lambda: _run(hp.Schedule1F1B(_stages(2), 2), *_batch(5)), "2 microbatches of different sizes; give a batch"),
        (lambda: hp.Schedule1F1B(_stages(2), 2).run(3, labels=_batch(1)[1]), "too few for 2 microbatches"),
        (lambda: hp.BatchDimSpec("rows"), "a number or None, got 'rows'"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            make()
