"""Philox4x32-10: the published test vectors, and equal bits from integers, numpy arrays, tensors and the fast path."""

import numpy as np
import pytest

from hyper_parallel.core.dtensor.random.philox import PhiloxBlocks, philox4x32
from tests.frameworks import torch

only_on = "torch"  # once is enough: no framework takes part

MASK32 = 2**32 - 1

# Counter, key and result, from the known-answer tests published with the generator.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words_of(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


def random_words(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 2**32, shape)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter, key, expected):
    assert philox4x32(words_of(counter), words_of(key)) == words_of(expected)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers_of_the_fast_path(counter, key, expected):
    word0, word1, word2, word3 = words_of(counter)
    key0, key1 = words_of(key)
    blocks = np.array([word1 << 32 | word0], dtype=np.uint64)
    numbers = PhiloxBlocks(seed=key1 << 32 | key0, draw=word3 << 32 | word2, capacity=1).numbers(blocks)
    result0, result1, result2, result3 = words_of(expected)
    assert numbers.tolist() == [[result0 << 32 | result1, result2 << 32 | result3]]


@pytest.mark.parametrize("kind", ["uint64 array", "int64 array", "int64 tensor"])
def test_definition_gives_the_same_bits_on_integers_arrays_and_tensors(kind):
    counters = random_words(4, 50)
    key = (0xFFFFFFFE, 0x80000001)
    expected = [philox4x32(tuple(column), key) for column in counters.T.tolist()]
    if kind == "int64 tensor":
        words = philox4x32(tuple(torch.from_numpy(counters)), key)
    else:
        words = philox4x32(tuple(counters.astype(kind.split()[0])), key)
    assert list(zip(*(word.tolist() for word in words), strict=True)) == expected


@pytest.mark.parametrize(
    "blocks",
    [
        np.arange(1000),
        np.array([7]),
        np.arange(2**32 - 20, 2**32 + 30),  # the high word of the block number changes inside
        np.arange(2**50, 2**50 + 10),
        np.sort(random_words(200) * 2**20),
    ],
    ids=["low", "one", "across 2**32", "high", "scattered"],
)
@pytest.mark.parametrize(("seed", "draw"), [(0, 0), (2**64 - 1, 2**64 - 2), (0x0123456789ABCDEF, 2**33 + 5)])
def test_fast_path_gives_the_bits_of_the_definition(blocks, seed, draw):
    blocks = blocks.astype(np.uint64)
    numbers = PhiloxBlocks(seed, draw, capacity=1000).numbers(blocks)
    counter = (blocks & np.uint64(MASK32), blocks >> np.uint64(32), draw & MASK32, draw >> 32)
    word0, word1, word2, word3 = philox4x32(counter, (seed & MASK32, seed >> 32))
    assert np.array_equal(numbers[:, 0], word0 << np.uint64(32) | word1)
    assert np.array_equal(numbers[:, 1], word2 << np.uint64(32) | word3)


def test_a_generator_can_be_asked_again():
    generator = PhiloxBlocks(seed=5, draw=6, capacity=100)
    blocks = np.arange(100, dtype=np.uint64)
    first = generator.numbers(blocks).copy()
    generator.numbers(blocks[:3] + np.uint64(9))
    assert np.array_equal(generator.numbers(blocks), first)
