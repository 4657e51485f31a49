"""Gradient reductions in flight."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.frameworks import (
    dist,
    ours,
    platform_module,
    theirs,
)
from tests.world import run_on_ranks

collectives, devices = platform_module("collectives"), platform_module("devices")
GradReduction = platform_module("overlap").GradReduction


class FakeDevice:
    """Streams that note what is done on which, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "main"
        self.num_streams = 0

    def new_stream(self) -> str:
        self.num_streams += 1
        return f"stream {self.num_streams}"

    def get_stream_context(self) -> Callable[[str], Any]:
        @contextlib.contextmanager
        def context(stream: str) -> Iterator[None]:
            before, self.current = self.current, stream
            yield
            self.current = before

        return context

    def get_current_stream(self) -> "FakeDevice":
        return self

    def wait_stream(self, other: str) -> None:
        self.log.append(f"{self.current} waits for {other}")

    def note(self, what: str) -> None:
        self.log.append(f"{what} on {self.current}")

    def reduction(self) -> GradReduction:
        return GradReduction(self.new_stream, self.get_stream_context, self.get_current_stream)


class FakeHandle:
    def __init__(self, device: FakeDevice, name: str) -> None:
        self._device, self._name = device, name

    def wait(self) -> None:
        self._device.note(f"wait {self._name}")


def test_setting_a_reduction_finishes_the_one_before() -> None:
    device = FakeDevice()
    reduction = device.reduction()
    reduction.wait()
    assert device.log == []
    reduction.set(FakeHandle(device, "a"), lambda: device.note("callback a"))
    assert device.log == []
    reduction.set(FakeHandle(device, "b"))
    assert device.log == ["wait a on stream 1", "callback a on stream 1"]
    reduction.wait()
    assert device.log[2:] == ["wait b on stream 1", "main waits for stream 1"]
    reduction.set(None, lambda: device.note("callback c"))
    reduction.wait()
    assert device.log[4:] == ["callback c on stream 1", "main waits for stream 1"]
    assert device.num_streams == 1


def test_a_reduction_that_fails_is_reported_once() -> None:
    device = FakeDevice()
    reduction = device.reduction()
    reduction.set(FakeHandle(device, "a"), lambda: [][0])
    with pytest.raises(IndexError):
        reduction.wait()
    reduction.wait()


@run_on_ranks(2)
def test_reductions_of_real_gradients() -> None:
    rank = dist.get_rank()
    reduction = GradReduction(devices.new_stream, devices.get_stream_context, devices.get_current_stream)
    gradients = [ours(torch.full((3,), float(rank + index))) for index in range(3)]
    results: dict[int, Any] = {}
    for index, gradient in enumerate(gradients):
        reduced, handle = collectives.all_reduce(gradient, None, async_op=True)
        reduction.set(handle, lambda index=index, reduced=reduced: results.update({index: reduced / 2}))
        assert sorted(results) == list(range(index))
    reduction.wait()
    assert {index: theirs(result).tolist() for index, result in results.items()} == {i: [i + 0.5] * 3 for i in range(3)}
