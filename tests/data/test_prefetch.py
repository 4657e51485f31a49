"""Reading ahead: the same batches, no position counted that was not used, errors where they belong, an end."""

from __future__ import annotations

import threading

import pytest

from hyper_parallel.data import Order, Prefetch

only_on = "torch"  # imports no framework: once is enough


def _threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("hyper-parallel-data")]


def test_batches_are_those_of_the_order_and_the_order_does_not_run_ahead():
    order, plain = Order(10, batch=3, seed=1), Order(10, batch=3, seed=1)
    with Prefetch(order, lambda numbers: numbers.tolist(), ahead=3) as batches:
        for _, got in zip(range(7), batches, strict=False):
            assert got == next(plain).tolist()
            assert order.state() == plain.state()
    assert _threads() == []


def test_batches_are_read_before_they_are_asked_for():
    begun = threading.Event()

    def load(numbers):
        if numbers[0] == 2:
            begun.set()
        return numbers

    with Prefetch(Order(10, batch=2, shuffle=False), load) as batches:
        next(batches)
        assert begun.wait(10)


def test_another_batch_size_drops_what_was_read():
    order = Order(20, batch=2, seed=1)
    with Prefetch(order, lambda numbers: numbers.tolist()) as batches:
        taken = next(batches)
        order.batch = 5
        taken = taken + next(batches) + next(batches)
    assert taken == order.numbers(0, 12).tolist()


def test_an_end():
    with Prefetch(Order(5, batch=2, shuffle=False, epochs=1), lambda numbers: numbers.tolist()) as batches:
        assert list(batches) == [[0, 1], [2, 3], [4]]


def test_an_error_is_raised_by_the_step_that_needs_the_batch_and_nothing_is_counted():
    def load(numbers):
        if 2 in numbers:
            raise ValueError("token 7 of sample 2")
        return numbers

    order = Order(6, batch=1, shuffle=False)
    with Prefetch(order, load) as batches:
        next(batches)
        next(batches)
        with pytest.raises(ValueError, match="token 7 of sample 2"):
            next(batches)
        assert order.position == 2
    assert _threads() == []


def test_a_closed_one_says_so():
    batches = Prefetch(Order(6, batch=1), lambda numbers: numbers)
    batches.close()
    batches.close()
    with pytest.raises(RuntimeError, match="this Prefetch is closed; make a new one"):
        next(batches)
    with pytest.raises(ValueError, match="ahead=0 must be at least 1"):
        Prefetch(Order(6, batch=1), lambda numbers: numbers, ahead=0)
