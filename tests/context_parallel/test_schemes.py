"""Every scheme gives one device's numbers: output and all gradients, for all visibilities, lengths and heads."""

import contextlib
import itertools

import pytest
import torch

import hyper_parallel as hp
from tests.context_parallel.cases import KINDS, Case, check, documents_of, values
from tests.frameworks import assert_close, distribute_tensor, equal, same_bits
from tests.world import run_on_ranks, small_or_sweep

SCHEMES = ["gather", "ring", "ulysses", "hybrid"]
TAKEN = [*SCHEMES, "balanced gather", "balanced ring"]


def _mesh() -> hp.DeviceMesh:
    return hp.init_device_mesh("cpu", (hp.get_platform().get_world_size(),), mesh_dim_names=("cp",))


def _taking(name: str) -> contextlib.AbstractContextManager[None]:
    """Attention takes a scheme, balanced or not, whatever it costs."""
    return hp.attention_scheme(name.split()[-1], balance=name.startswith("balanced"))


HEADS = {"all": (4, 4), "grouped": (4, 2), "one key head": (4, 1), "uneven": (6, 3), "fewer than ranks": (1, 1)}


@run_on_ranks(2, sweep=(3, 4), timeout=600)
@pytest.mark.parametrize("name", TAKEN)
def test_all_visibilities_lengths_and_heads(name: str, sweep: bool) -> None:
    world = hp.get_platform().get_world_size()
    if name == "hybrid" and world != 4:
        name = "ring"
    lengths = [16, 13, 3, 1] if sweep else [13, 1]
    kinds = KINDS if sweep else ["causal", "packed positions", "padded"]
    heads = HEADS if sweep else ["grouped", "uneven"]
    if name == "hybrid":
        heads = [count for count in heads if count != "fewer than ranks"]  # one head has no divisor to share
    with _taking(name):
        for tokens, kind, count in itertools.product(lengths, kinds, heads):
            of_queries, of_keys = HEADS[count]
            check(Case(tokens=tokens, heads=of_queries, key_heads=of_keys, seen=kind), _mesh(), [hp.Shard(2)])
        extra = Case(tokens=11, key_heads=2, seen="window", has_sinks=True, value_width=5, options=(("soft_cap", 2.0),))
        check(extra, _mesh(), [hp.Shard(2)])


@pytest.mark.sweep("mindspore")
@run_on_ranks(4)
@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("tokens", small_or_sweep([16, 13, 3], [13]))
def test_with_heads_or_the_batch_on_another_axis(name: str, tokens: int) -> None:
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "cp"))
    for other in (hp.Shard(1), hp.Shard(0)):
        if name == "hybrid":
            continue
        with _taking(name):
            for key_heads, kind in ((2, "causal"), (1, "padded")):
                case = Case(tokens=tokens, key_heads=key_heads, seen=kind, has_sinks=True)
                check(case, mesh, [other, hp.Shard(2)])
            check(Case(tokens=tokens, heads=3, key_heads=3), mesh, [other, hp.Shard(2)])


@pytest.mark.sweep("mindspore")
@run_on_ranks(3)
@pytest.mark.parametrize("name", ["balanced gather", "balanced ring"])
def test_the_rank_in_the_middle_of_an_odd_number_swaps_nothing(name: str) -> None:
    with _taking(name):
        check(Case(tokens=13, key_heads=2), _mesh(), [hp.Shard(2)])


@pytest.mark.sweep("mindspore")
@run_on_ranks(2)
def test_coordinates_may_be_distributed_tensors() -> None:
    query = distribute_tensor(values(1, 2, 13, 4), _mesh(), [hp.Shard(2)])
    documents = documents_of(13)
    found = [
        hp.attention(query, query, query, visible=hp.Visibility(causal=True, documents=given)).full_tensor()
        for given in (documents, distribute_tensor(torch.from_numpy(documents), _mesh(), [hp.Shard(0)]))
    ]
    assert same_bits(*found)


@pytest.mark.sweep("mindspore")
@run_on_ranks(4)
@pytest.mark.parametrize("kind", small_or_sweep(KINDS, ["causal", "packed"]))
@pytest.mark.parametrize("tokens", small_or_sweep([16, 13, 3], [13]))
def test_hybrid_over_two_axes_and_over_one(kind: str, tokens: int) -> None:
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    case = Case(tokens=tokens, key_heads=2, seen=kind, has_sinks=True)
    check(case, mesh, [hp.Shard(2), hp.Shard(2)], scheme="hybrid")
    for scheme in ("ring", "ulysses", "gather"):
        check(case, mesh, [hp.Shard(2), hp.Shard(2)], scheme=scheme)
    check(case, _mesh(), [hp.Shard(2)], scheme="hybrid")


@pytest.mark.sweep("mindspore")
@run_on_ranks(2, sweep=(4,))
@pytest.mark.parametrize("name", ["ring", "balanced ring"])
def test_keys_travel_in_pieces(name: str) -> None:
    for kind in ("causal", "window", "padded"):
        case = Case(tokens=773, batch=1, heads=2, key_heads=1, seen=kind, has_sinks=True)
        with _taking(name):
            check(case, _mesh(), [hp.Shard(2)])


@run_on_ranks(2, sweep=(4,))
@pytest.mark.parametrize("kind", small_or_sweep(KINDS, ["causal", "packed"]))
def test_ulysses_has_the_bits_of_one_device(kind: str) -> None:
    case = Case(tokens=24, heads=8, key_heads=4, seen=kind)
    for mine, want in zip(case.run(_mesh(), [hp.Shard(2)], scheme="ulysses"), case.run(), strict=True):
        assert same_bits(mine, want)


@run_on_ranks(2, sweep=(4,))
def test_dropout_draws_the_bits_of_one_device_in_every_scheme() -> None:
    case = Case(tokens=13, key_heads=2, seen="causal", options=(("dropout", 0.4),))
    hp.manual_seed(3)
    wanted = case.run()
    assert not equal(wanted[0], Case(tokens=13, key_heads=2, seen="causal").run()[0])
    for name in TAKEN:
        if name == "hybrid" and hp.get_platform().get_world_size() != 4:
            continue
        with _taking(name):
            hp.manual_seed(3)
            for mine, want in zip(case.run(_mesh(), [hp.Shard(2)]), wanted, strict=True):
                assert_close(mine, want, rtol=1e-10, atol=1e-10, msg=name)


@run_on_ranks(2)
def test_the_asked_scheme_is_taken_and_others_are_refused() -> None:
    mesh = _mesh()
    case = Case(tokens=12)
    for scheme in ("ring", "ulysses", "gather"):
        with hp.CommRecorder() as recorder, hp.attention_scheme(scheme):
            check(case, mesh, [hp.Shard(2)])
        assert any(record.chosen.startswith(scheme) for record in recorder.records)
    with pytest.raises(ValueError, match=r"'hybrid' needs a sequence that is sharded by two mesh axes.*cp.*'ring' or"):
        check(case, mesh, [hp.Shard(2)], scheme="hybrid")
    query, key = (distribute_tensor(torch.zeros(1, 2, size, 4), mesh, [hp.Shard(2)]) for size in (4, 6))
    with pytest.raises(ValueError, match=r"'ring' needs queries, keys and values of one length.*Shard all three alike"):
        hp.attention(query, key, key, scheme="ring")
    with pytest.raises(ValueError, match="no attention scheme 'rings': choose one of auto, ring"):
        hp.attention(query, query, query, scheme="rings")
