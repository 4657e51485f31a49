"""The reference models are what they say on one device: causal, grouped-query, rotary, tied where asked."""

import math

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import models

only_on = "torch"  # the models on PyTorch; on MindSpore the same numbers: test_mindspore_models.py

SMALL = {"vocab_size": 11, "dim": 16, "num_blocks": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 24}


def _llama(**changes):
    torch.manual_seed(0)
    return models.Llama(models.LlamaConfig(**{**SMALL, **changes})).double()


def test_logits_do_not_see_later_tokens():
    model, ids = _llama(), torch.randint(0, 11, (2, 7))
    changed = ids.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 11
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_attention_depends_on_distance_and_not_on_position():
    """Rotary positions: the same tokens further along give the same scores."""
    config = models.LlamaConfig(**SMALL)
    from hyper_parallel.models.torch.llama import rotary_table, rotate

    cos, sin = (table.double() for table in rotary_table(config))
    query, key = torch.randn(2, config.head_dim, dtype=torch.float64)

    def score(at: int, to: int) -> torch.Tensor:
        return rotate(query, cos[at], sin[at]) @ rotate(key, cos[to], sin[to])

    torch.testing.assert_close(score(3, 1), score(40, 38))
    assert not torch.allclose(score(3, 1), score(3, 2))


def test_query_heads_share_key_heads_in_groups():
    model = _llama()
    attention, x = model.blocks[0].attention, torch.randn(2, 5, 16, dtype=torch.float64)
    got = attention(x, model.cos[:5], model.sin[:5])
    from hyper_parallel.models.torch.llama import rotate

    def heads(layer, count):
        return layer(x).view(2, 5, count, 4).transpose(1, 2)

    query = rotate(heads(attention.query, 4), model.cos[:5], model.sin[:5])
    key = rotate(heads(attention.key, 2), model.cos[:5], model.sin[:5]).repeat_interleave(2, dim=1)
    value = heads(attention.value, 2).repeat_interleave(2, dim=1)
    scores = query @ key.transpose(-1, -2) / math.sqrt(4)
    weights = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf).softmax(-1)
    torch.testing.assert_close(got, attention.output((weights @ value).transpose(1, 2).reshape(2, 5, 16)))


def test_loss_is_the_cross_entropy_of_the_logits_and_starts_near_that_of_chance():
    model, ids = _llama(), torch.randint(0, 11, (4, 8))
    loss = model(ids[:, :-1], ids[:, 1:])
    torch.testing.assert_close(loss, F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()))
    assert abs(loss.item() - math.log(11)) < 0.1


def test_a_tied_head_is_the_embedding():
    model = _llama(tie_head=True)
    assert model.head.weight is model.embedding.weight
    assert len(list(model.parameters())) == len(list(_llama().parameters())) - 1


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"num_heads": 3}, "dim=16 must be num_heads=3 times an even number"),
        ({"num_heads": 16, "num_kv_heads": 1}, "times an even number, for rotary positions turn pairs"),
        ({"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"hidden_dim": 0}, "hidden_dim must be at least 1, got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, said):
    with pytest.raises(ValueError, match=said):
        models.LlamaConfig(**{**SMALL, **sizes})


def test_too_many_tokens_are_refused():
    with pytest.raises(ValueError, match="Llama: 9 tokens, but max_length is 8"):
        _llama(max_length=8)(torch.zeros(1, 9, dtype=torch.long))


def test_an_unknown_model_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Lama'"):
        models.Lama  # noqa: B018


def test_a_plain_model_compiles_into_one_graph():
    model, ids = _llama(), torch.randint(0, 11, (2, 7))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids), model(ids))
