"""Ranks whose block has no elements: operators that refuse such a block, or forget the graph there."""

import torch

import hyper_parallel as hp
from tests.shard.validator import Sample, tensor, validate
from tests.world import run_on_ranks

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


@run_on_ranks(2)
def test_gradients_of_gradients_where_a_rank_has_nothing() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    cases = [
        (torch.nn.functional.conv1d, tensor(1, 2, 5), tensor(3, 2, 3, seed=1)),
        (torch.nn.functional.linear, tensor(1, 5), tensor(3, 5, seed=1)),
        (lambda a, b: torch.cdist(a, b, 2.0, "use_mm_for_euclid_dist"), tensor(1, 3), tensor(4, 3, seed=1)),
    ]
    for run, x, weight in cases:
        found = []
        for places in (None, (hp.Shard(0), hp.Replicate())):  # x has one row
            leaves = [x.clone(), weight.clone()]
            if places is not None:
                leaves = [hp.distribute_tensor(leaf, mesh, [place]) for leaf, place in zip(leaves, places, strict=True)]
            for leaf in leaves:
                leaf.requires_grad_()
            (gradient,) = torch.autograd.grad(run(*leaves).square().sum(), leaves[0], create_graph=True)
            gradient.square().sum().backward()
            found.append([leaf.grad if places is None else leaf.grad.full_tensor() for leaf in leaves])
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
