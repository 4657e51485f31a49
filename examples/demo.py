"""One training, interrupted in every way, under three layouts: the losses are those of one process.

    python examples/demo.py [--steps 40] [--folder demo_runs] [--quick]

1. `hyper-parallel check`: the layout of the second run against one process, before anything runs.
2. The run of `demo.toml` in one process.
3. The same on 4 processes as dp_shard 2 x tp 2, which begins with a forecast of what a rank will need; asked to stop by
   SIGTERM in the middle.
4. It goes on as pp 2 x tp 2, two pipeline stages under a zero-bubble schedule; in the middle a rank is killed with
   `kill -9`, and the launcher starts all again by itself.
5. The first steps on MindSpore, where `make setup` has made its environment.

With `--quick` there are 2 processes instead of 4, and no MindSpore.

Every run is one `hyper-parallel train`; what they did is read from their metrics.jsonl. The exit status is 1 if a loss
differs by more than 1e-4.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).resolve().parent
CONFIG = HERE / "demo.toml"
MINDSPORE = HERE.parent / ".venv-mindspore" / "bin" / "python"
TOLERANCE = 1e-4
LIMIT = 600  # seconds of one run

OnStep = Callable[[int, float], None]


class Run:
    """One `hyper-parallel train`, followed by what it writes down."""

    def __init__(self, folder: Path, *options: str, python: str = sys.executable, platform: str = "torch") -> None:
        self.folder = folder
        command = [python, "-m", "hyper_parallel.cli", "train", str(CONFIG), "--set", f"log.folder={folder}", *options]
        environment = {**os.environ, "HYPER_PARALLEL_PLATFORM": platform, "GLOG_v": "3"}
        # Cores are shared out: ranks that each use all of them wait for each other.
        environment.setdefault("OMP_NUM_THREADS", "1")
        folder.mkdir(parents=True, exist_ok=True)
        self._output = (folder / "output.txt").open("a")
        self._process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT, env=environment)

    def forecast(self) -> str:
        """What it prints before its ranks start: a table, and behind it whether that fits."""
        while self._process.poll() is None:
            said = Path(self._output.name).read_text().splitlines()
            if verdict := [number for number, line in enumerate(said) if line.startswith("forecast: ")]:
                return "\n".join(said[: verdict[0] + 1])
            time.sleep(0.05)
        return ""

    def follow(self, on_step: OnStep, until: int | None = None) -> int:
        """Tell each step's loss as it comes, until the run has ended or a step is done; the last step."""
        end, last = time.monotonic() + LIMIT, 0
        while time.monotonic() < end:
            has_ended = self._process.poll() is not None
            losses = self.losses()
            if losses and max(losses) != last:
                last = max(losses)
                on_step(last, losses[last])
            if has_ended or (until is not None and last >= until):
                return last
            time.sleep(0.05)
        self._process.kill()
        raise SystemExit(f"the run in {self.folder} took more than {LIMIT} s; its output is in {self._output.name}")

    def ask_to_stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill_rank(self, rank: int) -> None:
        """End one of the processes that the launcher has started, without a warning."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        for child in children:
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables:
                os.kill(int(child), signal.SIGKILL)
                return
        raise SystemExit(f"rank {rank} of the run in {self.folder} was not found; its output is in {self._output.name}")

    def ended(self, *allowed: int) -> None:
        """Wait for the end; another exit status than these is an error that shows the run's last words."""
        status = self._process.wait()
        self._output.close()
        if status not in allowed:
            words = Path(self._output.name).read_text().splitlines()[-30:]
            raise SystemExit("\n".join([*words, f"the run in {self.folder} ended with status {status}"]))

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return []
        lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def losses(self) -> dict[int, float]:
        return {event["step"]: event["loss"] for event in self.events("step")}

    def recorded(self) -> dict[str, Any]:
        """What rank 0 held and sent in one step."""
        return json.loads((self.folder / "recorded" / "rank-0.json").read_text())

    def held(self) -> str:
        kinds = dict(self.recorded()["memory"])
        return f"{sum(kinds[kind] for kind in ('parameters', 'gradients', 'optimizer state')) / 2**20:.2f}"

    def sent(self) -> str:
        return f"{sum(one['sent'] for one in self.recorded()['communication']) / 2**20:.2f}"


def start_and_report(console: Console, *words: str) -> None:
    """A command of `hyper-parallel` whose output is shown as it is."""
    environment = {**os.environ, "HYPER_PARALLEL_PLATFORM": "torch", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "hyper_parallel.cli", *words], capture_output=True, text=True, env=environment
    )
    console.print((done.stdout + done.stderr).strip(), markup=False, highlight=False, soft_wrap=True)
    if done.returncode:
        raise SystemExit(f"hyper-parallel {' '.join(words)} ended with status {done.returncode}")


class Bars:
    """A live bar per run on a terminal; a line per run where output is piped."""

    def __init__(self, console: Console) -> None:
        self._console = console
        note = TextColumn("{task.fields[note]}")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), note, TimeElapsedColumn())
        self._progress = Progress(*columns, console=console)

    def __enter__(self) -> "Bars":
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def add(self, title: str, num_steps: int) -> tuple[OnStep, Callable[[str], None]]:
        """A new bar: what to call with each step, and with what happens."""
        task = self._progress.add_task(title.ljust(34), total=num_steps, note="")

        def on_step(step: int, loss: float) -> None:
            self._progress.update(task, completed=step, note=f"loss {loss:.4f}")

        def say(note: str) -> None:
            self._progress.update(task, note=note)
            self._console.print(f"{title}: {note}")

        return on_step, say

    def tell(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def second_layout(nproc: int) -> tuple[str, ...]:
    return ("--set", f"parallel.tp={nproc // 2}", "--nproc", str(nproc))


def third_layout(nproc: int) -> tuple[str, ...]:
    given = {"parallel.pp": 2, "parallel.tp": nproc // 2, "parallel.schedule": "zb_h1", "train.microbatches": 4}
    return (*(word for key, value in given.items() for word in ("--set", f"{key}={value}")), "--nproc", str(nproc))


def train_all(folder: Path, steps: int, nproc: int, bars: Bars) -> dict[str, Run]:
    """All runs, one after the other, by what they are called in the table."""
    runs: dict[str, Run] = {}
    warmup = max(1, min(10, steps // 4))
    length = ("--set", f"train.steps={steps}", "--set", f"schedule.warmup={warmup}")

    no_forecast = ("--set", "launch.forecast=false")

    on_step, say = bars.add("one process", steps)
    run = runs["one process"] = Run(folder / "one", *length, *no_forecast)
    run.follow(on_step)
    run.ended(0)
    say(f"done, loss {run.losses()[steps]:.4f}")

    name = f"dp_shard 2 x tp {nproc // 2}"
    on_step, say = bars.add(f"{name}, {nproc} processes", steps)
    run = runs[f"{name}, stopped"] = Run(folder / "two", *length, *second_layout(nproc))
    bars.tell(run.forecast())
    run.follow(on_step, until=steps // 2)
    run.ask_to_stop()
    stopped_at = run.follow(on_step)
    run.ended(143)
    say(f"asked to stop by SIGTERM, saved step {stopped_at}")

    saved = folder / "two" / "checkpoints"
    shutil.copytree(saved, folder / "three" / "checkpoints", dirs_exist_ok=True)
    name = f"pp 2 x tp {nproc // 2}"
    on_step, say = bars.add(f"{name}, {nproc} processes", steps)
    options = ("--set", "launch.max_restarts=1", "--set", "checkpoint.every=5", *third_layout(nproc))
    run = runs[f"then {name}, a rank killed"] = Run(folder / "three", *length, *options, *no_forecast)
    killed_at = run.follow(on_step, until=stopped_at + (steps - stopped_at) // 2)
    run.kill_rank(nproc - 1)
    say(f"went on at step {stopped_at + 1}; kill -9 of rank {nproc - 1} at step {killed_at}")
    run.follow(on_step)
    run.ended(0)
    say("started again by itself, done")

    if nproc == 4 and MINDSPORE.exists():
        # As many steps as the rate rises: it does not depend on how long a run is.
        on_step, say = bars.add("one process, MindSpore", warmup)
        options = ("--set", f"train.steps={warmup}", "--set", f"schedule.warmup={warmup}", *no_forecast)
        python = str(MINDSPORE)
        run = runs["MindSpore"] = Run(folder / "mindspore", *options, python=python, platform="mindspore")
        run.follow(on_step)
        run.ended(0)
        say("done")
    return runs


def show(console: Console, runs: dict[str, Run], steps: int) -> float:
    """The losses of all runs in one table; the largest difference from the first."""
    losses = {name: run.losses() for name, run in runs.items()}
    want = losses["one process"]
    worst = max(abs(one[step] - want[step]) for one in losses.values() for step in one)
    table = Table(title="One training, the same losses")
    table.add_column("step", justify="right")
    for name in losses:
        table.add_column(name, justify="right")
    for step in sorted({1, *(max(1, round(steps * part / 4)) for part in range(1, 5))}):
        table.add_row(str(step), *(f"{one[step]:.6f}" if step in one else "" for one in losses.values()))
    table.add_section()
    table.add_row("MiB a rank holds", *(run.held() for run in runs.values()))
    table.add_row("MiB it sends a step", *(run.sent() for run in runs.values()))
    console.print(table)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("demo_runs"), help="where the runs go; emptied first")
    parser.add_argument("--quick", action="store_true", help="2 processes instead of 4, and PyTorch alone")
    given = parser.parse_args()
    console = Console(highlight=False)
    begin = time.perf_counter()
    shutil.rmtree(given.folder, ignore_errors=True)
    nproc = 2 if given.quick else 4
    start_and_report(console, "check", str(CONFIG), *second_layout(nproc))
    with Bars(console) as bars:
        runs = train_all(given.folder, given.steps, nproc, bars)
    worst = show(console, runs, given.steps)
    is_equal = worst <= TOLERANCE
    verdict = "equal" if is_equal else f"NOT equal to {TOLERANCE:.0e}"
    style = "bold green" if is_equal else "bold red"
    console.print(f"The losses are {verdict}: the largest difference is {worst:.1e}.", style=style, soft_wrap=True)
    for run in list(runs.values())[0:3:2]:
        page = run.folder / "report.html"
        if page.is_file():
            console.print(f"A page about the run: {page}", soft_wrap=True)
    console.print(f"It took {time.perf_counter() - begin:.0f} s.", soft_wrap=True)
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
