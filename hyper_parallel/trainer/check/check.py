"""``check_run``: a run's layout against one process; all ranks as threads, on MindSpore as processes."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import TypeAdapter

from hyper_parallel.data.opening import open_data
from hyper_parallel.launch.join import join
from hyper_parallel.launch.local import run_local
from hyper_parallel.parallel.losses import is_hugging_face
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import PlatformType
from hyper_parallel.testing.threads import threads
from hyper_parallel.trainer.building import build_model, model_vocabulary
from hyper_parallel.trainer.check import rank as ranks
from hyper_parallel.trainer.check.short_data import ShortData
from hyper_parallel.trainer.check.shrinking import one_process, shrink
from hyper_parallel.trainer.check.verdict import Difference, Verdict
from hyper_parallel.trainer.config.run_config import RunConfig

if TYPE_CHECKING:
    from hyper_parallel.data.dataset import Dataset
    from hyper_parallel.parallel.parallel import Parallel

__all__ = ["check_run"]

_TOLERANCE = 1e-9  # of the size of what is compared
_ROUNDED_TOLERANCE = 1e-3  # in float32, as norms and losses of transformers are in any case


def check_run(
    config: RunConfig,
    *,
    steps: int = 3,
    world_size: int | None = None,
    keep_sizes: bool = False,
    tamper: Callable[[Parallel], None] | None = None,
) -> Verdict:
    """Train ``steps`` steps of the run at shrunk widths in float64, in one process and under its degrees, and compare.

    Losses, gradients, gradient norms and the weights behind the steps. ``keep_sizes``: the model as it is.
    ``tamper`` is called on every rank behind each backward, to see that the check finds what it does.
    """
    size = world_size or config.world_size
    on_threads = get_platform().platform_type is PlatformType.PYTORCH
    dtype: Literal["float64", "float32"] = (
        "float64" if on_threads else "float32"
    )  # MindSpore's CPU has kernels of the other for few operators
    small, length = shrink(config, size, dtype=dtype, keep_sizes=keep_sizes)
    model = build_model(small.model, dtype)
    title = _title(config, small, size, steps, length, model)
    tolerance = _TOLERANCE if dtype == "float64" and not is_hugging_face(model) else _ROUNDED_TOLERANCE
    if on_threads:
        data = _data(small, length, model)
        expected = _reference(small, data, steps, model, dtype)
        answers = threads(size).run(ranks.compare, small, data, steps, expected, tolerance, tamper)
    else:
        if tamper is not None:
            raise TypeError("check_run: ranks are processes on this framework, and `tamper` cannot be sent to them")
        answers = _on_processes(small, length, size, steps, tolerance)
    differences = [Difference(**one) for answer in answers for one in answer["differences"]]
    sizes = small.parallel.degrees.fit(size).sizes
    differences += _missing(answers, size // sizes["pp"])
    return Verdict(
        title=title,
        world_size=size,
        num_steps=steps,
        sizes=sizes,
        microbatches=small.microbatches(size),
        num_compared=max(answer["compared"] + len(answer["missing"]) for answer in answers)
        - len(set.intersection(*(set(answer["missing"]) for answer in answers))),
        largest=max(answer["largest"] for answer in answers),
        differences=differences,
    )


def _reference(small: RunConfig, data: Dataset, steps: int, model: Any, dtype: str) -> Any:
    try:
        (expected,) = threads(1).run(ranks.reference, one_process(small), data, steps)
    except (RuntimeError, LookupError) as error:
        raise ValueError(
            f"{type(model).__name__} fails in one process already, under no layout, in {dtype} at these sizes: "
            f"{(str(error) or type(error).__name__).splitlines()[0]}"
        ) from error
    return expected


def _missing(answers: list[dict[str, Any]], ranks_of_stage: int) -> list[Difference]:
    """What one process has and a rank does not, and none of its peers in the other stages of a pipeline."""
    by_rank = {answer["rank"]: set(answer["missing"]) for answer in answers}
    return [
        Difference(name, rank, math.inf, 0.0)
        for rank, missing in by_rank.items()
        for name in sorted(missing)
        if all(name in by_rank[peer] for peer in range(rank % ranks_of_stage, len(by_rank), ranks_of_stage))
    ]


def _title(config: RunConfig, small: RunConfig, size: int, steps: int, length: int, model: Any) -> str:
    degrees = str(small.parallel.degrees.fit(size)).strip('"')
    sizes = f"shrunk to {_num_elements(model):,} parameters" if small.model != config.model else "as it is"
    if small.model.build is not None:
        sizes = "as its function builds it"
    return (
        f"check: {type(model).__name__} {sizes} on {size} rank{'s' * (size > 1)} ({degrees}) against one process, "
        f"{steps} steps of {small.train.batch} x {length} tokens in {small.train.dtype}"
    )


def _num_elements(model: Any) -> int:
    total = 0
    for parameter in get_platform().parameters_dict(model).values():
        count = 1
        for size in parameter.shape:
            count *= size
        total += count
    return total


def _data(config: RunConfig, length: int, model: Any) -> Dataset:
    return ShortData(open_data(config.data, seed=config.train.seed), length, model_vocabulary(model))


# ---------------------------------------------------------------- on processes


def _on_processes(config: RunConfig, length: int, size: int, steps: int, tolerance: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="hyper_parallel_check_") as folder:
        for run, count in ((one_process(config), 1), (config, size)):
            text = TypeAdapter(RunConfig).dump_json(run).decode()
            run_local(
                run_process, count, args=[text, folder, length, steps, tolerance], on_line=lambda rank, line: None
            )
        return [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(size)]


def run_process(text: str, folder: str, length: int, steps: int, tolerance: float) -> None:
    """What a process of the check does: the one that is alone first, and writes down what the others read."""
    join()
    config = TypeAdapter(RunConfig).validate_json(text)
    data = _data(config, length, build_model(config.model, config.train.dtype))
    path = Path(folder) / "expected.npz"
    if not path.exists():
        np.savez(path, **ranks.reference(config, data, steps))
        return
    with np.load(path) as expected:
        answer = ranks.compare(config, data, steps, dict(expected), tolerance)
    (Path(folder) / f"rank-{get_platform().get_rank()}.json").write_text(json.dumps(answer))
