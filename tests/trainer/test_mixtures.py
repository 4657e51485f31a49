"""Runs of a model with mixtures of experts: curves, a resume with the experts' bias, metrics, and mistakes."""

from __future__ import annotations

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.models.sizes import model_size
from hyper_parallel.trainer.check.shrinking import shrink
from tests.trainer.runs import SIZES, plain_losses, run_config, steps_of, train_on_threads
from tests.world import small_or_sweep

MIXTURE = {
    **SIZES,
    "num_experts": 6,
    "top_k": 2,
    "expert_dim": 12,
    "shared_dim": 8,
    "num_dense_blocks": 1,
    "score_func": "sigmoid",
    "load_balance_coeff": 0.01,
    "sequence_loss": 0.05,
}


def _config(folder, degrees="one", **sections):
    return run_config(folder, degrees, model={"name": "mixture", "args": MIXTURE}, **sections)


class _ByHand(torch.nn.Module):
    """The model on one device, whose bias is updated before every step but the first."""

    def __init__(self):
        super().__init__()
        hp.manual_seed(0)
        with hp.deferred_init():
            model = hp.models.Mixture(hp.models.MixtureConfig(**MIXTURE)).to(torch.float64)
        self.model = hp.materialize(model)

    def forward(self, ids, labels):
        for block in self.model.blocks[1:]:
            counts, bias = block.moe.tokens_per_expert, block.moe.expert_bias
            step = 0.01 * torch.sign(counts.double().mean() - counts)
            bias += step - step.mean()
            counts.zero_()
        return self.model(ids, labels).loss


@pytest.mark.parametrize(
    "degrees", small_or_sweep(["one", "dp_shard", "tp", "cp", "dp_shard x tp"], ["dp_shard", "tp"])
)
def test_the_curve_is_that_of_a_hand_written_loop(tmp_path, degrees):
    config = _config(tmp_path, degrees, train={"microbatches": 2} if degrees == "dp_shard" else {})
    losses = train_on_threads(config).losses
    assert losses == pytest.approx(plain_losses(config, 6, _ByHand()), rel=1e-10)
    assert losses[6] < losses[1]
    imbalances = [line["expert_imbalance"] for line in steps_of(tmp_path)]
    assert len(imbalances) == 6 and all(1 <= one <= 3 for one in imbalances)  # 6 experts, of which 2 are chosen


def test_a_run_that_goes_on_is_the_straight_one(tmp_path):
    """With its bias: without, tokens would choose other experts."""
    schedule = {"name": "constant", "warmup": 0}
    config = _config(tmp_path / "a", "dp_shard", train={"steps": 3}, schedule=schedule, checkpoint={"every": 3})
    first = train_on_threads(config)
    again = train_on_threads(_config(tmp_path / "a", "tp", train={"steps": 6}, schedule=schedule))
    straight = train_on_threads(_config(tmp_path / "b", train={"steps": 6}, schedule=schedule))
    assert {**first.losses, **again.losses} == pytest.approx(straight.losses, rel=1e-10)


MISTAKES = [
    ({"top_k": 9}, r"args.top_k.*top_k=9 is more than the 6 experts"),
    ({"score_func": 3}, r"args.score_func.*must be a text, got 3"),
    ({"num_expertz": 3}, r"args.num_expertz.*did you mean 'num_experts'"),
    ({"num_dense_blocks": 7}, r"num_dense_blocks=7 must be from 0 to num_blocks=2"),
]


@pytest.mark.parametrize(("args", "told"), MISTAKES, ids=[next(iter(one)) for one, _ in MISTAKES])
def test_mistakes_are_told(tmp_path, args, told):
    with pytest.raises(ValueError, match=f"(?s){told}"):
        run_config(tmp_path, model={"name": "mixture", "args": {**MIXTURE, **args}})


def test_sizes_shrink_and_stay_as_odd(tmp_path):
    for name in ("mixture-671b-a37b", "mixture-8x7b", "mixture-16b-a3b"):
        given = model_size(name)
        config, _ = shrink(run_config(tmp_path, model={"name": name, "args": {}}, train={"microbatches": 2}), 1)
        sizes = hp.models.MixtureConfig(**config.model.args)
        assert sizes.num_experts < 20 and sizes.num_expert_groups == given.num_expert_groups
        assert (sizes.score_func, bool(sizes.shared_dim)) == (given.score_func, bool(given.shared_dim))
        assert sizes.balance_loss == 0 and sizes.sequence_loss == given.balance_loss + given.sequence_loss
