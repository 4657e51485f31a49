"""The reference model on MindSpore is PyTorch's: the same initial bits from one seed, and the same losses, whole and
cut by plans that are read off the structure of its cells or written out."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.experimental import optim

import hyper_parallel as hp
from hyper_parallel import models
from tests.tensor_parallel.llama_training import RATE, STEPS, Case, built, tokens, train_on_torch
from tests.world import run_on_ranks
from tests.world.world import Worlds

TIMEOUT = 300.0


def train_on_mindspore(cases: list[Case]) -> list[tuple[dict[str, np.ndarray], list[float]]]:
    """As ``train_on_torch``."""
    results = []
    for case in cases:
        model = built(case)
        weights = model.trainable_params()
        initial = {one.name.replace("embedding_table", "weight"): one.asnumpy().copy() for one in weights}
        ids, labels = Tensor(tokens()[:, :-1]), Tensor(tokens()[:, 1:])
        step = hp.value_and_grad(lambda model=model, ids=ids, labels=labels: model(ids, labels), weights)
        optimizer, losses = optim.AdamW(weights, lr=RATE), []
        for _ in range(STEPS):
            loss, gradients = step()
            optimizer(gradients)
            losses.append(float(loss))
        results.append((initial, losses))
    return results


def test_losses_and_initial_bits_are_those_of_torch(worlds):
    torch_worlds = Worlds("torch")
    try:
        cases = [Case(), Case("structure", True), Case(tied=True)]
        plain, cut, tied = torch_worlds(2, TIMEOUT).run(train_on_torch, cases)[0]
    finally:
        torch_worlds.close()
    assert plain[1][-1] < 0.98 * plain[1][0] and abs(plain[1][-1] - tied[1][-1]) > 1e-3
    np.testing.assert_allclose(cut[1], plain[1], rtol=0, atol=1e-5)

    some, sequence = [Case(), Case("structure")], Case("structure", True)
    often = [(2, [some[0], Case("by hand", True), sequence._replace(tied=True)])]
    seldom = [(2, [some[1], sequence]), (4, [some[1], Case("by hand", True), sequence._replace(tied=True)])]
    for world_size, cases in [*often, *seldom] if worlds.sweep else often:
        for results in worlds(world_size, TIMEOUT).run(train_on_mindspore, cases):
            for case, (weights, losses) in zip(cases, results, strict=True):
                wanted_weights, wanted = tied if case.tied else plain
                assert weights.keys() == wanted_weights.keys()
                for name, value in wanted_weights.items():
                    assert np.array_equal(weights[name], value), (case, name)
                np.testing.assert_allclose(losses, wanted, rtol=0, atol=1e-5, err_msg=str(case))


def test_the_plan_of_the_structure_is_the_one_written_out():
    model = models.Llama(models.LlamaConfig(vocab_size=11, dim=16, num_blocks=2, num_heads=4, num_kv_heads=2))
    written = models.llama_plan(sequence_parallel=True)
    read = hp.plans.for_model(model, sequence_parallel=True)
    assert list(read) == list(written)
    for path, styles in read.items():
        style = written[path]
        assert repr(styles) == repr(style if isinstance(style, list) else [style]), path


@run_on_ranks(2, timeout=TIMEOUT)
def test_weights_lie_as_the_plan_says():
    model = built(Case("structure", True))
    expected = {"query": 0, "key": 0, "value": 0, "output": 1, "gate": 0, "up": 0, "down": 1, "embedding": 0, "head": 0}
    for parameter in model.trainable_params():
        part = parameter.name.split(".")[-2]
        assert parameter.placements == ((hp.Shard(expected[part]),) if part in expected else (hp.Replicate(),)), part
    ids = Tensor(tokens()[:, :-1])
    assert not isinstance(model(ids), hp.DTensor) and model(ids).shape == (2, 6, 11)
    logits = built(Case("structure"))(ids)
    np.testing.assert_allclose(model(ids).asnumpy(), logits.asnumpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="Llama: 513 tokens, but max_length is 512"):
        model(Tensor(np.zeros((1, 513), np.int32)))


def test_a_refusal_names_the_cell():
    class Odd(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.CellList([nn.SequentialCell(nn.Dense(4, 5), nn.Dense(4, 8), nn.Dense(8, 4))])

    with pytest.raises(hp.plans.PlanError, match=r"cannot tell how to shard 'layers.0.\w', a Dense"):
        hp.plans.for_model(Odd())
    with pytest.raises(hp.plans.PlanError, match=r"no linear layers in SequentialCell.*its largest.*of '0'"):
        hp.plans.for_model(nn.SequentialCell(nn.Conv2d(1, 2, 3)))
