"""All-to-all that overlaps in both directions, the hook where two threads meet and its coordinator, and gradient
reductions in flight."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
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
from tests.world import run_on_ranks

collectives, devices, overlap = (platform_module(name) for name in ("collectives", "devices", "overlap"))
differentiable_all_to_all_single = platform_module("differentiable").differentiable_all_to_all_single
GradReduction, launch_async_all_to_all = overlap.GradReduction, overlap.launch_async_all_to_all
differentiable_async_a2a_wait = overlap.differentiable_async_a2a_wait
differentiable_sync_hook = overlap.differentiable_sync_hook
Function, checkpoint = get_platform().Function, get_platform().checkpoint


def random_tensor(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- all-to-all: launched early, awaited late ---

BATCH, SEQUENCE, HEADS, HEAD_DIM = 2, 8, 4, 3
WIDTH = HEADS * HEAD_DIM


def attention(q: Any, k: Any, v: Any) -> Any:
    """Of (batch, sequence, heads, head dim); in words that every framework has."""
    q, k, v = (x.permute(0, 2, 1, 3) for x in (q, k, v))
    weights = (q @ k.permute(0, 1, 3, 2)).exp()
    return ((weights / weights.sum(-1, True)) @ v).permute(0, 2, 1, 3)


def heads_of(hidden: Any, weight: Any) -> Any:
    projected = hidden @ weight
    return projected.reshape(projected.shape[0], projected.shape[1], HEADS, HEAD_DIM)


def flattened(attended: Any) -> Any:
    return attended.reshape(attended.shape[0], attended.shape[1], WIDTH)


def ulysses(hidden: Any, weights: list[Any], group: Any, boxes: str) -> Any:
    """Attention whose inputs and results are cut on the sequence, computed on whole sequences of some heads."""
    num_ranks = dist.get_world_size(group)
    shared: list = []
    make_box = {"shared": lambda: shared, "own": list, "none": lambda: None}[boxes]
    launched = []
    for weight in weights[:3]:
        box = make_box()
        launched.append((*launch_async_all_to_all(heads_of(hidden, weight), group, num_ranks, 2, box), box))
    q, k, v = (differentiable_async_a2a_wait(x, work, None, group, num_ranks, 1, 2, box) for x, work, box in launched)
    attended = attention(q, k, v)
    box = make_box()
    x, work = launch_async_all_to_all(attended, group, num_ranks, 1, box)
    attended = differentiable_async_a2a_wait(x, work, None, group, num_ranks, -2, 1, box)
    return flattened(attended) @ weights[3]


@run_on_ranks(2, 4)
def test_ulysses_is_the_same_as_one_process() -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    hidden = random_tensor(BATCH, SEQUENCE, WIDTH, seed=0).div(4).requires_grad_()
    weights = [random_tensor(WIDTH, WIDTH, seed=seed).div(4).requires_grad_() for seed in range(1, 5)]
    expected = flattened(attention(*(heads_of(hidden, weight) for weight in weights[:3]))) @ weights[3]
    upstream = random_tensor(*expected.shape, seed=6)
    expected_grads = torch.autograd.grad((expected * upstream).sum(), [hidden, *weights])

    for boxes in ("shared", "own", "none"):
        mine, own_weights = leaf(hidden.chunk(num_ranks, 1)[rank]), [leaf(weight) for weight in weights]
        output = ulysses(mine, own_weights, None, boxes)
        assert_close(output, expected.chunk(num_ranks, 1)[rank])
        grads = grad((output * ours(upstream.chunk(num_ranks, 1)[rank].contiguous())).sum(), [mine, *own_weights])
        assert_close(grads[0], expected_grads[0].chunk(num_ranks, 1)[rank])
        for gradient, expected_grad in zip(grads[1:], expected_grads[1:], strict=True):
            assert_close(collectives.all_reduce(gradient, None), expected_grad)


@run_on_ranks(2, 4)
@pytest.mark.parametrize("size", [0, 1, 3])
def test_all_dims_and_a_given_permutation(size: int) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(num_ranks)))
    for split_dim, concat_dim, out_perm in ((0, 1, None), (1, 0, None), (2, -1, None), (1, 2, (1, 3, 0, 2))):
        shape = [2, 2, 2]
        shape[split_dim] = size * num_ranks
        inputs = [random_tensor(*shape, seed=seed).requires_grad_() for seed in range(num_ranks)]
        parts = [data.chunk(num_ranks, split_dim) if size else [data] * num_ranks for data in inputs]
        outputs = []
        for target in range(num_ranks):
            received = [source[target] for source in parts]
            if out_perm is not None:
                received = [part.transpose(1, 2) for part in received]
            outputs.append(torch.cat(received, concat_dim))
        upstream = [random_tensor(*output.shape, seed=9 + seed) for seed, output in enumerate(outputs)]
        loss = sum((output * weight).sum() for output, weight in zip(outputs, upstream, strict=True))
        expected = torch.autograd.grad(loss, inputs, allow_unused=True)[rank]

        mine = ours(inputs[rank].detach().mT.contiguous().mT.requires_grad_())
        box: list = []
        x, work = launch_async_all_to_all(mine, group, num_ranks, split_dim, box)
        result = differentiable_async_a2a_wait(x, work, out_perm, group, num_ranks, concat_dim, split_dim, box)
        assert_close(result, outputs[rank])
        (gradient,) = grad((result * ours(upstream[rank])).sum(), [mine])
        assert_close(gradient, expected)
        assert box == []


class LoggedWork:
    """A work that notes when it is waited for."""

    def __init__(self, work: Any, name: str, log: list[str]) -> None:
        self._work, self._name, self._log = work, name, log

    def wait(self) -> None:
        self._log.append(f"wait {self._name}")
        if self._work is not None:
            self._work.wait()


class LoggedIdentity(Function):
    @staticmethod
    def forward(ctx: Any, x: Any, name: str, log: list[str]) -> Any:
        ctx.name, ctx.log = name, log
        log.append(f"{name} forward")
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple:
        ctx.log.append(f"{ctx.name} backward")
        return gradient, None, None


@run_on_ranks(2)
def test_what_lies_between_launch_and_wait_overlaps_in_both_directions() -> None:
    log: list[str] = []
    launch = collectives.all_to_all_single
    names = iter(("q", "k", "reverse k", "reverse q"))

    def logged_launch(*args: Any, **kwargs: Any) -> tuple:
        assert kwargs["async_op"] is True
        name = next(names)
        log.append(f"launch {name}")
        output, work = launch(*args, **kwargs)
        return output, LoggedWork(work, name, log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap.collectives, "all_to_all_single", logged_launch)
        hidden = leaf(torch.ones(4, 2, dtype=torch.float64))
        box: list = []
        q, q_work = launch_async_all_to_all(LoggedIdentity.apply(hidden, "Wq", log), None, 2, 0, box)
        k, k_work = launch_async_all_to_all(LoggedIdentity.apply(hidden, "Wk", log), None, 2, 0, box)
        other = LoggedIdentity.apply(hidden, "other", log)
        q = differentiable_async_a2a_wait(q, q_work, None, None, 2, 1, 0, box)
        k = differentiable_async_a2a_wait(k, k_work, None, None, 2, 1, 0, box)
        assert log == ["Wq forward", "launch q", "Wk forward", "launch k", "other forward", "wait q", "wait k"]
        log.clear()
        backward(q.sum() + 2 * k.sum() + 4 * other.sum())
    # Both reverse all-to-alls are under way before anything waits, and what else there is to do is done first.
    assert log[:3] == ["launch reverse k", "launch reverse q", "other backward"]
    assert sorted(log[3:]) == ["Wk backward", "Wq backward", "wait reverse k", "wait reverse q"]
    for name in ("k", "q"):
        assert log.index(f"wait reverse {name}") < log.index(f"W{name} backward")
    assert equal(grad_of(hidden), torch.full((4, 2), 7.0, dtype=torch.float64))


@run_on_ranks(2)
def test_backward_returns_before_the_peer_has_sent() -> None:
    """Rank 1 launches only when it hears that rank 0's backward has returned: had that one waited, both would hang."""
    rank = dist.get_rank()
    x = leaf(torch.zeros(2, 3, dtype=torch.float64))
    box: list = []
    result = differentiable_async_a2a_wait(x, None, None, None, 2, 0, 0, box)
    if rank == 1:
        get_platform().recv_object_list([None], 0, None)
    (gradient,) = grad((result * (rank + 1)).sum(), [x])
    ((work, buffer),) = box
    if rank == 0:
        assert not work.is_completed()
        get_platform().send_object_list(["returned"], 1, None)
    work.wait()
    expected = torch.tensor([[1.0] * 3, [2.0] * 3], dtype=torch.float64)
    assert equal(buffer, expected)
    assert equal(gradient, expected)


@run_on_ranks(2)
def test_a_group_of_one_needs_no_work() -> None:
    group = get_platform().create_group([dist.get_rank()])
    values = random_tensor(4, 3, seed=0)
    mine = leaf(values)
    box: list = []
    x, work = launch_async_all_to_all(mine, group, 1, 1, box)
    result = differentiable_async_a2a_wait(x, work, None, group, 1, 0, 1, box)
    assert equal(result, values)
    backward((result * result).sum())
    assert_close(grad_of(mine), 2 * values)


@run_on_ranks(2)
def test_mistakes_around_an_async_all_to_all() -> None:
    data = ours(torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"launch_async_all_to_all: world_size is 3 but the group has 2 ranks"):
        launch_async_all_to_all(data, None, 3, 0)
    with pytest.raises(ValueError, match=r"dim 0 of the tensor of shape \(3, 4\) cannot be split into 2 equal parts"):
        launch_async_all_to_all(data, None, 2, 0)
    with pytest.raises(ValueError, match=r"split_dim 2 is out of range for 2 dims \(tensor of shape \(3, 4\)\)"):
        launch_async_all_to_all(data, None, 2, 2)
    with pytest.raises(ValueError, match=r"x must have one slab per rank, \[2, ...\] .* its shape is \(3, 4\)"):
        differentiable_async_a2a_wait(data, None, None, None, 2, 0, 0)
    slabs = ours(torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"concat_dim 1 is out of range for 1 dims"):
        differentiable_async_a2a_wait(slabs, None, None, None, 2, 1, 0)
    with pytest.raises(
        ValueError, match=r"out_perm must be a permutation of the 2 dims of x that puts dim 0 at place 0"
    ):
        differentiable_async_a2a_wait(slabs, None, (1, 0), None, 2, 0, 0)
    x, work = launch_async_all_to_all(leaf(torch.ones(2, 4)), None, 2, 0, [])
    with pytest.raises(ValueError, match=r"handle_box is not the list that launch_async_all_to_all got for this x"):
        differentiable_async_a2a_wait(x, work, None, None, 2, 0, 0, [])
    work.wait()


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


# --- gradient reductions in flight ---


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
