"""Seed and draw counter: what each call changes, recompute, threads and mistakes."""

import json
import threading

import numpy as np
import pytest

from hyper_parallel.core.dtensor.random import random_state
from hyper_parallel.core.dtensor.random.draw import Draw
from hyper_parallel.core.dtensor.random.random_state import DEFAULT_SEED, RandomState
from hyper_parallel.core.dtensor.random.random_stream import GlobalRegion
from hyper_parallel.core.dtensor.random.random_values import normal

only_on = "torch"  # once is enough: no framework takes part


@pytest.fixture(autouse=True)
def _keep_the_state_of_the_process():
    with random_state.default_state.preserve():
        yield


def test_draws_count_from_the_seed():
    state = RandomState(7)
    assert [state.next_draw(), state.next_draw()] == [Draw(7, 0), Draw(7, 1)]
    state.manual_seed(8)
    assert state.next_draw() == Draw(8, 0)
    assert state.initial_seed() == 8


def test_the_seed_is_a_constant_until_one_is_given():
    assert RandomState().next_draw() == RandomState().next_draw() == Draw(DEFAULT_SEED, 0)


@pytest.mark.parametrize(
    ("seed", "expected"), [(-1, 2**64 - 1), (2**64 + 5, 5), (np.int64(9), 9), (0, 0), (2**64 - 1, 2**64 - 1)]
)
def test_any_int_is_a_seed(seed, expected):
    state = RandomState()
    state.manual_seed(seed)
    assert state.initial_seed() == expected


@pytest.mark.parametrize("seed", [1.5, "3", None, True])
def test_other_seeds_are_errors(seed):
    state = RandomState(4)
    with pytest.raises(TypeError, match=f"the seed must be an int, got {seed!r} of type {type(seed).__name__}"):
        state.manual_seed(seed)
    assert state.initial_seed() == 4


def test_state_round_trip_through_json():
    state = RandomState(3)
    state.next_draw()
    saved = json.loads(json.dumps(state.get_state()))
    expected = [state.next_draw() for _ in range(3)]
    other = RandomState()
    other.set_state(saved)
    assert [other.next_draw() for _ in range(3)] == expected


@pytest.mark.parametrize("wrong", [(1,), (1, 2, 3), 5, (1, -1), (2**64, 0), ("a", "b"), None, (1.0, 2)])
def test_wrong_states_are_errors(wrong):
    state = RandomState(4)
    with pytest.raises(ValueError, match=r"expected \(seed, draw number\).*pass what get_rng_state\(\) returned"):
        state.set_state(wrong)
    assert state.get_state() == (4, 0)


def test_recompute_repeats_and_leaves_no_trace():
    state = RandomState(11)
    state.next_draw()
    before = state.get_state()
    first = [normal(state.next_draw(), GlobalRegion((5,))) for _ in range(2)]
    state.next_draw()
    after = state.get_state()
    with state.preserve(before):
        again = [normal(state.next_draw(), GlobalRegion((5,))) for _ in range(2)]
    assert np.array_equal(first, again)
    assert not np.array_equal(first[0], first[1])
    assert state.get_state() == after


def _draw_and_fail(state: RandomState) -> None:
    with state.preserve((5, 5)):
        assert state.next_draw() == Draw(5, 5)
        raise KeyError


def test_preserve_restores_after_an_error_and_nests():
    state = RandomState(11)
    with state.preserve():
        state.next_draw()
        with pytest.raises(KeyError):
            _draw_and_fail(state)
        assert state.next_draw() == Draw(11, 1)
    assert state.get_state() == (11, 0)


def test_the_counter_wraps():
    state = RandomState()
    state.set_state((1, 2**64 - 1))
    assert [state.next_draw().number, state.next_draw().number] == [2**64 - 1, 0]


def test_threads_never_share_a_draw():
    state = RandomState(0)
    taken: list[list[int]] = [[] for _ in range(4)]

    def take(numbers: list[int]) -> None:
        numbers.extend(state.next_draw().number for _ in range(2000))

    threads = [threading.Thread(target=take, args=(numbers,)) for numbers in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for numbers in taken for number in numbers) == list(range(8000))


def test_functions_of_the_process():
    random_state.manual_seed(21)
    assert random_state.initial_seed() == 21
    assert random_state.next_draw() == Draw(21, 0)
    saved = random_state.get_rng_state()
    assert random_state.next_draw() == Draw(21, 1)
    random_state.set_rng_state(saved)
    assert random_state.next_draw() == Draw(21, 1)
    assert random_state.default_state.get_state() == (21, 2)
