"""Experts and tokens in all layouts: values and gradients are those of one device, without a factor."""

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel import DTensor, Replicate, Shard
from hyper_parallel.core.expert_parallel.experts_op import experts
from hyper_parallel.platform import get_platform
from hyper_parallel.testing import threads
from tests.expert_parallel.test_experts_op import FORMS, by_token, inputs, leaves, routing
from tests.frameworks import on_mindspore, ours, theirs
from tests.world import run_on_ranks, small_or_sweep

DTYPE = torch.float32 if on_mindspore else torch.float64
TOLERANCE = 1e-5 if on_mindspore else 1e-11
R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)

# name: shape and axes of the mesh, placements of tokens, of experts, or their inner features with "features"
CASES_2 = {
    "tokens and experts sharded": ((2,), "ep", [S0], [S0]),
    "tokens sharded, experts replicated": ((2,), "ep", [S0], [R]),
    "tokens replicated, experts sharded": ((2,), "ep", [R], [S0]),
    "replicated, sliced": ((2,), "ep", [R], [S0], "dispatch"),
    "features": ((2,), "tp", [R], ["features"]),
    "features, tokens sharded": ((2,), "tp", [S0], ["features"]),
}
CASES_4 = {
    "ep 4": ((4,), "ep", [S0], [S0]),
    "ep 4, replicated": ((4,), "ep", [R], [S0]),
    "edp 2 x ep 2": ((2, 2), "edp ep", [S0, S0], [R, S0]),
    "ep 2 x tp 2, tokens replicated over tp": ((2, 2), "ep tp", [S0, R], [S0, R]),
    "ep over both, tokens replicated over tp": ((2, 2), "ep tp", [S0, R], [S0, S0]),
    "ep 2, features over tp": ((2, 2), "ep tp", [S0, R], [S0, "features"]),
    "tokens over the other axis": ((2, 2), "ep tp", [R, S0], [S0, R]),
}
ROUTINGS = ("balanced", "all to one", "one empty", "few")


def _index(name, num_experts, choices=2):
    if name == "few":  # fewer tokens than ranks
        return routing("balanced", tokens=1, num_experts=num_experts, choices=choices)
    return routing(name, tokens=11, num_experts=num_experts, choices=choices)


def check(shape, axes, tokens, weights_at, way="auto", *, form="two", name="balanced", num_experts=4):
    platform = get_platform()
    form, index = FORMS[form], _index(name, num_experts)
    options = {"is_transposed": form.get("is_transposed", False), "weigh_inputs": form.get("weigh_inputs", False)}
    values = inputs(form, index, DTYPE, num_experts=num_experts)
    (hidden, weights, up, down, up_bias, down_bias), wanted = leaves(values, lambda one: one.clone().requires_grad_())
    expected = by_token(
        hidden, torch.tensor(index), weights, up, down, form["activation"], up_bias, down_bias, **options
    )
    (expected * expected).sum().backward()

    mesh = hp.init_device_mesh("cpu", shape, mesh_dim_names=tuple(axes.split()))
    inner_of_up, inner_of_down = (2, 1) if options["is_transposed"] else (1, 2)

    def at(dim):
        return [(Shard(dim) if dim is not None else R) if one == "features" else one for one in weights_at]

    def place(value, placements):
        if value is None:
            return None
        return platform.set_tensor_requires_grad(hp.distribute_tensor(ours(value), mesh, placements))

    given = [place(one, tokens) for one in values[:2]]
    given_up = [place(one, at(inner_of_up)) for one in values[2]]
    given_down = place(values[3], at(inner_of_down))
    given_up_bias = None if values[4] is None else [place(one, at(1)) for one in values[4]]
    given_down_bias = place(values[5], at(None))
    result = experts(
        given[0],
        hp.distribute_tensor(ours(torch.tensor(index)), mesh, tokens),
        given[1],
        given_up,
        given_down,
        activation=form["activation"],
        up_bias=given_up_bias,
        down_bias=given_down_bias,
        way=way,
        **options,
    )
    assert isinstance(result, DTensor) and tuple(result.shape) == tuple(expected.shape)
    loss = (result * result).sum()
    platform.backward(loss)
    assert torch.allclose(theirs(result.full_tensor()), expected.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    found = [
        *given,
        *given_up,
        given_down,
        *(given_up_bias or ()),
        *([] if given_down_bias is None else [given_down_bias]),
    ]
    for one, want in zip(found, wanted, strict=True):
        gradient = platform.get_grad(one)
        assert gradient is not None, "every block gets a gradient, also without tokens, also without experts"
        want = torch.zeros_like(want) if want.grad is None else want.grad
        assert torch.allclose(theirs(gradient.full_tensor()), want, rtol=10 * TOLERANCE, atol=10 * TOLERANCE)


@pytest.mark.parametrize("name", small_or_sweep(ROUTINGS, ["all to one"] if on_mindspore else ROUTINGS))
@pytest.mark.parametrize("case", small_or_sweep(CASES_2, list(CASES_2)[:3] if on_mindspore else CASES_2))
@run_on_ranks(2)
def test_on_two_ranks(case, name):
    check(*CASES_2[case], name=name)


@pytest.mark.parametrize("name", small_or_sweep(ROUTINGS, [] if on_mindspore else ["few"]))
@pytest.mark.parametrize("num_experts", [4, 6, 3])
@pytest.mark.parametrize("case", small_or_sweep(CASES_4, CASES_4))
@run_on_ranks(4)
def test_on_four_ranks_and_with_uneven_experts(case, num_experts, name):
    check(*CASES_4[case], name=name, num_experts=num_experts)


@pytest.mark.parametrize("form", small_or_sweep(FORMS, [] if on_mindspore else FORMS))
@pytest.mark.parametrize("case", ["tokens and experts sharded", "tokens replicated, experts sharded"])
@run_on_ranks(2)
def test_every_form_of_experts(case, form):
    check(*CASES_2[case], form=form)


@pytest.mark.sweep
@pytest.mark.parametrize("form", ["weights first", "no gate"])
@run_on_ranks(2)
def test_sharded_features_of_other_forms(form):
    check(*CASES_2["features"], form=form)


@pytest.mark.skipif(on_mindspore, reason="autocast is PyTorch's")
@pytest.mark.parametrize("inner", [8, 5])  # with the grouped kernel, and without
def test_under_autocast_all_ranks_send_one_dtype(inner):
    def work():
        mesh, made = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), torch.Generator().manual_seed(0)
        up, down, tokens = (torch.randn(size, generator=made) for size in ((4, inner, 8), (4, 8, inner), (6, 8)))
        index, weights = torch.tensor([[0, 1]] * 6), torch.rand(6, 2, generator=made)  # no row for rank 1
        blocks = [hp.distribute_tensor(one, mesh, [S0]) for one in (up, down)]
        with torch.autocast("cpu", torch.bfloat16):
            got = experts(tokens, index, weights, *blocks, activation=torch.relu)
            want = experts(tokens, index, weights, up, down, activation=torch.relu)
        assert torch.equal(got, want)
        exact = experts(tokens, index, weights, up, down, activation=torch.relu)
        assert 0 < (got - exact).abs().max() < 0.1 * exact.abs().max()
        with pytest.raises(ValueError, match=r"tokens are torch.bfloat16 and weights torch.float32; cast"):
            experts(tokens.bfloat16(), index, weights, *blocks, activation=torch.relu)

    threads(2).run(work)
