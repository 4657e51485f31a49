"""Two threads that take turns: the coordinator, and the hook where they meet."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.coordinator import HookCoordinator
from tests.frameworks import (
    assert_close,
    backward,
    dist,
    equal,
    grad,
    grad_of,
    leaf,
    on_mindspore,
    ours,
    platform_module,
    theirs,
)
from tests.platform.test_overlap import random_tensor
from tests.world import run_on_ranks

differentiable_all_to_all_single = platform_module("differentiable").differentiable_all_to_all_single
differentiable_sync_hook = platform_module("overlap").differentiable_sync_hook
Function, checkpoint = get_platform().Function, get_platform().checkpoint

# --- the coordinator: two threads ---

KIND = {"A": "comm", "B": "compute", "C": "comm", "D": "compute"}
BACKWARD_KIND = {"D": "comm", "C": "compute", "B": "comm", "A": "compute"}


def run_threads(*bodies: Callable[[], None]) -> list[BaseException | None]:
    """Run each body in a thread of its own; give what each raised."""
    raised: list[BaseException | None] = [None] * len(bodies)

    def guarded(index: int, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            raised[index] = error

    threads = [threading.Thread(target=guarded, args=item, daemon=True) for item in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a thread hangs"
    return raised


def pass_hooks(coordinator: HookCoordinator, direction: str, num_layers: int, log: list, pause: Callable) -> None:
    """What a micro-batch does at its hooks; notes when a section that communicates begins and ends."""
    hooks, kinds = ("ABCD", KIND) if direction == "forward" else ("DCBA", BACKWARD_KIND)
    with coordinator.taking_part():
        for hook in hooks * num_layers:
            pause()
            coordinator.rendezvous(hook, direction)
            log.append((direction, kinds[hook]))
            pause()
            log.append((direction, f"end of {kinds[hook]}"))


@pytest.mark.parametrize("seed", range(3))
def test_never_two_communicate_and_the_order_does_not_depend_on_speed(seed: int) -> None:
    generator = random.Random(seed)
    coordinator = HookCoordinator(timeout=60)
    coordinator.enable()
    log: list[tuple[str, str]] = []
    raised = run_threads(
        lambda: pass_hooks(coordinator, "forward", 3, log, lambda: time.sleep(generator.uniform(0, 0.002))),
        lambda: pass_hooks(coordinator, "backward", 3, log, lambda: time.sleep(generator.uniform(0, 0.002))),
    )
    assert raised == [None, None]
    communication = [entry for entry in log if entry[1].endswith("comm")]
    assert all(begin[0] == end[0] for begin, end in zip(communication[::2], communication[1::2], strict=True))
    # Backward communicates alone first, then they take turns.
    assert [direction for direction, what in communication if what == "comm"] == ["backward", "forward"] * 6


def test_one_computes_while_the_other_communicates() -> None:
    """The two meet inside sections of different kinds: they could not if one waited for the other's section to end."""
    coordinator = HookCoordinator(timeout=60)
    coordinator.enable()
    inside = threading.Barrier(2, timeout=60)

    def forward() -> None:
        with coordinator.taking_part():
            for hook in "ABC":
                coordinator.rendezvous(hook, "forward")
                inside.wait()

    def backward() -> None:
        with coordinator.taking_part():
            coordinator.rendezvous("D", "backward")
            for hook in "CBA":
                coordinator.rendezvous(hook, "backward")
                inside.wait()

    assert run_threads(forward, backward) == [None, None]


@pytest.mark.parametrize(("num_forward", "num_backward"), [(1, 4), (4, 1), (0, 2), (2, 0)])
def test_the_thread_with_more_hooks_ends_alone(num_forward: int, num_backward: int) -> None:
    coordinator = HookCoordinator(timeout=60)
    coordinator.enable()
    log: list[tuple[str, str]] = []
    raised = run_threads(
        lambda: pass_hooks(coordinator, "forward", num_forward, log, lambda: None),
        lambda: pass_hooks(coordinator, "backward", num_backward, log, lambda: None),
    )
    assert raised == [None, None]
    assert len(log) == 8 * (num_forward + num_backward)


def test_an_exception_wakes_the_other_thread() -> None:
    coordinator = HookCoordinator(timeout=60)
    coordinator.enable()

    def forward() -> None:
        with coordinator.taking_part():
            coordinator.rendezvous("A", "forward")
            time.sleep(0.05)
            raise FloatingPointError("loss is nan")

    def backward() -> None:
        with coordinator.taking_part():
            for hook in "DCBADCBA":
                coordinator.rendezvous(hook, "backward")

    first, second = run_threads(forward, backward)
    assert isinstance(first, FloatingPointError)
    assert isinstance(second, RuntimeError)
    assert str(second) == "the other thread of the overlapped pair failed: FloatingPointError: loss is nan"
    assert second.__cause__ is first

    coordinator.enable()  # a new stretch of work knows nothing of the failure
    log: list = []
    assert run_threads(
        lambda: pass_hooks(coordinator, "forward", 1, log, lambda: None),
        lambda: pass_hooks(coordinator, "backward", 1, log, lambda: None),
    ) == [None, None]


def test_a_thread_does_not_wait_for_ever() -> None:
    coordinator = HookCoordinator(timeout=0.1)
    coordinator.enable()
    with pytest.raises(
        TimeoutError, match=r"the forward thread waited 0.1 s at hook A for the backward thread, which never "
    ):
        coordinator.rendezvous("A", "forward")
    with pytest.raises(
        RuntimeError, match=r"the other thread of the overlapped pair failed: TimeoutError: the forward thr"
    ):
        coordinator.rendezvous("D", "backward")
    with pytest.raises(ValueError, match=r"timeout must be a positive number of seconds, got 0"):
        HookCoordinator(timeout=0)


def test_a_timeout_says_where_the_other_was_last_seen() -> None:
    coordinator = HookCoordinator(timeout=0.5)
    coordinator.enable()
    first, second = run_threads(
        lambda: coordinator.rendezvous("A", "forward"),
        lambda: coordinator.rendezvous("D", "backward"),
    )
    assert second is None
    assert isinstance(first, TimeoutError)
    assert "waited 0.5 s at hook A for the backward thread, which was last seen at hook D; run both threads" in str(
        first
    )


def test_disabled_nobody_waits_and_disabling_wakes() -> None:
    coordinator = HookCoordinator(timeout=60)
    assert not coordinator.enabled
    coordinator.rendezvous("A", "forward")
    coordinator.enable()
    assert coordinator.enabled
    timer = threading.Timer(0.05, coordinator.disable)
    timer.start()
    coordinator.rendezvous("A", "forward")
    assert not coordinator.enabled
    timer.join()


def test_wrong_names_and_a_third_thread_are_errors() -> None:
    coordinator = HookCoordinator(timeout=60)
    with pytest.raises(ValueError, match=r"rendezvous: hook_name must be one of A, B, C, D; got 'E'"):
        coordinator.rendezvous("E", "forward")
    with pytest.raises(ValueError, match=r"direction must be one of forward, backward, recompute; got 'sideways'"):
        coordinator.rendezvous("A", "sideways")
    coordinator.enable()
    raised = run_threads(*[lambda: _first_to_fail_frees(coordinator)] * 2)
    (message,) = [str(error) for error in raised if error is not None]
    assert "a forward thread came to hook B while another one waits at hook B; a coordinator serves one for" in message


def _first_to_fail_frees(coordinator: HookCoordinator) -> None:
    try:
        coordinator.rendezvous("B", "forward")
    finally:
        coordinator.finish()


def test_in_turns_one_thread_runs_at_a_time_and_hands_over_where_it_would_wait() -> None:
    coordinator = HookCoordinator(timeout=60, in_turns=True)
    log: list[str] = []

    def work(direction: str, hooks: str, fails: bool = False) -> None:
        with coordinator.taking_part(direction):
            for hook in hooks:
                log.append(f"{direction[0]}{hook}")
                coordinator.rendezvous(hook, direction)
            if fails:
                raise FloatingPointError("loss is nan")

    for _ in range(2):  # it does not depend on which thread is there first
        log.clear()
        coordinator.enable()
        assert run_threads(lambda: work("backward", "DCBA"), lambda: work("forward", "ABCDAB")) == [None, None]
        # A forward sends behind A and C and waits behind B and D, a backward the other way round.
        assert log == ["fA", "fB", "bD", "bC", "fC", "fD", "bB", "bA", "fA", "fB"]

    coordinator.enable()
    log.clear()
    first, second = run_threads(lambda: work("forward", "AB", fails=True), lambda: work("backward", "DCBADCBA"))
    assert isinstance(first, FloatingPointError)
    assert str(second) == "the other thread of the overlapped pair failed: FloatingPointError: loss is nan"
    assert log == ["fA", "fB", "bD", "bC"]
    coordinator.disable()
    with pytest.raises(ValueError, match=r"in turns it takes the direction, .* got None"), coordinator.taking_part():
        pass


# --- the hook ---


class RecordingCoordinator:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def rendezvous(self, hook_name: str, direction: str) -> None:
        self.calls.append((hook_name, direction))


def test_hook_is_the_identity_and_calls_in_both_directions() -> None:
    coordinator = RecordingCoordinator()
    values, weight = random_tensor(2, 3, seed=0), random_tensor(2, 3, seed=1)
    x = y = leaf(values)
    for hook in "ABCD":
        y = differentiable_sync_hook(y, hook, coordinator)
    assert equal(y, values)
    assert coordinator.calls == [(hook, "forward") for hook in "ABCD"]
    coordinator.calls.clear()
    backward((y * ours(weight)).sum())
    assert equal(grad_of(x), weight)
    assert coordinator.calls == [(hook, "backward") for hook in "DCBA"]


def test_hook_without_a_coordinator_or_with_a_disabled_one() -> None:
    x = leaf(torch.ones(2))
    assert differentiable_sync_hook(x, "A", None) is x
    backward(differentiable_sync_hook(x, "A", HookCoordinator(timeout=0.1)).sum())
    assert equal(grad_of(x), torch.ones(2))
    with pytest.raises(ValueError, match=r"differentiable_sync_hook: hook_name must be one of A, B, C, D; got 'a'"):
        differentiable_sync_hook(x, "a", None)


@pytest.mark.sweep("mindspore")
@run_on_ranks(2)
def test_a_forward_that_is_run_again_in_backward_belongs_to_the_backward_thread() -> None:
    coordinator = RecordingCoordinator()

    def layer(x: Any) -> Any:
        return differentiable_sync_hook(x.sin(), "A", coordinator).cos()

    one = torch.ones(2, dtype=torch.float64)
    x = leaf(one)
    backward(checkpoint(layer, x, use_reentrant=False).sum())
    assert coordinator.calls == [("A", "forward"), ("A", "recompute"), ("A", "backward")]
    assert_close(grad_of(x), -one.sin().sin() * one.cos())


def moe_layer(x: Any, weight: Any, coordinator: HookCoordinator, pause: Callable[[], None]) -> Any:
    """Sends its rows to other ranks, works on them there and gets them back."""
    x = differentiable_sync_hook((x @ weight).tanh(), "A", coordinator)
    x = differentiable_all_to_all_single(x, None, None, None)
    x = differentiable_sync_hook(x, "B", coordinator)
    pause()
    x = differentiable_sync_hook((x @ weight.T).sin(), "C", coordinator)
    x = differentiable_all_to_all_single(x, None, None, None)
    x = differentiable_sync_hook(x, "D", coordinator)
    pause()
    return Pause.apply(x, pause)


class Pause(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, pause: Callable[[], None]) -> Any:
        ctx.pause = pause
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple:
        ctx.pause()
        return gradient, None


two_threads_at_once = pytest.mark.skipif(
    on_mindspore,
    reason="needs Ascend: on a CPU MindSpore records nothing in one thread while another one runs a backward",
)


@two_threads_at_once
@run_on_ranks(2, 4)
def test_forward_and_backward_in_two_threads_share_one_group() -> None:
    run_two_threads_at_uneven_speeds(recompute=False)


@two_threads_at_once
@run_on_ranks(2)
def test_recomputing_in_the_backward_thread_keeps_the_order_too() -> None:
    run_two_threads_at_uneven_speeds(recompute=True)


def run_two_threads_at_uneven_speeds(recompute: bool) -> None:
    """The ranks run at speeds of their own; only the coordinator keeps the two threads' collectives in one order."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    generator = random.Random(rank)
    coordinator = HookCoordinator(timeout=60)
    weights = [leaf(random_tensor(3, 3, seed=seed)) for seed in range(4)]
    inputs = [leaf(random_tensor(2 * num_ranks, 3, seed=10 + 2 * rank + index)) for index in range(2)]

    def pause() -> None:
        time.sleep(generator.uniform(0, 0.003))

    def run(x: Any) -> Any:
        for weight in weights:
            arguments = (x, weight, coordinator, pause)
            x = checkpoint(moe_layer, *arguments, use_reentrant=False) if recompute else moe_layer(*arguments)
        return x.sum()

    expected = []
    for x in inputs:
        loss = run(x)
        expected.append((theirs(loss), grad(loss, [x, *weights])))

    first_loss = run(inputs[0])  # alone; its backward will overlap with the second forward
    coordinator.enable()
    results: dict[str, Any] = {}

    def run_forward() -> None:
        with coordinator.taking_part():
            results["loss"] = run(inputs[1])

    def run_backward() -> None:
        with coordinator.taking_part():
            results["grads"] = grad(first_loss, [inputs[0], *weights])

    assert run_threads(run_forward, run_backward) == [None, None]
    coordinator.disable()
    second_grads = grad(results["loss"], [inputs[1], *weights])
    assert_close(results["loss"], expected[1][0], rtol=0, atol=0)
    assert_close(results["grads"], expected[0][1], rtol=0, atol=0)
    assert_close(second_grads, expected[1][1], rtol=0, atol=0)
