"""`hyper-parallel pipeline show` and the pictures: as text, as SVG, and those of docs/pipeline.md."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hyper_parallel as hp
from hyper_parallel.cli.main import app
from hyper_parallel.core.pipeline_parallel.simulate import Times, simulate
from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.core.pipeline_parallel.tables import SCHEDULES, make_table

only_on = "torch"  # no framework takes part

DOCS = Path(__file__).parents[2] / "docs"
PICTURES = {"pipeline_1f1b.svg": "1f1b", "pipeline_zbv.svg": "zbv", "pipeline_v_half.svg": "v_half"}


def picture(name):
    """A picture of docs/pipeline.md."""
    return hp.draw(simulate(make_table(name, 4, 8), Times(1, 1.2, 0.8))).svg


def _show(*arguments):
    return CliRunner().invoke(app, ["pipeline", "show", *map(str, arguments)])


def test_timeline_in_a_terminal():
    done = _show("1f1b", "--ranks", 2, "--microbatches", 3, "--times", "1,1,1")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        "1f1b: 2 ranks, 2 stages, 3 microbatches",
        "",
        "rank 0 F0 F1 ......B0    F2 B1    ...B2",
        "rank 1 ...F0 B0    F1 B1    F2 B2    ......",
        "",
        "step 12, bubble 25.0 % (3 of it)",
        "idle inside each rank: 3 0",
        "peak of activations on each rank, in chunks (one stage, one microbatch): 2 1",
        "checked, 24 actions: ends even if every send and receive blocks, each microbatch once and in order, nothing "
        "used before it came",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_lines_are_as_wide_as_asked(name):
    done = _show(name, "--width", 90)
    assert done.exit_code == 0, done.output
    bands = [line for line in done.output.splitlines() if re.match(r"rank \d ", line)]
    assert len(bands) % 4 == 0
    assert 80 < max(map(len, bands)) <= 90
    assert "checked, " in done.output


def test_figures_of_the_issue():
    done = _show("zbv", "--ranks", 4, "--microbatches", 8, "--times", "1,1.2,.8")
    assert "step 25.8, bubble 7.0 % (1.8 of it)" in done.output
    assert "idle inside each rank: 1.2 0.9 0.6 0.3" in done.output
    assert "microbatch): 8 8 8 8" in done.output


def test_a_table_from_a_file_and_back(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text(_show("zb_h1", "--ranks", 2, "--table").output)
    assert Table.parse(file.read_text()).has_messages
    assert _show(file, "--table").output == file.read_text()
    assert "zb_h1: 2 ranks, 2 stages, 8 microbatches" in _show(file).output
    file.write_text(file.read_text().replace("0RECV_B0 ", "", 1))
    done = _show(file)
    assert done.exit_code == 1
    assert "1SEND_B0 waits for 0RECV_B0, which is missing on rank 0" in done.output


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("zvb",), 2, "error: there is no schedule 'zvb'"),
        (("interleaved", "--microbatches", 9), 2, "error: interleaved: 9 microbatches do not work"),
        (("zbv", "--times", "1,2"), 2, "error: times '1,2': write forward"),
        (("1f1b", "--budget", 3), 1, "4 chunks are alive on rank 0, its budget is 3; take a schedule that keeps less"),
        ((Path(__file__), "--ranks", 3), 2, "is a file, which says ranks, stages and microbatches itself"),
        ((Path(__file__),), 2, "line 1 of the text"),
        (("zbv", "--svg", "/nowhere/at/all.svg"), 2, "error: "),
    ],
)
def test_refusals(arguments, status, said):
    done = _show(*arguments)
    assert done.exit_code == status, done.output
    assert said in done.output


def test_no_framework_is_loaded():
    code = (
        "import sys; from hyper_parallel.cli.main import app; "
        "app(['pipeline', 'show', 'zbv'], standalone_mode=False); "
        "print([name for name in ('torch', 'mindspore', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def _boxes(svg):
    """(title, x, width) of each box of an action."""
    root = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    return [
        (title.text, float(box.get("x")), float(box.get("width")))
        for box in root.iter(f"{space}rect")
        if (title := box.find(f"{space}title")) is not None
    ]


@pytest.mark.parametrize("name", ["1f1b", "dual_pipe_v"])
def test_boxes_are_where_the_times_are(name, tmp_path):
    table = make_table(name, 2, 4)
    drawing = hp.draw(table)
    timeline = simulate(table)
    boxes = {title.partition(",")[0]: (x, width) for title, x, width in _boxes(drawing.svg)}
    steps = {str(step): span for row in timeline.spans for span in row for step in span.action.steps}
    assert boxes.keys() == steps.keys()
    left = boxes["0F0"][0]
    scale = boxes["0F0"][1] / (steps["0F0"].end - steps["0F0"].start)
    for title, (x, width) in boxes.items():
        assert x - left == pytest.approx(steps[title].start * scale, abs=0.01)
        assert width == pytest.approx((steps[title].end - steps[title].start) * scale, abs=0.01)
    drawing.save(tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_text() == drawing.svg == drawing._repr_svg_()
    assert repr(drawing) == f"TimelineDrawing({name}: 2 ranks, {table.stages.num_stages} stages, 4 microbatches)"
    assert str(drawing).startswith(f"{name}: 2 ranks")


@pytest.mark.parametrize("file", PICTURES)
def test_pictures_of_the_docs_are_what_the_library_draws_now(file):
    assert (DOCS / file).read_text() == picture(PICTURES[file]), "run: python -m tests.pipeline_parallel.make_pictures"
