"""Values whose gradients are reduced later: nothing is sent for them, and the sum of their parts is one device's."""

import random

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.dtensor.later_reduction import reduced_later
from hyper_parallel.core.shard.dispatching.reduce_later import by_the_law, reduce_later
from hyper_parallel.platform import get_platform
from tests.frameworks import assert_close, backward, distribute_tensor, grad, on_mindspore, ours, theirs
from tests.frameworks.functions import embedding, layer_norm, linear, relu
from tests.world import run_on_ranks

R, S, P = hp.Replicate, hp.Shard, hp.Partial


def _mesh(*shape):
    return hp.init_device_mesh("cpu", shape or (2,), mesh_dim_names=("cp", "tp")[: len(shape) or 1])


def _values(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _later(values, mesh, placements=None, axes="cp"):
    """A leaf of a wrapper that reduces over ``axes`` by itself."""
    made = reduce_later(distribute_tensor(values, mesh, placements or [R()] * mesh.ndim), axes)
    return made.detach().requires_grad_()


def _one_device(program, *values):
    inputs = [value.detach().clone().requires_grad_(value.is_floating_point()) for value in values]
    program(*inputs).backward()
    return [value.grad for value in inputs]


def _programs():
    """Each is of x, sharded on its first dim, and two weights that are reduced later."""
    return {
        "a product": lambda x, w, v: linear(relu(linear(x, w)), v).sum(),
        "used twice": lambda x, w, v: (linear(x, w) * linear(x * x, w) + linear(x, v)).sum(),
        "a function of the weight alone": lambda x, w, v: linear(x, (1 + w) * (1 + w) / (2 + v * v)).sum(),
        "weights that meet": lambda x, w, v: linear(x, w @ v.T + w).sum(),
        "another view": lambda x, w, v: (x @ w.T.reshape(6, 6) @ v[:3].T).sum(),
        "a norm": lambda x, w, v: (layer_norm(x, w[0], v[1]) ** 2).sum(),
        "an addend": lambda x, w, v: ((x + w[0]) * x + v.sum()).sum(),
        "beside the data": lambda x, w, v: linear(x, w).sum() + (w * w * v).sum(),
        "divided by a norm": lambda x, w, v: linear(x, v / (w * w).sum() ** 0.5).sum(),
    }


@run_on_ranks(2)
@pytest.mark.parametrize("name", _programs())
def test_nothing_is_sent_and_the_parts_make_the_gradient(name):
    program, mesh = _programs()[name], _mesh()
    values = [_values(5, 6), _values(6, 6, seed=1), _values(6, 6, seed=2)]
    x = distribute_tensor(values[0].requires_grad_(), mesh, [S(0)])
    w, v = (_later(value, mesh) for value in values[1:])
    loss = program(x, w, v)
    with hp.CommRecorder() as recorder:
        backward(loss)
    assert recorder.counts == {}, recorder.table()
    want = _one_device(program, *values)
    for ours_, theirs_ in zip((x, w, v), want, strict=True):
        assert ours_.grad.placements == ((S(0),) if ours_ is x else (P(),))
        assert_close(ours_.grad.full_tensor(), theirs_, rtol=1e-4, atol=1e-6)  # MindSpore's norm is a float32's


@run_on_ranks(2)
def test_a_table_a_tied_and_a_frozen_weight():
    mesh, ids = _mesh(), torch.tensor([[0, 3, 1], [2, 2, 4]])

    def program(table, scale, fixed):
        hidden = embedding(found, table) * scale
        return (linear(linear(hidden, fixed), table) ** 2).sum()

    values = [_values(5, 6), _values(6, seed=1), _values(6, 6, seed=2)]
    found = ids
    want = _one_device(program, *values)
    found = distribute_tensor(ids, mesh, [S(1)])
    table, scale = (_later(value, mesh) for value in values[:2])
    fixed = reduce_later(distribute_tensor(values[2], mesh), "cp")
    loss = program(table, scale, fixed)
    with hp.CommRecorder() as recorder:
        backward(loss)
    assert recorder.counts == {}, recorder.table()
    assert fixed.grad is None
    assert_close(table.grad.full_tensor(), want[0])
    assert_close(scale.grad.full_tensor(), want[1])


@run_on_ranks(2)
def test_values_by_the_law_beside_it():
    """Where nothing varies the result is whole by the law: no communication, and a gradient counted once."""
    mesh, values = _mesh(), [_values(6, 6), _values(6, 6, seed=1), _values(4, 6, seed=2)]

    def program(h, w, x):
        return (linear(h * w, w) ** 2).sum() + linear(x, w + h).sum()

    h = distribute_tensor(values[0].requires_grad_(), mesh, [R()])
    w, x = _later(values[1], mesh), distribute_tensor(values[2].requires_grad_(), mesh, [S(0)])
    with hp.strict(implicit_redistribution=True):
        assert (h * w).shape == (6, 6)  # nothing moves
    loss = program(h, w, x)
    with hp.CommRecorder() as recorder:
        backward(loss)
    assert recorder.counts == {"all_reduce": 1}, recorder.table()  # of what w + h met: h is by the law
    for found, wanted in zip((h, w, x), _one_device(program, *values), strict=True):
        assert_close(found.grad.full_tensor(), wanted)


@run_on_ranks(2)
def test_a_loss_that_no_data_is_in():
    """Every rank computes the same: the gradient is counted once, however it is asked for."""
    mesh, value = _mesh(), _values(3, 3)
    want = _one_device(lambda w: (w * w).sum(), value)[0]
    w = _later(value, mesh)
    backward((w * w).sum())
    assert_close(w.grad.full_tensor(), want)
    w = _later(value, mesh)
    (found,) = grad((w * w).sum(), [w])
    assert found.placements == (P(),)
    assert_close(found.full_tensor(), want)
    for leave in (lambda loss: loss.to_local(), lambda loss: loss.full_tensor()):
        w = _later(value, mesh)
        backward(leave((w * w).sum()))
        assert_close(w.grad.full_tensor(), want)
    w = _later(value, mesh)
    backward(w * w, distribute_tensor(torch.ones(3, 3, dtype=torch.float64), mesh))
    assert_close(w.grad.full_tensor(), want)


@run_on_ranks(2)
def test_one_reduction_for_all_uses():
    """Of a tensor with a graph: ``reduce_later`` itself is the edge that reduces, once."""
    mesh, values = _mesh(), [_values(5, 6), _values(6, 6, seed=1)]

    def program(x, w, later=lambda w: w):
        w = later(w)
        return (linear(x, w) * linear(x, w.T) * linear(x, w)).sum()

    x = distribute_tensor(values[0], mesh, [S(0)])
    want = _one_device(program, *values)[1]
    for later, num_reductions in ((lambda w: w, 3), (lambda w: reduce_later(w, "cp"), 1)):
        w = distribute_tensor(values[1].clone().requires_grad_(), mesh, [R()])
        with hp.CommRecorder() as recorder:
            backward(program(x, w, later))
        assert recorder.counts == {"all_reduce": num_reductions}, recorder.table()
        assert w.grad.placements == (R(),)
        assert_close(w.grad.full_tensor(), want)


@run_on_ranks(4)
@pytest.mark.parametrize("seed", range(4))
def test_random_programs(seed):
    """Square matrices in any layout under operators of all kinds: every gradient is that of one device."""
    numbers, mesh = random.Random(seed), _mesh(2, 2)
    any_layout = [R(), S(0), S(1)]
    for number in range(3 if on_mindspore else 12):
        leaves = []
        for place in range(5):
            value, axes = _values(4, 4, seed=100 * number + place), ()
            placements = [numbers.choice(any_layout) for _ in range(2)]
            if place < 3:
                axes = numbers.choice([("cp",), ("tp",), ("cp", "tp")])
                placements = [R() if name in axes else one for name, one in zip(("cp", "tp"), placements, strict=True)]
            leaves.append((value, placements, axes))
        steps = []
        for place in range(6):
            step = numbers.choice(["matmul", "add", "mul", "relu", "transpose", "scale", "move"])
            pick = [numbers.randrange(len(leaves) + place) for _ in range(2)]
            steps.append((step, pick, [numbers.choice([*any_layout, P()]) for _ in range(2)]))

        def run(values, steps=steps):
            made = list(values)
            for step, (first, second), placements in steps:
                a, b = made[first], made[second]
                if step == "move":
                    made.append(a.redistribute(mesh, placements) if isinstance(a, hp.DTensor) else a)
                else:
                    made.append(_OPERATORS[step](a, b))
            total = made[-1].sum()
            for one in made[:-1]:
                total = total + (one * one).sum()
            return total

        want = _one_device(lambda *values: run(values), *(value for value, _, _ in leaves))
        found = [
            _later(value, mesh, placements, axes)
            if axes
            else distribute_tensor(value.clone().requires_grad_(), mesh, placements)
            for value, placements, axes in leaves
        ]
        backward(run(found))
        for (_, placements, axes), ours_, theirs_ in zip(leaves, found, want, strict=True):
            on_axes = [P() if name in axes else one for name, one in zip(("cp", "tp"), placements, strict=True)]
            assert list(ours_.grad.placements) == on_axes
            assert_close(ours_.grad.full_tensor(), theirs_, msg=lambda text, steps=steps: f"{steps}: {text}")


_OPERATORS = {
    "matmul": lambda a, b: a @ b * 0.1,
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b * 0.1,
    "relu": lambda a, b: relu(a),
    "transpose": lambda a, b: a.T,
    "scale": lambda a, b: a * 0.5,
}


@run_on_ranks(2)
def test_what_it_is():
    mesh = _mesh()
    layout = hp.Layout.from_placements(mesh, [R()], 2)
    later = reduced_later(layout, "cp")
    assert later is reduced_later(layout, [0]) is reduced_later(later, ()) and later is not layout
    assert later.placements == layout.placements and later.is_replicated
    assert later.gradient() is hp.Layout.from_placements(mesh, [P()], 2)
    assert later.reduced() is layout and later.reduced(pending=False) is layout
    assert "reduced later over cp" in repr(later)
    w = _later(_values(3, 4), mesh)
    assert get_platform().as_parameter(w, True)._layout.reduced_later == (0,)
    for same in (w.T, w * 2.0, w + w, w[0], w.reshape(4, 3), w.to(get_platform().str_to_dtype("float32"))):
        assert same._layout.reduced_later == (0,)
    by_law = distribute_tensor(_values(3, 4), mesh)
    assert (w + by_law)._layout.reduced_later == ()
    assert by_the_law({"w": w})["w"]._layout is layout
    assert reduce_later(w, "cp") is w


@run_on_ranks(2)
def test_one_rank_has_nothing_to_sum():
    mesh = hp.init_device_mesh("cpu", (1, 2), mesh_dim_names=("cp", "tp"))
    layout = hp.Layout.from_placements(mesh, [R(), S(0)], 2)
    assert reduced_later(layout, "cp") is layout


@run_on_ranks(2)
def test_mistakes_are_named():
    mesh = _mesh()
    with pytest.raises(ValueError, match=r"is not replicated over 'cp': only the gradient of a replicated value"):
        reduce_later(distribute_tensor(_values(4, 4), mesh, [S(0)]), "cp")
    with pytest.raises(TypeError, match="reduce_later takes a DTensor, got a"):
        reduce_later(ours(_values(4)), "cp")
    with pytest.raises(ValueError, match="dp"):
        reduce_later(distribute_tensor(_values(4, 4), mesh), "dp")


@run_on_ranks(2)
def test_written_into():
    """What is written into stays reduced later: what it meets is summed."""
    mesh, values = _mesh(), [_values(4, 4), _values(4, 4, seed=1), _values(4, 4, seed=2)]

    def program(x, w, h):
        made = w * 2.0
        made.add_(h)
        return linear(x, made).sum()

    x, w = distribute_tensor(values[0], mesh, [S(0)]), _later(values[1], mesh)
    h = distribute_tensor(values[2].clone().requires_grad_(), mesh, [R()])
    backward(program(x, w, h))
    want = _one_device(program, *values)
    assert_close(w.grad.full_tensor(), want[1])
    assert_close(h.grad.full_tensor(), want[2])


@run_on_ranks(2)
def test_functions_of_ones_own():
    mesh, values = _mesh(), [_values(4, 4), _values(4, 4, seed=1)]
    doubled = hp.custom_shard(lambda a, b: a * b, mesh, [S(0)], [[S(0)], [S(0)]], redistribute_inputs=True)
    whole = hp.custom_shard(lambda a: a * a, mesh, [R()], [[R()]])
    x, w = distribute_tensor(values[0], mesh, [S(0)]), _later(values[1], mesh)
    backward(doubled(x, w).sum() + whole(w).sum())
    assert_close(w.grad.full_tensor(), values[0] + 2 * values[1])
    assert theirs(w.grad.full_tensor()).shape == (4, 4)
