"""Unmodified models of Hugging Face through `hp.parallelize(..., pp=2)`: they train as plain PyTorch in one piece."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason='these models are in an extra: pip install "hyper-parallel[transformers]"')

import torch

import hyper_parallel as hp
from hyper_parallel.testing import threads
from tests.parallel.training import batch, on_one_device, train
from tests.tensor_parallel.hugging_face import assert_same, build
from tests.world import small_or_sweep

only_on = "torch"  # models of transformers, which are PyTorch's

_BLOCKS = 5
# name, degrees, schedule, microbatches, options
_CASES: dict[str, tuple[str, str, str, int, dict[str, Any]]] = {
    f"{name}, {degrees}, {schedule}": (name, degrees, schedule, microbatches, options)
    for name, degrees, schedule, microbatches, options in [
        ("llama", "pp=2", "zbv", 3, {}),
        ("llama_odd_heads", "pp=4", "1f1b", 3, {"recompute": "full"}),
        ("llama", "pp=2, tp=2", "zb_h1", 3, {}),
        ("llama", "pp=2, dp_shard=2", "interleaved", 2, {"recompute": "full"}),
        ("llama", "pp=2, cp=2", "zbv", 2, {}),
        ("qwen3", "pp=2", "interleaved", 4, {}),
        ("qwen3", "pp=2, tp=2", "zbv", 3, {"sequence_parallel": False}),
        ("qwen3", "pp=2, dp_shard=2", "zbv", 2, {}),
        ("gpt2", "pp=2", "zb_h2", 4, {}),
        ("gpt2", "pp=2, tp=2", "1f1b", 2, {}),
        ("gpt2", "pp=2, dp_shard=2", "1f1b", 3, {}),
        ("gemma2", "pp=2", "v_half", 4, {}),
        ("gemma2", "pp=2, tp=2", "1f1b", 2, {}),
        ("mixtral_without_balance", "pp=2", "zb1p", 4, {}),
        ("mixtral_without_balance", "pp=2, tp=2", "zbv", 3, {}),
        ("deepseek_v3", "pp=2", "zbv", 3, {}),
        ("deepseek_v3", "pp=2, tp=2", "1f1b", 3, {}),
        ("deepseek_v3", "pp=2, cp=2", "zb_h1", 2, {}),  # its mixtures run on whole plain tensors
        ("gpt_oss", "pp=2", "dual_pipe_v", 5, {}),
        ("gpt_oss", "pp=2, tp=2", "zb_h1", 3, {}),
        ("mistral", "pp=3", "1f1b", 2, {}),
        ("olmo2", "pp=2", "looped_bfs", 3, {}),
        ("phi3", "pp=2, tp=2", "zbv", 3, {}),
        ("opt", "pp=2", "zbv", 3, {}),
        ("falcon", "pp=2", "1f1b", 3, {}),
        ("mamba", "pp=2", "zbv", 3, {}),
    ]
}
_SMALL = ["qwen3, pp=2, tp=2, zbv", "gpt2, pp=2, zb_h2", "deepseek_v3, pp=2, zbv"]


def _on_a_rank(name: str, degrees: str, options: dict[str, Any]) -> dict[str, Any]:
    return train(hp.parallelize(build(name, num_blocks=_BLOCKS), degrees, **options), batch(), 2)


@pytest.mark.parametrize("case", small_or_sweep(_CASES, _SMALL))
def test_they_train_as_in_one_piece(case: str) -> None:
    name, degrees, schedule, microbatches, options = _CASES[case]
    model = build(name, num_blocks=_BLOCKS)
    model.config.use_cache = False
    want = on_one_device(name, batch(), 2, model)
    ranks = 4 if "," in degrees else int(degrees[-1])
    options = {"schedule": schedule, "microbatches": microbatches, **options}
    held: set[str] = set()
    for got in threads(ranks, timeout=300).run(_on_a_rank, name, degrees, options):
        held |= got.keys()
        assert_same(got, {key: want[key] for key in got}, rtol=1e-9, atol=1e-9)
    assert held == want.keys()


@pytest.mark.parametrize("degrees", ["pp=2", "pp=2, tp=2"])
def test_dropout_has_the_bits_of_one_piece(degrees: str) -> None:
    """Draws are addressed by step, block and sample: a microbatch on a later stage draws what the whole batch does."""

    def work(degrees: str, **options: Any) -> dict[str, Any]:
        hp.manual_seed(5)
        return train(hp.parallelize(build("gpt2_dropout", num_blocks=4).train(), degrees, **options), batch(), 2)

    (want,) = threads(1).run(work, "dp_shard=1")
    (other,) = threads(1).run(work, "dp_shard=1", microbatches=3)
    assert_same(other, want, rtol=1e-9, atol=1e-9)
    without = on_one_device("gpt2", batch(), 2, build("gpt2", num_blocks=4))
    assert not torch.allclose(without["loss 0"], want["loss 0"], rtol=1e-3)
    for got in threads(4 if "tp" in degrees else 2, timeout=300).run(
        work, degrees, schedule="zbv", microbatches=3, recompute="full"
    ):
        assert_same(got, {key: want[key] for key in got}, rtol=1e-9, atol=1e-9)


def test_masks_are_made_in_the_dtype_of_the_computation() -> None:
    """Gemma 2 makes masks of the least number of the stream's dtype; that of another dtype is minus infinity here."""
    given = {**batch(), "attention_mask": torch.ones(7, 13, dtype=torch.long)}
    given["attention_mask"][2, 9:] = 0

    def work(degrees: str) -> float:
        model = build("gemma2", torch.float32, num_blocks=4)
        return float(hp.parallelize(model, degrees, precision="bf16", microbatches=2).forward_backward(**given))

    (want,) = threads(1).run(work, "dp_shard=1")
    assert threads(2).run(work, "pp=2") == pytest.approx([want, want], rel=1e-3)


def test_ranks_with_other_rows_are_told() -> None:
    def work() -> None:
        run = hp.parallelize(build("llama"), "pp=2", microbatches=2)
        rows = 4 + hp.get_platform().get_rank()
        run.forward_backward(**{name: value[:rows] for name, value in batch().items()})

    with pytest.raises(RuntimeError, match=r"stage 0 was given .*\(2, 13\).* and stage 1 .*\(3, 13\).* the same rows"):
        threads(2, timeout=60).run(work)
