"""Reductions under every layout: sums, means, extremes, moments and norms, also over cut and empty blocks."""

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.dtensor.comm_recorder import CommRecorder
from hyper_parallel.core.shard.dispatching.strict_mode import strict
from tests.shard.validator import Sample, assert_valid, tensor
from tests.world import run_on_ranks

only_on = "torch"  # calls PyTorch's operators one by one; MindSpore's own: test_mindspore_rules.py

NAN, INF = float("nan"), float("inf")
TIES = torch.tensor([[3.0, 1, 3], [0, 3, 3], [3, 0, 2], [3, 2, 1], [0, 3, 2]], dtype=torch.float64)
WITH_NAN = torch.tensor([[NAN, 1, 3], [0, 3, -INF], [3, NAN, 2], [3, 2, 1], [INF, 3, 2]], dtype=torch.float64)
COUNTS = torch.arange(15).reshape(5, 3) % 4
FLAGS = torch.tensor([[True, False, False], [True, True, False], [True, False, False]])
COMPLEX = torch.complex(tensor(3, 2), tensor(3, 2, seed=1))


def elementwise_max_keyword(x, y):
    return torch.max(x, other=y)


def numpy_spelling(x):
    return torch.sum(x, axis=1, keepdims=True)


SUMS = [
    Sample("sum", (tensor(5, 3),)),
    Sample("sum", (tensor(5, 3), 0)),
    Sample("sum", (tensor(5, 3), -1, True)),
    Sample("sum", (tensor(3, 2, 5), (0, -1)), {"keepdim": True}),
    Sample("sum", (tensor(1, 3), [])),
    Sample("sum", (tensor(0, 3), 0)),
    Sample("sum", (torch.tensor(2.5).double(), 0)),
    Sample("sum", (COUNTS, 0)),
    Sample("sum", (FLAGS,)),
    Sample("sum", (tensor(5, 3, dtype=torch.float32), 1), {"dtype": torch.float64}),
    Sample("sum", (tensor(5, 3), 1), {"dtype": torch.int64}, gradients=False),
    Sample(numpy_spelling, (tensor(5, 3),)),
    Sample("Tensor.sum", (tensor(5, 3),), {"dim": (0, 1)}),
    Sample("mean", (tensor(5, 3),)),
    Sample("mean", (tensor(5, 3), 0)),
    Sample("mean", (tensor(1, 3), -2, True)),
    Sample("mean", (tensor(3, 2, 5), (0, 2))),
    Sample("mean", (COUNTS, 0), {"dtype": torch.float64}),
    Sample("mean", (tensor(0, 3), 0)),
    Sample("nansum", (WITH_NAN.nan_to_num(NAN, 1.0, 2.0), 0)),
    Sample("nanmean", (WITH_NAN.nan_to_num(NAN, 1.0, 2.0), 0)),
    Sample("nanmean", (WITH_NAN.nan_to_num(NAN, 1.0, 2.0),)),
    Sample("count_nonzero", (COUNTS,)),
    Sample("count_nonzero", (COUNTS, (0, 1))),
    Sample("count_nonzero", (COUNTS, 1)),
    Sample("prod", (tensor(5, 3),)),
    Sample("prod", (tensor(5, 3), 0)),
    Sample("prod", (tensor(5, 3).round(), 1, True)),
    Sample("prod", (COUNTS + 1, 0)),
    Sample("any", (FLAGS,)),
    Sample("any", (FLAGS, 0)),
    Sample("all", (FLAGS, 0, True)),
    Sample("all", (FLAGS[:1],)),
    Sample("any", (COUNTS.to(torch.uint8), 1)),
    Sample("all", (COUNTS, (0, 1))),
    Sample("Tensor.sum_to_size", (tensor(2, 5, 3), (5, 1))),
    Sample("Tensor.sum_to_size", (COUNTS.int(), (5, 1))),
    Sample("trace", (tensor(5, 3),)),
    Sample("trace", (tensor(2, 7),)),
    Sample("median", (tensor(5, 3), 0)),
    Sample("median", (tensor(5, 3),)),
    Sample("nanmedian", (WITH_NAN, 1, True)),
    Sample("mode", (COUNTS, 0)),
    Sample("quantile", (tensor(5, 3), 0.3, 0)),
    Sample("quantile", (tensor(5, 3), torch.tensor([0.2, 0.7]).double(), 1), {"keepdim": True}, gradients=False),
    Sample("nn.functional.cosine_similarity", (tensor(4, 3, 2), tensor(3, 2, seed=1)), {"dim": 1}),
    Sample("pairwise_distance", (tensor(5, 3), tensor(5, 3, seed=1)), {"keepdim": True}),
]
EXTREMES = [
    Sample("amax", (TIES, 0)),
    Sample("amax", (TIES,)),
    Sample("amin", (TIES, (0, 1), True)),
    Sample("amax", (TIES[:1], 0)),
    Sample("amax", (WITH_NAN, 0)),
    Sample("aminmax", (TIES,), {"dim": 0}),
    Sample("aminmax", (TIES,)),
    Sample("max", (TIES,)),
    Sample("max", (WITH_NAN,)),
    Sample("min", (TIES,)),
    Sample("max", (TIES, 0)),
    Sample("max", (TIES, -1, True)),
    Sample("min", (TIES, 0), {"keepdim": True}),
    Sample("max", (WITH_NAN, 0)),
    Sample("max", (TIES[:1], 0)),
    Sample("min", (COUNTS, 1)),
    Sample("max", (FLAGS, 0)),
    Sample("Tensor.max", (TIES,), {"dim": 1}),
    Sample("max", (tensor(5, 3), tensor(3, seed=1))),
    Sample(elementwise_max_keyword, (tensor(5, 3), tensor(5, 1, seed=1))),
    Sample("argmax", (TIES,)),
    Sample("argmax", (TIES, 0)),
    Sample("argmin", (TIES, 1, True)),
    Sample("argmax", (TIES.reshape(1, 5, 3),), {"keepdim": True}),
    Sample("argmin", (COUNTS,)),
    Sample("argmax", (WITH_NAN, 0)),
    Sample("argmin", (WITH_NAN,)),
]
MOMENTS = [
    Sample("var", (tensor(5, 3),)),
    Sample("var", (tensor(5, 3), False)),
    Sample("var", (tensor(5, 3), 0)),
    Sample("var", (tensor(5, 3), 1, False, True)),
    Sample("var", (tensor(5, 3), (0, 1)), {"correction": 2, "keepdim": True}),
    Sample("var", (tensor(5, 3) + 1e6, 0)),
    Sample("var", (tensor(1, 3), 0)),
    Sample("var", (COMPLEX, 0)),
    Sample("std", (tensor(5, 3), 0)),
    Sample("std", (TIES[:, :1].clone().fill_(2.0),)),
    Sample("std", (tensor(5, 3),), {"dim": 0, "unbiased": False}),
    Sample("std", (tensor(3, 4, 2), [0, 2]), {"correction": 0.5}),
    Sample("var_mean", (tensor(5, 3), 0)),
    Sample("std_mean", (tensor(5, 3),), {"dim": (0, 1), "correction": 0}),
    Sample("std_mean", (tensor(5, 3),)),
    *(
        Sample("linalg.vector_norm", (values, p, dim))
        for values in (tensor(5, 3), TIES)
        for p in (1, 2, INF, -INF, 0, 3, 0.5, 1.5, -1, -2.5)
        for dim in (None, 0)
    ),
    Sample("linalg.vector_norm", (tensor(5, 3, low=0.5), -1, 0)),
    Sample("linalg.vector_norm", (torch.zeros(4, 3, dtype=torch.float64), 2, (0, 1), True)),
    Sample("linalg.vector_norm", (torch.zeros(4, 3, dtype=torch.float64), 1.5, 0)),
    Sample("linalg.vector_norm", (COMPLEX, 3, 0)),
    Sample("linalg.vector_norm", (tensor(5, 3, dtype=torch.float32),), {"dtype": torch.float64}, gradients=False),
    Sample("norm", (tensor(5, 3),)),
    Sample("norm", (tensor(5, 3), 1, 1)),
    Sample("Tensor.norm", (tensor(5, 3),), {"p": INF, "dim": 0, "keepdim": True}),
    Sample("linalg.norm", (tensor(5, 3),)),
    Sample("linalg.norm", (tensor(5, 3), 3, 0)),
    Sample("linalg.norm", (tensor(5, 3), 1)),
    Sample("linalg.norm", (tensor(2, 4, 3), "nuc", (-2, -1))),
    Sample("linalg.matrix_norm", (tensor(2, 4, 3), 1, (0, 2), True)),
    Sample("norm", (tensor(4, 3), "nuc")),
    Sample("renorm", (tensor(5, 3, 2), 2, 0, 1.0)),
    Sample("nn.functional.normalize", (tensor(5, 3),)),
    Sample("dist", (tensor(5, 3), tensor(5, 3, seed=1))),
    Sample("dist", (tensor(5, 3), tensor(3, seed=1)), {"p": INF}),
    Sample("dist", (tensor(5, 3), tensor(5, 1, seed=1), 1)),
]
FAMILIES = {"sums": SUMS, "extremes": EXTREMES, "moments": MOMENTS}


@pytest.mark.parametrize("family", FAMILIES)
def test_same_as_one_device(worlds, family: str) -> None:
    assert_valid(worlds, FAMILIES[family])


COUNTED = {
    "sum": (lambda x: x.sum(0), {}),
    "mean": (lambda x: x.mean(), {}),
    "amax": (lambda x: x.amax(0), {"all_reduce": 2}),  # one for the values, one for the ties of the gradient
    "max": (lambda x: x.max(0).values, {"all_reduce": 2}),
    "argmax": (lambda x: x.argmax(0), {"all_reduce": 2}),
    "var": (lambda x: x.var(0), {"all_reduce": 2}),
    "norm": (lambda x: x.norm(dim=0), {"all_reduce": 1}),
    "prod": (lambda x: x.prod(0), {"all_reduce": 1, "all_gather_into_tensor": 1}),
    "any": (lambda x: x.any(0), {"all_reduce": 1}),
    "logsumexp": (lambda x: x.logsumexp(0), {"all_reduce": 2}),
}


@run_on_ranks(2)
@pytest.mark.parametrize("name", list(COUNTED))
def test_only_results_travel(name: str) -> None:
    operator, wanted = COUNTED[name]
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    x = hp.distribute_tensor(tensor(6, 3).requires_grad_(), mesh, [hp.Shard(0)])
    with strict(implicit_redistribution=True), CommRecorder() as recorder:
        result = operator(x)
        if result.requires_grad:
            result.backward(hp.distribute_tensor(torch.ones(result.shape, dtype=x.dtype), mesh, [hp.Replicate()]))
    assert recorder.counts == wanted, recorder.table()
    assert max((record.num_bytes for record in recorder.records), default=0) <= 3 * 8


@run_on_ranks(4)
def test_empty_blocks_lose() -> None:
    """One row on four ranks: three blocks are empty, and the result is that of the one row."""
    mesh = hp.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    row = torch.tensor([[-5.0, -INF, 7.0]], dtype=torch.float64)
    x = hp.distribute_tensor(row, mesh, [hp.Shard(0)])
    assert torch.equal(x.amax(0).full_tensor(), row[0])
    assert torch.equal(x.min(0).values.full_tensor(), row[0])
    assert torch.equal(x.max(0).indices.full_tensor(), torch.zeros(3, dtype=torch.int64))
    assert torch.equal(x.argmin().full_tensor(), torch.tensor(1))
    assert torch.equal(x.int().long().amin(0).full_tensor(), row.int().long()[0])
    torch.testing.assert_close(x.mean(0).full_tensor(), row[0])


@run_on_ranks(2)
def test_half_precision_mean_does_not_overflow() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    values = torch.full((7,), 60000.0, dtype=torch.float16)
    x = hp.distribute_tensor(values, mesh, [hp.Shard(0)])
    torch.testing.assert_close(x.mean().full_tensor(), values.mean())
    spread = torch.tensor([0.0, 300, 0, 300, 0, 300], dtype=torch.float16)
    y = hp.distribute_tensor(spread, mesh, [hp.Shard(0)])
    torch.testing.assert_close(y.var(correction=0).full_tensor(), spread.var(correction=0))
    torch.testing.assert_close(y.norm().full_tensor(), spread.norm())


SECOND = {
    "var": lambda x: x.var(0),
    "std": lambda x: x.std(),
    "norm": lambda x: x.norm(3.0, 0),
    "amax": lambda x: x.amax(0) ** 3,
    "max": lambda x: x.max(0).values ** 3,
    "prod": lambda x: x.prod(0),
    "mean": lambda x: (x * x * x).mean(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "softmax": lambda x: x.softmax(0) ** 2,
    "log_softmax": lambda x: x.log_softmax(0) ** 2,
}


@run_on_ranks(2)
@pytest.mark.parametrize("name", list(SECOND))
def test_second_derivatives(name: str) -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    values = tensor(5, 3, low=0.2)

    def penalty(x):
        (first,) = torch.autograd.grad((SECOND[name](x) ** 2).sum(), x, create_graph=True)
        return (first * first).sum()

    plain = values.clone().requires_grad_()
    penalty(plain).backward()
    ours = hp.distribute_tensor(values.clone().requires_grad_(), mesh, [hp.Shard(0)])
    penalty(ours).backward()
    torch.testing.assert_close(ours.grad.full_tensor(), plain.grad)


@run_on_ranks(2)
def test_messages() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    x = hp.distribute_tensor(tensor(5, 3), mesh, [hp.Shard(0)])
    with pytest.raises(IndexError, match=r"sum on distributed tensors of global shape \(5, 3\).*out of range"):
        x.sum(2)
    empty = hp.distribute_tensor(tensor(0, 3), mesh, [hp.Shard(0)])
    with pytest.raises(IndexError, match="amax on distributed tensors of global shape"):
        empty.amax(0)
    x.std(0), x.argmax(0)  # what is planned for these is not for other dtypes
    with pytest.raises(RuntimeError, match="std and var only support floating point"):
        x.long().std(0)
    with pytest.raises(RuntimeError, match="does not support bool"):
        (x > 0).argmax(0)
    one = hp.distribute_tensor(tensor(1, 3), mesh, [hp.Shard(0)])  # the second rank has nothing
    for name in ("mean", "norm", "softmax", "log_softmax"):
        getattr(one, name)(dim=0)
        with pytest.raises((RuntimeError, TypeError), match=r"(?i)float"):
            getattr(one.long(), name)(dim=0)
    assert one.long().mean(dtype=torch.float64).full_tensor() == tensor(1, 3).long().double().mean()


@run_on_ranks(2)
def test_cut_by_an_axis_of_one_rank() -> None:
    mesh, values = hp.init_device_mesh("cpu", (1, 2)), tensor(5, 3, low=0.2)
    for name, function in SECOND.items():
        for other in (hp.Shard(1), hp.Replicate()):
            ours = hp.distribute_tensor(values.clone().requires_grad_(), mesh, [hp.Shard(0), other])
            plain = values.clone().requires_grad_()
            result, wanted = function(ours), function(plain)
            torch.testing.assert_close(result.full_tensor(), wanted, msg=lambda text, n=name: f"{n}: {text}")
            result.square().sum().backward()
            wanted.square().sum().backward()
            torch.testing.assert_close(ours.grad.full_tensor(), plain.grad, msg=lambda text, n=name: f"{n}: {text}")


@run_on_ranks(2)
def test_masked_reductions_and_plain_masks() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    plain, mask = tensor(5, 4).requires_grad_(), tensor(5, 4, seed=1) > 0
    for name in ("mean", "var", "std", "sum", "amax", "median", "logsumexp", "softmax", "norm"):
        function = getattr(torch.masked, name)
        arguments = (2.0, 1) if name == "norm" else (1,)
        for given in (None, mask):
            expected = function(plain, *arguments, mask=given)
            (want,) = torch.autograd.grad(expected.nan_to_num().square().sum(), plain)
            for placement in (hp.Shard(0), hp.Shard(1), hp.Replicate()):
                x = hp.distribute_tensor(plain.detach().clone().requires_grad_(), mesh, [placement])
                ours = function(
                    x, *arguments, mask=None if given is None else hp.distribute_tensor(given, mesh, [placement])
                )
                torch.testing.assert_close(ours.full_tensor(), expected, equal_nan=True)
                (gradient,) = torch.autograd.grad(ours.nan_to_num().square().sum(), x)
                torch.testing.assert_close(gradient.full_tensor(), want, equal_nan=True)
    with pytest.raises(
        RuntimeError, match=r"torch\.masked\.mean: a plain tensor of shape \(5, 4\) meets a distributed"
    ):
        torch.masked.mean(x, 1, mask=mask)
