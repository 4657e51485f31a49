"""What is proven on the model before the first step: packed documents do not see each other, and the loss is over what
is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel.parallel.explanation import prove_packing_of
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
    length = min(data.length, 64)
    return prove_packing_of(run, length, data.vocab_size, arguments=feeder.arguments).spelling
