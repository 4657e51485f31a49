"""Others that meet distributed tensors: sparse and nested ones, which cannot, and the compiler, which lets them be."""

import warnings

import pytest
import torch

import hyper_parallel as hp
from tests.shard.validator import tensor
from tests.world import run_on_ranks

only_on = "torch"  # PyTorch's sparse and nested tensors and its compiler; MindSpore's: test_mindspore_mixing.py


@run_on_ranks(2)
def test_sparse_and_nested_tensors() -> None:
    warnings.simplefilter("ignore")
    mesh = hp.init_device_mesh("cpu", (2,))
    x = hp.distribute_tensor(tensor(4, 4), mesh, [hp.Shard(0)])
    sparse = torch.eye(4, dtype=torch.float64).to_sparse()
    others = [
        sparse,
        sparse.to_sparse_csr(),
        torch.nested.nested_tensor([tensor(2, 4), tensor(3, 4)]),
        torch.nested.nested_tensor([tensor(2, 4), tensor(3, 4)], layout=torch.jagged),
    ]
    for other in others:
        for call in (torch.add, torch.mul, torch.matmul, lambda a, b: torch.cat([a, b])):
            with pytest.raises(RuntimeError, match=r"a sparse or nested tensor meets a distributed one; .*to_dense"):
                call(x, other)
        with pytest.raises(TypeError, match="cannot shard a sparse or nested tensor"):
            hp.distribute_tensor(other, mesh, [hp.Replicate()])
        with pytest.raises(TypeError, match="cannot take a sparse or nested tensor"):
            hp.DTensor.from_local(other, mesh, [hp.Replicate()])
    # A sparse result is whole on every rank, and can be made dense and distributed again.
    made = x.to_sparse()
    assert made.is_sparse and not isinstance(made, hp.DTensor)
    torch.testing.assert_close(made.to_dense(), tensor(4, 4))


@run_on_ranks(2)
def test_plain_tensors_without_dims_are_counted_among_the_tensors() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    calls = [
        lambda x, two: torch.nn.functional.embedding(two, x),
        lambda x, two: torch.nn.functional.cross_entropy(x[0], two),
        lambda x, two: torch.nn.functional.mse_loss(x, two.double()),
        lambda x, two: torch.nn.functional.gaussian_nll_loss(x[0], x[1], two.double()),
        lambda x, two: torch.broadcast_tensors(x, two)[1],
        lambda x, two: torch.tensordot(x, two.double(), 0),
        lambda x, two: torch.meshgrid(x[0], two.double(), indexing="ij")[1],
    ]
    for call in calls:
        for placement in (hp.Shard(0), hp.Shard(1), hp.Replicate()):
            found = call(hp.distribute_tensor(tensor(4, 3), mesh, [placement]), torch.tensor(2))
            torch.testing.assert_close(found.full_tensor(), call(tensor(4, 3), torch.tensor(2)))


@pytest.mark.processes("torch.compile keeps one state per process")
@run_on_ranks(2)
def test_compiled_code_runs_on_distributed_tensors_as_it_is() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def program(x, y):
        return ((x * 2 + y)[1:3].t() @ y[:2]).sin().sum()

    compiled = torch.compile(program, backend=count)
    plain, x = tensor(4, 3), hp.distribute_tensor(tensor(4, 3), mesh, [hp.Shard(0)])
    for _ in range(2):
        torch.testing.assert_close(compiled(x, x).full_tensor(), program(plain, plain))
    assert not graphs
    module = torch.nn.Linear(3, 2, dtype=torch.float64)
    hp.distribute_module(module, mesh)
    quick = torch.compile(module, backend=count)
    quick(x).sum().backward()
    torch.testing.assert_close(module.weight.grad.full_tensor(), plain.sum(0).expand(2, 3))
    assert not graphs
    # Code for plain tensors is compiled as ever.
    torch.testing.assert_close(torch.compile(lambda x: x.sin() * 2, backend=count)(plain), plain.sin() * 2)
    assert len(graphs) == 1
