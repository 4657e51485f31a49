"""Philox4x32-10, the counter-based generator behind every random DTensor: 128 random bits as a pure function of a
128-bit counter and a 64-bit key (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011).
`philox4x32` is the definition, in operators that integers, numpy arrays and framework tensors share; `PhiloxBlocks`
gives the same bits for numpy arrays of block numbers, several times faster."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_MASK32 = 0xFFFFFFFF


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Encrypt counters: four 32-bit words in, four random 32-bit words out.

    Each counter word is a Python int, a numpy int64 or uint64 array, or an int64 tensor of any framework and device,
    with values in [0, 2**32); the words broadcast against each other. Only `*`, `>>`, `&` and `^` are used, and integer
    products may wrap: a signed 64-bit product keeps its 64 bits, and the mask undoes the sign that `>>` drags along.
    """
    word0, word1, word2, word3 = counter
    key0, key1 = key
    for _ in range(_NUM_ROUNDS):
        product0 = word0 * _MULTIPLIERS[0]
        product1 = word2 * _MULTIPLIERS[1]
        word0 = ((product1 >> 32) & _MASK32) ^ word1 ^ key0
        word1 = product1 & _MASK32
        word2 = ((product0 >> 32) & _MASK32) ^ word3 ^ key1
        word3 = product0 & _MASK32
        key0 = (key0 + _KEY_STEPS[0]) & _MASK32
        key1 = (key1 + _KEY_STEPS[1]) & _MASK32
    return word0, word1, word2, word3


# Note [Two words in one 64-bit lane]
# `PhiloxBlocks` keeps the four words of a counter as two lanes,
#     A = word0 * 2**32 + word1  and  B = word2 * 2**32 + word3.
# With P0 = word0 * M0 and P1 = word2 * M1, a round is
#     A' = P1 ^ ((word1 ^ key0) << 32) = P1 ^ (A << 32) ^ (key0 << 32)
#     B' = P0 ^ ((word3 ^ key1) << 32) = P0 ^ (B << 32) ^ (key1 << 32)
# in unsigned 64-bit arithmetic. The lanes lie one behind the other in one array, so that shifts take both in one call;
# the low word of a lane needs no mask, shifting does that. Constants are arrays without dims: numpy's cheapest operand.
# In the first two rounds the words that are equal for all counters (the draw, and the high half of the block number)
# stay arrays of one element, and broadcasting saves their share of the work.

_SHIFT32 = np.array(32, dtype=np.uint64)
_LANE_MULTIPLIERS = tuple(np.array(multiplier, dtype=np.uint64) for multiplier in _MULTIPLIERS)


@lru_cache(maxsize=64)
def _round_keys(seed: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """For each round, key0 << 32 and key1 << 32."""

    def shifted(key: int, step: int, round_number: int) -> np.ndarray:
        return np.array(((key + round_number * step) & _MASK32) << 32, dtype=np.uint64)

    keys = (seed & _MASK32, (seed >> 32) & _MASK32)
    return tuple(
        (shifted(keys[0], _KEY_STEPS[0], number), shifted(keys[1], _KEY_STEPS[1], number))
        for number in range(_NUM_ROUNDS)
    )


class PhiloxBlocks:
    """The random blocks of one draw: block number -> two 64-bit numbers, for up to `capacity` blocks per call.

    Block n is `philox4x32((n low, n high, draw low, draw high), (seed low, seed high))`; its 64-bit numbers are
    word0 * 2**32 + word1 and word2 * 2**32 + word3. Work space is allocated once per object.
    """

    def __init__(self, seed: int, draw: int, capacity: int) -> None:
        self._keys = _round_keys(seed)
        self._draw_low = np.array([draw & _MASK32], dtype=np.uint64)
        self._draw_high = np.array([(draw >> 32) & _MASK32], dtype=np.uint64)
        self._lanes = np.empty(2 * capacity, dtype=np.uint64)
        self._products = np.empty(2 * capacity, dtype=np.uint64)
        self._result = np.empty((capacity, 2), dtype=np.uint64)

    def numbers(self, blocks: np.ndarray, is_ordered: bool = True) -> np.ndarray:
        """The numbers of `blocks` as a uint64 array (count, 2); `blocks` is a uint64 array (count,), smallest first and
        largest last unless it says otherwise.

        The result is work space of this object: writable, and valid until the next call.
        """
        count = len(blocks)
        lanes, products = self._lanes[: 2 * count], self._products[: 2 * count]
        lane_a, lane_b = lanes[:count], lanes[count:]
        product0, product1 = products[:count], products[count:]
        multiplier0, multiplier1 = _LANE_MULTIPLIERS
        self._first_two_rounds(blocks, lane_a, lane_b, product0, is_ordered)
        for key0, key1 in self._keys[2:]:
            np.right_shift(lanes, _SHIFT32, out=products)
            np.multiply(product0, multiplier0, out=product0)
            np.multiply(product1, multiplier1, out=product1)
            np.left_shift(lanes, _SHIFT32, out=lanes)
            np.bitwise_xor(lane_a, key0, out=lane_a)
            np.bitwise_xor(lane_b, key1, out=lane_b)
            np.bitwise_xor(lane_a, product1, out=lane_a)
            np.bitwise_xor(lane_b, product0, out=lane_b)
        result = self._result[:count]
        result[:, 0] = lane_a
        result[:, 1] = lane_b
        return result

    def _first_two_rounds(
        self, blocks: np.ndarray, lane_a: np.ndarray, lane_b: np.ndarray, scratch: np.ndarray, is_ordered: bool
    ) -> None:
        multiplier0, multiplier1 = _LANE_MULTIPLIERS
        (key0, key1), (next_key0, next_key1) = self._keys[0], self._keys[1]
        high = blocks[:1] >> _SHIFT32
        if not is_ordered or int(blocks[-1]) >> 32 != int(high[0]):
            high = blocks >> _SHIFT32

        first_a = (high << _SHIFT32) ^ (self._draw_low * multiplier1) ^ key0
        first_b = np.bitwise_and(blocks, np.uint64(_MASK32), out=scratch)
        np.multiply(first_b, multiplier0, out=first_b)
        np.bitwise_xor(first_b, (self._draw_high << _SHIFT32) ^ key1, out=first_b)

        np.right_shift(first_b, _SHIFT32, out=lane_a)
        np.multiply(lane_a, multiplier1, out=lane_a)
        np.bitwise_xor(lane_a, (first_a << _SHIFT32) ^ next_key0, out=lane_a)
        np.left_shift(first_b, _SHIFT32, out=lane_b)
        np.bitwise_xor(lane_b, (first_a >> _SHIFT32) * multiplier0 ^ next_key1, out=lane_b)
