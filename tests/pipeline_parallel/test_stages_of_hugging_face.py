"""Unmodified models of Hugging Face in three stages: loss and every gradient are those of the model in one piece."""

import copy

import pytest
import torch

from tests.pipeline_parallel.stages_by_hand import cut, gradients_of, run, split_of
from tests.world import small_or_sweep

transformers = pytest.importorskip("transformers", reason='an extra: pip install "hyper-parallel[transformers]"')

from tests.pipeline_parallel import hugging_face_models as toys  # noqa: E402

only_on = "torch"  # models of transformers, which are PyTorch's


def _expected(model, batch):
    whole = copy.deepcopy(model)
    loss = whole(**batch).loss
    loss.backward()
    return loss, {name: one.grad for name, one in whole.named_parameters() if one.grad is not None}


def _assert_same(losses, gradients, loss, expected, shared):
    assert torch.equal(losses[0], loss)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        if name in shared:  # a sum of two, in another order
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-6, atol=1e-9)
        else:
            assert torch.equal(gradients[name], gradient), name


@pytest.mark.parametrize("kind", small_or_sweep(toys.SIZES, ["llama", "gpt2", "gemma2", "opt", "bert"]))
def test_three_stages_give_the_gradients_of_one_piece(kind):
    torch.manual_seed(0)
    model = toys.build(kind)
    batch = toys.batch()
    split = split_of(model, 3, inputs={"input_ids": batch["input_ids"]})
    assert split.num_stages == 3 and split.stream.shape == (2, 12, 32)
    static = split_of(model, 3)
    assert (static.stages, static.prologue, static.epilogue) == (split.stages, split.prologue, split.epilogue)
    loss, expected = _expected(model, batch)
    for way in (static, split):
        stages = cut(model, way)
        losses = run(stages, [batch], lambda outputs: outputs.loss)
        _assert_same(losses, gradients_of(stages), loss, expected, split.shared)

    named = dict(model.named_parameters(remove_duplicate=False))
    held = [set(dict(stage.model.named_parameters(remove_duplicate=False))) for stage in stages]
    assert set.union(*held) == set(named), "names are those of one piece, and nothing is lost"
    for number, names in enumerate(held):
        assert not any(one is stages[number].model for one in stages[:number])
        for other in held[:number]:
            assert all(split.first_names[name] in split.shared for name in names & other)
