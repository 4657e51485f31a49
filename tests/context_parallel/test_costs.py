"""What the schemes send, as their docstrings say it; what they need without memory; what explain says of them."""

import re

import numpy as np
import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.context_parallel.batch import token_order
from hyper_parallel.core.context_parallel.blocks.balance import own_queries, swapped_queries
from hyper_parallel.core.context_parallel.blocks.choice import Problem, cheapest
from hyper_parallel.core.dtensor.redistribution_plan import AxisCost
from tests.context_parallel.cases import Case, values
from tests.world import run_on_ranks

B, H, K, S, D, V, E = 2, 8, 4, 16, 8, 6, 8  # batch, heads, key heads, tokens, widths, bytes of a float64


def _sent(
    world: int, scheme: str, balance: bool = False, kind: str = "full", is_zigzag: bool = False, **case: int
) -> list[int]:
    """Bytes that this rank sends in forward, and in backward."""
    mesh = hp.init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    shape = {"batch": B, "heads": H, "key_heads": K, "tokens": S, "width": D, "value_width": V, **case}
    asked = Case(seen=kind, **shape)
    query, key, value, gradient = (hp.distribute_tensor(t, mesh, [hp.Shard(2)]) for t in asked.inputs())
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    zigzag = hp.Visibility(causal=True, positions=token_order("zigzag", S, world))
    with hp.CommRecorder() as forward, hp.attention_scheme(scheme, balance=balance):
        output = hp.attention(*leaves, visible=zigzag if is_zigzag else asked.visible())
    with hp.CommRecorder() as backward:
        output.backward(gradient)
    return [forward.total_bytes, backward.total_bytes]


@run_on_ranks(2, 4)
def test_bytes_are_those_of_the_closed_forms() -> None:
    world = hp.get_platform().get_world_size()
    rank, s = hp.get_platform().get_rank(), S // world
    block = B * K * s * (D + V) * E
    assert _sent(world, "gather") == [(world - 1) * block] * 2
    assert _sent(world, "ring") == [(world - 1) * block, 2 * (world - 1) * block]
    # Keys go to the ranks behind only, their gradients come back from these.
    assert _sent(world, "ring", kind="causal") == [(world - 1 - rank) * block, (world - 1) * block]
    heads = (world - 1) * B * s * (H + K) * (D + V) * E // world
    assert _sent(world, "ulysses") == [heads] * 2
    halves = B * H * (s // 2) * (D + V) * E
    assert _sent(world, "gather", balance=True) == [(world - 1) * block + halves] * 2
    assert _sent(world, "ring", balance=True) == [(world - 1) * block + halves, 2 * (world - 1) * block + halves]


@run_on_ranks(2, 4)
def test_a_ring_in_zigzag_order_sends_three_quarters() -> None:
    """The half from the front goes to all ranks, the half from the back to those whose own begins behind it."""
    world, rank = hp.get_platform().get_world_size(), hp.get_platform().get_rank()
    half = B * K * (S // world // 2) * (D + V) * E
    given, home = (world - 1 + rank) * half, (2 * (world - 1) - rank) * half
    assert _sent(world, "ring", is_zigzag=True) == [given, given + home]
    assert sum((world - 1 + rank) / 2 for rank in range(world)) == 0.75 * world * (world - 1)


@run_on_ranks(4)
def test_a_hybrid_sends_what_its_parts_send() -> None:
    s = S // 4
    block = B * (K // 2) * (2 * s) * (D + V) * E  # half of the heads of the tokens of two ranks
    heads = B * s * (H + K) * (D + V) * E // 2
    assert _sent(4, "hybrid") == [heads + block, heads + 2 * block]


@run_on_ranks(4)
def test_heads_that_several_ranks_share_are_sent_to_each() -> None:
    s = S // 4
    sent = _sent(4, "ulysses", key_heads=2)  # each key head goes to two ranks, one of which may be this one
    queries = 3 * B * s * (H // 4) * (D + V) * E
    assert sent == [queries + 3 * B * s * (D + V) * E] * 2


@run_on_ranks(4)
def test_a_ring_sends_nothing_to_ranks_that_see_nothing() -> None:
    mesh = hp.init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    tensors = [hp.distribute_tensor(values(1, 2, 16, 4), mesh, [hp.Shard(2)]).requires_grad_() for _ in range(3)]
    for visible, neighbours in (
        (hp.Visibility(causal=True, documents=np.repeat(np.arange(4), 4)), 0),  # a document on each rank
        (hp.Visibility(causal=True, documents=np.repeat([0, 0, 1, 2, 3, 4, 5, 5], 2)), 0),
        (hp.Visibility(causal=True, window=4), 1),  # only to the next rank
    ):
        with hp.CommRecorder() as recorder, hp.attention_scheme("ring", balance=False):
            hp.attention(*tensors, visible=visible).to_local().sum().backward()
        rank = mesh.get_rank()
        block = 2 * 4 * 4 * 8 * 2
        wanted = neighbours * (2 * block * (rank < 3) + block * (rank > 0))
        assert recorder.total_bytes == wanted, visible


def _problem(num: int, heads: int, key_heads: int, tokens: int = 4096, device: str = "cpu") -> Problem:
    step = tokens // num
    intervals = tuple((at * step, (at + 1) * step) for at in range(num))
    shapes = [(1, count, tokens, 64) for count in (heads, key_heads, key_heads)]
    return Problem(*shapes, intervals, (num,), 2, device, (AxisCost(),))


def test_the_choice_follows_costs_and_memory() -> None:
    causal, everything = hp.Visibility(causal=True), hp.Visibility()
    assert cheapest(_problem(4, 8, 8).candidates(causal), "auto").scheme == "ulysses"
    assert cheapest(_problem(4, 7, 1).candidates(everything), "auto").scheme in ("ring", "gather")  # 7 heads: 2 on one
    # With few key heads it is cheaper to bring these, and to balance the queries.
    bytes_of = {one.name: one.bytes_sent for one in _problem(2, 16, 1, device="cuda").candidates(causal)}
    assert bytes_of["gather"] < bytes_of["ulysses"] and bytes_of["ring"] < bytes_of["ulysses"]
    candidates = _problem(8, 8, 2).candidates(causal)
    tight = cheapest(candidates, "auto", memory_cap=1.0)
    assert tight.scheme == "ring"
    assert tight.memory == min(one.memory for one in candidates)
    # Work of the slowest rank under causal order: (2n - 1) / n of the mean, and the mean itself after the swap.
    by_name = {one.name: one for one in candidates}
    mean = by_name["ulysses"].compute
    assert by_name["gather"].compute / mean == pytest.approx(15 / 8, rel=0.02)
    assert by_name["gather with swapped queries"].compute / mean == pytest.approx(1.0, rel=0.02)
    assert swapped_queries(((0, 3), (3, 3))) == (((0, 2), (3, 3)), ((3, 3), (2, 3)))
    assert own_queries(((0, 3),)) == (((0, 3),),)


@run_on_ranks(2)
def test_explain_shows_all_costs_and_the_choice() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    query, key, whole = (
        hp.distribute_tensor(torch.zeros(1, heads, 64, 8), mesh, [placement])
        for heads, placement in ((4, hp.Shard(2)), (2, hp.Shard(2)), (2, hp.Replicate()))
    )
    text = hp.explain_attention(query, key, key, visible=hp.Visibility(causal=True))
    assert "tokens sharded over cp, Visibility(causal)" in text
    for scheme in ("ring", "gather", "ulysses", "ring with swapped queries"):
        assert re.search(rf"^{scheme} +\d+ +\d+ +[\d.]+ us", text, re.MULTILINE), text
    assert len(re.findall("<- chosen", text)) == 1
    assert re.search("ring .*<- chosen", hp.explain_attention(query, key, key, scheme="ring"))
    assert "made whole before" in hp.explain_attention(query, whole, whole)
    assert "nothing is communicated" in hp.explain_attention(whole, whole, whole)
