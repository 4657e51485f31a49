"""Run folders for the tests of the page: written by hand, so that every number is known."""

from __future__ import annotations

import json
import math
from pathlib import Path

TIME = 4_000_000_000.0  # to come: what ends with it has not been silent for long
CONFIG = """[model]
name = "llama"                                # run.toml:2

[train]
steps = 20                                    # --set
dtype = "a # b"                               # default
"""


def start(**values):
    return {
        "event": "start",
        "time": TIME,
        "step": 0,
        "model": "Llama",
        "degrees": "tp=2",
        "ranks": 2,
        "parameters": 1000,
        "data": "bytes",
        "steps": 20,
        "batch": 8,
        "length": 16,
        "resumed_from": None,
        "attempt": 0,
        "repeated": 0,
        "flops_per_token": 6000.0,
        "peak_flops": 1e9,
        "peak_from": "log.peak_flops",
        **values,
    }


def step(number, **values):
    return {
        "event": "step",
        "time": TIME + number,
        "step": number,
        "position": 8 * number,
        "loss": 5.0 / (1 + 0.1 * number) + 0.1 * math.sin(number),
        "grad_norm": 1.0 + 1.0 / number,
        "lr": 1e-3 * number,
        "tokens": 100,
        "padding": number % 3,
        "tokens_per_second": 1000.0 + number,
        "mfu": 0.006 + number * 1e-6,
        "seconds": {"data": 0.01, "forward_backward": 0.07, "optimizer": 0.01, "all": 0.1},
        "memory_per_rank": [10_000_000, 11_000_000],
        **values,
    }


ENVIRONMENT = {
    "event": "environment",
    "time": TIME,
    "framework": "PyTorch",
    "device": "cpu",
    "host": "node1",
    "cores": 2,
    "system": "Linux",
    "versions": {"hyper-parallel": "0", "torch": "2"},
}
END = {"event": "end", "time": TIME + 100, "step": 20, "status": "finished", "reason": None}


def part(rank, num_spans=3, step=2):
    spans = [["phases", "forward and backward", 0, 90_000], ["model", "forward", 10, 40_000]]
    spans += [["collectives", "all-reduce over tp", 100 + 200 * i, 220 + 200 * i] for i in range(num_spans)]
    return {
        "step": step,
        "rank": rank,
        "host": "node1",
        "begin": TIME + 0.001 * rank,
        "place": {"tp": rank},
        "spans": spans,
        "communication": [{"kind": "all-reduce", "axes": "tp", "calls": 3, "sent": 4096, "seconds": 0.002}],
        "memory": {"parameters": 1000, "gradients": 1000, "optimizer state": 2000, "peak": 9_000_000},
    }


def write_run(folder: Path, events, parts=(), config=CONFIG, layout="") -> Path:
    (folder / "recorded").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    (folder / "resolved.toml").write_text(config)
    if layout:
        (folder / "layout.svg").write_text(layout)
    for one in parts:
        (folder / "recorded" / f"rank-{one['rank']}.json").write_text(json.dumps(one))
    return folder


def ordinary_run(folder: Path, num_steps=20, **values) -> Path:
    events = [start(steps=num_steps), ENVIRONMENT]
    for number in range(1, num_steps + 1):
        events.append(step(number, **values))
        if number % 5 == 0:
            events.append({"event": "eval", "time": TIME + number, "step": number, "loss": 4.0 - 0.01 * number})
            events.append({"event": "save", "time": TIME + number, "step": number, "seconds": 0.02})
    return write_run(folder, [*events, {**END, "step": num_steps}], [part(0), part(1)])
