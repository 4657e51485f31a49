"""A small transformer as arrays, for both frameworks, and its training on PyTorch, whole or cut over the ranks."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY, LENGTH, WIDTH, HEADS, BATCH, STEPS, RATE = 16, 6, 8, 4, 4, 10, 0.01
SHAPES = {
    "table": (VOCABULARY, WIDTH),
    "layer.query": (WIDTH, WIDTH),
    "layer.key": (WIDTH, WIDTH),
    "layer.value": (WIDTH, WIDTH),
    "layer.out": (WIDTH, WIDTH),
    "layer.up": (4 * WIDTH, WIDTH),
    "layer.down": (WIDTH, 4 * WIDTH),
    "head": (VOCABULARY, WIDTH),
}
# "tensor parallel": rows of what comes first in a pair, columns of what comes second.
CUTS = {
    "tensor parallel": {name: int(name in ("layer.out", "layer.down")) for name in SHAPES},
    "rows": dict.fromkeys(SHAPES, 0),
    "columns": dict.fromkeys(SHAPES, 1),
}


def arrays(seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Weights, tokens and targets; another seed gives other weights."""
    random = np.random.RandomState(0)
    tokens = random.randint(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32)
    random = np.random.RandomState(seed)
    weights = {name: (random.randn(*shape) * 0.3).astype(np.float32) for name, shape in SHAPES.items()}
    return weights, tokens, np.roll(tokens, -1, 1).reshape(-1)


def train_on_torch(cut: str | None, steps: int, load: Path | None = None, save: Path | None = None) -> list[float]:
    """The losses of some steps of AdamW on the ranks of a world; ``cut`` is a key of CUTS, or None for whole."""
    import hyper_parallel as hp
    from hyper_parallel import checkpoint as ckpt

    torch = importlib.import_module("torch")  # a test that imports it by name would be one of PyTorch only
    functional = torch.nn.functional
    values, tokens, targets = arrays(seed=0 if load is None else 1)
    mesh = hp.init_device_mesh("cpu", (hp.get_platform().get_world_size(),), mesh_dim_names=("tp",))

    def placed(array: np.ndarray, placement: Any) -> Any:
        tensor = torch.from_numpy(array.copy())
        return tensor if cut is None else hp.distribute_tensor(tensor, mesh, [placement])

    model, model.layer = torch.nn.Module(), torch.nn.Module()
    for name, value in values.items():
        owner, _, own_name = name.rpartition(".")
        placement = hp.Shard(CUTS[cut][name]) if cut else None
        setattr(model.layer if owner else model, own_name, torch.nn.Parameter(placed(value, placement)))
    layer = model.layer
    ids, wanted = placed(tokens.astype(np.int64), hp.Replicate()), placed(targets.astype(np.int64), hp.Replicate())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE if load is None else 1.0, weight_decay=0.01)

    if load is not None:
        state = dict(zip(("model", "optimizer"), ckpt.get_state_dict(model, optimizer), strict=True))
        ckpt.load(state, checkpoint_id=load)
        ckpt.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses = []
    for _ in range(steps):
        hidden = functional.embedding(ids, model.table)
        parts = [functional.linear(hidden, weight) for weight in (layer.query, layer.key, layer.value)]
        q, k, v = (part.reshape(BATCH, LENGTH, HEADS, -1).permute(0, 2, 1, 3) for part in parts)
        scores = functional.softmax(q @ k.permute(0, 1, 3, 2) * (WIDTH / HEADS) ** -0.5, -1)
        attended = (scores @ v).permute(0, 2, 1, 3).reshape(BATCH, LENGTH, WIDTH)
        hidden = hidden + functional.linear(attended, layer.out)
        hidden = hidden + functional.linear(functional.silu(functional.linear(hidden, layer.up)), layer.down)
        logits = functional.linear(hidden, model.head).reshape(BATCH * LENGTH, VOCABULARY)
        loss = functional.cross_entropy(logits, wanted)
        optimizer.zero_grad()
        hp.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    if save is not None:
        state = dict(zip(("model", "optimizer"), ckpt.get_state_dict(model, optimizer), strict=True))
        ckpt.save(state, checkpoint_id=save)
    return losses
