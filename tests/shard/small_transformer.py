"""A small transformer as arrays, for both frameworks, and its training on PyTorch, whole or cut over the ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY, LENGTH, WIDTH, HEADS, BATCH, STEPS = 16, 6, 8, 4, 4, 6
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
# Under one name in both frameworks (MindSpore's are those of mindspore.experimental.optim).
OPTIMIZERS = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "betas": (0.8, 0.95)},
    "SGD": {"lr": 0.2, "momentum": 0.9},
}
Dims = tuple[int | None, ...]  # for each axis of the mesh the dim that it cuts


@dataclass(frozen=True)
class Cut:
    """How the transformer lies on a mesh."""

    weights: Mapping[str, Dims]
    data: Dims = (None,)
    stream: Dims | None = None  # of the activations between the halves of the layer; None: as they come
    mesh: tuple[int, ...] | None = None  # None: all ranks in a line


# Rows of what comes first in a pair, columns of what comes second.
_PAIRED = {name: int(name in ("layer.out", "layer.down")) for name in SHAPES}
CUTS = {
    "tensor parallel": Cut({name: (dim,) for name, dim in _PAIRED.items()}),
    "sequence parallel": Cut({name: (dim,) for name, dim in _PAIRED.items()}, stream=(1,)),
    "rows": Cut(dict.fromkeys(SHAPES, (0,))),
    "columns": Cut(dict.fromkeys(SHAPES, (1,))),
    "data and tensor": Cut({name: (None, dim) for name, dim in _PAIRED.items()}, data=(0, None), mesh=(2, 2)),
    "rows and columns": Cut(dict.fromkeys(SHAPES, (0, 1)), data=(None, None), stream=(0, 1), mesh=(2, 2)),
}


@dataclass(frozen=True)
class Run:
    """Some steps of training; ``cut`` is a key of CUTS, or None for whole on every rank."""

    cut: str | None
    steps: int = STEPS
    optimizer: str = "AdamW"
    load: Path | None = None  # begin from this checkpoint, with another rate and other weights before it is read
    save: Path | None = None
    in_background: bool = False  # save in the background, and train on while that is done


class Training:
    """What both frameworks' trainings have in common: data, weights, layouts, checkpoints."""

    def __init__(self, run: Run, tensor_of: Callable[[np.ndarray], Any]) -> None:
        import hyper_parallel as hp

        self.run, self._hp, self._tensor_of = run, hp, tensor_of
        self.cut = CUTS[run.cut] if run.cut else None
        world = hp.get_platform().get_world_size()
        shape = (self.cut and self.cut.mesh) or (world,)
        self._mesh = hp.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
        values, tokens, targets = arrays(seed=0 if run.load is None else 1)
        dims = self.cut.weights if self.cut else dict.fromkeys(SHAPES)
        self.weights = {name: self._placed(value, dims[name]) for name, value in values.items()}
        data = self.cut.data if self.cut else None
        self.tokens, self.targets = self._placed(tokens, data), self._placed(targets, data)
        self.options = {**OPTIMIZERS[run.optimizer], **({} if run.load is None else {"lr": 1.0})}

    def _placed(self, array: np.ndarray, dims: Dims | None) -> Any:
        tensor = self._tensor_of(array.copy())
        return tensor if dims is None else self._hp.distribute_tensor(tensor, self._mesh, self._placements(dims))

    def _placements(self, dims: Dims) -> list[Any]:
        return [self._hp.Replicate() if dim is None else self._hp.Shard(dim) for dim in dims]

    def between(self, hidden: Any) -> Any:
        """The activations as they lie between the halves of the layer."""
        if self.cut is None or self.cut.stream is None:
            return hidden
        return hidden.redistribute(self._mesh, self._placements(self.cut.stream))

    def losses(self, model: Any, optimizer: Any, step: Callable[[], float]) -> list[float]:
        """The losses of the steps, between loading and saving."""
        from hyper_parallel import checkpoint as ckpt

        def state() -> dict[str, Any]:
            return dict(zip(("model", "optimizer"), ckpt.get_state_dict(model, optimizer), strict=True))

        if self.run.load is not None:
            wanted = state()
            ckpt.load(wanted, checkpoint_id=self.run.load)
            ckpt.set_state_dict(
                model, optimizer, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"]
            )
        losses = [step() for _ in range(self.run.steps)]
        if self.run.save is not None and not self.run.in_background:
            ckpt.save(state(), checkpoint_id=self.run.save)
        elif self.run.save is not None:
            saving = ckpt.async_save(state(), checkpoint_id=self.run.save)
            step()
            saving.result()
        return losses


def arrays(seed: int = 0) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Weights, tokens and targets; another seed gives other weights."""
    random = np.random.RandomState(0)
    tokens = random.randint(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32)
    random = np.random.RandomState(seed)
    weights = {name: (random.randn(*shape) * 0.3).astype(np.float32) for name, shape in SHAPES.items()}
    return weights, tokens, np.roll(tokens, -1, 1).reshape(-1)


def train_on_torch(runs: list[Run]) -> list[list[float]]:
    """The losses of each run, on the ranks of a world."""
    return [_train_on_torch(run) for run in runs]


def _train_on_torch(run: Run) -> list[float]:
    import hyper_parallel as hp

    torch = importlib.import_module("torch")  # a test that imports it by name would be one of PyTorch only
    functional = torch.nn.functional
    training = Training(run, lambda array: torch.from_numpy(array if array.dtype.kind == "f" else array.astype("i8")))
    model, model.layer = torch.nn.Module(), torch.nn.Module()
    for name, value in training.weights.items():
        owner, _, own_name = name.rpartition(".")
        setattr(model.layer if owner else model, own_name, torch.nn.Parameter(value))
    layer = model.layer
    optimizer = getattr(torch.optim, run.optimizer)(model.parameters(), **training.options)

    def step() -> float:
        hidden = training.between(functional.embedding(training.tokens, model.table))
        parts = [functional.linear(hidden, weight) for weight in (layer.query, layer.key, layer.value)]
        q, k, v = (part.reshape(BATCH, LENGTH, HEADS, -1).permute(0, 2, 1, 3) for part in parts)
        scores = functional.softmax(q @ k.permute(0, 1, 3, 2) * (WIDTH / HEADS) ** -0.5, -1)
        attended = (scores @ v).permute(0, 2, 1, 3).reshape(BATCH, LENGTH, WIDTH)
        hidden = hidden + training.between(functional.linear(attended, layer.out))
        widened = functional.silu(functional.linear(hidden, layer.up))
        hidden = hidden + training.between(functional.linear(widened, layer.down))
        logits = functional.linear(hidden, model.head).reshape(BATCH * LENGTH, VOCABULARY)
        loss = functional.cross_entropy(logits, training.targets)
        optimizer.zero_grad()
        hp.backward(loss)
        optimizer.step()
        return float(loss.detach())

    return training.losses(model, optimizer, step)
