"""What a random value costs: uniform, normal and Bernoulli values by global index, in numpy on one thread, beside
numpy's own Philox generator and torch's, taking turns in one run. Run from the root of the repository as
`python -m benchmarks.random_values [elements] [repeats]`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from hyper_parallel.core.dtensor.random.draw import Draw
from hyper_parallel.core.dtensor.random.random_stream import GlobalRegion
from hyper_parallel.core.dtensor.random.random_values import bernoulli, normal, randint, trunc_normal, uniform

Timed = Callable[[], object]


def nanoseconds_per_element(cases: dict[str, Timed | None], elements: int, repeats: int) -> dict[str, float | None]:
    """The best CPU time of each case; they take turns, so that a busy moment of the machine hits all of them."""
    best: dict[str, float | None] = dict.fromkeys(cases)
    for _ in range(repeats):
        for name, run in cases.items():
            if run is None:
                continue
            start = time.thread_time()
            run()
            taken = (time.thread_time() - start) / max(elements, 1) * 1e9
            best[name] = min(best[name] or taken, taken)
    return best


def main() -> None:
    elements = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    repeats = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    torch.set_num_threads(1)
    draw, whole = Draw(seed=1, number=0), GlobalRegion((elements,))
    # As many elements as a quarter of the columns of a matrix (short runs), and as a single column.
    rows = max(elements // 256, 1)
    columns = GlobalRegion((rows, 1024), (0, 256), (rows, 256))
    column = GlobalRegion((elements, 8), (0, 1), (elements, 1))
    numpy_philox = np.random.Generator(np.random.Philox(1))
    table: dict[str, tuple[Timed, Timed | None, Timed | None]] = {
        "uniform float32": (
            lambda: uniform(draw, whole),
            lambda: numpy_philox.random(elements, dtype=np.float32),
            lambda: torch.rand(elements),
        ),
        "uniform float64": (
            lambda: uniform(draw, whole, dtype="float64"),
            lambda: numpy_philox.random(elements),
            lambda: torch.rand(elements, dtype=torch.float64),
        ),
        "uniform bfloat16": (
            lambda: uniform(draw, whole, dtype="bfloat16"),
            None,
            lambda: torch.rand(elements, dtype=torch.bfloat16),
        ),
        "normal float32": (
            lambda: normal(draw, whole),
            lambda: numpy_philox.standard_normal(elements, dtype=np.float32),
            lambda: torch.randn(elements),
        ),
        "normal float64": (
            lambda: normal(draw, whole, dtype="float64"),
            lambda: numpy_philox.standard_normal(elements),
            lambda: torch.randn(elements, dtype=torch.float64),
        ),
        "trunc_normal float32": (
            lambda: trunc_normal(draw, whole),
            None,
            lambda: torch.nn.init.trunc_normal_(torch.empty(elements)),
        ),
        "bernoulli 0.9": (
            lambda: bernoulli(draw, whole, 0.9),
            lambda: numpy_philox.random(elements, dtype=np.float32) < 0.9,
            lambda: torch.empty(elements, dtype=torch.bool).bernoulli_(0.9),
        ),
        "randint int64": (
            lambda: randint(draw, whole, 0, 50_000),
            lambda: numpy_philox.integers(0, 50_000, elements),
            lambda: torch.randint(50_000, (elements,)),
        ),
        "uniform, 256 columns": (lambda: uniform(draw, columns), None, None),
        "normal, 256 columns": (lambda: normal(draw, columns), None, None),
        "uniform, one column": (lambda: uniform(draw, column), None, None),
    }
    cases = {
        f"{name}/{maker}": run
        for name, runs in table.items()
        for maker, run in zip(("ours", "numpy", "torch"), runs, strict=True)
    }
    best = nanoseconds_per_element(cases, elements, repeats)
    print(f"{elements} elements, best of {repeats}, ns of one thread per element")
    print(f"{'':24}{'by index':>10}{'numpy':>10}{'torch':>10}")
    for name in table:
        times = (best[f"{name}/{maker}"] for maker in ("ours", "numpy", "torch"))
        print(f"{name:24}" + "".join(f"{'-':>10}" if taken is None else f"{taken:10.1f}" for taken in times))


if __name__ == "__main__":
    main()
