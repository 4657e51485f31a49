"""A training loop for every layout, and the same on one device by plain PyTorch, for tests."""

from __future__ import annotations

from typing import Any

import torch

import hyper_parallel as hp
from tests.tensor_parallel.hugging_face import VOCABULARY, build, in_double, whole

ROWS, STEPS, RATE = 7, 3, 1e-2
# A larger eps: the gradient of a key's bias is zero but for rounding, and Adam would step by its sign.
EPS = 1e-6

Seen = dict[str, Any]


def batch(length: int = 13) -> dict[str, torch.Tensor]:
    """Seven samples: over 2 ranks in 3 micro-batches one has a single target, one none, and rank 1 fewer rows."""
    ids = torch.randint(3, VOCABULARY, (ROWS, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0] = labels[1] = labels[3:5] = -100
    labels[0, 5] = ids[0, 5]
    return {"input_ids": ids, "labels": labels}


def on_one_device(name: str, given: dict[str, torch.Tensor], steps: int = STEPS, model: Any = None) -> Seen:
    """Plain PyTorch."""
    model = model or build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPS)
    seen: Seen = {}
    with in_double():
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(**given).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            seen |= {f"loss {step}": loss.detach(), f"norm {step}": norm}
    return seen | {f"weight of {name}": whole(parameter) for name, parameter in model.named_parameters()}


def train(run: hp.Parallel, given: dict[str, torch.Tensor], steps: int = STEPS, optimizer: Any = None) -> Seen:
    """The loop of the documentation, on this rank."""
    optimizer = optimizer or torch.optim.AdamW(run.parameters(), lr=RATE, eps=EPS)
    samples = run.mine(range(len(given["input_ids"])))
    mine = {name: value[samples.start : samples.stop] for name, value in given.items()}
    seen: Seen = {}
    with in_double():
        for step in range(steps):
            optimizer.zero_grad()
            loss = run.forward_backward(**mine)
            norm = run.clip_grad_norm_(1.0)
            optimizer.step()
            seen |= {f"loss {step}": loss, f"norm {step}": whole(norm)}
    return seen | {f"weight of {name}": whole(parameter) for name, parameter in run.named_parameters()}
