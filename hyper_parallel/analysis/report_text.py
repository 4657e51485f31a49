"""The report of a dry run as tables of text, and the tables themselves for other pages."""

from __future__ import annotations

from hyper_parallel.analysis.byte_sizes import byte_text
from hyper_parallel.analysis.report import DryRun, starred

Table = tuple[str, list[str], list[list[str]]]  # caption, names of the columns, rows

_MOST_ROWS = 12
_FLOP_UNITS = ((10**15, "PFLOP"), (10**12, "TFLOP"), (10**9, "GFLOP"), (10**6, "MFLOP"))


def headline(report: DryRun) -> str:
    degrees = " x ".join(f"{axis} {size}" for axis, size in report.degrees.items())
    alike = "" if len(report.ranks) == 1 else f", and {len(report.ranks) - 1} ranks do alike"
    return (
        f"{report.model}, {count_text(report.num_parameters)} parameters in {report.dtype}: rank {report.rank} of "
        f"{report.world_size} ({degrees}){alike}"
    )


def job_line(report: DryRun) -> str:
    recompute = "blocks recomputed" if report.recompute else "no recompute"
    parts = f" in {report.microbatches} parts" if report.microbatches > 1 else ""
    return f"batch {report.batch} x {report.length} tokens{parts}, {report.optimizer}, {recompute}, on {report.device}"


def tables(report: DryRun) -> list[Table]:
    """All that is counted: memory at the peak, activations by module, collectives, operations."""
    return [_memory(report), *_modules(report), _collectives(report), _operations(report)]


def _memory(report: DryRun) -> Table:
    rows = [
        [kind, byte_text(size), f"{100 * size / max(1, report.peak_bytes):.1f} %"]
        for kind, size in report.peak_by_kind.items()
    ]
    rows.append(["peak", byte_text(report.peak_bytes), ""])
    rows.append(["between steps", byte_text(report.resting_bytes), ""])
    return f"memory at the peak, {report.peak_place()}", ["kind", "bytes", "share"], rows


def _modules(report: DryRun) -> list[Table]:
    found: list[Table] = []
    kinds = (("activations", report.activations_by_module), ("temporaries", report.temporaries_by_module))
    for kind, by_path in kinds:
        if by_path:
            rows = [[path, str(count), byte_text(size)] for path, (size, count) in starred(by_path).items()]
            found.append((f"{kind} at the peak, by module", ["module", "how many", "bytes"], _shortened(rows)))
    return found


def _collectives(report: DryRun) -> Table:
    merged: dict[tuple[str, ...], list[int]] = {}
    for row in report.collectives:
        totals = merged.setdefault((row.phase, row.module, row.axes, row.op, row.cause), [0, 0])
        totals[0] += row.count
        totals[1] += row.sent_bytes
    rows = [[*key, str(count), byte_text(sent)] for key, (count, sent) in merged.items()]
    rows.append(["a step", "", "", "", "", str(report.num_collectives), byte_text(report.sent_bytes)])
    return "collectives of a step", ["phase", "module", "axis", "collective", "cause", "calls", "sent"], rows


def _operations(report: DryRun) -> Table:
    rows = [[phase, flops_text(flops)] for phase, flops in report.flops_by_phase.items()]
    return "operations of a step", ["phase", "operations"], [*rows, ["a step", flops_text(report.flops)]]


def _shortened(rows: list[list[str]]) -> list[list[str]]:
    if len(rows) <= _MOST_ROWS:
        return rows
    return [*rows[: _MOST_ROWS - 1], [f"... and {len(rows) - _MOST_ROWS + 1} more", "", ""]]


def text(report: DryRun) -> str:
    """The whole report, for a terminal or a log."""
    lines = [headline(report), job_line(report), report.verdict(), *report.notes]
    for caption, columns, rows in tables(report):
        widths = [max(len(row[index]) for row in [columns, *rows]) for index in range(len(columns))]
        lines += ["", caption]
        for row in [columns, *rows]:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append(f"  {'  '.join(cells)}".rstrip())
    return "\n".join(lines)


def count_text(number: float) -> str:
    """As in 70.55 B.

    >>> count_text(70_553_706_496)
    '70.55 B'
    """
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return str(number)


def flops_text(flops: float) -> str:
    """As in 232.75 TFLOP."""
    for unit, name in _FLOP_UNITS:
        if flops >= unit:
            return f"{flops / unit:.2f} {name}"
    return f"{flops:.0f} FLOP"
