"""The reference model of either framework, from one seed, and its training on PyTorch."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import numpy as np

SIZES = {"vocab_size": 11, "dim": 16, "num_blocks": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 18}
STEPS, RATE, SEED = 4, 0.01, 5


class Case(NamedTuple):
    """How the model is cut: by the plan that is read off its structure, or by the one that is written out."""

    plan: str | None = None  # "structure", "by hand", or None for whole on every rank
    sequence_parallel: bool = False
    tied: bool = False


def tokens() -> np.ndarray:
    """Two sequences of seven tokens, of which six are inputs and six are labels."""
    return np.random.RandomState(0).randint(0, SIZES["vocab_size"], (2, 7)).astype(np.int32)


def built(case: Case, init: Any = None) -> Any:
    """The model, built without memory, cut as the case says and initialised."""
    import hyper_parallel as hp

    mesh = hp.init_device_mesh("cpu", (hp.get_platform().get_world_size(),), mesh_dim_names=("tp",))
    with hp.deferred_init():
        model = hp.models.Llama(hp.models.LlamaConfig(**SIZES, tie_head=case.tied))
    if case.plan is not None:
        make = (
            hp.models.llama_plan if case.plan == "by hand" else lambda **options: hp.plans.for_model(model, **options)
        )
        model = hp.parallelize_module(model, mesh, make(sequence_parallel=case.sequence_parallel))
    hp.manual_seed(SEED)
    return hp.materialize(model, init=init)


def whole(value: Any) -> np.ndarray:
    import hyper_parallel as hp

    plain = (value.full_tensor() if isinstance(value, hp.DTensor) else value).detach()
    return hp.get_platform().tensor_to_numpy(plain).copy()


def train_on_torch(cases: list[Case]) -> list[tuple[dict[str, np.ndarray], list[float]]]:
    """The initial weights by name and the losses of some steps of AdamW."""
    torch = importlib.import_module("torch")  # a test that imports it by name would be one of PyTorch only
    results = []
    for case in cases:
        model = built(case, init=lambda model: model.init_weights())
        weights = {name: whole(one) for name, one in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        ids, losses = torch.from_numpy(tokens().astype(np.int64)), []
        for _ in range(STEPS):
            loss = model(ids[:, :-1], ids[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        results.append((weights, losses))
    return results
