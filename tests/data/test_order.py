"""The order of samples: a permutation in each epoch, the same for every number of ranks, resumed without loss."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.data import Order, shuffled

only_on = "torch"  # imports no framework: once is enough

_SEEDS = st.integers(-(2**63), 2**64)


@given(st.integers(1, 3000), _SEEDS)
@settings(deadline=None, max_examples=30)
def test_a_shuffle_is_a_permutation_asked_place_by_place(num, seed):
    whole = shuffled(range(num), num, seed)
    assert sorted(whole.tolist()) == list(range(num))
    some = np.random.default_rng(0).integers(0, num, 20)
    assert shuffled(some, num, seed).tolist() == whole[some].tolist()


def test_small_shuffles_are_all_met_about_as_often():
    met = Counter(tuple(shuffled(range(4), 4, seed).tolist()) for seed in range(1200))
    assert len(met) == 24
    expected = 1200 / 24
    assert sum((count - expected) ** 2 / expected for count in met.values()) < 50  # chi-squared, 23 degrees: 1 in 1000


def test_a_large_shuffle_looks_random():
    num = 100_003
    one, two = shuffled(range(num), num, 1), shuffled(range(num), num, 2)
    places = np.arange(num)
    assert abs(np.corrcoef(one, places)[0, 1]) < 0.02
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.02
    assert np.abs(np.diff(one)).mean() / num == pytest.approx(1 / 3, abs=0.01)
    assert (one == places).sum() < 10


def test_places_of_enormous_data_cost_nothing():
    found = shuffled(np.arange(10**12, 10**12 + 512), 3 * 10**12, 1)
    assert len(set(found.tolist())) == 512
    assert 0 <= found.min() < found.max() < 3 * 10**12


def test_a_place_outside_is_an_error():
    with pytest.raises(ValueError, match=r"places 3 to 7 are not all in range\(7\)"):
        shuffled([3, 7], 7, 0)


@given(st.integers(1, 60), st.integers(1, 60), _SEEDS)
@settings(deadline=None, max_examples=30)
def test_every_epoch_has_every_sample_once_and_another_order(num, batch, seed):
    batch = min(batch, num)
    order = Order(num, batch=batch, seed=seed)
    taken: list[int] = []
    while len(taken) < 2.5 * num:
        taken += next(order).tolist()
    for epoch in range(2):
        assert sorted(taken[epoch * num : (epoch + 1) * num]) == list(range(num))
    if num > 20:
        assert taken[:num] != taken[num : 2 * num]


@given(st.integers(4, 30), st.integers(1, 4), _SEEDS)
@settings(deadline=None, max_examples=15)
def test_ranks_take_their_blocks_of_the_same_batches(num, batch, seed):
    """Over 2.5 epochs, for dp 1, 2, 3 and 4: each rank has an order of its own, and together they have the batch."""
    steps = -(-5 * num // (2 * batch))
    whole = [next(order).tolist() for order in [Order(num, batch=batch, seed=seed)] for _ in range(steps)]
    for dp in (1, 2, 3, 4):
        orders = [Order(num, batch=batch, seed=seed) for _ in range(dp)]
        for wanted in whole:
            blocks = [np.array_split(next(order), dp)[rank] for rank, order in enumerate(orders)]
            assert np.concatenate(blocks).tolist() == wanted


@given(st.integers(8, 60), st.integers(1, 8), st.integers(1, 8), st.integers(0, 40), _SEEDS)
@settings(deadline=None, max_examples=30)
def test_a_run_goes_on_with_another_batch_size_and_loses_nothing(num, first, second, stop, seed):
    order = Order(num, batch=first, seed=seed, fingerprint="data")
    taken = [number for _ in range(stop) for number in next(order).tolist()]
    state = json.loads(json.dumps(order.state()))
    resumed = Order(num, batch=second, seed=seed, fingerprint="data")
    resumed.load_state(state)
    assert resumed.step == stop
    while len(taken) < 3 * num:
        taken += next(resumed).tolist()
    assert taken == Order(num, batch=1, seed=seed).numbers(0, len(taken)).tolist()


def test_the_batch_may_change_on_the_way():
    order = Order(10, batch=2, seed=3)
    taken = next(order).tolist()
    order.batch = 5
    taken += next(order).tolist()
    assert taken == Order(10, batch=7, seed=3).numbers(0, 7).tolist()
    assert (order.position, order.step) == (7, 2)
    assert order.epoch == 0.7


def test_an_end():
    order = Order(5, batch=2, epochs=1, shuffle=False)
    assert len(order) == 3
    assert [batch.tolist() for batch in order] == [[0, 1], [2, 3], [4]]
    assert list(order) == []
    assert len(Order(5, batch=2, epochs=2)) == 5
    assert len(Order(5, batch=2)) == 3
    assert [batch.tolist() for batch in Order(3, batch=8, epochs=1, shuffle=False)] == [[0, 1, 2]]


def test_a_position_to_begin_at():
    order = Order(5, batch=2, position=4, seed=1)
    assert next(order).tolist() == Order(5, batch=2, seed=1).numbers(4, 2).tolist()
    assert (order.position, order.step) == (6, 3)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: Order(0, batch=1), ValueError, "num_samples=0 must be a whole number from 1; the data is empty"),
        (
            lambda: Order(3, batch=4),
            ValueError,
            "a batch of 4 samples from data that has 3 would hold some of them twi",
        ),
        (lambda: Order(3, batch=0), ValueError, "batch=0 must be a whole number from 1"),
        (lambda: Order(3, batch=1.5), TypeError, "batch must be a whole number, not 1.5"),
        (lambda: Order(3, batch=1, position=-1), ValueError, "position=-1 must be a whole number from 0"),
        (
            lambda: Order(3, batch=1).load_state({"position": 1}),
            ValueError,
            "is not the state of an order: it has no step",
        ),
    ],
)
def test_mistakes(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"fingerprint": "b"}, "data has changed: the run that was saved at sample 4 had data 'a', now it is 'b'"),
        ({"num_samples": 9}, "data has changed: the run that was saved at sample 4 had 8 samples, now there are 9"),
        ({"seed": 1}, "had data seed 0, now it is 1, .* Give seed=0"),
        ({"shuffle": False}, "had shuffle=True, now it is False, .* Give shuffle=True"),
    ],
)
def test_other_data_at_a_resume_is_an_error(changed, message):
    facts = {"num_samples": 8, "seed": 0, "shuffle": True, "fingerprint": "a"}
    order = Order(batch=2, position=4, **facts)
    other = Order(batch=2, **{**facts, **changed})
    with pytest.raises(ValueError, match=message):
        other.load_state(order.state())
    assert other.position == 0
