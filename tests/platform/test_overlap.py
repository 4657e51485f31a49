"""All-to-all that overlaps in both directions: launched early, awaited late."""

from typing import Any

import pytest
import torch

from hyper_parallel.platform import get_platform
from tests.frameworks import (
    assert_close,
    backward,
    dist,
    equal,
    grad,
    grad_of,
    leaf,
    ours,
    platform_module,
)
from tests.world import run_on_ranks

collectives, overlap = platform_module("collectives"), platform_module("overlap")
launch_async_all_to_all = overlap.launch_async_all_to_all
differentiable_async_a2a_wait = overlap.differentiable_async_a2a_wait
Function = get_platform().Function


def random_tensor(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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
