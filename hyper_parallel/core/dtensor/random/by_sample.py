"""`draws_by_sample`: random numbers that depend on the step, the place in the model and the sample alone; see
``docs/random.md``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.dtensor.random import random_state
from hyper_parallel.core.dtensor.random.random_fill import random_values_of
from hyper_parallel.core.dtensor.random.random_stream import GlobalRegion
from hyper_parallel.core.dtensor.random.sample_address import Address, at_address, checked_step, current
from hyper_parallel.core.dtensor.random.sample_rows import SampleRows, checked_rows
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.checks.taps import one_line


@contextmanager
def draws_by_sample(*, step: int, rows: SampleRows | tuple[int, ...]) -> Iterator[None]:
    """Inside, every random tensor that the program draws, plain or distributed, has the bits that its address gives.

    ``step`` is the number of the training step, ``rows`` which samples of the global batch this micro-batch holds:
    ``SampleRows(first, count)``. Enter it once for the forward of each micro-batch. The address is (seed of
    ``hyper_parallel.manual_seed``, step, block, draw in the block, sample, index in the sample): see
    ``number_blocks`` for blocks, and Note [Which tensors have samples] for what has samples. The framework's generator
    is neither used nor changed. Functions that are given a generator of their own use that.

    Recomputation in backward draws the same again, also when the context has ended.
    """
    platform = get_platform()
    address = Address(checked_step(step), checked_rows(rows))
    install_addressed_draws()
    mark = platform.generator_mark()
    with at_address(address):
        yield
    if platform.generator_mark() != mark:
        warnings.warn(
            "draws_by_sample: something drew from the framework's own generator, whose numbers have no address and "
            "depend on how the batch is cut: dropout inside of nn.LSTM, poisson, rrelu, operators of other libraries; "
            "use nn.Dropout between the layers, torch.rand, or a generator= of your own where that is meant",
            stacklevel=3,
        )


def install_addressed_draws() -> None:
    """Let the framework's random functions look whether draws have addresses; twice is once."""
    get_platform().install_addressed_draws(_has_address, _drawn)


def _has_address() -> bool:
    return current.address is not None


@one_line
def _drawn(kind: str, shape: tuple[int, ...], dtype: Any, device: Any, **parameters: Any) -> Any:
    """A plain random tensor of the next draw; without values where the device has no memory."""
    return random_values_of(kind, parameters, random_state.next_draw(), GlobalRegion(shape), dtype, device)
