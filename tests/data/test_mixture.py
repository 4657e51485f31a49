"""Mixtures: proportions at every point, each source gone through, no state."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.data import Mixture, Synthetic
from hyper_parallel.data.mixture import assign

only_on = "torch"  # imports no framework: once is enough


def _sources(*sizes):
    return [Synthetic(num_samples=size, length=4, vocab_size=10 + number) for number, size in enumerate(sizes)]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=6))
@settings(deadline=None, max_examples=30)
def test_no_source_is_ever_a_sample_off_its_share(weights):
    places = assign(weights)
    shares = np.array(weights) / sum(weights)
    counts = np.cumsum(places[:, None] == np.arange(len(weights)), axis=0)
    off = np.abs(counts - np.arange(1, len(places) + 1)[:, None] * shares)
    assert off.max() < 1
    assert np.allclose(counts[-1] / len(places), shares)


@pytest.mark.parametrize("weights", [[0.7], [0.5, 0.25, 0.125], [3.14159, 2.71828], [99.5, 0.01]])
def test_weights_that_are_no_whole_numbers_are_kept_to_four_digits(weights):
    got = np.bincount(assign(weights), minlength=len(weights)) / len(assign(weights))
    assert np.abs(got - np.array(weights) / sum(weights)).max() <= 1.01e-4


def test_each_source_is_gone_through_before_it_begins_again():
    mixture = Mixture(_sources(6, 3), [3, 1], seed=5)
    assert mixture.num_samples == 12  # until the second one has been seen
    served = list(zip(*(part.tolist() for part in mixture.places(range(48))), strict=True))
    by_source = [[inside for source, inside in served if source == which] for which in (0, 1)]
    assert [len(numbers) for numbers in by_source] == [36, 12]
    for numbers, size in zip(by_source, (6, 3), strict=True):
        epochs = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1


def test_a_mixture_is_addressed_and_its_order_does_not_wrap():
    mixture = Mixture(_sources(6, 3), [3, 1], seed=5)
    order = mixture.order(batch=5, seed=5, position=40)
    assert next(order).tolist() == [40, 41, 42, 43, 44]
    (source,), (inside,) = mixture.places([44])
    assert mixture.sample(44).input_ids.tolist() == mixture.datasets[source].sample(inside).input_ids.tolist()
    batch = mixture.collate([47, 3, 40])["input_ids"]
    assert batch.tolist() == [mixture.sample(number).input_ids.tolist() for number in (47, 3, 40)]


def test_sources_of_equal_size_are_shuffled_differently():
    mixture = Mixture(_sources(50, 50), [1, 1], seed=0)
    served = list(zip(*(part.tolist() for part in mixture.places(range(100))), strict=True))
    orders = [[inside for source, inside in served if source == which] for which in (0, 1)]
    assert orders[0] != orders[1]


def test_facts_of_a_mixture():
    mixture = Mixture(_sources(6, 3), [3, 1], seed=5, names=["web", "books"])
    assert mixture.vocab_size == 11
    assert "mixture of 2: web 75.00%, books 25.00%; 12 samples until all are seen" in mixture.describe()
    assert mixture.fingerprint != Mixture(_sources(6, 3), [1, 1], seed=5).fingerprint
    assert mixture.fingerprint != Mixture(_sources(6, 4), [3, 1], seed=5).fingerprint
    assert Counter(mixture.places(range(8))[0].tolist()) == {0: 6, 1: 2}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: assign([1, 0]), "the weight of source 1 is 0; weights must be above 0"),
        (lambda: assign([1, float("nan")]), "the weight of source 1 is nan"),
        (lambda: assign([1e6, 1]), "source 1 has weight 1 of 1e[+]06, less than 1 in 10000; leave it out"),
        (lambda: Mixture(_sources(2), [1, 2], seed=0), "1 sources and 2 weights; give a weight for each"),
        (lambda: Mixture(_sources(2), [1], seed=0).order(batch=1, seed=1), "opened with seed 0, so its order has that"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ValueError, match=message):
        make()
