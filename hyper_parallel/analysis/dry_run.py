"""``dry_run``: what one rank of a planned job needs, found on one CPU before the job is started."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from hyper_parallel.analysis.byte_sizes import parse_bytes
from hyper_parallel.analysis.model_source import find_model
from hyper_parallel.analysis.rank_run import Job, run_rank
from hyper_parallel.analysis.report import DryRun, make_report
from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.parallel.degrees import AXES, Degrees, as_degrees
from hyper_parallel.parallel.stages import table_for
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import HYPER_PARALLEL_PLATFORM, HYPER_PARALLEL_PLATFORM_TORCH, PlatformType

DEVICES = ("cpu", "cuda", "npu")


def dry_run(
    model: Any,
    degrees: str | Mapping[str, Any] | Degrees | None = None,
    *,
    world_size: int | None = None,
    rank: int = 0,
    plan: Any = None,
    sequence_parallel: bool | None = None,
    keep_whole: Sequence[str] = (),
    attention: str = "auto",
    order: str = "contiguous",
    batch: int = 1,
    length: int = 4096,
    microbatches: int | None = None,
    schedule: str | Table = "1f1b",
    stages_per_rank: int | None = None,
    stages: Sequence[int] | None = None,
    balance: str | Sequence[float] = "time",
    dtype: str | None = None,
    precision: Any = None,
    recompute: bool | str | Callable[..., Any] = False,
    offload: bool = False,
    clip_norm: float | None = None,
    optimizer: str | Callable[[Any], Any] | None = "adamw",
    device: str = "cpu",
    device_memory: str | int | None = None,
    steps: int = 2,
) -> DryRun:
    """Run ``rank`` of a job without memory, and say what a step needs: memory by kind, collectives, operations.

    The library's own code and the model's run on tensors that have a shape and no memory, in a world in which nobody
    answers: ``parallelize``, then forward, backward, optimizer. Nothing is modelled.

    Args:
        model: a size by name (``"llama-70b"``), the path of a Hugging Face ``config.json``, ``"module:function"``, or a
            function that builds the model: it returns the model, or the model and its inputs (a tuple or a dict).
        degrees: as :func:`parallelize` takes them, ``"dp_shard=4, tp=8"``; ``dp`` is short for ``dp_replicate``. Ranks
            of ``world_size`` that no axis names are ``dp_shard``.
        plan, sequence_parallel, keep_whole, attention, order, precision, offload: as :func:`parallelize` takes them.
        batch: sequences of ``length`` tokens that this rank trains on in a step, in ``microbatches`` parts (default 1,
            with ``pp`` twice its degree and at most ``batch``); ranks along ``dp_replicate`` and ``dp_shard`` have
            others, those along ``pp``, ``cp`` and ``tp`` the same.
        schedule, stages_per_rank, stages, balance: of a pipeline, as :func:`parallelize` takes them.
        dtype: of the parameters; by default the config's, or as the model was built.
        recompute: compute the activations of each block again in backward; a policy says which.
        clip_norm: the norm to which gradients are scaled down; None: they are not.
        optimizer: ``"adamw"``, ``"adam"``, ``"sgd"``, ``"adagrad"``, ``"rmsprop"``, ``"adafactor"``, None, or a
            function that makes one from the parameters.
        device: whose attention kernel, list kernels of optimizers and rounding of allocations are meant.
        device_memory: ``"80GB"``; the report says whether the peak fits, and if not, by how much.
        steps: the last one is counted; the first makes the optimizer's state.

    >>> report = dry_run("llama-demo", "tp=4", rank=3, batch=2, length=128)
    >>> report.peak_by_kind["parameters"]
    397568
    >>> report.num_collectives
    49
    """
    given = dict(locals())
    if get_platform().platform_type is not PlatformType.PYTORCH:
        (report,) = _ask_torch(given)
        return report
    job, limit = _prepare(**given)
    return make_report(job, run_rank(job, rank), rank, (rank,), limit)


def dry_run_classes(model: Any, degrees: Any = None, **options: Any) -> list[DryRun]:
    """:func:`dry_run` for one rank of each class: ranks that do alike are run once. See ``rank_questions.py``.

    >>> [report.ranks for report in dry_run_classes("llama-demo", "dp=2, tp=2", batch=2, length=32)]
    [(0, 1, 2, 3)]
    """
    given = {"model": model, "degrees": degrees, **_DEFAULTS, **options}
    if "rank" in options:
        raise TypeError("dry_run_classes looks at all ranks; leave out rank=, or call dry_run")
    if get_platform().platform_type is not PlatformType.PYTORCH:
        return _ask_torch(given, all_classes=True)
    job, limit = _prepare(**given)
    reports, left = [], list(range(job.world_size))
    while left:
        run = run_rank(job, left[0])
        answers = run.answers_of(left[0])
        alike = tuple(rank for rank in left if run.answers_of(rank) == answers)
        reports.append(make_report(job, run, left[0], alike, limit))
        left = [rank for rank in left if rank not in set(alike)]
    return reports


_DEFAULTS: dict[str, Any] = dict(dry_run.__kwdefaults__ or {})


def _prepare(
    model: Any,
    degrees: Any,
    world_size: int | None,
    rank: int,
    device_memory: str | int | None,
    **options: Any,
) -> tuple[Job, int | None]:
    """The job and the limit; every mistake is found before anything is built."""
    for name in ("batch", "length", "microbatches", "steps"):
        if name == "microbatches" and options[name] is None:
            continue
        if not isinstance(options[name], int) or options[name] < 1:
            raise ValueError(f"dry_run: {name} must be at least 1, got {options[name]!r}")
    if options["device"] not in DEVICES:
        raise ValueError(f"dry_run: device {options['device']!r} is not known; take {', '.join(DEVICES)}")
    found = read_degrees(degrees, world_size)
    if options["microbatches"] is None:
        options["microbatches"] = _microbatches(
            found, options["schedule"], options["stages_per_rank"], options["batch"]
        )
    job = Job(source=find_model(model), degrees=found, **options)
    if not 0 <= rank < job.world_size:
        raise ValueError(f"dry_run: rank {rank} is not one of the {job.world_size} ranks 0 to {job.world_size - 1}")
    return job, None if device_memory is None else parse_bytes(device_memory)


def _microbatches(degrees: Degrees, schedule: Any, stages_per_rank: int | None, batch: int) -> int:
    pp = degrees.sizes["pp"]
    return table_for(schedule, pp, None, stages_per_rank, rows=batch).microbatches if pp > 1 else 1


def read_degrees(given: Any, world_size: int | None) -> Degrees:
    """The degrees with a number for each axis; of as many ranks as they name where no world is given.

    >>> read_degrees("tp=8", 32), read_degrees("dp=2, tp=2", None)
    (Degrees("dp_shard=4, tp=8"), Degrees("dp_replicate=2, tp=2"))
    """
    if isinstance(given, str):
        given = re.sub(r"\bdp\s*=", "dp_replicate=", given)
    elif isinstance(given, Mapping) and "dp" in given:
        if "dp_replicate" in given:
            raise ValueError("degrees: dp is short for dp_replicate, and both are given; keep one")
        given = {"dp_replicate" if axis == "dp" else axis: degree for axis, degree in given.items()}
    asked = as_degrees(given)
    if world_size is not None and world_size < 1:
        raise ValueError(f"a world has one rank or more, got {world_size}")
    named = math.prod(degree for axis in AXES if isinstance(degree := getattr(asked, axis), int))
    return asked.fit(named if world_size is None else world_size)


# ---------------------------------------------------------------- on another framework


def _ask_torch(given: dict[str, Any], all_classes: bool = False) -> list[DryRun]:
    """The same question to a process that runs on PyTorch; see docs/mindspore.md."""
    if find_spec("torch") is None:
        raise RuntimeError(
            "the dry run executes the PyTorch twin of the model, and PyTorch is not installed; run: pip install "
            "'hyper-parallel[torch]'"
        )
    unsayable = [
        name
        for name in ("model", "plan", "schedule", "optimizer", "precision", "recompute")
        if callable(given[name]) or isinstance(given[name], (dict, Table))
    ]
    if unsayable:
        raise TypeError(
            f"on this framework the dry run is made by another process, on PyTorch, and {', '.join(unsayable)} cannot "
            "be sent there: name a model, a config.json or 'module:function', and an optimizer by name"
        )
    question = json.dumps({**given, "all_classes": all_classes}, default=str)
    done = subprocess.run(
        [sys.executable, "-m", "hyper_parallel.analysis.answer", question],
        env={**os.environ, HYPER_PARALLEL_PLATFORM: HYPER_PARALLEL_PLATFORM_TORCH},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 2:
        raise ValueError(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise RuntimeError(f"the dry run on PyTorch failed:\n{done.stderr.strip()}")
    return [DryRun.from_data(data) for data in json.loads(done.stdout.splitlines()[-1])]
