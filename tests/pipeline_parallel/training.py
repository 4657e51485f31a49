"""Our Llama trained through the stages of a pipeline, and by plain PyTorch in one piece; on both frameworks."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

import hyper_parallel as hp
from hyper_parallel.models.torch.llama import Llama as TorchLlama
from hyper_parallel.platform import get_platform
from tests.frameworks import on_mindspore, ours, theirs

SIZES = {"vocab_size": 37, "dim": 16, "num_blocks": 9, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 24}
ROWS, RATE, EPS = 11, 1e-2, 1e-6
Seen = tuple[list[float], list[float], dict[str, np.ndarray]]


#: MindSpore's reference model has tables in float32; what goes on there is of that precision too.
NARROW = on_mindspore or os.environ.get("HYPER_PARALLEL_TEST_DTYPE") == "float32"


def dtype() -> torch.dtype:
    return torch.float32 if NARROW else torch.float64


def values(tied: bool = False) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Weights by name, and a batch of which some rows have no target."""
    random = np.random.default_rng(0)
    model = TorchLlama(hp.models.LlamaConfig(**SIZES, tie_head=tied))
    weights = {name: random.normal(size=tuple(one.shape)) * 0.2 for name, one in model.named_parameters()}
    ids = np.random.default_rng(1).integers(0, 37, (ROWS, 10))
    inputs, labels = ids[:, :-1], ids[:, 1:].copy()
    labels[0] = labels[3:5] = -100
    labels[0, 5] = 4
    return weights, inputs, labels


def in_one_piece(tied: bool = False, steps: int = 2, zero_every: int = 1) -> Seen:
    """Plain PyTorch."""
    weights, inputs, labels = values(tied)
    model = TorchLlama(hp.models.LlamaConfig(**SIZES, tie_head=tied)).to(dtype())
    model.load_state_dict({name: torch.tensor(one, dtype=dtype()) for name, one in weights.items()}, strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPS)
    losses, norms = [], []
    for number in range(steps * zero_every):
        loss = model(torch.tensor(inputs), torch.tensor(labels))
        loss.backward()
        losses.append(loss.item())
        if (number + 1) % zero_every == 0:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms, {name: one.detach().numpy() for name, one in model.named_parameters()}


def model_with_values(tied: bool = False) -> Any:
    weights, _, _ = values(tied)
    model = hp.models.Llama(hp.models.LlamaConfig(**SIZES, tie_head=tied))
    platform = get_platform()
    if not on_mindspore:
        model = model.to(dtype())
    for name, parameter in platform.parameters_dict(model).items():
        value = weights[name.replace("embedding_table", "weight")]
        platform.load_into_param(parameter, ours(torch.tensor(value, dtype=dtype())))
    return model


def values_of(tensor: Any) -> np.ndarray:
    tensor = tensor.full_tensor() if isinstance(tensor, hp.DTensor) else tensor
    return theirs(tensor).detach().numpy()


def optimizer_of(run: hp.Parallel) -> Any:
    if on_mindspore:
        from mindspore.experimental.optim import AdamW

        return AdamW(run.parameters(), lr=RATE, weight_decay=0.01, eps=EPS)
    return torch.optim.AdamW(run.parameters(), lr=RATE, eps=EPS)


def step_of(run: hp.Parallel) -> Any:
    optimizer = optimizer_of(run)
    return (lambda: optimizer(run.gradients())) if on_mindspore else optimizer.step


def rows_of(run: hp.Parallel) -> list[Any]:
    _, inputs, labels = values()
    mine = run.mine(range(ROWS))
    return [ours(torch.tensor(one[mine.start : mine.stop])) for one in (inputs, labels)]


def in_stages(degrees: str, tied: bool = False, steps: int = 2, zero_every: int = 1, **options: Any) -> Seen:
    """Through ``hp.parallelize``, on this rank: its parameters alone."""
    run = hp.parallelize(model_with_values(tied), degrees, **options)
    step, losses, norms = step_of(run), [], []
    part = rows_of(run)
    for number in range(steps * zero_every):
        losses.append(float(values_of(run.forward_backward(*part))))
        if (number + 1) % zero_every == 0:
            norms.append(float(values_of(run.clip_grad_norm_(1.0))))
            step()
            run.zero_grad()
    return losses, norms, {name: values_of(one) for name, one in run.named_parameters()}


def check(got: Seen, want: Seen) -> None:
    limit = 1e-5 if NARROW else 1e-10
    for one, other in zip(got[:2], want[:2], strict=True):
        np.testing.assert_allclose(one, other, rtol=limit, atol=limit)
    assert got[2]
    for name, value in got[2].items():
        expected = want[2][name.replace("embedding_table", "weight")]
        np.testing.assert_allclose(value, expected, rtol=0, atol=20 * limit, err_msg=name)
