"""Ranks whose block has no elements: operators that refuse such a block, or forget the graph there."""

import itertools

import torch

import hyper_parallel as hp
from tests.shard.validator import Sample, tensor, validate
from tests.world import run_on_ranks

only_on = "torch"  # PyTorch's operators that refuse such blocks; MindSpore's: test_mindspore_mended.py

COMPLEX = torch.complex(tensor(2, 3), tensor(2, 3, seed=1))

SAMPLES = [
    Sample("addmv", (tensor(1), tensor(2, 3), tensor(3))),
    Sample("addmv", (tensor(2), tensor(2, 3), tensor(3)), {"beta": 2, "alpha": 0.5}),
    Sample("addmm", (tensor(3), tensor(2, 1), tensor(1, 3))),
    Sample("addbmm", (tensor(1, 3), tensor(2, 2, 1), tensor(2, 1, 3))),
    Sample("view_as_real", (COMPLEX,)),
    Sample("nn.functional.embedding", (torch.tensor([0, 1, 0]), tensor(2, 3))),
    Sample("nn.functional.layer_norm", (tensor(2, 3), (3,), tensor(3), tensor(3, seed=1))),
    Sample("nn.functional.linear", (tensor(2, 3), tensor(1, 3), tensor(1))),
    Sample("nn.functional.conv1d", (tensor(2, 2, 5), tensor(2, 2, 3), tensor(2))),
    Sample("nn.functional.cross_entropy", (tensor(2, 3), torch.tensor([2, 0]))),
    Sample("nn.functional.scaled_dot_product_attention", (tensor(1, 2, 3, 4), tensor(1, 2, 3, 4), tensor(1, 2, 3, 4))),
    Sample("nn.functional.max_pool1d", (tensor(2, 1, 6), 2)),
    Sample("nn.functional.group_norm", (tensor(2, 4, 3), 2, tensor(4), tensor(4, seed=1))),
    Sample("var", (tensor(2, 3), 0)),
    Sample("logsumexp", (tensor(2, 3), 0)),
    Sample("amax", (tensor(2, 3), 1)),
    Sample("cumsum", (tensor(2, 3), 0)),
    Sample("topk", (tensor(2, 3), 2)),
    Sample("cat", ([tensor(2, 3), tensor(1, 3)],)),
    Sample("quantile", (tensor(2, 3), torch.tensor([0.2, 0.7], dtype=torch.float64), 1)),
    Sample("quantile", (tensor(2, 3), torch.tensor(0.2, dtype=torch.float64), 1), {"interpolation": "lower"}),
    Sample("ormqr", (tensor(2, 2, 2), tensor(2, 2), tensor(2, 2, 1))),
    Sample("einsum", ("ij,jk->ik", tensor(2, 1), tensor(1, 3))),
]


@run_on_ranks(4, timeout=200)
def test_same_as_one_device_where_ranks_have_nothing() -> None:
    wrong = validate(SAMPLES, (4,), most=16)
    assert not wrong, "\n".join(wrong)


F = torch.nn.functional
PLACES = torch.tensor([[[0, 3]]])
# The function, its tensors, and the dim of the first of which there is one row only; its like in the others.
OF_ONE_ROW = [
    (F.conv1d, (tensor(1, 2, 5), tensor(3, 2, 3, seed=1)), (0, None)),
    (F.conv1d, (tensor(2, 1, 5), tensor(3, 1, 3, seed=1), tensor(3)), (1, 1, None)),
    (F.conv_transpose1d, (tensor(2, 2, 5), tensor(2, 1, 3, seed=1), tensor(1)), (None, 1, 0)),
    (F.linear, (tensor(1, 5), tensor(3, 5, seed=1)), (0, None)),
    (lambda a, b: torch.cdist(a, b, 2.0, "use_mm_for_euclid_dist"), (tensor(1, 3), tensor(4, 3, seed=1)), (0, None)),
    (lambda x, weight: F.batch_norm(x, None, None, weight, training=True), (tensor(3, 1, 2), tensor(1)), (1, 0)),
    (F.instance_norm, (tensor(1, 3, 4),), (0,)),
    (lambda x: F.max_unpool1d(x, x.detach().mul(0).long() + PLACES.to(x.device), 2), (tensor(1, 1, 2),), (0,)),
    (lambda x: F.pad(x, (1, 2), mode="replicate"), (tensor(1, 3, 4),), (0,)),
    (lambda x: F.max_pool2d(x, 2), (tensor(1, 2, 4, 4),), (0,)),
    (lambda x: F.avg_pool2d(x, 2), (tensor(1, 2, 4, 4),), (0,)),
    (lambda x: torch.cummax(x, 1).values, (tensor(1, 3),), (0,)),
    (lambda x: torch.cumprod(x, 1), (tensor(1, 3),), (0,)),
    (lambda x: torch.cumprod(x, 1), (tensor(3, 1),), (0,)),  # one element on the last rank
    (lambda x: torch.logcumsumexp(x, 1), (tensor(1, 3),), (0,)),
    (lambda x: torch.linalg.vander(x, N=3), (tensor(1, 3),), (0,)),
]


@run_on_ranks(2)
def test_gradients_of_gradients_where_a_rank_has_nothing() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    for run, tensors, dims in OF_ONE_ROW:
        found = []
        for is_distributed in (False, True):
            leaves = [one.clone().requires_grad_() for one in tensors]
            given = leaves
            if is_distributed:
                leaves = [hp.distribute_tensor(one, mesh, [hp.Replicate()]).detach().requires_grad_() for one in leaves]
                places = [hp.Replicate() if dim is None else hp.Shard(dim) for dim in dims]
                # Cut on the way, so that all ranks must meet in the gradient of each.
                given = [one.redistribute(mesh, [place]) for one, place in zip(leaves, places, strict=True)]
            for is_linear, wanted in itertools.product((True, False), (given[:1], given)):
                with hp.implicit_replication():
                    result = run(*given)
                total = result.sum() if is_linear else result.square().sum()
                gradients = torch.autograd.grad(total, wanted, create_graph=True)
                recorded = [gradient for gradient in gradients if gradient.requires_grad]
                if recorded:
                    sum(gradient.square().sum() for gradient in recorded).backward()
            found.append([leaf.grad.full_tensor() if is_distributed else leaf.grad for leaf in leaves])
        torch.testing.assert_close(found[1], found[0])


@run_on_ranks(4)
def test_parameters_have_gradients_on_every_rank() -> None:
    mesh = hp.init_device_mesh("cpu", (4,))
    module = torch.nn.Sequential(
        torch.nn.Embedding(5, 4),
        torch.nn.LayerNorm(4),
        torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        torch.nn.Linear(4, 3),
    ).double()
    hp.distribute_module(module, mesh)
    ids = hp.distribute_tensor(torch.tensor([[0, 1, 4], [2, 2, 1]]), mesh, [hp.Shard(0)])  # two rows on four ranks
    module(ids).square().mean().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    norms = [float(parameter.grad.norm()) for parameter in module.parameters()]
    assert all(norm == norm for norm in norms) and sum(norms) > 0
