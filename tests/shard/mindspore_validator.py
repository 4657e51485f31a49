"""The rules on MindSpore, by brute force: each sample under many layouts against the plain call, with gradients.

``python -m tests.shard.mindspore_validator`` runs all samples and writes what it found into ``docs/mindspore.md``: how
many rules were validated, which of them in their values only, and what MindSpore's kernels on a CPU say about the rest.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import sys
import traceback
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Tensor

import hyper_parallel as hp
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.dispatching import dispatch
from hyper_parallel.core.shard.rule_kit.rule_table import rule_names
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.mindspore import private_api
from tests.shard.mindspore_absent_rules import REASONS, by_reason
from tests.shard.mindspore_samples import SAMPLES, Sample

DOCS = Path(__file__).parents[2] / "docs" / "mindspore.md"
BEGIN, END = "<!-- written by tests/shard/mindspore_validator.py -->", "<!-- end -->"
MOST_LAYOUTS = 6


@dataclass
class Found:
    """What came of the samples."""

    wrong: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)  # rules
    values_only: set[str] = field(default_factory=set)  # rules whose samples have no gradient on one device either
    refused: dict[str, str] = field(default_factory=dict)  # rules whose plain calls fail, with the error

    def validated(self) -> list[str]:
        """The rules of the table that were used, each under one name."""
        names = set(rule_names())
        return sorted({name if name in names else name.rstrip("_") for name in self.used} & names)

    def without_kernel(self) -> dict[str, str]:
        """The rules that only samples without a kernel would have used."""
        known = set(self.validated())
        return {name: error for name, error in sorted(self.refused.items()) if name not in known}


def layouts_of(mesh: Any, values: np.ndarray) -> list[Layout]:
    """Every layout on the mesh; pending sums for numbers with a point."""
    cuts = [hp.Shard(dim) for dim in range(values.ndim)]
    options = [hp.Replicate(), *cuts, *([hp.Partial()] if values.dtype.kind == "f" else [])]
    return [
        Layout.from_placements(mesh, placements, values.ndim)
        for placements in itertools.product(options, repeat=mesh.ndim)
    ]


def as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def run_backward(results: list[Any]) -> None:
    """From a weighted sum of all results, so that every element counts differently."""
    platform, total = get_platform(), None
    for result in results:
        if not platform.requires_grad(result):
            continue
        weights = np.cos(np.arange(max(1, result.numel()))).reshape(tuple(result.shape) or ())
        term = (result * Tensor(weights, result.dtype)).sum()
        total = term if total is None else total + term
    if total is not None:
        hp.backward(total)


def leaf(values: np.ndarray, records: bool = True) -> Tensor:
    made = Tensor(values)
    if values.dtype.kind == "f" and records:
        made.requires_grad_()
    return made


def plain_run(sample: Sample, records: bool) -> tuple[list[Any], list[Any]]:
    """Results and gradients on one device."""
    leaves = [leaf(values, records) for values in sample.arrays]
    results = as_list(sample.call(*leaves))
    for result in results:
        result.asnumpy()
    if records:
        run_backward(results)
    return results, [None if hp.grad_of(one) is None else hp.grad_of(one).asnumpy().copy() for one in leaves]


def complaint(
    sample: Sample, layouts: tuple[Layout, ...], mesh: Any, wanted: list[Any], gradients: list[Any], records: bool
) -> str:
    """What is wrong with the sample under these layouts; nothing when all is right."""
    leaves = [
        hp.distribute_tensor(leaf(values, records), mesh, layout)
        for values, layout in zip(sample.arrays, layouts, strict=True)
    ]
    outputs = as_list(sample.call(*leaves))
    if len(outputs) != len(wanted):
        return f"{len(outputs)} results instead of {len(wanted)}"
    if not all(isinstance(output, hp.DTensor) for output in outputs):
        return f"a result is a {type(outputs[0]).__name__} and not distributed"
    whole = [output.full_tensor() for output in outputs]
    for mine, plain in zip(whole, wanted, strict=True):
        if mine.dtype != plain.dtype or tuple(mine.shape) != tuple(plain.shape):
            return f"{mine.dtype} of shape {mine.shape} instead of {plain.dtype} of shape {plain.shape}"
        if not np.allclose(mine.asnumpy(), plain.asnumpy(), sample.tolerance, sample.tolerance, equal_nan=True):
            return f"values\n{mine}\ninstead of\n{plain}"
    if not records:
        return ""
    run_backward(whole)
    for number, (one, want) in enumerate(zip(leaves, gradients, strict=True)):
        if want is None:
            continue
        mine = hp.grad_of(one)
        if mine is None:
            return f"no gradient for input {number}"
        if mine.layout is not one.layout.gradient():
            return f"gradient {number} lies under {mine.layout}"
        if not np.allclose(mine.full_tensor().asnumpy(), want, sample.tolerance, sample.tolerance, equal_nan=True):
            return f"gradient {number}\n{mine.full_tensor()}\ninstead of\n{want}"
    return ""


def _first_line(error: BaseException) -> str:
    """What it says: MindSpore's errors have headings between dashes, and go on with the call stack of its C++ code."""
    said = [line.strip() for line in str(error).splitlines()]
    said = [line for line in said if line and not line.startswith("-")] or [type(error).__name__]
    return re.sub(r"\s+", " ", said[0].partition(", Please confirm")[0])[:160]


def validate(labels: list[str], mesh_shape: tuple[int, ...], most: int, goes_on: bool = False) -> Found:
    """Runs on every rank. With ``goes_on`` also after an error, which is sound when all ranks have had it."""
    mesh = hp.init_device_mesh("cpu", mesh_shape, mesh_dim_names=("x", "y")[: len(mesh_shape)])
    found = Found()
    used_now: set[str] = set()
    plan = dispatch.plan_call

    def remember(func: Any, args: Any, kwargs: Any) -> Any:
        planned = plan(func, args, kwargs)
        if planned is not None:
            used_now.add(planned.name)
        return planned

    dispatch.forget_plans()  # a call that an earlier test has planned is not planned again
    dispatch.plan_call = remember
    try:
        for sample in [one for one in SAMPLES if one.label in labels]:
            used_now.clear()
            records = sample.has_gradient
            try:
                try:
                    wanted, gradients = plain_run(sample, records)
                except Exception:
                    private_api.start_recording()  # an error switches it off
                    if not sample.rule:
                        raise
                    records = False
                    wanted, gradients = plain_run(sample, False)
            except Exception as error:
                private_api.start_recording()
                if sample.rule:
                    found.refused.setdefault(sample.rule, _first_line(error))
                else:
                    found.wrong.append(f"{sample.label}, plain: {traceback.format_exc(limit=-3)}")
                continue
            every = list(itertools.product(*[layouts_of(mesh, values) for values in sample.arrays]))
            chosen = every if len(every) <= most else random.Random(sample.label).sample(every, most)
            for layouts in chosen:
                try:
                    wrong = complaint(sample, layouts, mesh, wanted, gradients, records)
                except Exception:  # the other ranks may be elsewhere now, so nothing more can be asked of them
                    under = ", ".join(map(str, layouts))
                    found.wrong.append(f"{sample.label} under {under}: {traceback.format_exc(limit=-6)}")
                    if goes_on:
                        private_api.start_recording()
                        break
                    return found
                if wrong:
                    found.wrong.append(f"{sample.label} under {', '.join(map(str, layouts))}: {wrong}")
                    break
            found.used |= used_now
            if not records and sample.rule:
                found.values_only.add(sample.rule)
    finally:
        dispatch.plan_call = plan
    return found


def row(rule: str, error: str) -> str:
    """The line of the table for a rule without a kernel."""
    return f"| `{rule}` | {error.replace('|', '/')} |"


def _row_of_reason(reason: str, absent: list[str]) -> str:
    instead = REASONS.get(reason, {})
    listed = [f"`{name}` (`{instead[name]}`)" if instead.get(name) else f"`{name}`" for name in absent]
    return f"| {reason} | {', '.join(listed)} |"


def report(found: Found) -> str:
    """The part of the page about the rules."""
    names, validated, refused = rule_names(), found.validated(), found.without_kernel()
    rest = sorted(set(names) - set(validated) - set(refused))
    lines = [
        BEGIN,
        f"Validated: {len(validated)} of {len(names)} rules, under many layouts on 2 ranks, against the plain call.",
        "",
        "MindSpore has no gradient for these on a CPU, so their values only: "
        + ", ".join(f"`{name}`" for name in sorted(found.values_only & set(validated)))
        + ".",
        "",
        f"No kernel on a CPU for {len(refused)}, in MindSpore's own words:",
        "",
        "| rule | the plain call says |",
        "|---|---|",
        *(row(name, error) for name, error in refused.items()),
        "",
        f"No function of MindSpore comes to these {len(rest)}:",
        "",
        "| why | rules |",
        "|---|---|",
        *(_row_of_reason(reason, absent) for reason, absent in by_reason(rest).items() if absent),
        END,
    ]
    return "\n".join(lines)


def with_report(page: str, text: str) -> str:
    """The page with the part replaced."""
    before, _, rest = page.partition(BEGIN)
    return before + text + rest.partition(END)[2]


def main() -> int:
    from tests.shard.mindspore_validator import validate  # under a name that the ranks know too
    from tests.world.world import Worlds

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="samples of these rules, or with these labels")
    given = parser.parse_args()
    labels = [one.label for one in SAMPLES if not given.only or {one.rule, one.label} & set(given.only.split(","))]
    with closing(Worlds("mindspore")) as worlds:
        found = worlds(2, timeout=1800).run(validate, labels, (2,), MOST_LAYOUTS, goes_on=True)[0]
    print("\n".join(found.wrong))
    print(report(found))
    if not found.wrong and not given.only:
        DOCS.write_text(with_report(DOCS.read_text(), report(found)))
    return 1 if found.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
