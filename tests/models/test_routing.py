"""Routers, experts and auxiliary losses on one device, against a reference in numpy and float64, token by token."""

import itertools

import numpy as np
import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.frameworks import on_mindspore, ours, theirs
from tests.world import run_on_ranks, small_or_sweep

DIM, HIDDEN, EXPERTS, SAMPLES, LENGTH = 8, 6, 8, 3, 5
GROUPS = [{}, {"num_expert_groups": 4, "num_limited_groups": 2}, {"num_expert_groups": 2, "num_limited_groups": 1}]
MODES = [
    {"score_func": score, "normalize_scores": norm, "top_k": k, "has_bias": bias, "group_score": by, **groups}
    for score, norm, k, bias, by, groups in itertools.product(
        ("softmax", "sigmoid"), (True, False), (1, 3), (True, False), ("top2", "max"), GROUPS
    )
    if (groups or by == "top2")
]
SMALL = [mode for number, mode in enumerate(MODES) if number % 7 == 0]


# ---------------------------------------------------------------- the reference


def scores_of(score_func, logits):
    if score_func == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    e = np.exp(logits - logits.max())
    return e / e.sum()


def choose(scores, config):
    """The best experts of a token, of equal ones the first, one after the other."""
    scores = list(scores)
    size = len(scores) // config.num_expert_groups
    groups = [scores[place * size : (place + 1) * size] for place in range(config.num_expert_groups)]
    count = 2 if config.group_score == "top2" else 1
    values = [sum(sorted(group, reverse=True)[:count]) for group in groups]
    kept = sorted(range(len(groups)), key=lambda place: (-values[place], place))[: config.num_limited_groups]
    allowed = [expert for expert in range(len(scores)) if expert // size in kept]
    return sorted(allowed, key=lambda expert: (-scores[expert], expert))[: config.top_k]


def reference(config, weights, bias, x):
    """(output, losses by name, counts) of tokens (samples, length, dim)."""
    output, probabilities, logits_of, counts = np.zeros_like(x), [], [], np.zeros((len(x), config.num_experts))
    for sample, place in np.ndindex(x.shape[:2]):
        token = x[sample, place]
        logits = weights["router.gate.weight"] @ token
        scores = scores_of(config.score_func, logits)
        chosen = choose(scores if bias is None else scores + bias, config)
        factors = scores[chosen] / (scores[chosen].sum() if config.normalize_scores else 1.0) * config.route_scale
        for expert, factor in zip(chosen, factors, strict=True):
            given = token * factor if config.score_before_experts else token
            gate, up = weights["experts.gate"][expert] @ given, weights["experts.up"][expert] @ given
            made = weights["experts.down"][expert] @ (gate / (1 + np.exp(-gate)) * up)
            output[sample, place] += made if config.score_before_experts else made * factor
            counts[sample, expert] += 1
        if config.shared_dim:
            gate, up = weights["shared.gate.weight"] @ token, weights["shared.up.weight"] @ token
            output[sample, place] += weights["shared.down.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        probabilities.append(scores / scores.sum())
        logits_of.append(logits)
    each = np.array(probabilities).reshape(len(x), -1, config.num_experts)
    logits = np.array(logits_of)
    return output, _losses(config, each, counts, logits), counts.sum(0)


def _losses(config, probabilities, counts, logits):
    experts = config.num_experts
    balance = experts * (counts.sum(0) / counts.sum() * probabilities.mean((0, 1))).sum()
    sequences = [
        experts * (count / count.sum() * one.mean(0)).sum() for count, one in zip(counts, probabilities, strict=True)
    ]
    z = np.log(np.exp(logits).sum(-1)) ** 2
    return config.balance_loss * balance + config.sequence_loss * np.mean(sequences) + config.z_loss * z.mean()


# ---------------------------------------------------------------- ours


def built(config, seed=0, scale=1.0):
    """The mixture, its weights by name in numpy, and tokens."""
    random, platform = np.random.default_rng(seed), get_platform()
    moe = hp.models.MoE(config)
    dtype = torch.float32 if on_mindspore else torch.float64
    if not on_mindspore:
        moe = moe.double()
    weights = {}
    for name, parameter in platform.parameters_dict(moe).items():
        weights[name] = torch.tensor(random.normal(size=tuple(parameter.shape)) * scale, dtype=dtype)
        platform.load_into_param(parameter, ours(weights[name]))
    x = torch.tensor(random.normal(size=(SAMPLES, LENGTH, config.dim)), dtype=dtype)
    if config.has_bias:
        weights["expert_bias"] = torch.tensor(random.normal(size=config.num_experts) * 0.3, dtype=dtype)
        platform.load_into_param(moe.expert_bias, ours(weights["expert_bias"]))
    return moe, {name: value.numpy().astype(np.float64) for name, value in weights.items()}, x


def numbers(tensor):
    return theirs(tensor).detach().numpy()


def config_of(mode, **more):
    options = {name: value for name, value in mode.items() if name != "has_bias"}
    coeff = 1e-2 if mode.get("has_bias") else 0.0
    return hp.models.MoEConfig(DIM, HIDDEN, EXPERTS, load_balance_coeff=coeff, **options, **more)


def _check_mode(mode, **more):
    config = config_of(mode, **more)
    moe, weights, x = built(config)
    output = moe(ours(x))
    want, loss, counts = reference(config, weights, weights.pop("expert_bias", None), x.numpy().astype(np.float64))
    if config.has_losses:
        output, auxiliary = output
        np.testing.assert_allclose(float(numbers(auxiliary)), loss, rtol=1e-5 if on_mindspore else 1e-12)
    limit = 2e-5 if on_mindspore else 1e-12
    np.testing.assert_allclose(numbers(output), want, rtol=limit, atol=limit * np.abs(want).max())
    np.testing.assert_array_equal(numbers(moe.tokens_per_expert), counts)


@run_on_ranks(1)
@pytest.mark.parametrize("mode", small_or_sweep(MODES, SMALL), ids=lambda mode: "-".join(map(str, mode.values())))
def test_every_mode(mode):
    _check_mode(mode, balance_loss=0.5, sequence_loss=0.25, z_loss=0.125, score_before_experts=False, shared_dim=5)
    _check_mode(mode, route_scale=2.5)


@run_on_ranks(1)
def test_ties_go_to_the_expert_with_the_lowest_number():
    for groups in ({}, {"num_expert_groups": 8, "num_limited_groups": 4}):
        config = hp.models.MoEConfig(4, 2, 64, 8, load_balance_coeff=0.0, score_func="softmax", **groups)
        moe, _, _ = built(config)
        gate = np.repeat(np.arange(8.0), 8)[:, None] * np.ones(4)  # eight experts of each logit
        dtype = torch.float32 if on_mindspore else torch.float64
        get_platform().load_into_param(moe.router.gate.weight, ours(torch.tensor(gate, dtype=dtype)))
        x = torch.ones(3, 4, dtype=dtype)
        x[1] = -1
        x[2] = 0
        chosen = numbers(moe.router(ours(x))[2])
        scores = [np.repeat(np.arange(8.0), 8), -np.repeat(np.arange(8.0), 8), np.zeros(64)]
        assert [list(row) for row in chosen] == [choose(one, config) for one in scores]


@run_on_ranks(1)
def test_gradients_against_differences():
    config = config_of(
        {"top_k": 3, "score_func": "sigmoid", "has_bias": True, **GROUPS[1]},
        balance_loss=0.5, sequence_loss=0.25, z_loss=0.125, shared_dim=5, score_before_experts=False,
    )  # fmt: skip
    moe, weights, x = built(config)
    platform, bias, tokens = get_platform(), weights["expert_bias"], x.numpy().astype(np.float64)
    output, auxiliary = moe(ours(x))
    platform.backward(output.sum() + auxiliary)
    random = np.random.default_rng(1)
    for name, parameter in platform.parameters_dict(moe).items():
        direction = random.normal(size=weights[name].shape)
        values = []
        for sign in (1, -1):
            moved = {**weights, name: weights[name] + sign * 1e-6 * direction}
            made, loss, _ = reference(config, moved, bias, tokens)
            values.append(made.sum() + loss)
        want = (values[0] - values[1]) / 2e-6
        got = (numbers(platform.get_grad(parameter)) * direction).sum()
        np.testing.assert_allclose(got, want, rtol=1e-4 if on_mindspore else 1e-6, err_msg=name)


@run_on_ranks(1)
def test_the_bias_moves_once_for_each_update_and_is_in_the_state():
    moe, _, x = built(config_of({"top_k": 2, "has_bias": True}))
    platform = get_platform()
    bias = numbers(moe.expert_bias).copy()
    moe(ours(x))
    moe(ours(x))
    counts = numbers(moe.tokens_per_expert).copy()
    assert counts.sum() == 2 * SAMPLES * LENGTH * 2
    with platform.no_grad():
        moe(ours(x))  # nothing is trained on it, so it does not count
    np.testing.assert_array_equal(numbers(moe.tokens_per_expert), counts)
    hp.models.update_expert_bias(moe, 0.5)
    step = 0.5 * np.sign(counts.mean() - counts)
    np.testing.assert_allclose(numbers(moe.expert_bias), bias + step - step.mean(), rtol=1e-6)
    assert not numbers(moe.tokens_per_expert).any()
    hp.models.update_expert_bias(moe, 0.5)  # nothing has been counted, and nothing moves
    np.testing.assert_allclose(numbers(moe.expert_bias), bias + step - step.mean(), rtol=1e-6)
    names = platform.get_model_state_dict(moe, options=None)
    assert "expert_bias" in names and "tokens_per_expert" not in names


@pytest.mark.skipif(on_mindspore, reason="MindSpore's reference models are in float32")
def test_the_bias_stays_in_float32():
    moe = hp.models.MoE(DIM, HIDDEN, EXPERTS, 2)
    moe.expert_bias += 1 / 3
    moe = moe.to(torch.bfloat16)
    assert moe.expert_bias.dtype == torch.float32 and moe.expert_bias[0] == torch.tensor(1 / 3)
    x = torch.randn(SAMPLES, LENGTH, DIM, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = moe.router(x[0])[0]
    assert logits.dtype == torch.float32 and moe(x).dtype == torch.bfloat16
    assert moe.double().expert_bias.dtype == torch.float64


MISTAKES = [
    ({"top_k": 9}, "top_k=9 is more than the 8 experts"),
    ({"num_expert_groups": 3, "num_limited_groups": 1}, "num_experts=8 must be a multiple of num_expert_groups=3"),
    ({"num_expert_groups": 2, "num_limited_groups": 3}, "num_limited_groups=3 is more than there are groups"),
    ({"num_expert_groups": 4, "num_limited_groups": 1, "top_k": 3}, "top_k=3 is more than the 2 experts"),
    ({"score_func": "tanh"}, "score_func='tanh' is none of 'sigmoid', 'softmax'"),
    ({"z_loss": -1.0}, "z_loss must be a finite number from 0"),
]


@pytest.mark.parametrize(("options", "told"), MISTAKES, ids=[next(iter(one)) for one, _ in MISTAKES])
def test_sizes_that_cannot_be(options, told):
    with pytest.raises(ValueError, match=f"MoEConfig: {told}"):
        hp.models.MoEConfig(DIM, HIDDEN, EXPERTS, **{"top_k": 2, **options})
    with pytest.raises(ValueError, match=f"MixtureConfig: {told}"):
        hp.models.MixtureConfig(num_experts=EXPERTS, **options)
    with pytest.raises(ValueError, match="num_dense_blocks=5 must be from 0 to num_blocks=4"):
        hp.models.MixtureConfig(num_dense_blocks=5)
    with pytest.raises(ValueError, match=rf"MoE takes \(samples, length, {DIM}\), got \(3, {DIM}\)"):
        hp.models.MoE(DIM, HIDDEN, EXPERTS, 2)(ours(torch.zeros(3, DIM)))
