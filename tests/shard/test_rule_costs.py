"""What rules send, what they leave cut or pending, and what they refuse, on every framework."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.dtensor.comm_recorder import CommRecorder
from hyper_parallel.core.shard.dispatching.strict_mode import strict
from tests.frameworks import (
    assert_close,
    backward,
    dist,
    distribute_tensor,
    equal,
    from_local,
    grad,
    leaf,
    needs_second_gradients,
    on_mindspore,
    ours,
)
from tests.frameworks.functions import (
    amax,
    cat,
    cross_entropy,
    embedding,
    layer_norm,
    linear,
    log_softmax,
    logsumexp,
    softmax,
    variance,
    vector_norm,
)
from tests.shard.validator import layouts_of, tensor
from tests.world import run_on_ranks

INF = float("inf")


def _mesh() -> hp.DeviceMesh:
    return hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))


def _classes(*numbers: int) -> torch.Tensor:
    """Targets and positions; MindSpore's losses take int32."""
    return torch.tensor(numbers, dtype=torch.int32 if on_mindspore else torch.int64)


@run_on_ranks(2)
def test_softmax_leaves_rows_cut() -> None:
    mesh = _mesh()
    for function in (softmax, log_softmax):
        x = distribute_tensor(leaf(tensor(2, 50)), mesh, [hp.Shard(1)])
        with strict(implicit_redistribution=True), CommRecorder() as recorder:
            result = function(x, 1)
            assert result.layout is x.layout
            result.backward(distribute_tensor(tensor(2, 50, seed=1), mesh, [hp.Shard(1)]))
        assert recorder.counts == {"all_reduce": 3}, recorder.table()
        assert {record.shape for record in recorder.records} == {(2, 1)}


@run_on_ranks(2)
def test_cross_entropy_leaves_logits_cut() -> None:
    """Vocabulary parallel: nothing of the size of the logits travels, and backward needs no message at all."""
    mesh = _mesh()
    logits = distribute_tensor(leaf(tensor(6, 101)), mesh, [hp.Shard(1)])
    target = distribute_tensor(_classes(0, 20, 40, 60, 80, 100), mesh, [hp.Replicate()])
    with strict(implicit_redistribution=True), CommRecorder() as recorder:
        loss = cross_entropy(logits, target)
    assert recorder.counts == {"all_reduce": 3}
    assert max(record.num_bytes for record in recorder.records) <= 2 * 6 * 8
    with CommRecorder() as recorder:
        loss.backward()
    assert recorder.records == []
    plain = tensor(6, 101).requires_grad_()
    expected = torch.nn.functional.cross_entropy(plain, torch.arange(6) * 20)
    expected.backward()
    assert_close(loss.detach().full_tensor(), expected)
    assert_close(logits.grad.full_tensor(), plain.grad)


@run_on_ranks(2)
def test_layer_norm_sends_statistics_only() -> None:
    mesh = _mesh()
    x, weight, bias = (
        distribute_tensor(leaf(value), mesh, [hp.Shard(value.ndim - 1)])
        for value in (tensor(4, 60), tensor(60, seed=1), tensor(60, seed=2))
    )
    with strict(implicit_redistribution=True), CommRecorder() as recorder:
        result = layer_norm(x, weight, bias)
        assert result.layout is x.layout
        result.backward(distribute_tensor(tensor(4, 60, seed=3), mesh, [hp.Shard(1)]))
    assert recorder.counts == {"all_reduce": 3}, recorder.table()
    assert max(record.num_bytes for record in recorder.records) <= 2 * 4 * 3 * 8


@run_on_ranks(2)
def test_a_partial_value_is_reduced_once() -> None:
    """However many operators read it, whole or beside shards, with and without gradients."""
    mesh, values, weights = _mesh(), tensor(4, 2, 3), tensor(4, 3, seed=1)

    def read(x: Any, weight: Any) -> list[Any]:
        return [x.exp(), linear(x, weight), x.tanh(), linear(x, weight * 2.0)]

    for trains in (True, False):
        x = distribute_tensor(leaf(values) if trains else values, mesh, [hp.Shard(0)])
        weight = distribute_tensor(weights, mesh, [hp.Shard(0)])
        with CommRecorder() as recorder:
            partial = x.sum(0)
            assert partial.layout.has_partial
            results = read(partial, weight)
        assert recorder.counts == {"all_reduce": 1}, recorder.table()
        plain = values.clone().requires_grad_(trains)
        expected = read(plain.sum(0), weights)
        for result, wanted in zip(results, expected, strict=True):
            assert_close(result.detach().full_tensor(), wanted.detach())
        if trains:
            losses = [result.sum() for result in results]
            with CommRecorder() as recorder:
                for loss in losses:
                    loss.backward(retain_graph=True)
            assert recorder.counts == {"all_reduce": 2}, recorder.table()  # of the two that read it beside shards
            sum(wanted.sum() for wanted in expected).backward()
            assert_close(x.grad.full_tensor(), plain.grad)


@run_on_ranks(2)
def test_a_partial_value_that_was_written_is_reduced_again() -> None:
    mesh = _mesh()
    partial = distribute_tensor(tensor(4, 3), mesh, [hp.Shard(0)]).sum(0)
    assert_close(partial.exp().full_tensor(), tensor(4, 3).sum(0).exp())
    partial.mul_(2.0)
    assert_close(partial.exp().full_tensor(), (tensor(4, 3).sum(0) * 2).exp())


@run_on_ranks(2)
def test_a_view_moves_the_shard_of_an_inner_dim_to_the_leading_one() -> None:
    """Logits of (samples, sequence, vocabulary) as rows: one all-to-all each way, nothing is gathered."""
    mesh, values = _mesh(), tensor(4, 6, 5)
    x = distribute_tensor(leaf(values), mesh, [hp.Shard(1)])
    with CommRecorder() as recorder:
        rows = x.reshape(-1, 5)
        assert rows.layout.shard_axes == ((0,), ())
        rows.backward(distribute_tensor(tensor(24, 5, seed=1), mesh, [hp.Shard(0)]))
    assert set(recorder.counts) <= {"all_to_all_single", "all_to_all"} and len(recorder.records) == 2, recorder.table()
    assert_close(rows.detach().full_tensor(), values.reshape(-1, 5))
    assert_close(x.grad.full_tensor(), tensor(24, 5, seed=1).reshape(4, 6, 5))


REDUCTIONS = {
    "sum": (lambda x: x.sum(0), {}),
    "mean": (lambda x: x.mean(), {}),
    "amax": (lambda x: amax(x, 0), {"all_reduce": 2}),  # one for the values, one for the ties of the gradient
    "variance": (lambda x: variance(x, 0), {"all_reduce": 2}),
    "norm": (lambda x: vector_norm(x, 0), {"all_reduce": 1}),
    "prod": (lambda x: x.prod(0), {"all_reduce": 1, "all_gather_into_tensor": 1}),
    **({} if on_mindspore else {"logsumexp": (lambda x: logsumexp(x, 0), {"all_reduce": 2})}),  # there made of parts
}


@run_on_ranks(2)
def test_only_results_of_reductions_travel() -> None:
    mesh = _mesh()
    for name, (operator, wanted) in REDUCTIONS.items():
        x = distribute_tensor(leaf(tensor(6, 3)), mesh, [hp.Shard(0)])
        with strict(implicit_redistribution=True), CommRecorder() as recorder:
            result = operator(x)
            seed = torch.ones(tuple(result.shape), dtype=torch.float64)
            result.backward(distribute_tensor(seed, mesh, [hp.Replicate()]))
        assert recorder.counts == wanted, f"{name}: {recorder.table()}"
        assert max((record.num_bytes for record in recorder.records), default=0) <= 3 * 8, name


SECOND = {
    "softmax": lambda x: softmax(x, 0) ** 2,
    "log_softmax": lambda x: log_softmax(x, 0) ** 2,
    "variance": lambda x: variance(x, 0),
    "prod": lambda x: x.prod(0),
}


@needs_second_gradients
@run_on_ranks(2)
def test_second_derivatives_along_a_cut_dim() -> None:
    mesh, values = _mesh(), tensor(5, 3, low=0.2)
    for name, function in SECOND.items():

        def penalty(x: Any, ask: Any, function: Any = function) -> Any:
            (first,) = ask((function(x) ** 2).sum(), [x], create_graph=True)
            return (first * first).sum()

        plain = values.clone().requires_grad_()
        penalty(plain, torch.autograd.grad).backward()
        x = distribute_tensor(leaf(values), mesh, [hp.Shard(0)])
        penalty(x, grad).backward()
        assert_close(x.grad.full_tensor(), plain.grad, msg=lambda text, name=name: f"{name}: {text}")


@run_on_ranks(2)
def test_a_cut_sum_is_pending_and_stays_so_through_mean() -> None:
    total = distribute_tensor(tensor(5, 3), _mesh(), [hp.Shard(0)]).sum(0)
    assert total.placements == (hp.Partial(),)
    assert total.mean().placements == (hp.Partial(),)
    assert_close(total.mean().full_tensor(), tensor(5, 3).sum(0).mean())


@run_on_ranks(4)
def test_empty_blocks_lose() -> None:
    """One row on four ranks: three blocks are empty, and the result is that of the one row."""
    mesh = hp.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    row = torch.tensor([[-5.0, -INF, 7.0]], dtype=torch.float64)
    x = distribute_tensor(leaf(row), mesh, [hp.Shard(0)])
    assert equal(amax(x, 0).full_tensor(), row[0])
    assert equal((x * 2).sum(0).full_tensor(), row[0] * 2)
    assert_close(x.mean(0).full_tensor(), row[0])
    (x * x).sum(0).backward(distribute_tensor(torch.ones(3).double(), mesh, [hp.Replicate()]))
    assert equal(x.grad.full_tensor(), 2 * row)


@run_on_ranks(2)
def test_a_bias_is_added_once_to_a_pending_product() -> None:
    mesh = _mesh()
    x, weight, bias = tensor(3, 4), tensor(5, 4, seed=1), tensor(5, seed=2).requires_grad_()
    mine = distribute_tensor(leaf(bias), mesh, [hp.Replicate()])
    with strict(implicit_redistribution=True), CommRecorder() as recorder:
        found = linear(distribute_tensor(x, mesh, [hp.Shard(1)]), distribute_tensor(weight, mesh, [hp.Shard(1)]), mine)
    assert not recorder.records and found.placements == (hp.Partial(),)
    expected = linear(x, weight, bias)
    assert_close(found.detach().full_tensor(), expected)
    expected.square().sum().backward()
    backward((found.full_tensor() ** 2).sum())
    assert_close(mine.grad.full_tensor(), bias.grad)


@run_on_ranks(2)
def test_pending_sums_and_other_dims_pass_without_communication() -> None:
    mesh = _mesh()
    pending = from_local(tensor(4, 6), mesh, [hp.Partial()])
    cut = distribute_tensor(tensor(5, 6), mesh, [hp.Shard(0)])
    with strict(implicit_redistribution=True), CommRecorder() as recorder:
        still_pending = [cat([pending, pending]), pending.reshape(24), pending.T, pending[1:3], pending * 2]
        still_cut = [cat([cut, cut], 1), cut.reshape(5, 3, 2), cut[:, 2:], cut.exp(), softmax(cut, 1)]
    assert recorder.records == []
    assert all(each.placements == (hp.Partial(),) for each in still_pending)
    assert all(each.placements == (hp.Shard(0),) for each in still_cut)
    with pytest.raises(RuntimeError, match=r"exp .*would redistribute"), strict(implicit_redistribution=True):
        pending.exp()


@run_on_ranks(2)
def test_elements_of_a_cut_dim_cost_nothing() -> None:
    mesh = _mesh()
    x = distribute_tensor(tensor(5, 4), mesh, [hp.Shard(0)])
    rows = distribute_tensor(_classes(0, 4, 4), mesh, [hp.Replicate()])
    table = distribute_tensor(tensor(5, 4), mesh, [hp.Shard(1)])
    with strict(implicit_redistribution=True), CommRecorder() as recorder:
        pending = [x[3], x[1, 1:3], x[rows], embedding(rows, x)]
        cut = [embedding(rows, table), table[rows], table[1:3]]
        x[1:3] = 0.5
    assert recorder.records == []
    with CommRecorder() as recorder:
        x[4] = x[0]
    assert recorder.counts == {"all_reduce": 1}  # of one row
    assert all(each.placements == (hp.Partial(),) for each in pending)
    assert [each.placements for each in cut] == [(hp.Shard(1),)] * 3
    expected = tensor(5, 4)
    expected[1:3] = 0.5
    expected[4] = expected[0]
    assert equal(x.full_tensor(), expected)


@run_on_ranks(2)
def test_a_value_with_a_gradient_written_into_a_fresh_tensor() -> None:
    mesh = _mesh()
    plain = tensor(3, 4).requires_grad_()
    x = distribute_tensor(leaf(tensor(3, 4)), mesh, [hp.Shard(1)])
    fresh = torch.zeros(5, 4, dtype=torch.float64)
    for value, y in ((plain, fresh), (x, distribute_tensor(fresh.clone(), mesh, [hp.Shard(0)]))):
        y[1:4] = value
        y[4] = value[0] * 2
        (y * y).sum().backward()
    assert_close(x.grad.full_tensor(), plain.grad)


READS = {
    "embedding": lambda x, i: embedding(i, x),
    "getitem": lambda x, i: x[i],
    "cross_entropy": lambda x, i: cross_entropy(x[:4, :], i),
}


@run_on_ranks(2)
def test_a_position_outside_is_an_error_on_every_rank() -> None:
    """Under every layout, and no rank waits for another."""
    mesh = _mesh()
    table, positions = tensor(5, 5), _classes(0, 4, 7, 1)
    for name, run in READS.items():
        for layout in layouts_of(mesh, table, False):
            for other in layouts_of(mesh, positions, False):
                raised = None
                try:
                    run(distribute_tensor(table, mesh, layout), distribute_tensor(positions, mesh, other))
                except (IndexError, RuntimeError, ValueError) as error:
                    raised = type(error).__name__
                kinds: list[Any] = [None, None]
                dist.all_gather_object(kinds, raised)
                assert kinds[0] is not None and kinds[0] == kinds[1], f"{name}, {layout}, {other}: {kinds}"


@run_on_ranks(2)
def test_mistakes_are_named() -> None:
    mesh = _mesh()
    x = distribute_tensor(tensor(5, 4), mesh, [hp.Shard(0)])
    pending = from_local(tensor(4, 4), mesh, [hp.Partial()])
    for attempt, kind, words in (
        (lambda: x[ours(_classes(0, 1))], RuntimeError, r"getitem: a plain tensor of shape \(2,\).*distribute_tensor"),
        (lambda: x.__setitem__(0, ours(tensor(4))), RuntimeError, r"setitem: a plain tensor .*distribute_tensor"),
        (lambda: x[5], IndexError, r"getitem on distributed tensors of global shape \(5, 4\).*out of"),
        (lambda: pending.__setitem__(0, 1.0), RuntimeError, r"setitem cannot write into .*reduce_partial"),
        (lambda: softmax(x, 2), (IndexError, ValueError), r"(dim 2 is out of range|axis must be in)"),
        (lambda: x @ x, (RuntimeError, ValueError), r"matmul on distributed tensors of global shape \(5, 4\)"),
        (lambda: linear(x, ours(tensor(3, 4))), RuntimeError, r"a plain tensor of shape \(3, 4\) meets a distributed"),
    ):
        with pytest.raises(kind, match=words):
            attempt()
