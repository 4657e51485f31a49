"""The operator of experts on plain tensors, against a loop over tokens and choices."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyper_parallel.core.expert_parallel.experts_op import experts
from hyper_parallel.core.expert_parallel.row_counts import host_reads
from hyper_parallel.platform import get_platform
from tests.frameworks import on_mindspore, ours, theirs

TOKENS, FEATURES, INNER, EXPERTS, CHOICES = 10, 8, 12, 4, 2
ROUTINGS = ("balanced", "all to one", "one empty", "no tokens")


def gated(gate, up):
    return gate * (1 / (1 + (-gate).exp())) * up


def both_gated(both):
    return gated(both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :])


def interleaved(both):
    pairs = both.reshape(both.shape[0], both.shape[1] // 2, 2)
    return gated(pairs[:, :, 0], pairs[:, :, 1])


def routing(name, tokens=TOKENS, num_experts=EXPERTS, choices=CHOICES, seed=0):
    """(tokens, choices) of experts, no one twice."""
    random = np.random.default_rng(seed)
    if name == "no tokens":
        return np.zeros((0, choices), np.int64)
    if name == "all to one":
        return np.tile(np.arange(choices), (tokens, 1))
    allowed = np.arange(num_experts) if name == "balanced" else np.delete(np.arange(num_experts), 1)
    return np.stack([random.permutation(allowed)[:choices] for _ in range(tokens)])


def by_token(hidden, index, weights, up, down, activation, up_bias, down_bias, is_transposed, weigh_inputs):
    """Token by token, choice by choice: what the operator must give."""
    result = []
    for token in range(hidden.shape[0]):
        total = torch.zeros_like(hidden[token])
        for choice, expert in enumerate(index[token].tolist()):
            x, weight = hidden[token : token + 1], weights[token, choice]
            x = x * weight if weigh_inputs else x
            projected = []
            for place, matrix in enumerate(up):
                one = x @ (matrix[expert] if is_transposed else matrix[expert].T)
                projected.append(one if up_bias is None else one + up_bias[place][expert])
            inner = activation(*projected)
            one = inner @ (down[expert] if is_transposed else down[expert].T)
            one = one if down_bias is None else one + down_bias[expert]
            total = total + (one[0] if weigh_inputs else one[0] * weight)
        result.append(total)
    return torch.stack(result) if result else hidden * 0


FORMS = {
    "two": {"num_up": 2, "activation": gated},
    "concatenated": {"num_up": 1, "width": 2, "activation": both_gated},
    "interleaved, transposed, with biases": {
        "num_up": 1,
        "width": 2,
        "activation": interleaved,
        "is_transposed": True,
        "has_bias": True,
    },
    "no gate": {"num_up": 1, "activation": lambda x: x * x},
    "weights first": {"num_up": 2, "activation": gated, "weigh_inputs": True},
}


def inputs(form, index, dtype, seed=1, num_experts=EXPERTS):
    """(hidden, weights, up, down, up_bias, down_bias) as tensors of PyTorch."""
    random = np.random.default_rng(seed)

    def make(*shape):
        return torch.tensor(random.normal(size=shape) * 0.5, dtype=dtype)

    width = form.get("width", 1) * INNER
    shape = (lambda outs, ins: (ins, outs)) if form.get("is_transposed") else (lambda outs, ins: (outs, ins))
    up = [make(num_experts, *shape(width, FEATURES)) for _ in range(form["num_up"])]
    down = make(num_experts, *shape(FEATURES, INNER))
    biases = [make(num_experts, width) for _ in up] if form.get("has_bias") else None
    down_bias = make(num_experts, FEATURES) if form.get("has_bias") else None
    return make(len(index), FEATURES), make(*index.shape), up, down, biases, down_bias


def leaves(values, wrap):
    found = []

    def leaf(value):
        if value is None:
            return None
        if isinstance(value, list):
            return [leaf(one) for one in value]
        made = wrap(value)
        found.append(made)
        return made

    return [leaf(value) for value in values], found


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_experts_is_that_of_a_loop_over_tokens(name, form):
    form = FORMS[form]
    dtype = torch.float32 if on_mindspore else torch.float64
    index = routing(name)
    options = {"is_transposed": form.get("is_transposed", False), "weigh_inputs": form.get("weigh_inputs", False)}
    values = inputs(form, index, dtype)
    (hidden, weights, up, down, up_bias, down_bias), wanted = leaves(values, lambda one: one.clone().requires_grad_())
    expected = by_token(
        hidden, torch.tensor(index), weights, up, down, form["activation"], up_bias, down_bias, **options
    )
    (expected * expected).sum().backward()

    platform = get_platform()
    (hidden, weights, up, down, up_bias, down_bias), found = leaves(
        values, lambda one: platform.set_tensor_requires_grad(ours(one))
    )
    result = experts(
        hidden,
        ours(torch.tensor(index)),
        weights,
        up,
        down,
        activation=form["activation"],
        up_bias=up_bias,
        down_bias=down_bias,
        **options,
    )
    assert tuple(result.shape) == (len(index), FEATURES)
    platform.backward((result * result).sum())
    tolerance = 1e-5 if on_mindspore else 1e-12
    assert torch.allclose(theirs(result), expected.detach(), rtol=tolerance, atol=tolerance)
    for one, want in zip(found, wanted, strict=True):
        gradient = platform.get_grad(one)
        assert gradient is not None, "every weight gets a gradient, also without tokens"
        want = torch.zeros_like(want) if want.grad is None else want.grad
        assert torch.allclose(theirs(gradient), want, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.skipif(on_mindspore, reason="the kernel of PyTorch")
@pytest.mark.parametrize("name", ROUTINGS)
def test_the_grouped_kernel_gives_what_the_loop_gives(name):
    form = FORMS["concatenated"]
    index = routing(name)
    values = inputs(form, index, torch.float64)
    results = []
    before = host_reads.number
    for dtype in (torch.float64, torch.float32):
        cast = [
            None if one is None else [o.to(dtype) for o in one] if isinstance(one, list) else one.to(dtype)
            for one in values
        ]
        (hidden, weights, up, down, _, _), found = leaves(cast, lambda one: one.clone().requires_grad_())
        result = experts(hidden, torch.tensor(index), weights, up, down, activation=form["activation"])
        result.sum().backward()  # an expanded gradient, which the kernel's backward refuses
        results.append([result, *(one.grad for one in found)])
    reads = 0 if name == "no tokens" else 1
    assert host_reads.number - before == reads, "the loop reads the counts once, the kernel never"
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one.float(), other, rtol=1e-4, atol=1e-5)


def test_wrong_shapes_are_told():
    hidden, one = ours(torch.zeros(2, 3, 4)), ours(torch.zeros(6, 2))
    weight = ours(torch.zeros(4, 4, 4))
    with pytest.raises(ValueError, match=r"hidden \(2, 3, 4\) must be \(tokens, features\).*flatten"):
        experts(hidden, one, one, weight, weight, activation=F.silu)
    with pytest.raises(ValueError, match="5 tokens, but choices of 6"):
        experts(ours(torch.zeros(5, 4)), one, one, weight, weight, activation=F.silu)
    with pytest.raises(
        ValueError, match=r"first dim of every weight and bias is the expert, got \(4, 4, 4\), \(3, 4, 4\)"
    ):
        experts(ours(torch.zeros(6, 4)), one, one, weight, ours(torch.zeros(3, 4, 4)), activation=F.silu)
    hidden, index, weights = (
        ours(torch.zeros(6, 4)),
        ours(torch.zeros(6, 2, dtype=torch.int64)),
        ours(torch.zeros(6, 2)),
    )
    with pytest.raises(ValueError, match=r"by whole numbers; got .*loat32 of shape \(6, 2\)"):
        experts(hidden, weights, weights, weight, weight, activation=F.silu)
    with pytest.raises(ValueError, match=r"names at least one expert for each token.*of shape \(6, 0\)"):
        experts(hidden, index[:, :0], weights[:, :0], weight, weight, activation=F.silu)
    with pytest.raises(ValueError, match="capacity_factor=0 must be above 0"):
        experts(hidden, index, weights, weight, weight, activation=F.silu, capacity_factor=0)
    told = r"hidden has 4 features, so each of up must be \(experts, inner, features\), down .*; got "
    with pytest.raises(ValueError, match=told + r"\(4, 4, 3\), \(4, 4, 4\)"):
        experts(hidden, index, weights, weight[:, :, :3], weight, activation=F.silu)
    with pytest.raises(ValueError, match=told + r"\(4, 4, 4\), \(4, 4, 4\), \(4, 2\)"):
        experts(hidden, index, weights, weight, weight, activation=F.silu, up_bias=ours(torch.zeros(4, 2)))
