"""The blocks of a model as addresses of random numbers; see ``docs/random.md``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hyper_parallel.core.dtensor.random.sample_address import current
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.checks.taps import one_line

_NUMBER = "hyper_parallel_block"


def number_blocks(blocks: Iterable[Any], *, first: int = 0) -> None:
    """Number the blocks of a model, such as ``model.layers``, from ``first`` on: inside ``draws_by_sample`` what a
    block draws is then addressed by its number, and does not depend on the blocks before it.

    Call it on the whole model, before blocks are removed or wrapped; numbers stay with the blocks. Twice is once.
    """
    platform = get_platform()
    for number, block in enumerate(blocks, first):
        is_new = getattr(block, _NUMBER, None) is None
        setattr(block, _NUMBER, number)
        if is_new:
            platform.register_forward_pre_hook(block, _enter, prepend=True)
            platform.register_forward_hook(block, _leave, always_call=True)


def _enter(block: Any, args: Any) -> None:
    if current.address is not None:
        enter_block(getattr(block, _NUMBER))


def _leave(block: Any, args: Any, outputs: Any) -> None:
    if current.address is not None:
        leave_block()


@one_line
def enter_block(number: int) -> None:
    """The draws that follow have the address of the block."""
    if current.address is not None:
        current.address.enter(number)


@one_line
def leave_block() -> None:
    """The draws that follow have the address behind the block that was entered last."""
    if current.address is not None:
        current.address.leave()
