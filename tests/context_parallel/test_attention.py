"""The neutral operator: on one device against the definition, and under layouts that shard the sequence."""

import math

import numpy as np
import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.context_parallel.blocks import visibility
from tests.context_parallel.cases import KINDS, Case, check, seen_by_definition, values
from tests.frameworks import ours
from tests.world import run_on_ranks, small_or_sweep


@pytest.mark.sweep("mindspore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_one_device_is_the_definition(kind: str, key_heads: int) -> None:
    check(Case(tokens=13, key_heads=key_heads, seen=kind))


EXTRAS = {
    "soft cap": Case(tokens=11, key_heads=2, options=(("soft_cap", 1.5),)),
    "sinks": Case(tokens=11, key_heads=2, seen="window", has_sinks=True),
    "sinks, padded": Case(tokens=12, seen="padded", has_sinks=True),
    "scale": Case(tokens=9, options=(("scale", 0.3),)),
    "narrow values": Case(tokens=9, value_width=5, key_heads=2),
    "wide values": Case(tokens=9, value_width=12, seen="packed"),
    "soft cap, sinks, window": Case(tokens=14, seen="window", has_sinks=True, options=(("soft_cap", 2.0),)),
    "float32": Case(tokens=9, dtype=torch.float32),
}


@pytest.mark.parametrize("name", EXTRAS)
def test_what_scores_are_made_of(name: str) -> None:
    check(EXTRAS[name], tolerance=1e-5 if name == "float32" else 1e-10)


@pytest.mark.sweep("mindspore")
@pytest.mark.parametrize("kind", KINDS)
def test_small_tiles_give_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visibility, "LARGEST_MASK", 4)
    check(Case(tokens=18, key_heads=2, seen=kind, has_sinks=True))
    check(Case(tokens=18, key_heads=2, seen=kind, options=(("soft_cap", 1.5),)))  # without a kernel


@pytest.mark.sweep("mindspore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [7, 18])
def test_relations_are_what_the_mask_says(kind: str, tokens: int) -> None:
    arguments, seen = seen_by_definition(kind, 2, tokens, tokens)
    visible = hp.Visibility(**arguments)
    like = ours(torch.zeros(2, 1, 1, 1))
    for start in range(0, tokens, 3):
        for low in range(0, tokens, 2):
            queries, keys = (start, min(start + 4, tokens)), (low, min(low + 5, tokens))
            block = seen[:, slice(*queries), slice(*keys)]
            relation = visible.relation(queries, keys)
            made = np.asarray(visible.mask(queries, keys, like))
            assert (np.broadcast_to(made[:, 0], block.shape) == block.numpy()).all()
            if relation == visibility.NONE:
                assert not block.any()
            elif relation == visibility.ALL:
                assert block.all()
            elif relation == visibility.DIAGONAL:
                assert (block == torch.ones_like(block).tril()).all()
            elif kind in ("full", "causal"):
                assert block.any() and not block.all()


def test_rows_that_see_nothing_are_zeros() -> None:
    query = ours(values(1, 2, 4, 8))
    hidden = np.array([[False, False, True, True]])
    output = hp.attention(query, query, query, visible=hp.Visibility(causal=True, valid=hidden))
    assert (np.asarray(output.detach())[:, :, :2] == 0).all()


def test_mistakes_say_what_was_given() -> None:
    query = ours(values(2, 4, 6, 8))
    for key, value, options, said in [
        (ours(values(2, 3, 6, 8)), ours(values(2, 3, 6, 8)), {}, r"4 heads cannot share 3 key heads"),
        (ours(values(2, 4, 6, 7)), query, {}, r"\(2, 4, 6, 7\).*one width"),
        (query, ours(values(2, 4, 5, 8)), {}, r"the same heads and tokens"),
        (query, query, {"dropout": 1.5}, "dropout is a probability, got 1.5"),
        (query, query, {"sinks": ours(values(3))}, r"sinks must be of shape \(4,\)"),
        (query, query, {"visible": hp.Visibility(documents=np.zeros(5, int))}, "for 5 tokens, but there are 6 keys"),
    ]:
        with pytest.raises(ValueError, match=said):
            hp.attention(query, key, value, **options)
    with pytest.raises(ValueError, match="the query's own token, 1, got 0"):
        hp.Visibility(window=0)
    with pytest.raises(ValueError, match=r"documents must be of shape \(tokens,\) or \(batch, tokens\)"):
        hp.Visibility(documents=np.zeros((1, 2, 3)))
    with pytest.raises(ValueError, match="no attention scheme 'rings': choose one of auto, ring"):
        hp.attention_scheme("rings").__enter__()


def test_dropout_keeps_the_mean() -> None:
    hp.manual_seed(3)
    ones = ours(torch.ones(4, 8, 32, 4))
    output = np.asarray(hp.attention(ones, ones, ones, dropout=0.5).detach())
    assert abs(float(output.mean()) - 1) < 0.02 and float(output.std()) > 0.1
    assert math.isfinite(float(output.sum()))


@run_on_ranks(2, sweep=(4,))
@pytest.mark.parametrize("kind", small_or_sweep(KINDS, ["causal", "packed positions"]))
@pytest.mark.parametrize("tokens", small_or_sweep([16, 13, 3], [13]))
def test_sharded_sequence(kind: str, tokens: int) -> None:
    mesh = hp.init_device_mesh("cpu", (hp.get_platform().get_world_size(),), mesh_dim_names=("cp",))
    for placement in (hp.Shard(2), hp.Shard(1), hp.Shard(0)):
        check(Case(tokens=tokens, key_heads=2, seen=kind, has_sinks=True), mesh, [placement])
