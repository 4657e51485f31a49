"""PyTorch's operator database on distributed tensors: a sample of one operator in six here, of each in a sweep."""

from tests.shard.op_coverage import run_database
from tests.shard.op_trials import Trial

only_on = "torch"  # PyTorch's own database of operators


def test_operators_are_right_and_none_hangs(worlds) -> None:
    every = 1 if worlds.sweep else 6
    trial = Trial(seed=5, num_samples=1)
    outcomes = [outcome for outcome in run_database(worlds, trial, every=every) if outcome.status != "no sample"]
    bad = {outcome.name: outcome for outcome in outcomes if outcome.status in ("wrong", "died or hung")}
    assert not bad, "\n".join(f"{name}: {outcome.status}: {outcome.message}" for name, outcome in bad.items())
    right = [outcome for outcome in outcomes if outcome.status == "right"]
    assert len(outcomes) > 500 / every
    assert len(right) >= 0.97 * len(outcomes), [o.name for o in outcomes if o.status != "right"]
    assert sum(not outcome.gathered for outcome in right) >= 300 / every
