"""Boxes that cover a tensor, each element once, are told from all others: as counting tells them, and fast."""

from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest

from hyper_parallel.core.distributed_checkpoint.base.exact_cover import covers_once

only_on = "torch"  # arithmetic, no framework takes part


def _cut(box, draw: random.Random):
    """A box in pieces, cut again and again where it falls."""
    offsets, sizes = box
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    if not dims or draw.random() < 0.2:
        return [box]
    dim = draw.choice(dims)
    at = draw.randrange(1, sizes[dim])
    low = offsets, (*sizes[:dim], at, *sizes[dim + 1 :])
    high = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :]), (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])
    return _cut(low, draw) + _cut(high, draw)


def _counted(boxes, shape) -> bool:
    counts = np.zeros(shape, int)
    for offsets, sizes in boxes:
        counts[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] += 1
    return bool((counts == 1).all())


@pytest.mark.parametrize("ndim", [0, 1, 2, 3, 4])
def test_as_counting_says(ndim):
    draw = random.Random(ndim)
    outcomes = set()
    for _ in range(300):
        shape = tuple(draw.randrange(1, 6) for _ in range(ndim))
        boxes = _cut(((0,) * ndim, shape), draw)
        change = draw.randrange(4)
        if change == 1:
            boxes.remove(draw.choice(boxes))
        elif change == 2:
            boxes.append(draw.choice(boxes))
        elif change == 3 and ndim:  # Another place for a box: often an overlap and a hole of the same size.
            (_, sizes) = boxes.pop(draw.randrange(len(boxes)))
            boxes.append((tuple(draw.randrange(end - size + 1) for end, size in zip(shape, sizes, strict=True)), sizes))
        draw.shuffle(boxes)
        outcomes.add((change, _counted(boxes, shape)))
        assert covers_once(boxes, shape) == _counted(boxes, shape), (shape, boxes)
    assert {(0, True), (1, False), (2, False)} <= outcomes


def test_outside_and_nothing():
    assert covers_once([], (0, 3)) and not covers_once([], (2,)) and not covers_once([((0,), (3,))], (2,))
    assert not covers_once([((-1,), (3,)), ((2,), (1,))], (3,))


def test_no_order_of_boxes_is_slow():
    """Long strips along both dims: a sweep along either dim has half of them open at all times."""
    num = 10_000
    strips = [((at, 0), (1, num)) for at in range(num)] + [((num, at), (num, 1)) for at in range(num)]
    whole = (2 * num, num)
    start = time.process_time()
    assert covers_once(strips, whole) and not covers_once([*strips[1:], strips[5]], whole)
    assert time.process_time() - start < 5
    cells = list(itertools.product(range(20), repeat=3))
    assert covers_once([(cell, (1, 1, 1)) for cell in cells], (20, 20, 20))
