"""The loss on samples that are not trained on: always the same ones, whatever the degrees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.batches import Feeder

if TYPE_CHECKING:
    from hyper_parallel.data.dataset import Dataset
    from hyper_parallel.launch.signals import StopRequest
    from hyper_parallel.parallel.parallel import Parallel
    from hyper_parallel.trainer.config.sections.evaluation import EvalConfig

__all__ = ["Evaluation"]


class Evaluation:
    """Evaluations of one run; none without data for them."""

    def __init__(
        self, run: Parallel, data: Dataset | None, config: EvalConfig, batch: int, spelling: str | None
    ) -> None:
        if config.every and data is None:
            raise ValueError(
                f"eval.every = {config.every}, but there is no data to evaluate on; give [eval.data], data.validation "
                "= 0.05 or data.validation_path"
            )
        self._run, self._data, self._config, self._batch = run, data, config, batch
        self._feeder = None if data is None else Feeder(run, data, spelling)

    def is_due(self, step: int, num_steps: int) -> bool:
        every = self._config.every
        return self._feeder is not None and bool(every) and (step % every == 0 or step == num_steps)

    def loss(self, stop: StopRequest) -> float | None:
        """The mean over all targets of the samples; None: a rank was asked to stop meanwhile."""
        assert self._feeder is not None and self._data is not None
        read = get_platform().tensor_to_numpy
        count = min(self._config.samples, self._data.num_samples)
        total, targets = 0.0, 0
        for begin in range(0, count, self._batch):
            numbers, batch = self._feeder.load(np.arange(begin, min(begin + self._batch, count)))
            self._run.mine(numbers)
            self._run.tell = (int(stop.flag),)
            loss = self._run.loss_of(**self._feeder.arguments(batch))
            if stop.heard(int(read(self._run.told)[0])):
                return None
            number = int(read(self._run.counts.targets))  # type: ignore[union-attr]
            if number:
                total, targets = total + float(read(loss)) * number, targets + number
        return total / max(1, targets)
