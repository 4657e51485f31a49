"""`hyper-parallel check` and the forecast of a run on MindSpore: ranks are processes, the forecast is by the twin."""

from __future__ import annotations

import json

from pydantic import TypeAdapter

from hyper_parallel.trainer.check import check_run
from hyper_parallel.trainer.config.run_config import RunConfig
from hyper_parallel.trainer.forecast import forecast_run

only_on = "mindspore"  # ranks as processes, the forecast by the twin


def _config(**sections) -> RunConfig:
    given = {
        "model": {"name": "llama-1b"},
        "data": {"kind": "synthetic", "length": 64, "isolate": False, "num_samples": 64},
        "train": {"steps": 10, "batch": 4},
        **sections,
    }
    return TypeAdapter(RunConfig).validate_json(json.dumps(given))


def test_two_processes_are_equal_to_one():
    verdict = check_run(_config(parallel={"tp": 2}), steps=2)
    assert verdict.equal, verdict.text()
    assert verdict.largest < 1e-3 and "in float32" in verdict.text()


def test_the_forecast_is_that_of_the_twin():
    found = forecast_run(_config(model={"name": "llama-demo"}, parallel={"dp_shard": 2}), seconds=None)
    assert found.parameters == 791680 * 4 // 2
    assert found.peak > found.state and "twin on PyTorch" in found.note
