"""Addresses of random numbers: samples, steps, blocks and draws, in numbers alone and under either framework."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import hyper_parallel as hp
from hyper_parallel import SampleRows
from hyper_parallel.core.dtensor.random import random_state
from hyper_parallel.core.dtensor.random.draw import Draw
from hyper_parallel.core.dtensor.random.philox import philox4x32
from hyper_parallel.core.dtensor.random.random_stream import GlobalRegion
from hyper_parallel.core.dtensor.random.random_values import random_bits, uniform
from hyper_parallel.core.dtensor.random.sample_address import derived_seed

WHOLE = SampleRows(0, 6)


def _of(rows, shape, *part):
    return uniform(Draw(1, 2, rows), GlobalRegion(shape, *part), dtype="float64")


def test_bits_are_those_of_the_generator_at_the_index_of_the_sample():
    found = random_bits(Draw(5, 9, SampleRows(3, 2)), GlobalRegion((2, 3)), bits=64)
    for row, sample in enumerate((3, 4)):
        for place in range(3):
            block = (sample * 2**40 + place) // 2
            words = philox4x32((block & 0xFFFFFFFF, block >> 32, 9, 0), (5, 0))
            first, second = words[0] << 32 | words[1], words[2] << 32 | words[3]
            assert int(found[row, place]) == (second if place % 2 else first)


@pytest.mark.parametrize("rows", [(0, 6), (0, 3), (3, 3), (1, 2), (5, 1), (0, 1)])
def test_a_part_of_the_batch_has_the_bits_of_the_whole(rows):
    first, count = rows
    part, whole = SampleRows(first, count, 6), _of(WHOLE, (6, 5, 7))
    want = whole[first : first + count]
    assert np.array_equal(_of(part, (count, 5, 7)), want)
    flat = want.reshape(-1, 7)
    assert np.array_equal(_of(part, (count * 5, 7)), flat)
    sizes = (count * 5 - 3, 4)  # a shard of flattened tokens that begins and ends within a sample
    assert np.array_equal(_of(part, (count * 5, 7), (1, 2), sizes), flat[1:-2, 2:6])
    assert np.array_equal(_of(part, (count, 5, 7), (0, 2, 0), (count, 3, 7)), want[:, 2:])
    in_dim_1 = SampleRows(first, count, 6, dim=1)
    assert np.array_equal(_of(in_dim_1, (5, count, 7)), want.transpose(1, 0, 2))
    assert np.array_equal(_of(in_dim_1, (5, count, 7), (1, 0, 3), (2, count, 4)), want.transpose(1, 0, 2)[1:3, :, 3:])


def test_longer_samples_begin_with_the_bits_of_shorter_ones():
    assert np.array_equal(_of(WHOLE, (6, 9, 7))[:, :5], _of(WHOLE, (6, 5, 7)))


def test_samples_in_another_dim_of_a_tensor_of_many_pieces():
    want = _of(SampleRows(2, 300), (300, 500, 3)).transpose(1, 0, 2)
    assert np.array_equal(_of(SampleRows(2, 300, dim=1), (500, 300, 3)), want)


@pytest.mark.parametrize("tokens", [[0, 1, 6, 7, 2, 3, 4, 5], [0, 2, 4, 6, 1, 3, 5], [3, 0, 1, 2]])
def test_tokens_in_another_order_keep_their_bits(tokens):
    rows, length = SampleRows(2, 3, tokens=np.array(tokens)), len(tokens)
    ordered = SampleRows(2, 3)
    hidden, weights = (3, length, 9), (3, 5, length, length)
    want = _of(ordered, hidden)[:, tokens]
    for part in ((), ((0, 0, 0), hidden), ((1, 1, 2), (2, length - 2, 5)), ((0, 2, 0), (3, 0, 9))):
        start, size = part or ((0, 0, 0), hidden)
        box = tuple(slice(at, at + many) for at, many in zip(start, size, strict=True))
        assert np.array_equal(_of(rows, hidden, *part), want[box])
    flat = ((3, 1), (3 * length - 4, 8))
    assert np.array_equal(_of(rows, (3 * length, 9), *flat), want.reshape(-1, 9)[3:-1, 1:])
    want = _of(ordered, weights)[:, :, tokens][..., tokens]
    assert np.array_equal(_of(rows, weights, (0, 1, 1, 2), (3, 4, length - 1, 2)), want[:, 1:, 1:, 2:4])
    assert np.array_equal(_of(rows, (3, 2)), _of(ordered, (3, 2)))


def test_which_tensors_have_samples():
    four, one = SampleRows(8, 4), SampleRows(8, 1)
    assert [four.rows_per_sample(shape) for shape in ((4,), (4, 1), (8, 3), (20, 2, 2))] == [1, 1, 2, 5]
    assert [one.rows_per_sample(shape) for shape in ((1, 1), (1, 1, 1), (7, 2))] == [1, 1, 7]
    for shape in ((), (1,), (1, 3), (6, 3), (8,), (0, 3)):
        assert four.rows_per_sample(shape) is None, shape
        assert np.array_equal(_of(four, shape), _of(SampleRows(0, 4), shape)), shape
    assert one.rows_per_sample(()) is one.rows_per_sample((1,)) is one.rows_per_sample((5,)) is None
    assert SampleRows(0, 4, dim=1).rows_per_sample((4,)) is None
    assert SampleRows(0, 0).rows_per_sample((0, 3)) is None


def test_mistakes_are_named():
    for rows in ((0,), (0, 1.5), "ab", 3, (None, 1)):
        with pytest.raises(TypeError, match=r"rows must be SampleRows\(first, count\), whole numbers, got"):
            hp.draws_by_sample(step=0, rows=rows).__enter__()
    with pytest.raises(ValueError, match=r"rows 4 to 8 of a batch of 8 in dim 0 are none.*nor first \+ count more"):
        hp.draws_by_sample(step=0, rows=SampleRows(4, 5, 8)).__enter__()
    with pytest.raises(ValueError, match="first, count and dim cannot be negative"):
        hp.draws_by_sample(step=0, rows=(-1, 5)).__enter__()
    for step in (-1, 1.0, True, None):
        with pytest.raises(ValueError, match="step must be the number of the training step"):
            hp.draws_by_sample(step=step, rows=(0, 1)).__enter__()
    with pytest.raises(ValueError, match=r"at most 2\*\*40 elements per sample"):
        _of(WHOLE, (6, 2**21, 2**20), (0, 0, 0), (6, 1, 1))


def test_derived_seeds_differ():
    rows = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (2**40,), (0, 0, 0)]
    seeds = {derived_seed(seed, *numbers) for seed in (0, 1, 2**63) for numbers in rows}
    assert len(seeds) == 3 * len(rows)


class _Blocks:
    """The places of a program that visits blocks; what it draws there are names."""

    def __init__(self, step=0, first=0):
        self.context = hp.draws_by_sample(step=step, rows=(first, 2))

    def __enter__(self):
        self.context.__enter__()
        return random_state.current.address

    def __exit__(self, *error):
        self.context.__exit__(*error)


def _draws(count=2):
    return [random_state.next_draw() for _ in range(count)]


def test_an_address_depends_on_step_place_visit_and_number_alone():
    random_state.manual_seed(11)
    with _Blocks() as address:
        before = _draws()
        address.enter(4)
        inside = _draws(3)
        address.leave()
        behind = _draws()
        address.enter(4)  # a block that layers share
        again = _draws()
        address.leave()
    found = [*before, *inside, *behind, *again]
    assert len(set(found)) == len(found)
    with _Blocks() as address:  # another stage: other blocks, which draw otherwise
        address.enter(3)
        _draws(7)
        address.enter(9)
        _draws()
        address.leave()
        _draws(1)
        address.leave()
        address.enter(4)
        assert _draws(3) == inside
        address.leave()
        assert _draws() == behind
    with _Blocks(step=1) as address:
        address.enter(4)
        assert not {draw[:2] for draw in _draws(9)} & {draw[:2] for draw in inside}
    random_state.manual_seed(12)
    with _Blocks():
        assert not {draw[:2] for draw in _draws()} & {draw[:2] for draw in before}


def test_inner_blocks_leave_the_outer_one_where_it_was():
    with _Blocks() as address:
        address.enter(0)
        want = _draws(4)
    with _Blocks() as address:
        address.enter(0)
        got = _draws(2)
        address.enter(1)
        _draws(5)
        address.leave()
        assert got + _draws(2) == want


def test_the_state_that_recomputation_takes_brings_an_address_back():
    with _Blocks(first=4) as address:
        address.enter(2)
        _draws()
        saved = random_state.get_whole_state()
        want = _draws()
    number = random_state.get_rng_state()
    for _ in range(2):
        now = random_state.get_whole_state()
        random_state.set_whole_state(saved)
        assert _draws() == want and want[0].rows == SampleRows(4, 2)
        random_state.set_whole_state(now)
    assert random_state.get_rng_state() == number
    assert random_state.next_draw().rows is None


def test_without_samples_and_other_threads():
    found = []
    with _Blocks(first=2):
        with hp.without_samples():
            assert random_state.next_draw().rows is None
        assert random_state.next_draw().rows == SampleRows(2, 2)
        thread = threading.Thread(target=lambda: found.append(random_state.next_draw().rows))
        thread.start()
        thread.join()
        state = random_state.get_rng_state()
        _draws()
        random_state.draw_aside()
        assert random_state.get_rng_state() == state
    assert found == [None]
    with hp.without_samples():
        assert random_state.next_draw().rows is None
