"""What is proven on the model before the first step: packed documents do not see each other, and the loss is over what
is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.data.proof import prove_packing
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.batches import Feeder

if TYPE_CHECKING:
    from hyper_parallel.data.dataset import Dataset
    from hyper_parallel.parallel.parallel import Parallel

__all__ = ["find_spelling"]


def find_spelling(run: Parallel, data: Dataset) -> str | None:
    """How this model is told where packed documents begin; None for data that is not packed.

    Every rank runs the model on the same tiny batch. An error if no spelling isolates them.
    """
    if not data.is_packed:
        return None

    feeder = Feeder(run, data)
    platform = get_platform()

    def run_model(batch: dict[str, Any]) -> np.ndarray:
        arguments = feeder.arguments({name: np.asarray(value) for name, value in batch.items()})
        before = platform.set_training(run.model, False)
        try:
            with platform.no_grad():
                outputs = run(**arguments)
        finally:
            platform.set_training(run.model, before)
        return platform.tensor_to_numpy(getattr(outputs, "logits", outputs))

    return prove_packing(run_model, vocab_size=data.vocab_size, length=min(data.length, 64)).spelling
