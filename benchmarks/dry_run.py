"""How long a dry run takes: one rank of a large model, and all classes of ranks of a large world.

Each job runs in a process of its own, whose imports are not counted; the first run of a process finds all shapes, the
second knows none of them either but has PyTorch's own tables. The exit status is 1 when Llama-70B at tp 8 takes more
than 5 seconds of CPU, which is the time on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

JOBS: dict[str, dict[str, Any]] = {
    "llama-8b, tp 8": {"model": "llama-8b", "degrees": "tp=8"},
    "llama-70b, tp 8": {"model": "llama-70b", "degrees": "tp=8"},
    "llama-70b, tp 8, recompute": {"model": "llama-70b", "degrees": "tp=8", "recompute": True},
    "llama-70b, tp 8, on cuda": {"model": "llama-70b", "degrees": "tp=8", "device": "cuda"},
    "llama-405b, tp 16": {"model": "llama-405b", "degrees": "tp=16"},
    "llama-70b, dp 512 x tp 8, all ranks": {"model": "llama-70b", "degrees": "dp=512, tp=8", "all": True},
}
LONGEST = 5.0


def measure(job: dict[str, Any]) -> None:
    import torch

    import hyper_parallel as hp

    torch.set_num_threads(1)
    run = hp.dry_run_classes if job.pop("all", False) else hp.dry_run
    rows = []
    for _ in range(2):
        wall, cpu = time.perf_counter(), time.process_time()
        reports = run(**job)
        rows.append((time.perf_counter() - wall, time.process_time() - cpu))
    report = reports[0] if isinstance(reports, list) else reports
    print(
        json.dumps(
            {"times": rows, "peak": report.peak_bytes, "ranks": len(report.ranks), "line": str(report.verdict())}
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        measure(json.loads(given.job))
        return
    print(f"{'job':<38}{'wall s':>8}{'cpu s':>8}{'again':>8}{'peak GB':>10}")
    too_long = False
    for name, job in JOBS.items():
        command = [sys.executable, __file__, "--job", json.dumps(job)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        answer = json.loads(done.stdout.splitlines()[-1])
        (wall, cpu), (_, again) = answer["times"]
        print(f"{name:<38}{wall:8.2f}{cpu:8.2f}{again:8.2f}{answer['peak'] / 1e9:10.2f}", flush=True)
        too_long = too_long or (name == "llama-70b, tp 8" and cpu > LONGEST)
    sys.exit(1 if too_long else 0)


if __name__ == "__main__":
    main()
