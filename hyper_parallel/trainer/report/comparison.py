"""Two runs beside each other: how far their losses are apart, and which of their values differ."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.analysis.byte_sizes import byte_text
from hyper_parallel.trainer.report.run_data import RunData
from hyper_parallel.trainer.report.sections import duration, table

__all__ = ["comparison_of", "largest_difference"]


def largest_difference(a: RunData, b: RunData) -> tuple[int, float] | None:
    """(step, by how much) at which the losses of two runs are furthest apart; None without a common step."""
    losses = [dict(zip(*run.series("loss"), strict=True)) for run in (a, b)]
    common = losses[0].keys() & losses[1].keys()
    if not common:
        return None
    step = max(sorted(common), key=lambda one: abs(losses[0][one] - losses[1][one]))
    return step, abs(losses[0][step] - losses[1][step])


def comparison_of(runs: Sequence[RunData], names: Sequence[str]) -> list[str]:
    """The sections of a page about two runs."""
    found = largest_difference(runs[0], runs[1])
    if found is None:
        words = "The runs have no step in common."
    elif found[1] == 0:
        words = "The losses of all steps that both have are equal."
    else:
        words = f"The losses are furthest apart at step {found[0]}: by {found[1]:.3g}."
    rows = _figures(runs)
    sections = [f"<section><h2>Difference</h2><p>{words}</p>{table(['', *names], rows, names)}</section>"]
    differing = _differing(runs)
    body = table(["key", *names], differing) if differing else '<p class="faint">No value differs.</p>'
    sections.append(f"<section><h2>Config</h2>{body}</section>")
    return sections


def _figures(runs: Sequence[RunData]) -> list[list[str]]:
    rows: list[list[str]] = []
    for title, name, form in (("loss, last", "loss", "{:.6g}"), ("gradient norm, last", "grad_norm", "{:.6g}")):
        rows.append([title, *(form.format(run.series(name)[1][-1]) if run.of("step") else "" for run in runs)])
    evaluations = [run.series("loss", "eval")[1] for run in runs]
    if any(evaluations):
        rows.append(["evaluation, best", *(f"{min(one):.6g}" if one else "" for one in evaluations)])
    for title, name, form in (("tokens/s, median", "tokens_per_second", "{:,.0f}"), ("MFU, median", "mfu", "{:.1%}")):
        values = [sorted(run.series(name)[1]) for run in runs]
        if any(values):
            rows.append([title, *(form.format(one[len(one) // 2]) if one else "" for one in values)])
    rows.append(["peak memory of a rank", *(byte_text(max(run.peaks.values())) if run.peaks else "" for run in runs)])
    rows.append(["sent in one step, all ranks", *map(_sent, runs)])
    rows.append(["ranks", *(f"{run.start.get('ranks', '')} ({run.start.get('degrees', '')})" for run in runs)])
    rows.append(["steps", *(str(len(run.of("step"))) for run in runs)])
    rows.append(["time", *(duration(run.seconds) for run in runs)])
    return rows


def _sent(run: RunData) -> str:
    sent = sum(one["sent"] for part in run.parts for one in part["communication"])
    return byte_text(sent) if run.parts else ""


def _differing(runs: Sequence[RunData]) -> list[list[str]]:
    values = [{f"{one.section}.{one.key}": one.value for one in run.config} for run in runs]
    keys = list(dict.fromkeys(key for of in values for key in of))
    rows = [[key, *(of.get(key, "not set") for of in values)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]
