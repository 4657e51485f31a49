"""Collectives with gradients against the plain computation in one process: every rank knows the inputs of all ranks,
computes the reference from them and compares values, gradients and gradients of gradients with its own."""

import functools
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.frameworks import differentiable as functions
from tests.frameworks import dist, groups, known_dtypes, on_mindspore
from tests.world import run_on_ranks

EXCHANGED = ["bool", "float8_e4m3fn", "complex64", "int16"]
# The gradients are the same code on both frameworks, and take ten times as long over the bridge.
SIZES = [(3, 3, 3, 3), (1, 1, 1, 1), (2, 0, 3, 1), (0, 1, 0, 0), (0, 0, 0, 0)][2 if on_mindspore else 0 :]
LENGTHS = (5, 0) if on_mindspore else (8, 5, 1, 0)
WORLDS = (4,) if on_mindspore else (2, 4)


@functools.cache
def make_groups() -> list[Any | None]:
    """The world and, in a world of 4, this rank's pair of every second rank."""
    if dist.get_world_size() < 4:
        return [None]
    first = dist.get_rank() % 2
    return [None, dist.new_group([first, first + 2])]


def in_each_group(body: Callable[..., None]) -> Callable[..., None]:
    """Call the body with each of `make_groups` as `group`."""

    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> None:
        for group in make_groups():
            body(*args, group=group, **kwargs)

    signature = inspect.signature(body)
    others = [parameter for name, parameter in signature.parameters.items() if name != "group"]
    run.__signature__ = signature.replace(parameters=others)
    return run


def make_group_of_one() -> Any:
    return dist.new_group([dist.get_rank()])


def make_inputs(shapes: Sequence[Sequence[int]], strided: bool = False) -> list[torch.Tensor]:
    """One float64 tensor per rank of the group, the same list on every rank."""
    generator = torch.Generator().manual_seed(7)
    made = [torch.randn(tuple(shape), generator=generator, dtype=torch.float64) for shape in shapes]
    if strided:
        made = [data.transpose(0, -1).contiguous().transpose(0, -1) for data in made]
        assert not any(data.is_contiguous() for data in made if min(data.shape) > 1)
    return made


def make_like(outputs: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(output.shape, generator=generator, dtype=torch.float64) for output in outputs]


def losses(outputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], kind: str) -> list[torch.Tensor]:
    """By rank: "expanded" sends back one number, repeated; "curved" one per element, and has second derivatives."""
    if kind == "expanded":
        return [3.0 * output.sum() for output in outputs]
    return [(weight * (output + output**3)).sum() for output, weight in zip(outputs, weights, strict=True)]


def assert_same_as_one_process(
    function: Callable[[torch.Tensor], torch.Tensor],
    reference: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    inputs: list[torch.Tensor],
    rank: int,
    whole: bool,
) -> None:
    """`reference` gives the result of every rank. If the result is `whole`, the loss made of it counts once; if not,
    the losses of the ranks add up."""
    for kind in ("expanded", "curved"):
        leaves = [data.clone().requires_grad_() for data in inputs]
        outputs = reference(leaves)
        weights = make_like(outputs, seed=8)
        if whole:
            weights = [weights[0]] * len(weights)
        reference_losses = losses(outputs, weights, kind)
        reference_loss = reference_losses[0] if whole else sum(reference_losses)

        mine = inputs[rank].clone(memory_format=torch.preserve_format).requires_grad_()
        assert mine.stride() == inputs[rank].stride()
        output = function(mine)
        torch.testing.assert_close(output, outputs[rank])
        assert torch.equal(mine, inputs[rank]), "the input was changed"
        loss = losses([output], [weights[rank]], kind)[0]

        second_order = kind == "curved" and not on_mindspore  # which refuses them on a CPU
        grads = torch.autograd.grad(reference_loss, leaves, create_graph=second_order, allow_unused=True)
        grads = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]
        (grad,) = torch.autograd.grad(loss, mine, create_graph=second_order)
        torch.testing.assert_close(grad, grads[rank])

        if second_order:
            directions = make_like(inputs, seed=9)
            products = [(grad * direction).sum() for grad, direction in zip(grads, directions, strict=True)]
            seconds = torch.autograd.grad(sum(products), leaves)
            (second,) = torch.autograd.grad((grad * directions[rank]).sum(), mine)
            torch.testing.assert_close(second, seconds[rank])


def place(group: Any | None) -> tuple[int, int]:
    return dist.get_rank(group), dist.get_world_size(group)


def chunk_of(data: torch.Tensor, num_chunks: int, index: int, dim: int) -> torch.Tensor:
    block = -(-data.shape[dim] // num_chunks)
    indices = [i for i in range(data.shape[dim]) if i // max(block, 1) == index]
    return data.index_select(dim, torch.tensor(indices, dtype=torch.long))


@run_on_ranks(4)
@pytest.mark.parametrize("gradient", ["slice", "reduce_scatter"])
@pytest.mark.parametrize("sizes", SIZES)
@in_each_group
def test_all_gather_concat(sizes: tuple[int, ...], gradient: str, group: Any | None) -> None:
    rank, num_ranks = place(group)
    sizes = sizes[:num_ranks]
    even = len(set(sizes)) == 1
    for dim, strided in ((0, False), (1, True), (-1, False)):
        shapes = [[2, 3, 4] for _ in sizes]
        for shape, size in zip(shapes, sizes, strict=True):
            shape[dim] = size
        for concat_size in (num_ranks, sizes) if even else (sizes,):
            assert_same_as_one_process(
                lambda x, c=concat_size, d=dim: functions.differentiable_all_gather_concat(x, group, c, d, gradient),
                lambda leaves, d=dim: [torch.cat(leaves, d) for _ in leaves],
                make_inputs(shapes, strided and sum(sizes) > 0),
                rank,
                whole=gradient == "slice",
            )


@run_on_ranks(2)
def test_all_gather_concat_slices_by_default_and_keeps_no_whole_gradient() -> None:
    rank, num_ranks = place(None)
    mine = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    output = functions.differentiable_all_gather_concat(mine, None, num_ranks, 0)
    weight = torch.arange(30, dtype=torch.float64).reshape(10, 3)
    (output * weight).sum().backward()
    assert torch.equal(mine.grad, weight[rank * 5 : rank * 5 + 5])
    assert mine.grad.untyped_storage().nbytes() == 5 * 3 * 8


@run_on_ranks(4)
@pytest.mark.parametrize("rows", [0, 1, 3])
@in_each_group
def test_all_to_all(rows: int, group: Any | None) -> None:
    rank, num_ranks = place(group)
    for output_shape in ((num_ranks * rows, 4), (2, num_ranks * rows, 2)):
        assert_same_as_one_process(
            lambda x, s=output_shape: functions.differentiable_all_to_all(x, s, group),
            lambda leaves, s=output_shape: [
                torch.cat([leaf[rows * r : rows * (r + 1)] for leaf in leaves]).reshape(s) for r in range(num_ranks)
            ],
            make_inputs([(num_ranks * rows, 4)] * num_ranks, strided=rows > 0),
            rank,
            whole=False,
        )


@run_on_ranks(4)
@pytest.mark.parametrize("name", ["differentiable_all_to_all_single", "differentiable_all_to_all_single_async"])
@pytest.mark.parametrize("splits", ["even", "uneven", "only to the last rank", "nothing"])
@in_each_group
def test_all_to_all_single(splits: str, name: str, group: Any | None) -> None:
    rank, num_ranks = place(group)
    counts = {
        "even": lambda source, target: 2,
        "uneven": lambda source, target: (3 * source + 2 * target) % 4,
        "only to the last rank": lambda source, target: 3 if target == num_ranks - 1 else 0,
        "nothing": lambda source, target: 0,
    }[splits]
    table = [[counts(source, target) for target in range(num_ranks)] for source in range(num_ranks)]
    given = (None, None) if splits == "even" else (table[rank], [row[rank] for row in table])

    def reference(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        parts = [leaf.split(row) for leaf, row in zip(leaves, table, strict=True)]
        return [torch.cat([parts[source][target] for source in range(num_ranks)]) for target in range(num_ranks)]

    assert_same_as_one_process(
        lambda x: getattr(functions, name)(x, *given, group),
        reference,
        make_inputs([(sum(row), 3) for row in table], strided=sum(map(sum, table)) > 0),
        rank,
        whole=False,
    )


REDUCTIONS = {
    "sum": lambda stack: stack.sum(0),
    "avg": lambda stack: stack.mean(0),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
    "prod": lambda stack: stack.prod(0),
}


@run_on_ranks(4)
@pytest.mark.parametrize("op", REDUCTIONS)
@in_each_group
def test_all_reduce(op: str, group: Any | None) -> None:
    rank, num_ranks = place(group)
    for shape, strided in (((3, 2), False), ((2, 3, 2), True), ((), False), ((1,), False), ((0, 2), False)):
        assert_same_as_one_process(
            lambda x: functions.differentiable_all_reduce(x, op, group),
            lambda leaves: [REDUCTIONS[op](torch.stack(leaves))] * num_ranks,
            make_inputs([shape] * num_ranks, strided),
            rank,
            whole=True,
        )


@run_on_ranks(*WORLDS)
@pytest.mark.parametrize("op", ["max", "min", "prod"])
def test_all_reduce_with_ties_and_zeros(op: str) -> None:
    rank, num_ranks = place(None)
    # All combinations of three values over the ranks: every number of ties, and of zeros in a product.
    values = torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64)
    inputs = [column.contiguous() for column in torch.cartesian_prod(*[values] * num_ranks).unbind(1)]
    assert_same_as_one_process(
        lambda x: functions.differentiable_all_reduce(x, op, None),
        lambda leaves: [REDUCTIONS[op](torch.stack(leaves))] * num_ranks,
        inputs,
        rank,
        whole=True,
    )


@run_on_ranks(*WORLDS)
@pytest.mark.parametrize(
    ("name", "op"),
    [("all_reduce", op) for op in REDUCTIONS] + [("reduce_scatter", op) for op in REDUCTIONS if op != "prod"],
)
def test_gradient_against_differences(name: str, op: str) -> None:
    """Move all ranks' inputs along random directions: the loss changes by the sum of gradient times direction."""
    rank, num_ranks = place(None)
    mine, direction = (make_like([torch.empty(5, 3)] * num_ranks, seed)[rank] for seed in (1, 2))

    def loss_at(x: torch.Tensor) -> torch.Tensor:
        if name == "all_reduce":
            return functions.differentiable_all_reduce(x, op, None).sin().sum()
        return functions.differentiable_reduce_scatter(x, num_ranks, 0, op, None).sin().sum()

    leaf = mine.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss_at(leaf), leaf)
    slope = (grad * direction).sum()
    dist.all_reduce(slope)
    step = 1e-6
    difference = (loss_at(mine + step * direction) - loss_at(mine - step * direction)) / (2 * step)
    if name == "reduce_scatter":
        dist.all_reduce(difference)
    torch.testing.assert_close(slope, difference, rtol=1e-6, atol=1e-7)


@run_on_ranks(4)
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("length", LENGTHS)
@in_each_group
def test_reduce_scatter(length: int, op: str, group: Any | None) -> None:
    rank, num_ranks = place(group)
    for dim, strided in ((0, False), (-2, True)):
        shape = [2, 3, 2]
        shape[dim] = length
        inputs = make_inputs([shape] * num_ranks, strided and length > 0)
        if op in ("max", "min"):
            inputs = [data.mul(2).round() for data in inputs]  # ties
        assert_same_as_one_process(
            lambda x, d=dim: functions.differentiable_reduce_scatter(x, num_ranks, d, op, group),
            lambda leaves, d=dim: [
                chunk_of(REDUCTIONS[op](torch.stack(leaves)), num_ranks, r, d) for r in range(num_ranks)
            ],
            inputs,
            rank,
            whole=False,
        )


@run_on_ranks(4)
def test_reduce_scatter_cuts_by_the_chunk_rule() -> None:
    rank, num_ranks = place(None)
    shape = functions.differentiable_reduce_scatter(torch.ones(5, 2), num_ranks, 0, "sum", None).shape
    assert tuple(shape) == [(2, 2), (2, 2), (1, 2), (0, 2)][rank]


@run_on_ranks(4)
@in_each_group
def test_vary(group: Any | None) -> None:
    """The same leaf on every rank, used by each in its own way: its gradient is the sum."""
    second_order = not on_mindspore
    rank, num_ranks = place(group)
    shared = make_inputs([(2, 3)])[0]
    others = make_inputs([(2, 3)] * num_ranks)

    leaf = shared.clone().requires_grad_()
    reference_loss = sum((leaf**2 * other).sum() for other in others)
    (expected,) = torch.autograd.grad(reference_loss, leaf, create_graph=True)
    (expected_second,) = torch.autograd.grad((expected**2).sum(), leaf)

    mine = shared.clone().requires_grad_()
    output = functions.vary(mine, group)
    assert torch.equal(output, mine)
    (grad,) = torch.autograd.grad((output**2 * others[rank]).sum(), mine, create_graph=second_order)
    torch.testing.assert_close(grad, expected)
    if second_order:
        (second,) = torch.autograd.grad((grad**2).sum(), mine)
        torch.testing.assert_close(second, expected_second)


@run_on_ranks(*WORLDS)
@pytest.mark.parametrize("shape", [(3, 2), (), (0, 2)])
def test_p2p_exchange(shape: tuple[int, ...]) -> None:
    rank, num_ranks = place(None)
    peers = {r: num_ranks - 1 - r for r in range(num_ranks)}
    assert_same_as_one_process(
        lambda x: functions.p2p_exchange(x, peers[rank]),
        lambda leaves: [leaves[peers[r]].clone() for r in range(num_ranks)],
        make_inputs([shape] * num_ranks, strided=shape == (3, 2)),
        rank,
        whole=False,
    )


@run_on_ranks(4)
def test_p2p_exchange_in_a_group_takes_ranks_of_the_world() -> None:
    group = make_groups()[1]
    rank = dist.get_rank()
    peer = (rank + 2) % 4
    received = functions.p2p_exchange(torch.tensor([float(rank)]), peer, group)
    assert received.tolist() == [peer]
    with pytest.raises(ValueError, match=r"peer_rank=\d is not in the group; .* here one of \[\d, \d\]"):
        functions.p2p_exchange(torch.zeros(1), (rank + 1) % 4, group)


@run_on_ranks(2)
def test_p2p_exchange_with_itself_is_the_identity() -> None:
    data = torch.randn(3, requires_grad=True)
    functions.p2p_exchange(data, dist.get_rank()).sum().backward()
    assert torch.equal(data.grad, torch.ones(3))


def calls_with(data: torch.Tensor, group: Any | None) -> dict[str, torch.Tensor]:
    """Every function on a tensor of 4 rows."""
    num_ranks = dist.get_world_size(group)
    results = {
        "gather": functions.differentiable_all_gather_concat(data, group, num_ranks, 0),
        "all_to_all": functions.differentiable_all_to_all(data, data.shape, group),
        "single": functions.differentiable_all_to_all_single(data, None, None, group),
        "async": functions.differentiable_all_to_all_single_async(data, None, None, group),
        "vary": functions.vary(data, group),
        "exchange": functions.p2p_exchange(data, dist.get_rank() ^ 1 if num_ranks > 1 else dist.get_rank(), group),
    }
    for op in ("sum", "max", "min", "prod"):
        results[f"all_reduce {op}"] = functions.differentiable_all_reduce(data, op, group)
    for op in ("sum", "max", "min"):
        results[f"reduce_scatter {op}"] = functions.differentiable_reduce_scatter(data, num_ranks, 0, op, group)
    return results


@run_on_ranks(2)
def test_a_group_of_one_gives_the_input_itself() -> None:
    group = make_group_of_one()
    data = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    for name, result in calls_with(data, group).items():
        assert result.data_ptr() == data.data_ptr(), name
        (grad,) = torch.autograd.grad(result.sum(), data)
        assert torch.equal(grad, torch.ones(4, 2)), name


@run_on_ranks(2)
def test_integers_pass_without_a_gradient() -> None:
    rank = dist.get_rank()
    data = torch.arange(4) + 10 * rank
    results = calls_with(data, None)
    assert not any(result.requires_grad for result in results.values())
    assert all(result.dtype == torch.int64 for result in results.values())
    assert results["gather"].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert results["single"].tolist() == ([0, 1, 10, 11] if rank == 0 else [2, 3, 12, 13])
    assert results["all_reduce prod"].tolist() == [0, 11, 24, 39]
    assert results["reduce_scatter max"].tolist() == ([10, 11] if rank == 0 else [12, 13])
    assert results["exchange"].tolist() == (torch.arange(4) + 10 * (1 - rank)).tolist()


@run_on_ranks(2)
def test_results_may_be_changed_in_place() -> None:
    data = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    for name, result in calls_with(data * 1.0, None).items():
        if name in ("vary", "reduce_scatter max", "reduce_scatter min"):
            continue  # made of the input's memory, or needed in backward: autograd refuses, as for torch.amax
        expected = torch.autograd.grad((result * 2).sum(), data, retain_graph=True)[0]
        result.mul_(2)
        torch.testing.assert_close(torch.autograd.grad(result.sum(), data, retain_graph=True)[0], expected, msg=name)


@run_on_ranks(2)
def test_a_nan_is_not_lost_and_its_gradient_is_that_of_one_process() -> None:
    rank = dist.get_rank()
    nan = float("nan")
    inputs = [torch.tensor([nan, 1.0, 2.0]).double(), torch.tensor([1.0, nan, 3.0]).double()]
    leaves = [data.clone().requires_grad_() for data in inputs]
    expected = torch.stack(leaves).amax(0)
    mine = inputs[rank].clone().requires_grad_()
    result = functions.differentiable_all_reduce(mine, "max", None)
    torch.testing.assert_close(result, expected, equal_nan=True)
    expected_grads = torch.autograd.grad(expected.sum(), leaves)
    (grad,) = torch.autograd.grad(result.sum(), mine)
    torch.testing.assert_close(grad, expected_grads[rank], equal_nan=True)


@run_on_ranks(2)
@pytest.mark.parametrize("dtype", [name for name in EXCHANGED if known_dtypes([getattr(torch, name)])])
def test_p2p_exchange_carries_every_dtype(dtype: str) -> None:
    values = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    rank = dist.get_rank()
    received = functions.p2p_exchange(values[rank].to(getattr(torch, dtype)), 1 - rank)
    assert received.dtype == getattr(torch, dtype)
    assert received.to(torch.complex64).real.tolist() == values[1 - rank].tolist()


@run_on_ranks(4)
def test_groups_of_the_library_and_objects_that_hold_one() -> None:
    rank = dist.get_rank()
    pair = [rank - rank % 2, rank - rank % 2 + 1]
    holder = SimpleNamespace(group=groups.make_group(pair))
    data = torch.ones(4, dtype=torch.float64, requires_grad=True)
    results = calls_with(data * (rank + 1), holder.group)
    assert results["exchange"].tolist() == [(rank ^ 1) + 1.0] * 4
    assert functions.differentiable_all_reduce(data, "sum", holder).tolist() == [2.0] * 4
    assert functions.p2p_exchange(data * rank, rank ^ 1, holder).tolist() == [rank ^ 1] * 4


@run_on_ranks(2)
def test_bfloat16_keeps_its_type_and_sums() -> None:
    data = torch.full((4, 2), 1.5, dtype=torch.bfloat16, requires_grad=True)
    for name, result in calls_with(data, None).items():
        assert result.dtype == torch.bfloat16, name
        (grad,) = torch.autograd.grad(result.sum(), data)
        assert grad.dtype == torch.bfloat16, name
    assert functions.differentiable_all_reduce(data, "sum", None).tolist() == [[3.0, 3.0]] * 4


MISTAKES = [
    (
        lambda x, n: functions.differentiable_all_gather_concat(x, None, n, 2),
        r"differentiable_all_gather_concat: concat_dim 2 is out of range for a tensor of shape \(4, 3\)",
    ),
    (
        lambda x, n: functions.differentiable_all_gather_concat(x, None, n + 1, 0),
        r"concat_size is 3 but the group has 2 ranks; give the number of ranks, or a sequence",
    ),
    (
        lambda x, n: functions.differentiable_all_gather_concat(x, None, [4] * (n + 1), 0),
        r"concat_size \(4, 4, 4\) has 3 entries but the group has 2 ranks",
    ),
    (
        lambda x, n: functions.differentiable_all_gather_concat(x, None, [5] * n, 0),
        r"gives rank \d of the group 5 elements on dim 0, but its tensor has shape \(4, 3\)",
    ),
    (
        lambda x, n: functions.differentiable_all_gather_concat(x, None, [4, -4], 0),
        r"concat_size \(4, -4\) has a negative entry",
    ),
    (
        lambda x, n: functions.differentiable_all_gather_concat(x, None, n, 0, grad="sum"),
        r"grad must be one of \('slice', 'reduce_scatter'\), got 'sum'",
    ),
    (
        lambda x, n: functions.differentiable_all_to_all(x[:3], (3, 3), None),
        r"dim 0 of the input of shape \(3, 3\) cannot be split into 2 equal parts.* use differentiable_all_to_all_sin",
    ),
    (
        lambda x, n: functions.differentiable_all_to_all(x, (4, 4), None),
        r"output_shape \(4, 4\) does not hold the 12 elements of the input of shape \(4, 3\)",
    ),
    (
        lambda x, n: functions.differentiable_all_to_all_single(x.sum(), None, None, None),
        r"differentiable_all_to_all_single: a tensor with 0 dims has no rows to send",
    ),
    (
        lambda x, n: functions.differentiable_all_to_all_single(x, [1, 1], [1, 1], None),
        r"input_splits \(1, 1\) add up to 2 rows but the input has shape \(4, 3\)",
    ),
    (
        lambda x, n: functions.differentiable_all_to_all_single_async(x, [2, 2], [3, 3], None),
        r"_async: rank \d of the group sends itself 2 rows .* but expects 3 from itself \(output_splits \(3, 3\)\)",
    ),
    (
        lambda x, n: functions.differentiable_all_reduce(x, "median", None),
        r"differentiable_all_reduce: op must be one of sum, avg, max, min, prod; got 'median'",
    ),
    (
        lambda x, n: functions.differentiable_reduce_scatter(x, n, 0, "prod", None),
        r"differentiable_reduce_scatter: op must be one of sum, avg, max, min; got 'prod'",
    ),
    (
        lambda x, n: functions.differentiable_reduce_scatter(x, 4, 0, "sum", None),
        r"dev_num is 4 but the group has 2 ranks",
    ),
    (
        lambda x, n: functions.differentiable_reduce_scatter(x, n, -3, "sum", None),
        r"axis -3 is out of range for a tensor of shape \(4, 3\)",
    ),
    (
        lambda x, n: functions.p2p_exchange(x, 2),
        r"p2p_exchange on rank 1 .*: peer_rank=2 is not in the group; peer_rank is a rank of the world",
    ),
]


@run_on_ranks(2)
def test_mistakes_are_found_before_anything_is_sent() -> None:
    """Only one rank makes the mistake: had anything been sent, it would meet the all-reduce that follows."""
    for call, message in MISTAKES:
        if dist.get_rank() == 1:
            with pytest.raises(ValueError, match=message):
                call(torch.ones(4, 3), 2)
        count = torch.ones(1)
        dist.all_reduce(count)
        assert count.item() == 2, message


@run_on_ranks(2)
def test_what_is_not_a_tensor_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"differentiable_all_reduce: expected a (torch|mindspore).Tensor, got list"):
        functions.differentiable_all_reduce([1.0], "sum", None)
