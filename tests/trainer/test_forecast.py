"""The forecast of a run: its figures, what it refuses, and how it compares with the run itself."""

from __future__ import annotations

import contextlib
import io
import json
import math

import pytest
import torch
from pydantic import TypeAdapter
from typer.testing import CliRunner

import hyper_parallel as hp
from hyper_parallel.analysis.rank_run import run_rank
from hyper_parallel.cli.main import app
from hyper_parallel.parallel.parallelize import parallelize
from hyper_parallel.testing import threads
from hyper_parallel.trainer.building import build_model
from hyper_parallel.trainer.config.run_config import RunConfig
from hyper_parallel.trainer.forecast import FORECAST_FILE, Forecast, answer, asking, forecast_run
from hyper_parallel.trainer.forecast.answer import _changes
from hyper_parallel.trainer.forecast.forecast import fingerprint
from hyper_parallel.trainer.forecast.job import job_of, state_of
from hyper_parallel.trainer.metrics import read_metrics
from hyper_parallel.trainer.optimizers import make_optimizer

only_on = "torch"  # which makes the forecast; on MindSpore test_on_mindspore asks it

SIZES = {"dim": 32, "num_blocks": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 56, "vocab_size": 96}


def _config(**sections) -> RunConfig:
    given = {
        "model": {"name": "llama", "args": SIZES},
        "data": {"kind": "synthetic", "length": 16, "vocab_size": 96, "isolate": False},
        "train": {"steps": 3, "batch": 4},
    }
    for name, values in sections.items():
        given[name] = values if name == "model" else {**given.get(name, {}), **values}
    return TypeAdapter(RunConfig).validate_json(json.dumps(given))


def test_the_state_of_one_process_is_that_of_the_plain_model():
    config = _config()
    state = state_of(job_of(config, 1, "cpu"), config)
    plain = hp.models.Llama(hp.models.LlamaConfig(**SIZES))
    optimizer = torch.optim.AdamW(plain.parameters())
    ids = torch.zeros(1, 4, dtype=torch.long)
    plain(ids, ids).backward()
    optimizer.step()
    slots = [one for state in optimizer.state.values() for one in state.values()]
    assert state["parameters"] == sum(one.numel() * 4 for one in plain.parameters())
    assert state["gradients"] == sum(one.grad.numel() * 4 for one in plain.parameters())
    assert state["optimizer_state"] == sum(one.numel() * 4 for one in slots)
    assert state["largest_gather"] == 0
    assert state["logits"] == 4 * 16 * 96 * 4


@pytest.mark.parametrize(
    "degrees", [{"tp": 2}, {"dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"dp_replicate": 2}, {"cp": 2}, {"tp": 3}]
)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_state_is_what_a_rank_holds_after_a_step(degrees, optimizer):
    options = {"name": optimizer, **({"momentum": 0.9} if optimizer == "sgd" else {})}
    config = _config(parallel=degrees, optimizer=options, train={"dtype": "float64"})
    state = state_of(job_of(config, config.world_size, "cpu"), config)

    def rank():
        run = parallelize(build_model(config.model, "float64"), config.parallel.degrees).materialize(seed=0)
        made = make_optimizer(config.optimizer, run.named_parameters())
        ids = torch.zeros(2, 16, dtype=torch.long)
        run.forward_backward(ids, labels=ids)
        made.step()
        local = [one.to_local() if isinstance(one, hp.DTensor) else one for one in run.parameters()]
        slots = [one for state in made.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
        slots = [one.to_local() if isinstance(one, hp.DTensor) else one for one in slots]
        return [sum(one.numel() * one.element_size() for one in some) for some in (local, slots)]

    parameters, kept = threads(config.world_size).run(rank)[0]
    assert state["parameters"] == parameters
    assert state["optimizer_state"] == pytest.approx(kept, rel=0.001)  # a number of steps for each parameter


def test_the_largest_gather_is_the_largest_unit_in_the_dtype_of_the_computation():
    for compute, size in (("same", 4), ("bfloat16", 2)):
        config = _config(parallel={"dp_shard": 2}, precision={"compute": compute})
        state = state_of(job_of(config, 2, "cpu"), config)
        plain = hp.models.Llama(hp.models.LlamaConfig(**SIZES))
        block = sum(one.numel() for one in plain.blocks[0].parameters())
        outside = sum(one.numel() for one in plain.parameters()) - 2 * block
        assert state["largest_gather"] == size * max(block, outside)


def test_a_model_that_does_not_know_its_loss(tmp_path, monkeypatch):
    (tmp_path / "own_model.py").write_text(
        "from torch import nn\n"
        "class Own(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embedding, self.head = nn.Embedding(96, 8), nn.Linear(8, 96)\n"
        "    def forward(self, tokens):\n"
        "        return self.head(self.embedding(tokens))\n"
        "def build():\n"
        "    return Own()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = _config()
    config = RunConfig(model={"build": "own_model:build"}, data=config.data, train=config.train)
    assert (
        run_rank(job_of(config, 1, "cpu"), 0).peak.num_bytes > state_of(job_of(config, 1, "cpu"), config)["gradients"]
    )


# ---- what is answered; by a process of its own only in the test of the command ----


@pytest.fixture
def answered_here(monkeypatch):
    def ask(question, seconds):
        said = io.StringIO()
        with monkeypatch.context() as patch, contextlib.redirect_stdout(said):
            patch.setattr("sys.stdin", io.StringIO(question))
            answer.main()
        return said.getvalue(), "", False

    monkeypatch.setattr(asking, "_ask", ask)


def test_the_forecast_fits_or_names_the_cheapest_change(answered_here):
    found = forecast_run(_config(), seconds=None)
    assert found.fits and found.peak > found.state and found.note == ""
    assert found.verdict().startswith("forecast: fits: the peak is ")
    assert "optimizer state" in found.table() and "free on this host" in found.table()
    tight = forecast_run(_config(launch={"device_memory": f"{found.peak - 1}"}), seconds=None)
    assert not tight.fits
    assert "does not fit: the peak of rank 0 is" in tight.verdict()
    assert "with train.microbatches = 2 the peak is " in tight.verdict()


def test_a_model_that_cannot_be_built_as_the_config_says_is_refused(answered_here, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    lora = {"rank": 2, "targets": ["*.vlaue"]}
    found = forecast_run(_config(model={"name": "llama", "args": SIZES, "weights": str(tmp_path), "lora": lora}))
    assert not found.fits
    assert found.verdict().startswith(
        "forecast: this run cannot start: model.lora.targets: add_lora: no linear layer of Llama is called '*.vlaue'"
    )


def test_what_is_not_known_in_time_is_not_refused():
    late = forecast_run(_config(launch={"device_memory": "1B"}), seconds=0.01)
    assert late.fits and late.needed is None
    assert "not all was known after 0 s" in late.table()


def test_a_model_that_cannot_be_run_without_memory_is_told_and_its_state_known(tmp_path, monkeypatch, answered_here):
    (tmp_path / "reading_model.py").write_text(
        "from torch import nn\n"
        "class Own(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.embedding, self.head = nn.Embedding(96, 8), nn.Linear(8, 96)\n"
        "    def forward(self, tokens):\n"
        "        x = self.embedding(tokens)\n"
        "        return self.head(x) if x.sum() > 0 else self.head(-x)\n"
        "def build():\n"
        "    return Own()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = forecast_run(_config(model={"build": "reading_model:build"}), seconds=None)
    assert found.parameters == 4 * (96 * 8 + 8 * 96 + 96) and found.peak is None
    assert "reads a value that follows from weights" in found.table()
    assert found.verdict().startswith("forecast: fits: the state alone is ")


def test_changes_go_from_cheap_to_dear():
    config = _config(train={"batch": 8}, parallel={"dp_replicate": 2})
    texts = [text for text, _, _ in _changes(config, 2)]
    assert texts == [
        "train.microbatches = 2",
        "train.microbatches = 4",
        "parallel.dp_replicate = 1, parallel.dp_shard = 2",
        'recompute.mode = "full"',
        'recompute.mode = "full", train.microbatches = 4',
        "parallel.dp_shard = 2 on 4 ranks",
        "parallel.dp_shard = 4 on 8 ranks",
    ]
    peaks = [run_rank(job_of(changed, size, "cpu"), 0).peak.num_bytes for _, changed, size in _changes(config, 2)]
    assert max(peaks) < run_rank(job_of(config, 2, "cpu"), 0).peak.num_bytes


# ---- the commands and the run ----


_TOML = """
[model]
name = "llama"
args = { dim = 32, num_blocks = 1, num_heads = 4, num_kv_heads = 2, hidden_dim = 56, vocab_size = 96 }
[data]
kind = "synthetic"
length = 16
vocab_size = 96
isolate = false
[train]
steps = 3
batch = 4
"""


def test_train_refuses_what_cannot_fit_and_starts_nothing(tmp_path, monkeypatch, capfd, answered_here):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(_TOML)
    done = CliRunner().invoke(app, ["train", "run.toml", "--set", "launch.device_memory=1kB"])
    assert done.exit_code == 2
    assert "does not fit" in done.stdout + capfd.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_the_command_tells_programs(tmp_path):
    (tmp_path / "run.toml").write_text(_TOML)
    done = CliRunner().invoke(app, ["forecast", str(tmp_path / "run.toml"), "--json", "--nproc", "2"])
    data = json.loads(done.stdout)
    assert done.exit_code == 0 and data["fits"] and data["degrees"] == "dp_shard=2"


def test_the_run_compares_its_forecast_with_what_it_measures(tmp_path, capsys):
    config = _config(log={"folder": str(tmp_path)}, checkpoint={"every": 0})
    said = state_of(job_of(config, 1, "cpu"), config)
    forecast = Forecast(1, "dp_shard=1", **said, peak=10**6, fingerprint=fingerprint(config))
    (tmp_path / FORECAST_FILE).write_text(json.dumps(forecast.as_data()))
    hp.Trainer(config).train()
    events = {line["event"]: line for line in read_metrics(tmp_path)}
    assert events["forecast"]["parameters"] == said["parameters"]
    compared = events["forecast_measured"]
    assert compared["step"] == 2 and compared["state"]["within"] and compared["state"]["error"] == 0
    assert compared["peak"]["within"] is None and "too little to tell" in compared["peak_is"]
    assert "forecast and measured: state " in capsys.readouterr().out


def test_the_forecast_of_another_config_is_not_this_runs(tmp_path):
    config = _config(log={"folder": str(tmp_path)})
    other = Forecast(1, "dp_shard=1", parameters=1, gradients=1, optimizer_state=1, fingerprint="of another")
    (tmp_path / FORECAST_FILE).write_text(json.dumps(other.as_data()))
    hp.Trainer(config).train()
    assert not any(line["event"].startswith("forecast") for line in read_metrics(tmp_path))
    assert math.isfinite(next(line["loss"] for line in read_metrics(tmp_path) if line["event"] == "step"))
