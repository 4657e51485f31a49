"""`hyper-parallel data`: prepare and show as a user meets them."""

from __future__ import annotations

import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hyper_parallel.cli.main import app
from hyper_parallel.data import DataConfig, open_data, show_sample

only_on = "torch"  # imports no framework: once is enough


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command with prepared data in the test's folder; (status, output, errors)."""
    monkeypatch.setenv("HYPER_PARALLEL_CACHE", str(tmp_path / "cache"))

    def run(*arguments):
        done = CliRunner().invoke(app, ["data", *map(str, arguments)])
        return done.exit_code, done.stdout, done.stderr

    return run


@pytest.fixture
def chats(tmp_path):
    turns = [{"role": "user", "content": "Hi\x1b[31m"}, {"role": "assistant", "content": "Hello!"}]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n" + json.dumps({"messages": turns}) + "\n")
    return path


def test_prepare_says_what_it_made_and_finds_it_again(run, tmp_path, chats):
    status, said, _ = run("prepare", chats, "--length", 256)
    assert status == 0
    described, folder = said.splitlines()
    assert "2 rows, packed into 1 samples of 256" in described
    assert folder.startswith(str(tmp_path / "cache" / "chat-"))
    assert run("prepare", chats, "--length", 256)[1] == said


def test_show_marks_what_is_trained_and_drives_no_terminal(run, chats):
    status, said, _ = run("show", chats, "--length", 256)
    assert status == 0
    assert "-- sample 0 of the run, number 0 of the data: " in said
    assert said.count("<|im_start|>user\nHi�[31m<|im_end|>\n<|im_start|>assistant\n⟦Hello!<|im_end|>\n⟧") == 2
    assert "────" in said
    assert "\x1b" not in said


def test_show_follows_the_order_of_a_run(run, tmp_path):
    text = tmp_path / "t.txt"
    text.write_text("".join(f"{number:03d} " for number in range(50)))
    status, said, _ = run("show", text, "--length", 4, "-n", 3, "--first", 2, "--seed", 7, "--no-isolate")
    assert status == 0
    data = open_data(DataConfig(kind="text", path=str(text), length=4, isolate=False), seed=7)
    for place, number in enumerate(data.order(batch=1, seed=7).numbers(2, 3).tolist(), 2):
        assert f"-- sample {place} of the run, number {number} of the data: 4 tokens, 4 of them trained" in said
        assert f"⟦{number:03d} "[2:] in said


def test_a_run_toml_is_understood(run, tmp_path, chats):
    toml = tmp_path / "run.toml"
    toml.write_text(f'steps = 3\n[data]\nkind = "chat"\npath = "{chats}"\nlength = 128\n')
    assert "samples of 128" in run("prepare", toml)[1]
    assert "samples of 99" in run("prepare", toml, "--length", 99)[1]
    toml.rename(tmp_path / "base.toml")
    toml.write_text('extends = "base.toml"\ndata = { length = 97 }\n')
    assert "samples of 97" in run("prepare", toml)[1]
    toml.write_text("[data\n")
    assert "run.toml:1: is not TOML" in run("prepare", toml)[2]


def test_the_corpus_and_synthetic_tokens_need_no_files(run):
    assert "Python's library" in run("show", "--length", 32)[1]
    assert run("show", "--kind", "synthetic", "--length", 8)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "nowhere"], "error: path: must be a file or folder of this machine; there is no 'nowhere'"),
        (["prepare", "--length", "0"], "error: length: Input should be greater than or equal to 1"),
        (["show", "--kind", "text"], 'error: path: is missing: kind = "text" reads a file or folder'),
        (["show", "--kind", "book"], "error: kind: Input should be 'corpus', 'text'"),
    ],
)
def test_mistakes_are_a_line_and_status_2(run, arguments, message):
    status, _, errors = run(*arguments)
    assert status == 2
    assert message in errors
    assert len(errors.splitlines()) == 1


def test_colours(run, chats):
    data = open_data(DataConfig(kind="chat", path=str(chats), length=256), seed=0)
    console = Console(force_terminal=True, color_system="standard", width=200)
    with console.capture() as captured:
        console.print(show_sample(data, data.sample(0)))
    assert "\x1b[1;32mHello!<|im_end|>" in captured.get()
    assert show_sample(data, data.sample(0), most_tokens=4).plain == "<|im"
