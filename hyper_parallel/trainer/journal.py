"""What a run tells while it trains: lines in the terminal, ``metrics.jsonl``, and loggers that are installed.

Rank 0 writes. What it needs of the others travels with the number of targets of a step: padding, and every few steps
the memory of each rank. One step is looked at closely, by every rank; at the end, however it came, there is a page.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.launch.processes import ATTEMPT_VARIABLE
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.forecast.measured import MeasuredForecast, line_of
from hyper_parallel.trainer.loggers import open_loggers
from hyper_parallel.trainer.metrics import MetricsFile
from hyper_parallel.trainer.report.environment import environment_facts
from hyper_parallel.trainer.report.flops import flops_per_token, peak_of_device
from hyper_parallel.trainer.report.live import LIVE_VARIABLE
from hyper_parallel.trainer.report.page import write_report
from hyper_parallel.trainer.report.parts import forget_parts, read_parts
from hyper_parallel.trainer.report.recording import StepRecording
from hyper_parallel.trainer.report.run_data import LAYOUT_FILE
from hyper_parallel.trainer.report.trace import write_trace

if TYPE_CHECKING:
    from hyper_parallel.trainer.config.run_config import RunConfig
    from hyper_parallel.trainer.trainer import Result, Trainer

__all__ = ["Journal"]

_LIVE_SECONDS = 0.25  # between lines of a terminal that shows only the last


class Journal:
    """The story of one run."""

    def __init__(self, config: RunConfig, trainer: Trainer) -> None:
        platform = get_platform()
        self._config, self._trainer = config, trainer
        self._rank, self._size = platform.get_rank(), platform.get_world_size()
        mesh = trainer.run.mesh
        self._counts_rows = not any(mesh.get_local_rank(axis) for axis in ("cp", "tp"))
        self._writes = self._rank == 0
        self._begin, self._first_step = time.perf_counter(), trainer.run.step
        self._metrics: MetricsFile | None = None
        self._loggers: list[Any] = []
        self._folder = Path(config.log.folder)
        self._is_live, self._said_at, self._memory = LIVE_VARIABLE in os.environ, 0.0, [0]
        recorded = config.log.trace_step or min(trainer.run.step + 2, trainer.num_steps)
        self._recording = StepRecording(trainer.run, recorded)
        self._flops = flops_per_token(trainer.run, trainer.data.length)
        dtype = config.train.dtype if config.precision.compute == "same" else config.precision.compute
        self._peak, self._peak_from = peak_of_device(config.log.peak_flops, dtype) if self._flops else (None, "")
        if not self._writes:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        if recorded > trainer.run.step:
            forget_parts(self._folder)
        self._attempt = int(os.environ.get(ATTEMPT_VARIABLE, "0"))
        self._metrics = MetricsFile(self._folder, trainer.run.step, is_restart=self._attempt > 0)
        self._loggers = open_loggers(config.log, self._folder)
        self._started()
        self._forecast = MeasuredForecast(config, trainer)
        if self._forecast.forecast is not None:
            self._write("forecast", step=trainer.run.step, **self._forecast.forecast.as_data())
        (self._folder / LAYOUT_FILE).write_text(trainer.run.draw().svg, encoding="utf-8")

    # ---------------------------------------------------------------- what ranks tell rank 0

    def tells(self, step: int, batch: Any) -> tuple[int, ...]:
        """Padding of this rank's rows, and on some steps its memory in KiB, each rank at a place of its own."""
        padding = batch.num_padding if self._counts_rows else 0
        if not self._is_shown(step):
            return (padding,)
        memory = [0] * self._size
        memory[self._rank] = get_platform().peak_memory() // 1024
        return (padding, *memory)

    def _is_shown(self, step: int) -> bool:
        return step % self._config.log.every == 0 or step in (self._first_step + 1, self._trainer.num_steps)

    # ---------------------------------------------------------------- one step, closely

    def recording(self) -> AbstractContextManager[None]:
        """Around the next step."""
        is_next = self._trainer.run.step + 1 == self._recording.step
        return self._recording.recording() if is_next else nullcontext()

    def before_forgetting(self) -> None:
        """Called behind the optimizer, while the gradients are there."""
        if self._trainer.run.step == self._recording.step:
            self._recording.measure_memory(self._trainer.optimizer)

    # ---------------------------------------------------------------- events

    def _started(self) -> None:
        trainer, config = self._trainer, self._config
        self._write(
            "start",
            step=trainer.run.step,
            model=trainer.run.name,
            degrees=str(trainer.run.degrees).strip('"'),
            ranks=self._size,
            parameters=sum(_num_elements(one) for one in trainer.run.parameters()),
            data=trainer.data.describe(),
            steps=trainer.num_steps,
            batch=config.train.batch,
            length=trainer.data.length,
            resumed_from=None if trainer.resumed_from is None else str(trainer.resumed_from),
            attempt=self._attempt,
            repeated=self._metrics.num_repeated if self._metrics is not None else 0,
            flops_per_token=self._flops,
            peak_flops=self._peak,
            peak_from=self._peak_from,
        )
        self._write("environment", **environment_facts())
        from_where = f", from {trainer.resumed_from}" if trainer.resumed_from is not None else ""
        self._say(
            f"{trainer.run.name} on {self._size} rank{'s' * (self._size > 1)} ({trainer.run.degrees}), steps "
            f"{trainer.run.step + 1} to {trainer.num_steps}{from_where}"
        )
        self._say(f"data: {trainer.data.describe()}")

    def step(self, step: int, measured: dict[str, Any], seconds: float) -> None:
        """The numbers of a step that took ``seconds``, evaluation and waiting for a save among them."""
        if step == self._recording.step:
            self._recording.write(self._folder, time.perf_counter() - seconds, measured["seconds"])
        if not self._writes:
            return
        padding, *memory = measured.pop("told")[1:]
        tokens = measured["tokens"]
        values = {
            "step": step,
            "position": self._trainer.order.position,
            **{name: measured[name] for name in ("loss", "grad_norm", "lr", "tokens")},
            "padding": padding,
            "tokens_per_second": tokens / (seconds - measured["seconds"].get("eval", 0.0)),
            "seconds": {**{name: round(one, 6) for name, one in measured["seconds"].items()}, "all": round(seconds, 6)},
        }
        if "expert_imbalance" in measured:
            values["expert_imbalance"] = round(measured["expert_imbalance"], 4)
        if self._flops and self._peak:
            values["mfu"] = values["tokens_per_second"] * self._flops / (self._peak * self._size)
        if memory:
            self._memory = memory
            values["memory_per_rank"] = [one * 1024 for one in memory]
        self._write("step", **values)
        for logger in self._loggers:
            shown = ("loss", "grad_norm", "lr", "tokens_per_second", "mfu", "expert_imbalance")
            logger.log(step, {name: values[name] for name in shown if name in values})
        if self._is_shown(step) or (self._is_live and time.perf_counter() > self._said_at + _LIVE_SECONDS):
            self._said_at = time.perf_counter()
            self._say(self._line(step, values, self._memory))
        if self._forecast.is_due(step):
            compared = self._forecast.compare()
            self._write("forecast_measured", step=step, **compared)
            self._say(line_of(compared))

    def _line(self, step: int, values: dict[str, Any], memory: list[int]) -> str:
        done = step - self._first_step
        left = (time.perf_counter() - self._begin) / done * (self._trainer.num_steps - step)
        return (
            f"step {step:>6}/{self._trainer.num_steps}  loss {values['loss']:.4f}  norm {values['grad_norm']:.3f}  "
            f"lr {values['lr']:.2e}  {values['tokens_per_second']:,.0f} tokens/s  "
            f"{max(memory, default=0) / 1024**2:.2f} GiB  {_duration(left)} left"
        )

    def evaluated(self, step: int, loss: float) -> None:
        if self._writes:
            self._write("eval", step=step, loss=loss)
            for logger in self._loggers:
                logger.log(step, {"eval_loss": loss})
            self._say(f"step {step:>6}  evaluation: loss {loss:.4f}")

    def saved(self, step: int, waited: float) -> None:
        if self._writes:
            self._write("save", step=step, seconds=round(waited, 6))
            self._say(f"saved step {step}")

    def ended(self, result: Result) -> None:
        if self._writes:
            self._write("end", step=result.step, status=result.status, reason=result.reason)
            why = f" by {result.reason}" if result.reason else ""
            self._say(f"{result.status}{why} at step {result.step}")

    def failed(self, error: BaseException) -> None:
        """Note why training ended; whoever started the ranks may know better."""
        self._write(
            "end", step=self._trainer.run.step, status="failed", reason=f"{type(error).__name__}: {error}".strip()
        )

    def close(self) -> None:
        """Close all files, and write the page of the run."""
        for logger in self._loggers:
            logger.close()
        if self._metrics is None:
            return
        self._metrics.close()
        try:
            parts = read_parts(self._folder)
            if self._config.log.trace_step is not None and parts:
                self._say(f"trace of step {parts[0]['step']}: {write_trace(self._folder, parts)}")
            self._say(f"report: {write_report([self._folder])}")
        except Exception as error:  # What was trained is more than a page about it.
            self._say(f"no report: {type(error).__name__}: {error}; try `hyper-parallel report {self._folder}`")

    def _write(self, event: str, **values: Any) -> None:
        if self._metrics is not None:
            self._metrics.write(event, **values)

    def _say(self, text: str) -> None:
        print(text, flush=True)


def _num_elements(tensor: Any) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
