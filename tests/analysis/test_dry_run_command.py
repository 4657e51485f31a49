"""`hyper-parallel dry-run`: what it prints, writes and answers with."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hyper_parallel.cli.main import app
from tests.analysis.real_steps import write_config

only_on = "torch"  # which executes the run; on MindSpore test_on_mindspore.py asks it

SMALL = ("dry-run", "llama-demo", "-d", "tp=2", "--length", "64")


def _run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_text_json_and_page(tmp_path):
    page = tmp_path / "report.html"
    shown = _run(*SMALL, "--html", page)
    assert shown.exit_code == 0, shown.output
    assert "memory at the peak" in shown.stdout and "collectives of a step" in shown.stdout
    (data,) = json.loads(_run(*SMALL, "--json").stdout)
    assert data["world_size"] == 2 and data["fits"]
    assert page.read_text().startswith("<!doctype html>") and str(data["peak_bytes"]) in page.read_text()


def test_status_1_when_it_does_not_fit():
    done = _run(*SMALL, "--device-memory", "1MB")
    assert done.exit_code == 1
    assert "does not fit: peak " in done.stdout and "exceeds 1.00 MB by" in done.stdout


def test_all_classes():
    done = _run("dry-run", "llama-demo", "-d", "tp=3", "--length", 64, "--all-classes", "--json")
    assert [report["ranks"] for report in json.loads(done.stdout)] == [[0, 1], [2]]


def test_options_of_parallelize():
    arguments = (
        "-d",
        "dp_shard=2, cp=2",
        "--batch",
        2,
        "--microbatches",
        2,
        "--precision",
        "bf16",
        "--dtype",
        "float32",
    )
    (data,) = json.loads(_run("dry-run", "llama-demo", "--length", 64, *arguments, "--json").stdout)
    assert data["degrees"] == {"dp_shard": 2, "cp": 2} and data["microbatches"] == 2


def test_experts_are_named_among_the_degrees(tmp_path):
    config = write_config(tmp_path, "mixtral")
    done = _run("dry-run", config, "-d", "dp_shard=2, ep=2", "--length", 32, "--dtype", "float32")
    assert "rank 0 of 2 (dp_shard 2 x ep 2)" in done.stdout


def test_options_of_stages():
    arguments = ("-d", "pp=2", "--batch", 2, "--stages", "1,3", "--schedule", "gpipe", "--dtype", "float32")
    shards = []
    for rank in (0, 1):
        (data,) = json.loads(_run("dry-run", "llama-demo", "--length", 32, *arguments, "--rank", rank, "--json").stdout)
        shards.append(data["peak_by_kind"]["parameters"])
    assert shards[0] < shards[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing",), "no model is called 'nothing'"),
        (("llama-demo", "-d", "tp=3", "--world-size", "8"), "the world has 8"),
        (("llama-demo", "--rank", "7"), "rank 7 is not one of"),
        (("llama-demo", "-d", "pp=2", "--stages", "1;3"), "--stages '1;3' is not a list of numbers"),
        (("llama-demo", "-d", "pp=2", "--stages", "9,9"), "give the number of blocks of each stage"),
        (("llama-demo", "-d", "cp=2", "--attention", "sparse"), "sparse"),
        (("missing/config.json",), "does not exist"),
        (("llama-demo", "--device-memory", "much"), "is not an amount of memory"),
        (("llama-demo", "--html", "no/such/folder/page.html", "--length", "32"), "No such file"),
    ],
)
def test_status_2_for_what_is_not_understood(arguments, said):
    done = _run("dry-run", *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ") and said in done.stderr
    assert "Traceback" not in done.output


def test_broken_json(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": ')
    done = _run("dry-run", tmp_path / "config.json")
    assert done.exit_code == 2 and "is not JSON" in done.stderr
