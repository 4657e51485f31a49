"""The curve of a run is that of a hand-written loop on one device, whatever the degrees, and across a resume."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hyper_parallel.data import open_data
from tests.trainer.runs import DEGREES, plain_losses, run_config, steps_of, tiny_llama, train_on_threads
from tests.world import small_or_sweep


@pytest.mark.parametrize("degrees", small_or_sweep(DEGREES, ["one", "dp_shard x tp", "cp", "pp x tp"]))
def test_the_curve_of_every_layout_is_that_of_a_hand_written_loop(tmp_path, degrees):
    config = run_config(tmp_path, degrees, train={"microbatches": 2} if degrees in ("dp_shard", "pp x tp") else {})
    losses = train_on_threads(config).losses
    assert losses == pytest.approx(plain_losses(config, 6), rel=1e-11)
    assert losses[6] < losses[1]


_PAIRS = list(itertools.permutations([one for one in DEGREES if one != "tp 4"], 2))
_FEW = [("one", "dp_shard x tp"), ("dp_shard x tp", "cp")]


@pytest.mark.parametrize("pair", small_or_sweep(_PAIRS, _FEW), ids=" to ".join)
def test_a_run_that_goes_on_under_other_degrees_is_the_straight_one(tmp_path, pair):
    """Saved at step 3 of 6, in the middle of an epoch and of the schedule."""
    first, second = pair
    stopped = train_on_threads(run_config(tmp_path, first, checkpoint={"every": 3}), before=_stop_at(3))
    assert (stopped.status, stopped.step, stopped.exit_code) == ("stopped", 3, 143)
    config = run_config(tmp_path, second)
    again = train_on_threads(config)
    assert again.step == 6
    assert {**stopped.losses, **again.losses} == pytest.approx(plain_losses(config, 6), rel=1e-11)
    assert [line["step"] for line in steps_of(tmp_path)] == [1, 2, 3, 4, 5, 6]


def _stop_at(step):
    """Ask the run to stop in ``step``: every rank is told by a sum, so one asks."""

    def ask(trainer):
        original = trainer._step

        def ask_then_step(numbers, batch, stop):
            if trainer.run.step + 1 == step and trainer.run.mesh.get_local_rank("tp") == 0:
                stop._signal = 15
            return original(numbers, batch, stop)

        trainer._step = ask_then_step

    return ask


def test_across_an_epoch_and_with_another_batch_size_no_sample_is_lost_or_twice(tmp_path):
    """23 samples: the first part ends inside of epoch 1, the second begins with another batch."""
    (tmp_path / "text.txt").write_bytes(np.random.default_rng(0).integers(32, 127, 23 * 16 + 1).astype("u1").tobytes())
    data = {"kind": "text", "path": str(tmp_path / "text.txt"), "cache": str(tmp_path / "cache"), "length": 16}
    seen: list[int] = []

    def note(trainer):
        original = trainer._step

        def noted(numbers, batch, stop):
            seen.extend(int(one) for one in numbers)
            return original(numbers, batch, stop)

        trainer._step = noted

    first = run_config(tmp_path / "run", data=data, train={"steps": 3})
    train_on_threads(first, note)
    assert len(seen) == 15
    train_on_threads(run_config(tmp_path / "run", data=data, train={"steps": 8, "batch": 7}), note)
    assert len(seen) == 15 + 5 * 7
    num_samples = open_data(first.data, seed=0).num_samples
    assert num_samples == 23
    assert sorted(seen[:23]) == list(range(23))
    assert sorted(seen[23:46]) == list(range(23))
    assert seen[:23] != seen[23:46]
    assert steps_of(tmp_path / "run")[-1]["position"] == 50


@pytest.mark.sweep
@pytest.mark.parametrize(
    "parts",
    [
        {10: "dp_shard x tp", 20: "tp 4"},
        {10: "tp 4", 20: "pp x tp"},
        {10: "pp x tp", 20: "one"},
        {5: "dp_shard x tp", 9: "tp 4", 14: "pp x tp", 20: "one"},
    ],
    ids=lambda parts: " to ".join(parts.values()),
)
def test_twenty_steps_in_parts_under_other_degrees_are_twenty_straight(tmp_path, parts):
    """25 samples in batches of 5: an epoch ends where the second part begins (10), or inside of one (9, 14)."""
    (tmp_path / "text.txt").write_bytes(np.random.default_rng(0).integers(32, 127, 25 * 16 + 1).astype("u1").tobytes())
    data = {"kind": "text", "path": str(tmp_path / "text.txt"), "cache": str(tmp_path / "cache"), "length": 16}
    train = {"steps": 20}
    seen: dict[int, list[int]] = {}
    losses: dict[int, float] = {}
    for last, degrees in parts.items():

        def note(trainer, last=last):
            _stop_at(last)(trainer)
            original = trainer._step

            def noted(numbers, batch, stop):
                seen.setdefault(trainer.run.step + 1, [int(one) for one in numbers])
                return original(numbers, batch, stop)

            trainer._step = noted

        part = train_on_threads(run_config(tmp_path / "run", degrees, data=data, train=train), note)
        assert part.step == last
        assert not set(part.losses) & set(losses)
        losses |= part.losses
    config = run_config(tmp_path / "straight", data=data, train=train)
    assert losses == pytest.approx(plain_losses(config, 20), rel=1e-10)
    numbers = [number for step in range(1, 21) for number in seen[step]]
    for epoch in range(4):
        assert sorted(numbers[25 * epoch : 25 * (epoch + 1)]) == list(range(25))


def test_a_run_of_epochs_over_its_boundary_is_the_straight_one(tmp_path):
    (tmp_path / "text.txt").write_bytes(np.random.default_rng(0).integers(32, 127, 10 * 16 + 1).astype("u1").tobytes())
    data = {"kind": "text", "path": str(tmp_path / "text.txt"), "cache": str(tmp_path / "cache"), "length": 16}
    train = {"steps": None, "epochs": 3.0}
    stopped = train_on_threads(run_config(tmp_path / "run", data=data, train=train), _stop_at(2))
    assert stopped.step == 2  # the end of epoch 0
    config = run_config(tmp_path / "run", "tp", data=data, train=train)
    again = train_on_threads(config)
    straight = run_config(tmp_path / "straight", data=data, train={"steps": 6})
    assert {**stopped.losses, **again.losses} == pytest.approx(plain_losses(straight, 6), rel=1e-11)
    first = {"resume": str(tmp_path / "run" / "checkpoints" / "step-2"), "folder": str(tmp_path / "more")}
    more = train_on_threads(run_config(tmp_path / "run", data=data, train={**train, "batch": 4}, checkpoint=first))
    assert (more.step, steps_of(tmp_path / "run")[-1]["position"]) == (2 + 20 / 4, 30)


def test_the_norm_the_rate_and_the_tokens_of_a_step_are_written_down(tmp_path):
    train_on_threads(run_config(tmp_path, "dp_shard x tp", train={"steps": 2}))
    first, second = steps_of(tmp_path)
    config = run_config(tmp_path)
    data = open_data(config.data, seed=0)
    batch = data.collate(data.order(batch=5, seed=0).numbers(0, 5))
    model = tiny_llama()
    model(torch.from_numpy(batch["input_ids"]), torch.from_numpy(batch["labels"])).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-11)
    assert (first["tokens"], first["position"], second["position"]) == (5 * 16, 5, 10)
    assert (first["lr"], second["lr"]) == pytest.approx((1.5e-3, 3e-3))
    assert len(first["memory_per_rank"]) == 4
    assert set(first["seconds"]) == {"data", "forward_backward", "optimizer", "all"}
