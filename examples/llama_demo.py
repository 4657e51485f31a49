"""Train a small Llama-like model in one process, and once more cut over 4 local processes, and compare.

The model (`hyper_parallel/models/torch/llama.py`) is plain single-device code. How it is cut is said beside it, on one
page, `hyper_parallel/models/plan_of_llama.py`: tensor parallel, with the sequence cut between the halves of a block.
The text is Python's own library, read byte by byte. The losses of the two runs must agree to 1e-4 at every step on
every rank, or the exit status is 1.

    python examples/llama_demo.py [--ranks 4] [--steps 60] [--kill-rank 2] [--svg layouts.svg]
"""

import argparse
import json
import os
import random
import signal
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

BATCH, LENGTH = 4, 128
LEARNING_RATE, NUM_RISING, EPS = 1e-3, 10, 1e-5  # the rate rises over the first steps: rounding is not blown up
NUM_WARM_UP = 3  # steps that the speed is not measured on
TOLERANCE = 1e-4
COLOURS_VARIABLE = "EXAMPLE_COLOURS"  # set when the drawing is for a terminal with colours
TEXT_BYTES = 1_000_000


# ---------------------------------------------------------------- the text, the model, the training: one device's code


def read_text() -> bytes:
    """The first megabyte of Python's own library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return bytes(text[:TEXT_BYTES])


def make_model() -> Any:
    import torch

    from hyper_parallel import models

    torch.manual_seed(1)
    return models.Llama(models.LlamaConfig(max_length=LENGTH))


def train(model: Any, num_steps: int, on_step: Callable[[int, float], None]) -> tuple[float, Callable[[], None]]:
    """Train, tell each step's loss; (tokens per second without the first steps, a function that does one step)."""
    import torch

    text = torch.frombuffer(bytearray(read_text()), dtype=torch.uint8).long()
    choice = random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / NUM_RISING))

    def step() -> float:
        starts = [choice.randrange(len(text) - LENGTH) for _ in range(BATCH)]
        sequences = torch.stack([text[start : start + LENGTH + 1] for start in starts])
        optimizer.zero_grad()
        loss = model(sequences[:, :-1], sequences[:, 1:])
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.item()

    seconds = 0.0
    for number in range(num_steps):
        start = time.perf_counter()
        loss = step()
        seconds += time.perf_counter() - start if number >= NUM_WARM_UP else 0.0
        on_step(number, loss)
    num_timed = max(0, num_steps - NUM_WARM_UP)
    return (BATCH * LENGTH * num_timed / seconds if num_timed else 0.0), step


# ---------------------------------------------------------------- what one process holds and sends


def memory_of(model: Any) -> dict[str, int]:
    """Bytes of this process: weights, gradients with the optimizer's two moments, and what one forward pass keeps."""
    import torch

    from hyper_parallel import DTensor

    def block(tensor: Any) -> Any:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    weights = [block(parameter.detach()) for parameter in model.parameters()]
    num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    not_counted = {weight.untyped_storage().data_ptr() for weight in weights}
    kept: dict[int, int] = {}

    def keep(tensor: Any) -> Any:
        storage = block(tensor.detach()).untyped_storage()
        if storage.data_ptr() not in not_counted:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(ids, ids)
    return {"weights": num_bytes, "optimizer": 3 * num_bytes, "activations": sum(kept.values())}


def draw_layouts(model: Any, svg_path: str | None) -> str:
    """The drawing as text for the terminal, also saved as SVG."""
    import torch

    import hyper_parallel as hp

    drawing = hp.draw(model, torch.zeros(BATCH, LENGTH, dtype=torch.long))
    if hp.get_platform().get_rank() != 0:
        return ""
    if svg_path is not None:
        drawing.save(svg_path)
    if COLOURS_VARIABLE not in os.environ:
        return str(drawing)
    console = Console(force_terminal=True, width=120)
    with console.capture() as captured:
        console.print(drawing)
    return captured.get()


def say(message: dict[str, Any]) -> None:
    """Called by a rank: send a message to the process that started it."""
    print(json.dumps(message), flush=True)


def run_rank(num_steps: int, kill_rank: int | None, svg_path: str | None) -> None:
    """What each of the processes of the cut run does."""
    import torch

    import hyper_parallel as hp

    torch.set_num_threads(1)
    place = hp.launch.join(timeout=600)
    rank, num_ranks = place.rank, place.size
    mesh = hp.init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))
    model = hp.parallelize_module(make_model(), mesh, hp.models.llama_plan(sequence_parallel=True))

    losses = []

    def on_step(step: int, loss: float) -> None:
        if rank == kill_rank and step == num_steps // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        losses.append(loss)
        hp.launch.note_step(step)
        if rank == 0:
            say({"step": step})

    speed, step = train(model, num_steps, on_step)
    with hp.CommRecorder() as recorder:
        step()
    by_op: dict[str, tuple[int, int]] = {}
    for record in recorder.records:
        count, sent = by_op.get(record.op, (0, 0))
        by_op[record.op] = (count + 1, sent + record.sent_bytes)
    memory = memory_of(model)
    drawing = draw_layouts(model, svg_path)
    say({"losses": losses, "speed": speed, "memory": memory, "collectives": by_op, "drawing": drawing})
    hp.get_platform().destroy_process_group()


# ---------------------------------------------------------------- both runs side by side


class Bars:
    """A live bar per run on a terminal; a line per quarter of a run where output is piped."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
        )

    def __enter__(self) -> "Bars":
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def add(self, title: str, num_steps: int) -> Callable[[int, float | None], None]:
        """A new bar; call the result with each finished step and its loss."""
        task = self._progress.add_task(title.ljust(22), total=num_steps, note="starting", start=False)

        def on_step(step: int, loss: float | None = None) -> None:
            if step == 0:
                self._progress.start_task(task)
            note = "" if loss is None else f"loss {loss:.3f}"
            self._progress.update(task, completed=step + 1, note=note)
            if not self._console.is_terminal and (step + 1) * 4 // num_steps > step * 4 // num_steps:
                self._console.print(f"{title}: step {step + 1} of {num_steps}")

        return on_step


def table(title: str, *headings: str) -> Table:
    made = Table(title=title)
    for heading in headings:
        made.add_column(heading, justify="right")
    return made


def mebibytes(count: float) -> str:
    return f"{count / 2**20:.2f}"


def print_losses(console: Console, single: list[float], cut: list[float], num_ranks: int) -> None:
    made = table("The same training, twice", "step", "loss, one process", f"loss, {num_ranks} ranks", "difference")
    num_rows = min(7, len(single))
    for step in sorted({round(row * (len(single) - 1) / max(1, num_rows - 1)) for row in range(num_rows)}):
        difference = abs(single[step] - cut[step])
        made.add_row(str(step + 1), f"{single[step]:.6f}", f"{cut[step]:.6f}", f"{difference:.1e}")
    console.print(made)


def print_ranks(console: Console, single: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    made = table(
        "What each process holds, MiB", "process", "weights", "gradients, optimizer", "kept for backward", "tokens/s"
    )
    for name, told in [("one process", single), *((f"rank {rank}", told) for rank, told in enumerate(ranks))]:
        memory = told["memory"]
        sizes = [mebibytes(memory[part]) for part in ("weights", "optimizer", "activations")]
        made.add_row(name, *sizes, f"{told['speed']:,.0f}")
    console.print(made)


def print_collectives(console: Console, collectives: dict[str, tuple[int, int]]) -> None:
    made = table("What each rank sends in one step, forward and backward", "collective", "calls", "MiB sent")
    names = {"all_gather_into_tensor": "all-gather", "reduce_scatter_tensor": "reduce-scatter"}
    for op, (count, sent) in sorted(collectives.items()):
        made.add_row(names.get(op, op.replace("_", "-")), str(count), mebibytes(sent))
    counts, sizes = zip(*collectives.values(), strict=True) if collectives else ((0,), (0,))
    made.add_section()
    made.add_row("all", str(sum(counts)), mebibytes(sum(sizes)))
    console.print(made)


def largest_difference(single: list[float], ranks: list[dict[str, Any]]) -> float:
    return max(
        abs(one - many) if one == one and many == many else float("inf")
        for rank in ranks
        for one, many in zip(single, rank["losses"], strict=True)
    )


def run_demo(num_ranks: int, num_steps: int, kill_rank: int | None, svg_path: str | None) -> int:
    """Train once in this process, once over `num_ranks` processes, compare; the exit status."""
    import torch

    from hyper_parallel import launch

    torch.set_num_threads(1)
    console = Console(highlight=False)
    start = time.perf_counter()
    single_losses: list[float] = []
    told: dict[int, dict[str, Any]] = {}
    with Bars(console) as bars:
        on_single = bars.add("one process", num_steps)
        on_cut = bars.add(f"sharded over {num_ranks} processes", num_steps)
        model = make_model()

        def on_step(step: int, loss: float) -> None:
            single_losses.append(loss)
            on_single(step, loss)

        speed, _ = train(model, num_steps, on_step)
        single = {"speed": speed, "memory": memory_of(model)}

        def hear(rank: int, line: str) -> None:
            if line.startswith("{"):
                message = json.loads(line)
                if "step" in message:
                    on_cut(message["step"], None)
                else:
                    told[rank] = message

        if console.is_terminal and console.color_system:
            os.environ[COLOURS_VARIABLE] = "1"
        try:
            status = launch.run_local(run_rank, num_ranks, args=[num_steps, kill_rank, svg_path], on_line=hear)
        except launch.RankFailure as failure:
            console.print(f"The sharded run failed: {failure}", style="bold red", markup=False, soft_wrap=True)
            return 1
    if status:
        return status

    ranks = [told[rank] for rank in range(num_ranks)]
    console.print(Text.from_ansi(ranks[0]["drawing"]), soft_wrap=True)
    print_collectives(console, ranks[0]["collectives"])
    print_ranks(console, single, ranks)
    print_losses(console, single_losses, ranks[0]["losses"], num_ranks)
    worst = largest_difference(single_losses, ranks)
    if worst > TOLERANCE:
        text = f"The losses differ by up to {worst:.1e}, more than {TOLERANCE:.0e}."
        console.print(text, style="bold red", soft_wrap=True)
        return 1
    text = f"The losses are equal on every rank at all {num_steps} steps (largest difference {worst:.1e})."
    console.print(text, style="bold green", soft_wrap=True)
    if svg_path is not None:
        console.print(f"The drawing is in {svg_path}.", soft_wrap=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    console.print(
        f"It took {time.perf_counter() - start:.0f} s. {num_ranks} processes share {cores} CPU cores here, so sharding "
        "saves memory and not time.",
        soft_wrap=True,
    )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train a small Llama in one process and sharded over several; compare."
    )
    parser.add_argument("--ranks", type=int, default=4, help="number of processes (default 4)")
    parser.add_argument("--steps", type=int, default=60, help="training steps (default 60)")
    parser.add_argument("--svg", help="also write the drawing of the layouts to this file")
    parser.add_argument("--kill-rank", type=int, help="kill this rank halfway, to see how a death is reported")
    arguments = parser.parse_args()
    if arguments.ranks < 1 or arguments.steps < 1:
        parser.error("--ranks and --steps must be at least 1")
    return run_demo(arguments.ranks, arguments.steps, arguments.kill_rank, arguments.svg)


if __name__ == "__main__":
    sys.exit(main())
