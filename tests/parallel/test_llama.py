"""The reference Llama under `hp.parallelize` on both frameworks: every layout trains as PyTorch does on one device."""

import numpy as np
import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.models.torch.llama import Llama as TorchLlama
from hyper_parallel.platform import get_platform
from tests.frameworks import on_mindspore, ours, theirs
from tests.parallel.layouts import LAYOUTS
from tests.world import run_on_ranks

SIZES = {"vocab_size": 37, "dim": 16, "num_blocks": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 24}
STEPS, RATE = 3, 1e-2
SMALL = {1: ("dp_shard=1",), 2: ("dp_shard=2", "tp=2", "cp=2"), 4: ("dp_shard=2, tp=2", "dp_shard=2, cp=2")}
if on_mindspore:  # where ranks are processes: what the neutral half gives is tried on PyTorch
    SMALL |= {2: ("dp_shard=2", "cp=2"), 4: ("dp_shard=2, tp=2",)}


def _values(seed=0):
    """Weights by name, and a batch: 7 sequences of which some are masked."""
    random = np.random.default_rng(seed)
    model = TorchLlama(hp.models.LlamaConfig(**SIZES))
    weights = {name: random.normal(size=tuple(one.shape)) * 0.2 for name, one in model.named_parameters()}
    ids = random.integers(0, 37, (7, 14))
    inputs, labels = ids[:, :-1], ids[:, 1:].copy()
    labels[0] = labels[1] = labels[3:5] = -100
    labels[0, 5] = 4
    return weights, inputs, labels


def _on_one_device(dtype):
    weights, inputs, labels = _values()
    model = TorchLlama(hp.models.LlamaConfig(**SIZES)).to(dtype)
    model.load_state_dict({name: torch.tensor(value, dtype=dtype) for name, value in weights.items()}, strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.tensor(inputs), torch.tensor(labels))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: one.detach().numpy() for name, one in model.named_parameters()}


def _model():
    weights, _, _ = _values()
    model = hp.models.Llama(hp.models.LlamaConfig(**SIZES))
    platform = get_platform()
    if not on_mindspore:
        model = model.double()
    for name, parameter in platform.parameters_dict(model).items():
        value = weights[name.replace("embedding_table", "weight")]
        platform.load_into_param(parameter, ours(torch.tensor(value, dtype=_dtype())))
    return model


def _dtype():
    return torch.float32 if on_mindspore else torch.float64  # MindSpore's reference model has tables in float32


def values_of(tensor):
    tensor = tensor.full_tensor() if isinstance(tensor, hp.DTensor) else tensor
    return theirs(tensor).detach().numpy()


def _step_of(run):
    if on_mindspore:
        from mindspore.experimental.optim import AdamW

        optimizer = AdamW(run.parameters(), lr=RATE, weight_decay=0.01)
        return lambda: optimizer(run.gradients())
    return torch.optim.AdamW(run.parameters(), lr=RATE).step


def _train(degrees, microbatches, **options):
    _, inputs, labels = _values()
    run = hp.parallelize(_model(), degrees, microbatches=microbatches, **options)
    step, losses, norms = _step_of(run), [], []
    mine = run.mine(range(7))
    part = [ours(torch.tensor(one[mine.start : mine.stop])) for one in (inputs, labels)]
    for _ in range(STEPS):
        losses.append(float(values_of(run.forward_backward(*part))))
        norms.append(float(values_of(run.clip_grad_norm_(1.0))))
        step()
        run.zero_grad()
    return losses, norms, {name: values_of(one) for name, one in run.named_parameters()}


def _check(got, want):
    limit = 1e-5 if on_mindspore else 1e-9
    for one, other in zip(got[:2], want[:2], strict=True):
        np.testing.assert_allclose(one, other, rtol=limit, atol=limit)
    for name, value in got[2].items():
        expected = want[2][name.replace("embedding_table", "weight")]
        np.testing.assert_allclose(value, expected, rtol=0, atol=20 * limit, err_msg=name)


def _layouts(ranks):
    return [degrees for degrees, count in LAYOUTS.items() if count == ranks]


@run_on_ranks(1, 2, 4, timeout=400)
def test_every_layout_trains_as_one_device(sweep):
    ranks = get_platform().get_world_size()
    want = _on_one_device(_dtype())
    assert want[0][-1] < want[0][0]
    for degrees in _layouts(ranks) if sweep else SMALL[ranks]:
        _check(_train(degrees, 3), want)


@pytest.mark.sweep("mindspore")
@run_on_ranks(2, timeout=300)
def test_recomputed_blocks(sweep):
    want = _on_one_device(_dtype())
    for degrees in ("dp_shard=2", "tp=2") if sweep else ("dp_shard=2",):
        _check(_train(degrees, 2, recompute="full"), want)


@run_on_ranks(2, timeout=300)
def test_initial_values_do_not_depend_on_the_degrees():
    states = []
    for degrees in ("dp_shard=2", "tp=2", "cp=2"):
        with hp.deferred_init():
            model = hp.models.Llama(hp.models.LlamaConfig(**SIZES))
        run = hp.parallelize(model, degrees).materialize(seed=4)
        states.append({name: values_of(one) for name, one in run.named_parameters()})
    for state in states[1:]:
        for name, value in state.items():
            np.testing.assert_array_equal(value, states[0][name], err_msg=name)
    assert 0.01 < np.std(next(iter(states[0].values()))) < 0.03
