"""What carries nothing: the transport of groups in a world in which nobody else is.

As PyTorch's silent groups (Note [Groups that nobody answers] in ``torch/communication/pretend_groups.py``): tensors
without memory give tensors without memory, others come back as if every rank had given what this one gave, a message
that is received is zeros, and what only another rank can know, an object that it sends, is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor, mint

from hyper_parallel.platform.checks.group_checks import DONE, nobody_sends_first, nobody_sends_objects
from hyper_parallel.platform.host.host_collectives import reduce_arrays
from hyper_parallel.platform.mindspore.base import start
from hyper_parallel.platform.mindspore.base.memory import from_array, memory_of
from hyper_parallel.platform.mindspore.base.tensors import is_meta, overwrite, zeros

__all__ = ["SilentChannel", "SilentTransport"]


class SilentChannel(NamedTuple):
    """The world ranks of a group, and which of them this rank is."""

    ranks: tuple[int, ...]
    place: int


class SilentTransport:
    """The methods of ``TcpTransport`` for groups that a member makes; joining and leaving are the member's."""

    backend = "pretend"
    carries_meta = True

    def drop_group(self, channel: SilentChannel) -> None:
        """Nothing is held for a group."""

    # ---------------------------------------------------------------- collectives

    def barrier(self, channel: SilentChannel) -> Any:
        return DONE

    def all_reduce(self, channel: SilentChannel, data: Tensor, op: str, async_op: bool) -> tuple[Tensor, Any]:
        """In place."""
        if not is_meta(data):
            overwrite(data, from_array(_reduced(_flat(data), op, channel).reshape(data.shape)))
        return data, DONE

    def all_gather(self, channel: SilentChannel, data: Tensor, shape: Sequence[int]) -> tuple[Tensor, Any]:
        if is_meta(data):
            return _without_memory(shape, data), DONE
        return from_array(np.tile(_flat(data), len(channel.ranks)), tuple(shape)), DONE

    def reduce_scatter(
        self, channel: SilentChannel, data: Tensor, op: str, shape: Sequence[int], async_op: bool
    ) -> tuple[Tensor, Any]:
        if is_meta(data):
            return _without_memory(shape, data), DONE
        mine = _flat(data).reshape(len(channel.ranks), -1)[channel.place]
        return from_array(_reduced(mine, op, channel), tuple(shape)), DONE

    def broadcast(self, channel: SilentChannel, data: Tensor, source: int) -> tuple[Tensor, Any]:
        """In place."""
        return data, DONE

    def all_to_all(
        self, channel: SilentChannel, data: Tensor, shape: Sequence[int], sent: Sequence[int], received: Sequence[int]
    ) -> tuple[Tensor, Any]:
        """What this rank sends to itself comes from each, again and again for a rank that sends more."""
        if is_meta(data):
            return _without_memory(shape, data), DONE
        begin = sum(sent[: channel.place])
        mine = _flat(data)[begin : begin + sent[channel.place]]
        parts = [np.resize(mine, count) for count in received]
        return from_array(np.concatenate(parts).astype(mine.dtype, copy=False), tuple(shape)), DONE

    # ---------------------------------------------------------------- messages

    def send(self, channel: SilentChannel, data: Tensor, target: int, tag: int) -> Any:
        return DONE

    def receive(self, channel: SilentChannel, data: Tensor, source: int | None, tag: int) -> Any:
        if source is None:
            raise nobody_sends_first()
        overwrite(data, zeros(data.shape, data.dtype))
        return DONE

    def exchange(self, channel: SilentChannel, data: Tensor, peer: int) -> Tensor:
        return zeros(data.shape, data.dtype, data.device)

    def send_bytes(self, channel: SilentChannel, data: bytes, target: int) -> None:
        """Nobody receives them."""

    def receive_bytes(self, channel: SilentChannel, source: int | None) -> tuple[int, bytes]:
        raise nobody_sends_objects(None if source is None else channel.ranks[source])

    def gather_bytes(self, channel: SilentChannel, data: bytes) -> list[bytes]:
        return [data] * len(channel.ranks)


def _without_memory(shape: Sequence[int], like: Tensor) -> Tensor:
    return mint.empty(tuple(shape), dtype=like.dtype, device="meta")


def _flat(data: Tensor) -> np.ndarray:
    return np.ascontiguousarray(data.asnumpy() if start.on_ascend() else memory_of(data)).reshape(-1)


def _reduced(values: np.ndarray, op: str, channel: SilentChannel) -> np.ndarray:
    return reduce_arrays([values] * len(channel.ranks), op)
