"""``Trainer``: a run of training from its config, on this process as one rank of its world; the loop.

Note [One reading a step]
Nothing is read on the host inside a step. Behind it the loss, the norm and what ranks told each other are read at once;
every rank sees the same numbers, so every rank decides alike: to stop, to save, to give up.

Note [Stopping before the first step]
Data can take hours to prepare, and values minutes to read. A request to stop that comes meanwhile is looked at between
the two and before the loop, by all ranks together, and ends the preparation of data at once. Nothing is saved then:
what there is to go on from is what the run began with.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
from hyper_parallel.core.dtensor.random.random_state import manual_seed
from hyper_parallel.data.dataset import Dataset
from hyper_parallel.data.prefetch import Prefetch
from hyper_parallel.launch.durations import seconds_of
from hyper_parallel.launch.join import join
from hyper_parallel.launch.notes import note_step
from hyper_parallel.launch.signals import StopRequest
from hyper_parallel.models.expert_balance import load_imbalance, update_expert_bias
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.batches import Feeder
from hyper_parallel.trainer.building import build_model, give_values, model_vocabulary
from hyper_parallel.trainer.checkpoints import Checkpoints
from hyper_parallel.trainer.config.run_config import RunConfig
from hyper_parallel.trainer.evaluation import Evaluation
from hyper_parallel.trainer.journal import Journal
from hyper_parallel.trainer.opened_data import Asked, open_evaluation, open_training
from hyper_parallel.trainer.optimizers import make_optimizer, set_rate
from hyper_parallel.trainer.proofs import find_spelling
from hyper_parallel.trainer.schedule import num_steps, rate_factor
from hyper_parallel.trainer.splitting import split_model

__all__ = ["Result", "Trainer"]


@dataclass
class Result:
    """How a run ended."""

    status: str  # "finished" or "stopped"
    step: int
    exit_code: int = 0
    reason: str | None = None
    losses: dict[int, float] = field(default_factory=dict)  # by step, of this process


class Trainer:
    """A run from its config: ``Trainer(RunConfig(...)).train()``, the same on every rank.

    In a process that nobody launched it is a world of one; under a launcher every rank calls it.
    """

    def __init__(self, config: RunConfig) -> None:
        if not isinstance(config, RunConfig):
            raise TypeError(f"Trainer takes a RunConfig, got a {type(config).__name__}")
        self.config = config

    def train(self, stop: StopRequest | None = None) -> Result:
        """Train until the run is complete, or asked to stop; then its state is saved.

        Signals are caught meanwhile, which only the main thread of a process can do. ``stop`` is a request of the
        caller's in place of that: entered, or one that catches nothing.
        """
        limit = self.config.launch.stop_after
        if stop is None:
            with StopRequest(after=None if limit is None else seconds_of(limit)) as own:
                return self.train(own)
        join(timeout=seconds_of(self.config.launch.timeout))
        if not self._prepare(stop):
            if get_platform().get_rank() == 0:
                print(f"stopped by {stop.reason} before a step was made", flush=True)
            return Result("stopped", self.run.step, stop.exit_code, stop.reason)
        try:
            return self._loop(stop)
        except BaseException as error:
            self.journal.failed(error)
            raise
        finally:
            self.journal.close()

    # ---------------------------------------------------------------- before the first step

    def _prepare(self, stop: StopRequest) -> bool:
        """All that a step needs; False if the run was asked to stop, see Note [Stopping before the first step]."""
        config = self.config
        manual_seed(config.train.seed)
        model = build_model(config.model, config.train.dtype)
        compiled = config.precision.compile
        self.run = split_model(model, config, compile=False if compiled == "none" else compiled)
        validation = self._open_data(stop)
        if self._is_asked(stop):
            return False
        for data in (self.data, validation):
            vocabulary = model_vocabulary(model)
            if data is not None and vocabulary is not None:
                data.require_vocabulary(vocabulary)
        self.order = self.data.order(batch=config.train.batch, seed=config.train.seed)
        self.checkpoints = Checkpoints(config)
        self.optimizer: Any = None
        self._resume_or_begin()
        self.num_steps = num_steps(config.train, self.data.num_samples, self.run.step, self.order.position)
        spelling = find_spelling(self.run, self.data)
        if self._is_asked(stop):
            return False
        self.feeder = Feeder(self.run, self.data, spelling)
        self.evaluation = Evaluation(self.run, validation, config.eval, config.train.batch, spelling)
        self.journal = Journal(config, self)
        return True

    def _open_data(self, stop: StopRequest) -> Dataset | None:
        """Open what is trained on; what is evaluated on. Preparing it ends early where this rank is to stop."""
        try:
            self.data = open_training(self.config, stop)
            return open_evaluation(self.config, stop)
        except Asked:
            return None

    def _is_asked(self, stop: StopRequest) -> bool:
        """Whether a rank was asked to stop. forward: all-reduce of a number over all ranks; no backward."""
        platform, mesh = get_platform(), self.run.mesh
        flag = platform.index_tensor([[int(stop.flag)]], platform.get_device_type())
        if mesh.size() > 1:
            flag = platform.all_reduce(flag, mesh.get_group(tuple(range(mesh.ndim))))
        return stop.heard(int(platform.tensor_to_numpy(flag)[0, 0]))

    def _resume_or_begin(self) -> None:
        config = self.config
        self.resumed_from = self.checkpoints.to_resume()
        if self.resumed_from is None:
            give_values(self.run, config.model, config.train.seed)
            self.optimizer = make_optimizer(config.optimizer, self.run.named_parameters())
            return
        if self.checkpoints.hold_frozen:
            self.run.materialize(seed=config.train.seed)
        else:
            give_values(self.run, config.model, config.train.seed)
        self.optimizer = make_optimizer(config.optimizer, self.run.named_parameters())
        frozen = self.checkpoints.hold_frozen
        try:
            more = self.run.load(self.resumed_from, self.optimizer, frozen=frozen, options=False, order=None)
        except CorruptCheckpointError as error:
            raise type(error)(f"{error}. {self.checkpoints.instead_of(self.resumed_from)}") from None
        self.order.load_state(more["order"])

    # ---------------------------------------------------------------- the loop

    def _loop(self, stop: StopRequest) -> Result:
        result = Result("finished", self.run.step)
        with Prefetch(self.order, self.feeder.load) as batches:
            while self.run.step < self.num_steps:
                begin = time.perf_counter()
                numbers, batch = next(batches)
                loaded = time.perf_counter()
                with self.journal.recording():
                    measured = self._step(numbers, batch, stop)
                step = self.run.step
                result.step, result.losses[step] = step, measured["loss"]
                measured["seconds"] = {"data": loaded - begin, **measured["seconds"]}
                is_stopped = stop.heard(measured["told"][0])
                if not is_stopped and self.evaluation.is_due(step, self.num_steps):
                    start = time.perf_counter()
                    loss = self.evaluation.loss(stop)
                    measured["seconds"]["eval"] = time.perf_counter() - start
                    is_stopped = loss is None
                    if loss is not None:
                        self.journal.evaluated(step, loss)
                if is_stopped or self.checkpoints.is_due(step) or step == self.num_steps:
                    waited = self._save(step, at_once=is_stopped or step == self.num_steps)
                    measured["seconds"]["save"] = waited
                else:
                    self.checkpoints.poll()
                self.journal.step(step, measured, time.perf_counter() - begin)
                if is_stopped:
                    result.status, result.exit_code, result.reason = "stopped", stop.exit_code, stop.reason
                    break
        self.checkpoints.finish()
        if result.status == "finished":
            self._export()
        self.journal.ended(result)
        return result

    def _step(self, numbers: Any, batch: Any, stop: StopRequest) -> dict[str, Any]:
        """One step of the optimizer, and its numbers."""
        config, run = self.config, self.run
        begin = time.perf_counter()
        step = run.step + 1
        note_step(step)
        run.mine(numbers)
        run.tell = (int(stop.flag), *self.journal.tells(step, batch))
        loss = run.forward_backward(**self.feeder.arguments(batch))
        clip = config.train.clip_norm
        norm = run.clip_grad_norm_(math.inf if clip == "none" else clip)
        rate = config.optimizer.lr * rate_factor(config.schedule, step, self.num_steps)
        set_rate(self.optimizer, rate)
        between = time.perf_counter()
        get_platform().step_optimizer(self.optimizer)
        self.journal.before_forgetting()
        run.zero_grad()
        read = _read(loss, norm, run.counts.targets, run.told)  # type: ignore[union-attr]
        imbalance = load_imbalance(run)
        if imbalance is not None:
            read["expert_imbalance"] = imbalance
        update_expert_bias(run)
        if not (math.isfinite(read["loss"]) and math.isfinite(read["grad_norm"])):
            raise FloatingPointError(
                f"step {step} has a loss of {read['loss']:.6g} and a gradient norm of {read['grad_norm']:.3g}, on "
                f"every rank; the last checkpoint is in '{self.checkpoints.folder}'. Lower optimizer.lr "
                f"({config.optimizer.lr:g}) or train.clip_norm, or look at this step's samples: "
                f"{[int(number) for number in numbers[:8]]}"
            )
        end = time.perf_counter()
        read |= {"lr": rate, "seconds": {"forward_backward": between - begin, "optimizer": end - between}}
        return read

    def _save(self, step: int, at_once: bool) -> float:
        waited = self.checkpoints.save(self.run, self.optimizer, step, at_once=at_once, order=self.order.state())
        self.journal.saved(step, waited)
        return waited

    def _export(self) -> None:
        config, folder = self.config, Path(self.config.log.folder)
        if config.model.lora is not None:
            self.run.save_adapters(folder / "adapter", base=config.model.hugging_face or config.model.weights)
        if config.checkpoint.export_hugging_face:
            self.run.save_hugging_face(folder / "hugging_face", tokenizer=self._tokenizer())

    def _tokenizer(self) -> Path | None:
        given = self.config.data.tokenizer
        path = Path(given)
        return None if given == "bytes" else path if path.is_dir() else path.parent


def _read(loss: Any, norm: Any, targets: Any, told: Any) -> dict[str, Any]:
    """See Note [One reading a step]."""
    read = get_platform().tensor_to_numpy
    whole = getattr(norm, "full_tensor", None)
    return {
        "loss": float(read(loss)),
        "grad_norm": float(read(norm if whole is None else whole())),
        "tokens": int(read(targets)),
        "told": [int(number) for number in read(told)],
    }
