"""Operators on lists of tensors: one dispatch, the same results as one by one on one device."""

import itertools
import random

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.dtensor.comm_recorder import CommRecorder
from tests.shard.validator import layouts_of, tensor
from tests.world import run_on_ranks

only_on = "torch"  # PyTorch's operators on lists of tensors, which MindSpore does not have

SHAPES = [(5, 3), (4,), (1, 2), (2, 3, 2), (), (7,), (0, 3)]
UNARY = [
    *("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "frac", "lgamma"),
    *("log", "log10", "log1p", "log2", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt"),
    *("tan", "tanh", "trunc"),
]


def _values(seed: int, shapes=SHAPES) -> list[torch.Tensor]:
    return [tensor(*shape, seed=seed, low=0.1, high=0.9) for shape in shapes]


def _cut(mesh, values: list[torch.Tensor], pick: random.Random, partial: bool = False, plain: bool = True) -> list:
    """Each value under a random layout; some stay plain, at the same positions in every list."""
    made = []
    for number, value in enumerate(values):
        layout = pick.choice(layouts_of(mesh, value, partial))
        made.append(value.clone() if plain and number % 3 == 1 else hp.distribute_tensor(value.clone(), mesh, layout))
    return made


def _whole(values) -> list[torch.Tensor]:
    return [value.full_tensor() if isinstance(value, hp.DTensor) else value for value in values]


def _compare(found, expected, what: str) -> None:
    for number, (mine, want) in enumerate(zip(_whole(found), expected, strict=True)):
        torch.testing.assert_close(mine, want, msg=lambda text, number=number: f"{what}, position {number}: {text}")


def _cases() -> list[tuple[str, int, tuple, dict]]:
    """(name, how many lists, further arguments, keywords) of every operator."""
    scalars = [0.5 + number for number in range(len(SHAPES))]
    cases = [(name, 1, (), {}) for name in UNARY]
    for name in ("add", "sub", "mul", "div", "clamp_max", "clamp_min", "maximum", "minimum"):
        cases += [(name, 2, (), {}), (name, 1, (0.5,), {}), (name, 1, (scalars,), {})]
    cases += [("add", 2, (), {"alpha": 2}), ("sub", 2, (), {"alpha": 2})]
    cases += [(name, 1, (torch.tensor(0.5, dtype=torch.float64),), {}) for name in ("add", "mul", "div")]
    cases += [("pow", 2, (), {}), ("pow", 1, (2,), {}), ("pow", 1, (scalars,), {})]
    cases += [("lerp", 3, (), {}), ("lerp", 2, (0.3,), {}), ("lerp", 2, (scalars,), {})]
    for name in ("addcmul", "addcdiv"):
        cases += [(name, 3, (), {}), (name, 3, (0.5,), {}), (name, 3, (scalars,), {}), (name, 3, (), {"value": 2})]
    return cases


@run_on_ranks(2, sweep=(4,))
def test_every_operator() -> None:
    world = hp.get_platform().get_world_size()
    mesh = hp.init_device_mesh("cpu", (2,) if world == 2 else (2, 2), mesh_dim_names=("x", "y")[: world // 2])
    pick = random.Random(5)
    for name, num_lists, rest, keywords in _cases():
        for in_place, alike in itertools.product((False, True), (False, True)):
            func = getattr(torch, f"_foreach_{name}_" if in_place else f"_foreach_{name}")
            values = [_values(seed) for seed in range(num_lists)]
            if alike:
                layouts = random.Random(pick.random())
                seeds = layouts.random()
                lists = [_cut(mesh, one, random.Random(seeds)) for one in values]
            else:
                lists = [_cut(mesh, one, pick, partial=not in_place) for one in values]
            expected = func(*values, *rest, **keywords)
            found = func(*lists, *rest, **keywords)
            what = f"{func.__name__}{rest}{keywords}"
            if in_place:
                assert all(mine is given for mine, given in zip(found, lists[0], strict=True))
                _compare(lists[0], values[0], what)
            else:
                assert all(
                    isinstance(f, hp.DTensor) == isinstance(a, hp.DTensor) for f, a in zip(found, lists[0], strict=True)
                )
                _compare(found, expected, what)


@run_on_ranks(2)
def test_without_communication_and_with_one_call_when_tensors_lie_alike() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    lists = [[hp.distribute_tensor(v, mesh, [hp.Shard(0)]) for v in _values(s, [(5, 3), (3,)])] for s in range(2)]
    with CommRecorder() as recorder:
        made = torch._foreach_add(*lists)
        torch._foreach_addcmul_(made, *lists, value=0.5)
    assert not recorder.records
    assert all(result.layout is value.layout for result, value in zip(made, lists[0], strict=True))


@run_on_ranks(2)
def test_pending_sums_pass_through_linear_operators_only() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    values = _values(0, [(3,), (2, 2)])
    pending = [hp.distribute_tensor(value, mesh, [hp.Partial()]) for value in values]
    for func, rest in ((torch._foreach_add, (pending,)), (torch._foreach_mul, (2.0,)), (torch._foreach_neg, ())):
        with CommRecorder() as recorder:
            made = func(pending, *rest)
        assert not recorder.records and all(result.placements == (hp.Partial(),) for result in made)
        _compare(made, func(values, *([values] if rest and rest[0] is pending else rest)), func.__name__)
    for func, rest in ((torch._foreach_exp, ()), (torch._foreach_add, (1.0,)), (torch._foreach_mul, (pending,))):
        made = func(pending, *rest)
        assert all(result.placements == (hp.Replicate(),) for result in made)
        _compare(made, func(values, *([values] if rest and rest[0] is pending else rest)), func.__name__)
    with pytest.raises(
        RuntimeError, match=r"_foreach_exp_ cannot write into a tensor under .*reduce_partial\(\) first"
    ):
        torch._foreach_exp_(pending)
    torch._foreach_mul_(pending, 3.0)
    torch._foreach_zero_(pending)
    assert all(value.full_tensor().abs().sum() == 0 for value in pending)


@run_on_ranks(2)
def test_copies_clones_reductions_and_broadcasting() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    values, others = _values(0, [(5, 3), (4,)]), _values(1, [(5, 3), (4,)])
    ours = [hp.distribute_tensor(value.clone(), mesh, [hp.Shard(0)]) for value in values]
    theirs = [hp.distribute_tensor(value.clone(), mesh, [hp.Replicate()]) for value in others]
    clones = torch._foreach_clone(ours)
    torch._foreach_copy_(clones, theirs)
    _compare(clones, others, "copy")
    assert all(clone.placements == (hp.Shard(0),) for clone in clones)
    _compare(ours, values, "the originals")
    _compare(torch._foreach_max(ours), torch._foreach_max(values), "max")
    _compare(torch._foreach_pow(2.0, ours), torch._foreach_pow(2.0, values), "number to the power of tensors")
    rows = [tensor(3), tensor(1)]
    spread = [hp.distribute_tensor(row, mesh, [hp.Shard(0)]) for row in rows]
    _compare(torch._foreach_mul(ours, spread), torch._foreach_mul(values, rows), "broadcasting")
    factor = hp.distribute_tensor(torch.tensor(0.25, dtype=torch.float64), mesh, [hp.Partial()])
    torch._foreach_mul_(ours, factor)
    _compare(ours, [value * 0.25 for value in values], "a distributed number")


@run_on_ranks(4)
@pytest.mark.parametrize("order", [2, 1, 3.0, float("inf"), float("-inf"), 0])
def test_norms_take_one_reduction_for_all_tensors_spread_alike(order: float) -> None:
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    values = [tensor(*shape, seed=3) for shape in [(5, 3), (4,), (1, 2), (), (7,)]]
    first = [hp.distribute_tensor(v, mesh, [hp.Shard(0), hp.Replicate()]) for v in values if v.ndim]
    second = [hp.distribute_tensor(v, mesh, [hp.Shard(0), hp.Shard(0)]) for v in values if v.ndim]
    whole = [hp.distribute_tensor(v, mesh, [hp.Replicate(), hp.Replicate()]) for v in values]
    with CommRecorder() as recorder:
        found = torch._foreach_norm([*first, *second, *whole, *values], order)
    assert recorder.counts == {"all_reduce": 2}
    expected = torch._foreach_norm([v for v in values if v.ndim] * 2 + values * 2, order)
    _compare(found, expected, f"norm of order {order}")
    assert isinstance(found[0], hp.DTensor) and not isinstance(found[-1], hp.DTensor)


@run_on_ranks(2)
def test_gradients_flow_through_lists() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    values = [value.requires_grad_() for value in _values(0, [(5, 3), (4,)])]
    ours = [hp.distribute_tensor(value, mesh, [hp.Shard(0)]) for value in values]
    others = [hp.distribute_tensor(value, mesh, [hp.Replicate()]) for value in values]
    sum(v.square().sum() for v in torch._foreach_mul(values, [v * 2 for v in values])).backward()
    sum(v.square().sum() for v in torch._foreach_mul(ours, [v * 2 for v in others])).backward()
    for mine, other, want in zip(ours, others, values, strict=True):
        torch.testing.assert_close(mine.grad.full_tensor() + other.grad.full_tensor(), want.grad)
    sum(torch._foreach_norm(ours, 2)).full_tensor().backward()


@run_on_ranks(2)
def test_wrong_use_is_named() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    other_mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
    cut = hp.distribute_tensor(tensor(4), mesh, [hp.Shard(0)])
    with pytest.raises(RuntimeError, match=r"_foreach_add: a plain tensor of shape \(4,\) meets a distributed one"):
        torch._foreach_add([cut], [tensor(4)])
    with pytest.raises(ValueError, match="_foreach_add: the tensors are on different meshes"):
        torch._foreach_add([cut], [hp.distribute_tensor(tensor(4), other_mesh, [hp.Shard(0)])])


@run_on_ranks(2)
def test_whole_numbers_are_copied_from_sums_that_are_done() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    halves = hp.DTensor.from_local(torch.full((3,), 0.5), mesh, [hp.Partial()])
    whole = hp.distribute_tensor(torch.zeros(3, dtype=torch.int64), mesh, [hp.Replicate()])
    torch._foreach_copy_([whole], [halves])
    assert whole.full_tensor().tolist() == [1, 1, 1]
    pending = hp.DTensor.from_local(torch.zeros(3, dtype=torch.int64), mesh, [hp.Partial()])
    with pytest.raises(RuntimeError, match=r"_foreach_copy_ cannot write .*call reduce_partial\(\) first"):
        torch._foreach_copy_([pending], [halves])


@run_on_ranks(2)
def test_norms_of_negative_order_with_an_empty_block() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    values = [tensor(1, 3, low=1.0), tensor(4, low=1.0)]
    ours = [hp.distribute_tensor(value, mesh, [hp.Shard(0)]) for value in values]
    for order in (-2, -1.0, 1, 2, float("inf"), float("-inf")):
        for mine, want in zip(torch._foreach_norm(ours, order), torch._foreach_norm(values, order), strict=True):
            torch.testing.assert_close(mine.full_tensor(), want, msg=lambda text, o=order: f"order {o}: {text}")
    second = []
    for leaf in (values[0].clone().requires_grad_(), ours[0].detach().requires_grad_()):
        (gradient,) = torch.autograd.grad(leaf.norm(-2), leaf, create_graph=True)
        (gradient**2).sum().backward()
        second.append(leaf.grad.full_tensor() if isinstance(leaf, hp.DTensor) else leaf.grad)
    torch.testing.assert_close(*second)


@run_on_ranks(2, 4)
def test_one_factor_for_all_gets_the_gradient_of_every_rank() -> None:
    mesh = hp.init_device_mesh("cpu", (hp.get_platform().get_world_size(),))
    whole = [torch.arange(1.0, 6.0, dtype=torch.float64), torch.arange(6.0, dtype=torch.float64).reshape(3, 2)]
    sums = sum(value.square().sum() for value in whole)
    for operator, expected in ((torch._foreach_mul, 6 * sums), (torch._foreach_div, -2 * sums / 27)):
        for in_place, distributed in itertools.product((False, True), repeat=2):
            factor = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
            if distributed:
                factor = hp.distribute_tensor(factor, mesh, [hp.Replicate()])
            values = [hp.distribute_tensor(value, mesh, [hp.Shard(0)]) for value in whole]
            if in_place:
                results = [value.clone() for value in values]
                getattr(torch, f"{operator.__name__}_")(results, factor)
            else:
                results = operator(values, factor)
            sum(result.square().sum() for result in results).backward()
            gradient = factor.grad.full_tensor() if distributed else factor.grad
            torch.testing.assert_close(gradient, expected)
