"""The config of a run: all sections, and what must hold between them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pydantic import Field
from pydantic.dataclasses import dataclass

from hyper_parallel.core.pipeline_parallel.tables.counts import (
    TooFewRows,
    default_microbatches,
    refused_microbatches,
)
from hyper_parallel.data.config import DataConfig
from hyper_parallel.parallel.degrees import AXES, REST
from hyper_parallel.trainer.config.section import STRICT, Data, Problem, Section
from hyper_parallel.trainer.config.sections.checkpoint import AUTO, NEVER, CheckpointConfig
from hyper_parallel.trainer.config.sections.evaluation import EvalConfig
from hyper_parallel.trainer.config.sections.launch import LaunchConfig
from hyper_parallel.trainer.config.sections.log import LogConfig
from hyper_parallel.trainer.config.sections.model import ModelConfig
from hyper_parallel.trainer.config.sections.optimizer import OptimizerConfig
from hyper_parallel.trainer.config.sections.parallel import ParallelConfig
from hyper_parallel.trainer.config.sections.precision import PrecisionConfig
from hyper_parallel.trainer.config.sections.recompute import RecomputeConfig
from hyper_parallel.trainer.config.sections.schedule import ScheduleConfig
from hyper_parallel.trainer.config.sections.train import TrainConfig

__all__ = ["RunConfig"]

_METADATA = "metadata.json"  # of a checkpoint


@dataclass(config=STRICT, kw_only=True, frozen=True)
class RunConfig(Section):
    """A run: what is trained, on what, how, on how many ranks. Frozen; sections may be given as dicts.

    >>> RunConfig(model={"name": "llama-demo"}, data={"length": 64}, train={"steps": 10, "batch": 8}).world_size
    1
    """

    model: ModelConfig
    data: Data = Field(default_factory=DataConfig)
    train: TrainConfig
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    recompute: RecomputeConfig = Field(default_factory=RecomputeConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    launch: LaunchConfig = Field(default_factory=LaunchConfig)

    @property
    def nproc(self) -> int:
        """Processes on this host: as said, or as many as the degrees ask for, "rest" counting as 1."""
        if self.launch.nproc is not None:
            return self.launch.nproc
        given = [getattr(self.parallel, axis) for axis in AXES]
        return max(1, math.prod(degree for degree in given if degree != REST) // self.launch.hosts)

    @property
    def world_size(self) -> int:
        """Ranks of the run, when it starts its own processes."""
        return self.nproc * self.launch.hosts

    def microbatches(self, world_size: int | None = None) -> int:
        """Parts in which a rank computes its samples: as said, or as :func:`hyper_parallel.parallelize` chooses."""
        if self.train.microbatches is not None:
            return self.train.microbatches
        sizes = self.parallel.degrees.fit(world_size or self.world_size).sizes
        rows = math.ceil(self.train.batch / (sizes["dp_replicate"] * sizes["dp_shard"]))
        return default_microbatches(self.parallel.schedule, sizes["pp"], rows) if sizes["pp"] > 1 else 1

    @property
    def checkpoint_folder(self) -> Path:
        """Where checkpoints go."""
        return Path(self.checkpoint.folder or Path(self.log.folder) / "checkpoints")

    def problems(self) -> Iterator[Problem]:
        yield from self._problems_of_degrees()
        if self.eval.every and not (self.eval.data or self.data.validation or self.data.validation_path):
            yield Problem(
                ("eval.data", "eval.every", "data.validation", "data.validation_path"),
                f"is missing: every = {self.eval.every} evaluates on samples of [eval.data], or on those that "
                "data.validation sets apart",
            )
        if self.train.steps is not None and self.schedule.warmup > self.train.steps:
            yield Problem(
                ("schedule.warmup", "train.steps"),
                f"must be at most the steps of the run, train.steps = {self.train.steps}, got {self.schedule.warmup}",
            )
        if self.train.steps is not None and (self.log.trace_step or 0) > self.train.steps:
            yield Problem(
                ("log.trace_step", "train.steps"),
                f"must be one of the steps 1 to train.steps = {self.train.steps}, got {self.log.trace_step}",
            )
        every, stays = self.checkpoint.every, self.checkpoint.keep_every
        if stays and every and stays % every:
            yield Problem(
                ("checkpoint.keep_every", "checkpoint.every"),
                f"must be a multiple of every = {every}, got {stays}: no checkpoint would be of such a step",
            )
        for key, path in (("log.folder", self.log.folder), ("checkpoint.folder", self.checkpoint.folder)):
            if path is not None and (what := _why_no_folder(path)):
                yield Problem((key,), what)
        resume = self.checkpoint.resume
        if resume not in (AUTO, NEVER) and not os.path.isfile(os.path.join(resume, _METADATA)):
            inside = sorted(Path(resume).glob(f"*/{_METADATA}"), key=os.path.getmtime) if os.path.isdir(resume) else []
            hint = f"; did you mean '{inside[-1].parent}'?" if inside else f": it has no {_METADATA}"
            yield Problem(
                ("checkpoint.resume",),
                f"must be {AUTO!r}, {NEVER!r} or the folder of a checkpoint, got {resume!r}{hint}",
            )
        if self.checkpoint.export_hugging_face and self.model.build is not None:
            yield Problem(
                ("checkpoint.export_hugging_face", "model.build"),
                "must be false for a model of your own: Hugging Face has no class that would open it",
            )
        if self.train.dtype == "float64" and self.precision.compute not in ("same",):
            yield Problem(
                ("precision.compute", "train.dtype"),
                f'must be "same" with train.dtype = "float64", which is for comparing runs, got '
                f"{self.precision.compute!r}",
            )

    def _problems_of_degrees(self) -> Iterator[Problem]:
        keys = [f"parallel.{axis}" for axis in AXES if getattr(self.parallel, axis) not in (1, REST)]
        world = ("launch.nproc", "launch.hosts")
        try:
            dense = replace(self.parallel.degrees, ep=1).fit(self.world_size)
        except ValueError as error:
            yield Problem((*keys, "parallel", *world), str(error))
            return
        try:
            degrees = replace(dense, ep=self.parallel.ep).fit(self.world_size)
        except ValueError as error:
            yield Problem(("parallel.ep", *keys, *world), str(error))
            return
        parts = degrees.sizes["dp_replicate"] * degrees.sizes["dp_shard"]
        if self.train.batch < parts:
            yield Problem(
                ("train.batch", *keys, "launch.nproc"),
                f"must be at least dp_replicate x dp_shard = {parts}, one sample for each part of the batch, got "
                f"{self.train.batch}",
            )
        elif degrees.sizes["pp"] > 1:
            yield from self._problems_of_microbatches(degrees.sizes["pp"])
        if self.data.length < degrees.sizes["cp"]:
            yield Problem(
                ("data.length", "parallel.cp"),
                f"must be at least cp = {degrees.sizes['cp']}, one token for each part of a sequence, got "
                f"{self.data.length}",
            )

    def _problems_of_microbatches(self, pp: int) -> Iterator[Problem]:
        schedule, given = self.parallel.schedule, self.train.microbatches
        keys = ("parallel.schedule", "parallel.pp")
        try:
            refused = refused_microbatches(schedule, pp, self.microbatches())
        except TooFewRows as error:
            yield Problem(
                ("train.batch", *keys),
                f'is too small: {error}; give a larger batch, or a schedule that takes any number, "1f1b" or "zbv"',
            )
            return
        if refused is not None:
            yield Problem(
                ("train.microbatches", *keys), f"does not fit schedule = {schedule!r}: {refused}, got {given}"
            )


def _why_no_folder(path: str) -> str:
    """Why files cannot be written below a folder, which need not be there yet; "" if they can."""
    place = os.path.abspath(path)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        return f"must be a folder that can be made; '{place}' is no folder"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"must be a folder to write to; '{place}' may not be written to"
    whole = os.fsencode(os.path.abspath(path))
    name, most = os.pathconf(place, "PC_NAME_MAX"), os.pathconf(place, "PC_PATH_MAX")
    if len(whole) >= most or max(map(len, whole.split(b"/"))) > name:
        return f"must be a folder that can be made; a name has at most {name} bytes here, and a path {most - 1}"
    return ""
