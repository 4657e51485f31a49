"""Run folders that a full disk, a crash of the host or a hand has damaged: read as far as they can be."""

from __future__ import annotations

import json

import pytest

from hyper_parallel.trainer.metrics import METRICS_FILE, MetricsFile, count_damaged_lines, read_metrics
from hyper_parallel.trainer.report.page import write_report
from hyper_parallel.trainer.report.parts import damaged_parts, read_parts
from tests.trainer.report.made_runs import start, step, write_run

only_on = "torch"  # reads files, no framework takes part

DAMAGED_LINES = [
    b"\0" * 4096,  # what some file systems leave of a line when the host dies
    b'{"event": "st\xff',
    b"[" * 100_000,
    b"null",
    b'{"event": 3, "time": 1}',
    b'{"event": "step", "time": 1}',
    b'{"event": "step", "time": 1, "step": "4"}',
    b'{"event": "step", "step": 4}',
]


def _run(folder):
    write_run(folder, [start(), step(1), step(2), step(3)])
    content = (folder / METRICS_FILE).read_bytes()
    (folder / METRICS_FILE).write_bytes(b"\n".join(DAMAGED_LINES) + b"\n" + content)
    return folder


def test_damaged_lines_are_left_out_and_counted_on_the_page(tmp_path):
    folder = _run(tmp_path / "run")
    assert [line.get("step") for line in read_metrics(folder)] == [0, 1, 2, 3]
    assert count_damaged_lines(folder) == len(DAMAGED_LINES)
    for number, content in enumerate(["", "{", "[]", '{"step": 1, "rank": 0, "memory": null}']):
        (folder / "recorded" / f"rank-{number}.json").write_text(content)
    (folder / "recorded" / "rank-4.json").mkdir()
    (folder / "layout.svg").write_bytes(b"\xff")
    assert read_parts(folder) == []
    assert damaged_parts(folder) == [f"recorded/rank-{number}.json" for number in range(5)]
    page = write_report([folder]).read_text()
    assert "Left out, as damaged: 8 lines of metrics.jsonl, " in page
    assert "layout.svg, recorded/rank-0.json" in page


def test_a_run_goes_on_behind_damaged_lines(tmp_path):
    folder = _run(tmp_path / "run")
    metrics = MetricsFile(folder, 2)
    metrics.write("end", step=2)
    metrics.close()
    assert metrics.num_repeated == 1
    assert [json.loads(line)["event"] for line in (folder / METRICS_FILE).open()] == ["start", "step", "step", "end"]


@pytest.mark.parametrize(("loss", "error"), [({}, "TypeError"), (10**400, "OverflowError")])
def test_values_that_no_run_writes_are_refused(tmp_path, loss, error):
    folder = write_run(tmp_path / "run", [start(), step(1, loss=loss)])
    said = rf"^the files of the run in '.*run' have values that no run writes \({error}"
    with pytest.raises(ValueError, match=said):
        write_report([folder])
