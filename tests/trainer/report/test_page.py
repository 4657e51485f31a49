"""The page about a run: its numbers are those of metrics.jsonl, nothing comes from outside, it says what happened."""

from __future__ import annotations

import html.parser
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.trainer.metrics import MetricsFile, append_event, read_metrics
from hyper_parallel.trainer.report.comparison import largest_difference
from hyper_parallel.trainer.report.page import write_failure, write_report
from hyper_parallel.trainer.report.run_data import RunData
from hyper_parallel.trainer.report.series import MOST_POINTS, downsampled
from tests.commands import command_environment
from tests.trainer.report.made_runs import CONFIG, END, ENVIRONMENT, TIME, ordinary_run, part, start, step, write_run

only_on = "torch"  # imports no framework: once is enough

_EMPTY = {"meta", "input", "br"}


class _Parser(html.parser.HTMLParser):
    """Fails for tags that do not close; gathers what would be fetched."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched, self.handlers, self.text = [], [], [], []

    def handle_starttag(self, tag, attributes):
        if tag not in _EMPTY:
            self.open.append(tag)
        self.fetched += [value for name, value in attributes if name in ("src", "href", "xlink:href", "action")]
        self.handlers += [name for name, _ in attributes if name.startswith("on")]

    def handle_startendtag(self, tag, attributes):
        self.fetched += [value for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def parsed(page):
    parser = _Parser()
    parser.feed(page)
    assert parser.open == []
    return parser


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def curves_of(page):
    """{chart: {curve: (steps, values)}}, as the page has them."""
    return {
        chart["id"]: {one["name"]: (list(itertools.accumulate(one["dx"])), one["y"]) for one in chart["series"]}
        for chart in data_of(page)["charts"]
    }


def six_digits(values):
    return [float(f"{value:.6g}") for value in values]


# ---------------------------------------------------------------- one run


def test_every_curve_is_that_of_the_metrics(tmp_path):
    folder = ordinary_run(tmp_path / "run")
    curves = curves_of(write_report([folder]).read_text())
    lines = list(read_metrics(folder))
    steps = [one for one in lines if one["event"] == "step"]
    named = {"gradient norm": "grad_norm", "valid tokens/s": "tokens_per_second", "learning rate": "lr", "mfu": "mfu"}
    named |= {"padding, tokens a step": "padding", "training": "loss"}
    found = {name: curve for chart in curves.values() for name, curve in chart.items()}
    assert found.keys() == {*named, "evaluation"}
    for name, key in named.items():
        assert found[name] == ([one["step"] for one in steps], six_digits(one[key] for one in steps))
    evaluations = [one for one in lines if one["event"] == "eval"]
    assert found["evaluation"] == ([one["step"] for one in evaluations], six_digits(one["loss"] for one in evaluations))


def test_nothing_is_fetched_and_everything_is_there(tmp_path):
    folder = ordinary_run(tmp_path / "run")
    page = write_report([folder]).read_text()
    parser = parsed(page)
    assert parser.fetched == []
    assert "http" not in page
    assert "@import" not in page
    text = " ".join(parser.text)
    for words in ("Finished", "all 20 steps", "Memory per rank", "Communication of one step", "all-reduce", "4.10 kB"):
        assert words in text
    for words in ("run.toml:2", "--set", '"a # b"', "step 15", "node1", "torch 2", "rank 1", "tp=2", "prefers-color"):
        assert words in text or words in page


def test_a_long_run_of_many_ranks_stays_small(tmp_path):
    events = [start(steps=20_000, ranks=64), ENVIRONMENT]
    events += [
        step(number, loss=4.0 + 1.0 / number, memory_per_rank=[10**9 + i for i in range(64)])
        for number in range(1, 20_001)
    ]
    events[10_000]["loss"] = 123.456789
    events += [{"event": "save", "time": TIME, "step": number, "seconds": 1.0} for number in range(500)]
    parts = [part(rank, num_spans=1000) for rank in range(64)]
    folder = write_run(tmp_path / "run", [*events, END], parts, layout="<svg>" + "<g></g>" * 20_000 + "</svg>")
    page = write_report([folder]).read_text()
    assert len(page.encode()) < 300_000
    parsed(page)
    curves = curves_of(page)
    steps, losses = curves["loss"]["training"]
    assert len(steps) <= MOST_POINTS
    assert (steps[0], steps[-1], max(losses)) == (1, 20_000, 123.457)
    assert steps[losses.index(123.457)] == events[10_000]["step"]


def test_downsampling_keeps_what_stands_out():
    steps, values = list(range(100_000)), [float(number % 7) for number in range(100_000)]
    values[31_415], values[92_653] = 99.0, -99.0
    kept_steps, kept = downsampled(steps, values)
    assert len(kept) <= MOST_POINTS
    assert (kept_steps[0], kept_steps[-1]) == (0, 99_999)
    assert (kept_steps[kept.index(99.0)], kept_steps[kept.index(-99.0)]) == (31_415, 92_653)
    assert kept_steps == sorted(set(kept_steps))


@pytest.mark.parametrize(
    ("events", "status", "said"),
    [
        ([start(), step(1), END], "finished", "Finished: all 20 steps"),
        (
            [start(), step(7), {**END, "step": 7, "status": "stopped", "reason": "SIGTERM"}],
            "stopped",
            "Stopped at step 7 of 20 by SIGTERM; its state is saved",
        ),
        (
            [start(), step(7), {**END, "step": 7, "status": "failed", "reason": "rank 1 ended\nTraceback"}],
            "failed",
            "Failed at step 7 of 20: rank 1 ended",
        ),
        ([start(), step(3)], "running", "Running: step 3 of 20"),
        ([start(), END, start(attempt=1, step=3), step(4)], "running", "Running: step 20 of 20"),
        ([start(time=1.0), step(3, time=2.0)], "silent", "No end is written: killed, or waiting, at step 3 of 20"),
    ],
)
def test_the_verdict(tmp_path, events, status, said):
    run = RunData.read(write_run(tmp_path / "run", events))
    assert (run.status, run.verdict) == (status, said)
    page = write_report([run.folder]).read_text()
    assert f'class="verdict {status}"' in page


def test_what_a_user_wrote_is_text(tmp_path):
    evil = '</script><img src=x onerror="alert(1)">&amp;'
    events = [start(model=evil, data=evil, degrees=evil, peak_from=evil), {**ENVIRONMENT, "host": evil, "system": evil}]
    events += [step(1), {**END, "status": "failed", "reason": f"{evil}\n{evil}"}]
    parts = [{**part(0), "host": evil, "spans": [["modules", evil, 0, 10]], "place": {evil: 0}}, part(1)]
    parts[0]["communication"][0]["kind"] = evil
    parts[0]["memory"][evil] = 5
    config = f"[{evil}]\n{json.dumps(evil)} = {json.dumps(evil)}  # {evil}\n"
    folder = write_run(tmp_path / "<b>run", events, parts, config, layout=f"<svg><text>{evil}</text></svg>")
    page = write_report([folder]).read_text()
    parser = parsed(page)
    assert (parser.fetched, parser.handlers) == ([], [])
    assert evil in "".join(parser.text)
    assert "<img" not in page
    assert "layout.svg is not the one that was drawn" in page
    other = write_run(tmp_path / "other", events, parts, CONFIG)
    both = write_report([folder, other]).read_text()
    assert (parsed(both).fetched, parsed(both).handlers) == ([], [])
    assert "<img" not in both


def test_a_picture_of_the_layout_is_shown(tmp_path):
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><rect fill="url(#partial)"/><text>blocks.0</text></svg>'
    folder = write_run(tmp_path / "run", [start(), step(1), END], layout=svg)
    page = write_report([folder]).read_text()
    assert svg.replace(' xmlns="http://www.w3.org/2000/svg"', "") in page


def test_the_forecast_stands_beside_the_measured(tmp_path):
    forecast = {"event": "forecast", "time": TIME, "step": 0, "parameters": 1000, "gradients": 1000}
    forecast |= {"optimizer_state": 2000, "activations": 500, "state": 4000, "peak": 4_500_000}
    error = {"forecast": 3000, "measured": 2900, "error": 0.0345, "bound": 0.05, "within": True}
    measured = {"event": "forecast_measured", "time": TIME, "step": 2, "state": error}
    folder = write_run(tmp_path / "run", [start(), ENVIRONMENT, forecast, step(2), measured, END], [part(0), part(1)])
    page = write_report([folder]).read_text()
    text = " ".join(parsed(page).text)
    assert "forecast 4.50 kB 4.50 MB" in re.sub(r"\s+", " ", text)
    assert "rank 1 4.00 kB 11.00 MB" in re.sub(r"\s+", " ", text)
    assert "2.90 kB measured, 3.00 kB forecast (+3.5%)" in text


def test_a_run_that_died_before_its_first_step(tmp_path):
    write_failure(tmp_path / "run", "rank 0 ended with status 1 on host x\nTraceback ...")
    page = (tmp_path / "run" / "report.html").read_text()
    parsed(page)
    assert "Failed at step 0" in page
    assert "No step is written down yet" in page
    assert data_of(page) == {"charts": []}


def test_a_failure_is_written_behind_a_line_that_was_cut_short(tmp_path):
    folder = write_run(tmp_path / "run", [start(), step(1), step(2)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "st')
    append_event(folder, "end", step=2, status="failed", reason="killed")
    assert [one["event"] for one in read_metrics(folder)] == ["start", "step", "step", "end"]


def test_restarts_are_counted_with_the_steps_done_again(tmp_path):
    folder = write_run(tmp_path / "run", [start(), *(step(number) for number in range(1, 8))])
    metrics = MetricsFile(folder, 5, is_restart=True)
    assert metrics.num_repeated == 2
    again = start(step=5, attempt=1, repeated=metrics.num_repeated, resumed_from="step-5")
    metrics.write(**again)
    metrics.close()
    text = " ".join(parsed(write_report([folder]).read_text()).text)
    assert "restart 1 step 5 2 ranks, tp=2 2" in text
    fresh = MetricsFile(tmp_path / "run", 0, is_restart=True)
    assert fresh.num_repeated == 5
    fresh.close()
    assert [one["event"] for one in read_metrics(folder)] == ["start"]  # how it was started the first time is kept


# ---------------------------------------------------------------- two runs


def test_two_runs_on_one_page(tmp_path):
    a, b = ordinary_run(tmp_path / "a"), ordinary_run(tmp_path / "b", num_steps=15)
    lines = list(read_metrics(b))
    lines = [
        {**one, "loss": one["loss"] + 0.25} if one["event"] == "step" and one["step"] == 11 else one for one in lines
    ]
    (b / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (b / "resolved.toml").write_text(CONFIG.replace("20", "15"))
    found = largest_difference(RunData.read(a), RunData.read(b))
    assert found == (11, pytest.approx(0.25))
    path = write_report([a, b])
    assert path == b / "comparison.html"
    page = path.read_text()
    text = " ".join(parsed(page).text)
    assert "furthest apart at step 11: by 0.25" in text
    assert "train.steps" in text
    assert "model.name" not in text  # equal
    curves = curves_of(page)["loss"]
    assert [len(steps) for steps, _ in curves.values()] == [20, 4, 15, 3]


def test_two_equal_runs(tmp_path):
    page = write_report([ordinary_run(tmp_path / "a"), ordinary_run(tmp_path / "b")]).read_text()
    assert "losses of all steps that both have are equal" in page
    assert "No value differs" in page


# ---------------------------------------------------------------- the command


def command(*words):
    done = subprocess.run(
        [sys.executable, "-m", "hyper_parallel.cli", "report", *map(str, words)],
        capture_output=True,
        text=True,
        env=command_environment(),
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_command(tmp_path):
    folder = ordinary_run(tmp_path / "run")
    assert command(folder) == (0, f"{folder / 'report.html'}\n")
    assert command(folder, "-o", tmp_path / "x.html") == (0, f"{tmp_path / 'x.html'}\n")
    assert (tmp_path / "x.html").read_text() == (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such-run"], "there is no folder 'no-such-run'; give the folder of a run, which log.folder names"),
        ([str(Path(__file__).parent)], "has no metrics.jsonl, so no run has written there"),
        (["a", "b", "c"], "report takes one folder, or two to compare; got 3"),
    ],
)
def test_mistakes_of_the_command(words, said):
    status, output = command(*words)
    assert status == 2
    assert said in output


# ---------------------------------------------------------------- the script


STUB = """
const fs = require("fs"), vm = require("vm");
const page = fs.readFileSync(process.argv[2], "utf8");
const tags = page.matchAll(/<script(?: type="application\\/json" id="data")?>([^]*?)<\\/script>/g);
const scripts = [...tags].map(m => m[1]);
const elements = {};
const make = id => ({ id, innerHTML: "", textContent: id === "data" ? scripts[0] : "", hidden: true, style: {},
  offsetWidth: 40,
  attributes: {}, listeners: {}, setAttribute(n, v) { this.attributes[n] = v; },
  addEventListener(n, f) { this.listeners[n] = f; }, getBoundingClientRect: () => ({ left: 0, width: 560 }) });
const ids = new Set([...page.matchAll(/ id="?([\\w-]+)/g)].map(m => m[1]));
const document = { getElementById(id) {
  const inside = Object.values(elements).some(e => e.innerHTML.includes(`id="${id}"`));
  if (!ids.has(id) && !inside) throw new Error("no element " + id);
  return elements[id] = elements[id] || make(id); } };
vm.runInNewContext(scripts[1], { document, console });
const out = { plain: {}, log: {}, smooth: {}, tips: {} };
const keep = to => { for (const [id, e] of Object.entries(elements)) if (e.innerHTML) to[id] = e.innerHTML; };
keep(out.plain);
for (const id of Object.keys(out.plain)) {
  elements[id].listeners.mousemove({ clientX: 559 });
  out.tips[id] = elements[id + "-tip"].textContent;
  elements[id].listeners.mouseleave();
  if (!elements[id + "-tip"].hidden) throw new Error("the tip stays");
  elements[id + "-log"].listeners.click();
}
keep(out.log);
for (const id of Object.keys(out.plain)) elements[id + "-log"].listeners.click();
elements.smooth.listeners.input({ target: { value: "0.5" } });
keep(out.smooth);
console.log(JSON.stringify(out));
"""


def drawn(folder, path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed; the page's script is not run")
    (folder / "stub.js").write_text(STUB)
    done = subprocess.run([node, folder / "stub.js", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def points_of(svg, name):
    d = re.search(rf'data-name="{re.escape(name)}" d="([^"]*)"', svg)[1]
    return [tuple(map(float, pair.split())) for pair in re.split("[ML]", d)[1:]]


def test_the_script_draws_the_data(tmp_path):
    """Where the points are on the screen is a straight function of step and value, or of its logarithm."""
    path = write_report([ordinary_run(tmp_path / "run")])
    out = drawn(tmp_path, path)
    for chart, series in curves_of(path.read_text()).items():
        for name, (steps, values) in series.items():
            for kind, scale in (("plain", float), ("log", math.log)):
                shown = [(x, y) for x, y in zip(steps, values, strict=True) if kind == "plain" or y > 0]
                points = points_of(out[kind][chart], name)
                assert len(points) == len(shown)
                x0, x1 = points[0][0], points[-1][0]
                high = max(range(len(shown)), key=lambda place: shown[place][1])
                low = min(range(len(shown)), key=lambda place: shown[place][1])
                top, bottom = points[high][1], points[low][1]
                assert top <= bottom
                for (step_, value), (x, y) in zip(shown, points, strict=True):
                    part_ = (step_ - shown[0][0]) / (shown[-1][0] - shown[0][0])
                    assert x == pytest.approx(x0 + (x1 - x0) * part_, abs=0.11)
                    span = scale(shown[high][1]) - scale(shown[low][1])
                    share = (scale(value) - scale(shown[low][1])) / span if span else 0.0
                    assert y == pytest.approx(bottom + (top - bottom) * share, abs=0.11)
    assert out["tips"]["loss"].splitlines()[0] == "step 20"
    last = next(one for one in reversed(list(read_metrics(tmp_path / "run"))) if one["event"] == "step")
    assert f"training {last['loss']:.5g}" in out["tips"]["loss"]
    assert f"mfu {last['mfu'] * 100:.5g}%" in out["tips"]["mfu"]
    assert out["smooth"]["loss"].count("<path") == 3
    assert 'class="raw"' in out["smooth"]["loss"]


def test_the_script_on_odd_data(tmp_path):
    """One step, equal values, zeros under a logarithm, a loss that is no number, nothing at all."""
    runs = {
        "one": [start(), step(1), END],
        "equal": [start(), step(1, loss=2.0), step(2, loss=2.0), END],
        "zeros": [start(), step(1, loss=0.0), step(2, loss=0.0), END],
        "none": [start()],
        "nan": [start(), step(1), step(2, loss=float("nan")), step(3), END],
    }
    for name, events in runs.items():
        out = drawn(tmp_path, write_report([write_run(tmp_path / name, events)]))
        assert "NaN" not in json.dumps(out), name
        assert "Infinity" not in json.dumps(out), name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_chromium(tmp_path, scheme):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("Chromium is not installed (Debian: apt install chromium); the page is not looked at")
    path = write_report([ordinary_run(tmp_path / "run")])
    picture = tmp_path / "page.png"
    words = [
        chromium,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--window-size=1240,1600",
    ]
    words += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000", f"--screenshot={picture}"]
    words += ["--blink-settings=preferredColorScheme=0"] if scheme == "dark" else []
    done = subprocess.run(
        [*words, path.as_uri()],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    assert picture.stat().st_size > 30_000
    dumped = subprocess.run(
        [*words[:-1], "--dump-dom", path.as_uri()], capture_output=True, text=True, check=False, timeout=120
    ).stdout
    assert dumped.count('<path class="" data-name=') == 7
