"""PyTorch's own operator database under random layouts: which operators are right, and which of them gather.

``python -m tests.shard.op_coverage`` runs the whole database, ``--write docs/reference/ops.md`` writes that page;
``--form`` and ``--dtype`` try the other forms of an operator (see ``op_trials``).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.shard.op_trials import FORMS, Outcome, Trial, check_ops, full_name, op_infos
from tests.world.failures import RanksFailed
from tests.world.world import Worlds


def run_database(
    worlds: Any, trial: Trial, only: str = "", chunk: int = 20, timeout: float = 400.0, every: int = 1
) -> Iterator[Outcome]:
    """Every operator (or one in ``every``), in worlds that are replaced when one hangs (for ``timeout`` seconds, in a
    chunk) or dies."""
    names = [full_name(info) for info in op_infos()]
    indices = [index for index, name in enumerate(names) if only in name][::every]
    size = math.prod(trial.mesh_shape)
    for start in range(0, len(indices), chunk):
        part = indices[start : start + chunk]
        try:
            yield from _merged(worlds(size, timeout=timeout).run(check_ops, part, trial))
        except RanksFailed:
            for index in part:
                try:
                    yield from _merged(worlds(size, timeout=0.3 * timeout).run(check_ops, [index], trial))
                except RanksFailed as failure:
                    yield Outcome(names[index], "died or hung", False, str(failure))


def _merged(answers: list[list[Outcome]]) -> list[Outcome]:
    """The ranks' answers as one: the worst counts."""
    rank = {"right": 0, "no sample": 1, "error": 2, "wrong": 3}
    return [max(per_op, key=lambda outcome: rank[outcome.status]) for per_op in zip(*answers, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="operators whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mesh", default="2", help="2, 4 or 2x2")
    parser.add_argument("--samples", type=int, default=Trial.num_samples, help="how many of each operator")
    parser.add_argument("--form", choices=FORMS, default=Trial.form)
    parser.add_argument("--dtype", default="", help="bfloat16, int64, ...; without it each operator's most telling one")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for 20 operators")
    parser.add_argument("--write", type=Path, default=None, help="write the table to this file")
    options = parser.parse_args()
    shape = tuple(int(size) for size in options.mesh.split("x"))
    trial = Trial(options.seed, shape, options.samples, options.form, options.dtype)
    outcomes: list[Outcome] = []
    with closing(Worlds()) as worlds:
        for outcome in run_database(worlds, trial, options.only, timeout=options.timeout):
            outcomes.append(outcome)
            if len(outcomes) % 100 == 0:
                print(f"{len(outcomes)} operators", flush=True)
            if outcome.status not in ("right", "no sample"):
                print(f"--- {outcome.name}: {outcome.status}: {outcome.message}", flush=True)
    right = [o for o in outcomes if o.status == "right"]
    print(
        f"{len(outcomes)} operators: {len(right)} right ({sum(not o.gathered for o in right)} without a gather), "
        + ", ".join(
            f"{sum(o.status == s for o in outcomes)} {s}" for s in ("wrong", "error", "died or hung", "no sample")
        )
    )
    if options.write:
        options.write.write_text(table(outcomes, options.mesh))


def table(outcomes: list[Outcome], mesh: str) -> str:
    """The coverage page."""
    outcomes = [o for o in outcomes if o.status != "no sample"]
    right = [o for o in outcomes if o.status == "right"]
    lines = [
        "# Operators",
        "",
        "Made by `python -m tests.shard.op_coverage --write docs/reference/ops.md`: PyTorch's operator database, every",
        f"tensor argument under a random layout on a mesh of {mesh} ranks, compared with one device.",
        "",
        f"{len(right)} of {len(outcomes)} operators are right, "
        f"{sum(not o.gathered for o in right)} of them without a gather.",
        "",
        "| operator | result | how |",
        "|---|---|---|",
    ]
    how = {True: "gathers", False: "by rule"}
    lines += [f"| `{o.name}` | {o.status} | {how[o.gathered] if o.status == 'right' else ''} |" for o in outcomes]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    from tests.shard.op_coverage import main as run  # under its own name, which the ranks can import

    run()
