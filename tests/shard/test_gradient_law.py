"""What the gradient law costs: counted with CommRecorder."""

import pytest
import torch

import hyper_parallel as hp
from tests.frameworks import assert_close, distribute_tensor, ours, theirs
from tests.frameworks.functions import linear, relu
from tests.world import run_on_ranks


def _mesh() -> hp.DeviceMesh:
    return hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def _leaf(mesh: hp.DeviceMesh, placements: list, *shape: int, seed: int) -> hp.DTensor:
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return distribute_tensor(values.requires_grad_(), mesh, placements)


@run_on_ranks(2)
def test_q_k_v_from_one_input_cost_one_backward_all_reduce() -> None:
    mesh = _mesh()
    x = _leaf(mesh, [hp.Replicate()], 4, 6, seed=0) * 1.0
    weights = [_leaf(mesh, [hp.Shard(0)], 8, 6, seed=i + 1) for i in range(3)]
    with hp.CommRecorder() as forward:
        q, k, v = (linear(x, weight) for weight in weights)
        loss = (q * k * v).sum()
    assert forward.counts == {}
    assert q.placements == (hp.Shard(1),)
    with hp.CommRecorder() as recorder:
        loss.backward()
    assert recorder.counts == {"all_reduce": 1}, recorder.table()
    assert "backward" in recorder.records[0].asked_by


@run_on_ranks(2)
def test_a_gather_that_meets_a_cut_weight_costs_one_reduce_scatter() -> None:
    mesh = _mesh()
    x = _leaf(mesh, [hp.Shard(0)], 4, 6, seed=0)
    weight = _leaf(mesh, [hp.Shard(0)], 8, 6, seed=1)
    with hp.CommRecorder() as forward:
        gathered = (x * 1.0).redistribute(placements=[hp.Replicate()])
        out = linear(gathered, weight)
    assert forward.counts == {"all_gather_into_tensor": 1}
    with hp.CommRecorder() as recorder:
        (out * out).sum().backward()
    assert recorder.counts == {"reduce_scatter_tensor": 1}, recorder.table()
    full_x, full_w = (theirs(tensor.detach().full_tensor()).requires_grad_() for tensor in (x, weight))
    (linear(full_x, full_w) ** 2).sum().backward()
    assert_close(x.grad.full_tensor(), full_x.grad)
    assert_close(weight.grad.full_tensor(), full_w.grad)


@run_on_ranks(2)
def test_a_gather_used_whole_and_varying_gets_both_gradients() -> None:
    mesh = _mesh()
    x = _leaf(mesh, [hp.Shard(0)], 5, 6, seed=0)
    weight = _leaf(mesh, [hp.Shard(0)], 8, 6, seed=1)
    gathered = x.redistribute(placements=[hp.Replicate()])
    loss = (linear(gathered, weight) ** 2).sum() + (gathered**3).sum()
    loss.backward()
    full_x, full_w = (theirs(tensor.detach().full_tensor()).requires_grad_() for tensor in (x, weight))
    ((linear(full_x, full_w) ** 2).sum() + (full_x**3).sum()).backward()
    assert_close(x.grad.full_tensor(), full_x.grad)
    assert_close(weight.grad.full_tensor(), full_w.grad)


@run_on_ranks(2)
def test_column_then_row_costs_one_all_reduce_each_way() -> None:
    mesh = _mesh()
    x = _leaf(mesh, [hp.Replicate()], 4, 6, seed=0) * 1.0
    up, down = _leaf(mesh, [hp.Shard(0)], 8, 6, seed=1), _leaf(mesh, [hp.Shard(1)], 6, 8, seed=2)
    with hp.CommRecorder() as forward:
        out = linear(relu(linear(x, up)), down)
        assert out.placements == (hp.Partial(),)
        loss = (out.reduce_partial() ** 2).sum()
    assert forward.counts == {"all_reduce": 1}
    with hp.CommRecorder() as recorder:
        loss.backward()
    assert recorder.counts == {"all_reduce": 1}


@run_on_ranks(2)
def test_an_edge_is_not_remembered_past_a_write() -> None:
    mesh = _mesh()
    x = _leaf(mesh, [hp.Replicate()], 4, 6, seed=0)
    weight = _leaf(mesh, [hp.Shard(0)], 8, 6, seed=1)
    y = x * 2.0
    first = linear(y, weight).sum()
    y.mul_(3.0)
    second = linear(y, weight).sum()
    second.backward()
    full_w = theirs(weight.detach().full_tensor())
    assert_close(x.grad.full_tensor(), 6.0 * full_w.sum(0).expand(4, 6))
    assert first.shape == ()


@run_on_ranks(2)
def test_mistakes_are_named() -> None:
    mesh = _mesh()
    x, plain = _leaf(mesh, [hp.Shard(0)], 4, 6, seed=0), ours(torch.ones(4, 6, dtype=torch.float64))
    for attempt, kind, words in (
        (
            lambda: x + plain,
            RuntimeError,
            ("add", "plain tensor", "distribute_tensor"),
        ),
        (lambda: x + x[:, :5], (RuntimeError, ValueError), ("add", "global shape")),
        (lambda: x + hp.ones((4, 6), hp.init_device_mesh("cpu", (1, 2))), ValueError, ("different meshes",)),
        # Another tensor shares the memory, and would still be labelled as a partial sum.
        (
            lambda: [(p := hp.ones((4,), mesh, [hp.Partial()])).view(4), p.exp_()],
            RuntimeError,
            ("exp_", "reduce_partial", "partial"),
        ),
    ):
        with pytest.raises(kind) as caught:
            attempt()
        assert all(word in str(caught.value) for word in words), str(caught.value)
    assert (x + ours(torch.tensor(1.0))).placements == (hp.Shard(0),)
