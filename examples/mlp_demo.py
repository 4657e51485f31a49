"""Train a small MLP with its weights split over 4 local processes, next to the same training in one process.

The first layer is cut by columns (each rank computes some of the hidden units), the second by rows (each rank adds its
part of the output), so a step needs one all-reduce forward and one backward. The hidden size does not divide by 4 on
purpose. Everything is float64: the losses must agree to 1e-12 at every step, or the exit status is 1.

    python examples/mlp_demo.py [--ranks 4] [--steps 100] [--kill-rank 2]
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from launch import INIT_METHOD_VARIABLE, RankFailure, run_ranks, say
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

NUM_INPUTS, NUM_HIDDEN, NUM_OUTPUTS, NUM_SAMPLES = 64, 1022, 16, 128
TOLERANCE = 1e-12
Parameters = dict[str, Any]


# ---------------------------------------------------------------- the model and its training, the same for both runs


def _make_parameters() -> Parameters:
    import torch

    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int, scale: float) -> Any:
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "gain": torch.ones(NUM_INPUTS, dtype=torch.float64),
        "w1": normal(NUM_HIDDEN, NUM_INPUTS, scale=NUM_INPUTS**-0.5),
        "b1": torch.zeros(NUM_HIDDEN, dtype=torch.float64),
        "w2": normal(NUM_OUTPUTS, NUM_HIDDEN, scale=NUM_HIDDEN**-0.5),
        "b2": torch.zeros(NUM_OUTPUTS, dtype=torch.float64),
    }


def _make_data() -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(2)
    x = torch.randn(NUM_SAMPLES, NUM_INPUTS, generator=generator, dtype=torch.float64)
    mix = torch.randn(NUM_INPUTS, NUM_OUTPUTS, generator=generator, dtype=torch.float64) * NUM_INPUTS**-0.5
    return x, torch.sin(3 * x @ mix)


def _same(value: Any) -> Any:
    return value


def _forward(
    parameters: Parameters, x: Any, enter: Callable[[Any], Any] = _same, leave: Callable[[Any], Any] = _same
) -> Any:
    """`enter` and `leave` are where the split run communicates; one process has nothing to do there."""
    import torch

    whole = enter(x * parameters["gain"])
    hidden = torch.nn.functional.gelu(whole @ parameters["w1"].T + parameters["b1"])
    return leave(hidden @ parameters["w2"].T) + parameters["b2"]


def _train(
    parameters: Parameters, num_steps: int, forward: Callable[..., Any], on_step: Callable[[int, float], None]
) -> float:
    """Train in place, report (step, loss), and return the seconds per step without the first, which warms up."""
    import torch

    x, y = _make_data()
    velocities = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    seconds = 0.0
    for step in range(num_steps):
        start = time.perf_counter()
        for parameter in parameters.values():
            parameter.requires_grad_().grad = None
        loss = (forward(parameters, x) - y).square().mean()
        loss.backward()
        with torch.no_grad():  # SGD with momentum; torch.optim imports its compiler, seconds for five processes
            for name, parameter in parameters.items():
                velocity = velocities[name].mul_(0.9).add_(parameter.grad)
                parameter.sub_(velocity, alpha=0.05)
        seconds += time.perf_counter() - start if step else 0.0
        on_step(step, loss.item())
    return seconds / max(1, num_steps - 1)


def _num_bytes(parameters: Parameters) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())


# ---------------------------------------------------------------- one rank of the split run


def _split(parameters: Parameters, platform: Any) -> Parameters:
    """This rank's part: hidden units are rows of w1 and b1 and columns of w2; gain and b2 stay whole on every rank."""
    rank, num_ranks = platform.get_rank(), platform.get_world_size()
    cut_dims = {"w1": 0, "b1": 0, "w2": 1}
    return {
        name: platform.chunk(parameter, cut_dims[name], num_ranks, rank).clone() if name in cut_dims else parameter
        for name, parameter in parameters.items()
    }


def _count_collectives(step: Callable[[], None]) -> int:
    """Collectives that the framework's profiler sees during one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        step()
    return sum(event.count for event in profiled.key_averages() if event.key.startswith(("gloo:", "nccl:", "hccl:")))


def run_rank(num_steps: int, kill_rank: int | None) -> None:
    """What each of the processes does."""
    import torch

    from hyper_parallel.platform import get_platform

    torch.set_num_threads(1)
    platform = get_platform()
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    platform.init_process_group(
        init_method=os.environ[INIT_METHOD_VARIABLE], rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60)
    )
    group = platform.create_group(range(num_ranks))

    def forward(parameters: Parameters, x: Any) -> Any:
        return _forward(
            parameters,
            x,
            enter=lambda value: platform.vary(value, group),  # forward: identity; backward: all-reduce
            leave=lambda value: platform.differentiable_all_reduce(value, "sum", group),  # backward: identity
        )

    losses = []

    def on_step(step: int, loss: float) -> None:
        if rank == kill_rank and step == num_steps // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        losses.append(loss)
        if rank == 0:
            say({"step": step})

    parameters = _split(_make_parameters(), platform)
    seconds = _train(parameters, num_steps, forward, on_step)

    def one_more_step() -> None:
        _train(parameters, 1, forward, lambda step, loss: None)

    # Every rank takes part in that step; one rank counts, since a profiler takes a second to start.
    num_collectives = _count_collectives(one_more_step) if rank == 0 else one_more_step()
    say(
        {
            "losses": losses,
            "num_hidden": parameters["w1"].shape[0],
            "weight_bytes": _num_bytes(parameters),
            "num_collectives": num_collectives,
            "seconds": seconds,
        }
    )
    platform.destroy_process_group()


# ---------------------------------------------------------------- both runs side by side


class _Bars:
    """A live bar per run on a terminal; a line per quarter of a run where output is piped."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )

    def __enter__(self) -> "_Bars":
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def add(self, title: str, num_steps: int) -> Callable[[int], None]:
        """A new bar; call the result with each finished step."""
        task = self._progress.add_task(title.ljust(22), total=num_steps)

        def on_step(step: int) -> None:
            self._progress.update(task, completed=step + 1)
            if not self._console.is_terminal and (step + 1) * 4 // num_steps > step * 4 // num_steps:
                self._console.print(f"{title}: step {step + 1} of {num_steps}")

        return on_step


def _print_losses(console: Console, single: list[float], split: list[float], num_ranks: int) -> None:
    table = Table(title="The same training, in one process and split")
    for heading in ("step", "loss, one process", f"loss, split over {num_ranks}", "difference"):
        table.add_column(heading, justify="right")
    num_rows = min(8, len(single))
    for step in sorted({round(row * (len(single) - 1) / max(1, num_rows - 1)) for row in range(num_rows)}):
        difference = abs(single[step] - split[step])
        table.add_row(str(step), f"{single[step]:.12f}", f"{split[step]:.12f}", f"{difference:.1e}")
    console.print(table)


def _print_ranks(console: Console, single_seconds: float, single_bytes: int, ranks: list[dict[str, Any]]) -> None:
    table = Table(title="What each process holds and does")
    for heading in ("process", "hidden units", "weights, KiB", "ms per step"):
        table.add_column(heading, justify="right")
    table.add_row("one process", str(NUM_HIDDEN), f"{single_bytes / 1024:.1f}", f"{1000 * single_seconds:.1f}")
    for rank, told in enumerate(ranks):
        table.add_row(
            f"rank {rank}",
            str(told["num_hidden"]),
            f"{told['weight_bytes'] / 1024:.1f}",
            f"{1000 * told['seconds']:.1f}",
        )
    console.print(table)


def run_demo(num_ranks: int, num_steps: int, kill_rank: int | None) -> int:
    """Train once in this process, once over `num_ranks` processes, compare; the exit status."""
    import torch

    torch.set_num_threads(1)
    console = Console(highlight=False)
    start = time.perf_counter()
    single_losses: list[float] = []
    told: dict[int, dict[str, Any]] = {}
    with _Bars(console) as bars:
        on_single = bars.add("one process", num_steps)
        parameters = _make_parameters()

        def on_step(step: int, loss: float) -> None:
            single_losses.append(loss)
            on_single(step)

        single_seconds = _train(parameters, num_steps, _forward, on_step)
        on_split = bars.add(f"split over {num_ranks} processes", num_steps)
        command = [sys.executable, os.path.abspath(__file__), "--steps", str(num_steps)]
        command += [] if kill_rank is None else ["--kill-rank", str(kill_rank)]
        try:
            for rank, message in run_ranks(command, num_ranks):
                if "step" in message:
                    on_split(message["step"])
                else:
                    told[rank] = message
        except RankFailure as failure:
            console.print(f"The split run failed: {failure}", style="bold red", markup=False, soft_wrap=True)
            return 1

    ranks = [told[rank] for rank in range(num_ranks)]
    _print_losses(console, single_losses, ranks[0]["losses"], num_ranks)
    _print_ranks(console, single_seconds, _num_bytes(parameters), ranks)
    worst = max(
        abs(one - many) if one == one and many == many else float("inf")
        for rank in ranks
        for one, many in zip(single_losses, rank["losses"], strict=True)
    )
    seconds = time.perf_counter() - start
    if worst > TOLERANCE:
        text = f"The losses differ by up to {worst:.1e}, more than {TOLERANCE:.0e}."
        console.print(text, style="bold red", soft_wrap=True)
        return 1
    text = f"The losses are equal on every rank at all {num_steps} steps (largest difference {worst:.1e})."
    console.print(text, style="bold green", soft_wrap=True)
    console.print(f"{ranks[0]['num_collectives']} collectives per step; the demo took {seconds:.1f} s.", soft_wrap=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small MLP split over local processes, next to one process.")
    parser.add_argument("--ranks", type=int, default=4, help="number of processes (default 4)")
    parser.add_argument("--steps", type=int, default=100, help="training steps (default 100)")
    parser.add_argument("--kill-rank", type=int, help="kill this rank halfway, to see how a death is reported")
    arguments = parser.parse_args()
    if arguments.ranks < 1 or arguments.steps < 1:
        parser.error("--ranks and --steps must be at least 1")
    if INIT_METHOD_VARIABLE in os.environ:
        run_rank(arguments.steps, arguments.kill_rank)
        return 0
    return run_demo(arguments.ranks, arguments.steps, arguments.kill_rank)


if __name__ == "__main__":
    sys.exit(main())
