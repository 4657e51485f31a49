"""A config from files, options and Python: which value counts, where it is from, and what editors are told."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

import hyper_parallel as hp
from hyper_parallel.trainer.config import config_schema, load_config, resolved_toml
from hyper_parallel.trainer.config.toml_layers import file_layers
from tests.commands import command_environment

only_on = "torch"  # imports no framework: once is enough

BASE = """
[model]
name = "llama"
args.dim = 64  # [not a table]
args."num_heads" = 4

[train]
steps = 100
batch = 8

[optimizer]
no_decay = [
  "a", # ]
  '''b
[train]
''',
]
lr = 1e-3

[data]
isolate = false
"""
CHILD = """extends = "configs/base.toml"
train = { batch = 16 }
[parallel]
tp = 2
[optimizer]
lr = 2e-3
"""


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "base.toml").write_text(BASE)
    (tmp_path / "run.toml").write_text(CHILD)


def test_the_topmost_value_counts_and_says_where_it_is_from():
    loaded = load_config(
        "run.toml", ["optimizer.lr=5", "log.wandb=my-project", "optimizer.lr=4e-3"], {"--nproc": ("launch.nproc", 4)}
    )
    config, places = loaded.config, loaded.places
    assert (config.train.steps, config.train.batch, config.parallel.tp) == (100, 16, 2)
    assert (config.optimizer.lr, config.log.wandb, config.launch.nproc) == (4e-3, "my-project", 4)
    assert config.optimizer.no_decay == ("a", "b\n[train]\n")
    assert places["train", "steps"] == "configs/base.toml:8"
    assert places["model", "args", "dim"] == "configs/base.toml:4"
    assert places["model", "args", "num_heads"] == "configs/base.toml:5"
    assert places["optimizer", "no_decay"] == "configs/base.toml:12"
    assert places["train", "batch"] == "run.toml:2"
    assert places["parallel", "tp"] == "run.toml:4"
    assert places["optimizer", "lr"] == places["log", "wandb"] == "--set"
    assert places["launch", "nproc"] == "--nproc"
    assert ("launch", "hosts") not in places


def test_an_alternative_takes_the_place_of_the_one_below():
    config = load_config("run.toml", ["train.epochs=1.5", "model.name=llama-demo"]).config
    assert (config.train.steps, config.train.epochs) == (None, 1.5)
    assert (config.model.name, config.model.args) == ("llama-demo", {"dim": 64, "num_heads": 4})
    with pytest.raises(ValueError, match=r"^--set: model\.build: there is no module 'a'"):
        load_config("run.toml", ["model.build=a:b"])  # and the sizes of the llama are gone with it


def test_what_is_shown_is_the_same_config_again(tmp_path):
    text = resolved_toml(load_config("run.toml", ['log.folder="a \\"b\\" ü"', "launch.stop_after=11h50m"]))
    lines = [line.split("  #") for line in text.splitlines()]
    origins = {line[0].strip(): line[1].strip() for line in lines if len(line) == 2}
    assert origins["steps = 100"] == "configs/base.toml:8"
    assert origins["batch = 16"] == "run.toml:2"
    assert origins['stop_after = "11h50m"'] == "--set"
    assert origins["seed = 0"] == "default"
    assert "# microbatches is not set" in text
    (tmp_path / "resolved.toml").write_text(text)
    again = load_config("resolved.toml")
    assert again.config == load_config("run.toml", ['log.folder="a \\"b\\" ü"', "launch.stop_after=11h50m"]).config
    number = text.splitlines().index(next(line for line in text.splitlines() if line.startswith("batch"))) + 1
    assert again.places["train", "batch"] == f"resolved.toml:{number}"


def test_lines_of_arrays_of_tables():
    text = '[[a.b]]\nx = 1\n[a.b.c]\ny = 2\n\n[[a.b]]\nx = 3\ns = """\n[no]\n"""\nz = [{ w = 1 }, { w = 2 }]\n'
    with open("arrays.toml", "w") as file:
        file.write(text)
    (layer,) = file_layers(Path("arrays.toml"))
    lines = {key: int(place.rpartition(":")[2]) for key, place in layer.places.items()}
    assert lines["a", "b", 0, "x"] == 2
    assert lines["a", "b", 0, "c", "y"] == 4
    assert (lines["a", "b", 1], lines["a", "b", 1, "x"], lines["a", "b", 1, "s"]) == (6, 7, 8)
    assert lines["a", "b", 1, "z", 1, "w"] == 11


def test_from_python():
    given = {"model": {"name": "llama-demo"}, "data": {"isolate": False}}
    config = hp.RunConfig(**given, train={"steps": 2, "batch": 4}, parallel={"tp": 2, "pp": 2})
    assert config.world_size == 4
    assert str(config.checkpoint_folder) == "run/checkpoints"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.steps = 3
    changed = dataclasses.replace(config, log={"folder": "x"}, launch={"nproc": 8})
    assert (changed.world_size, str(changed.checkpoint_folder)) == (8, "x/checkpoints")
    with pytest.raises(
        ValidationError, match=r"train\.batch: must be at least dp_replicate x dp_shard = 5, one sample"
    ):
        hp.RunConfig(**given, train={"steps": 2, "batch": 4}, launch={"nproc": 5})
    with pytest.raises(ValidationError, match=r"batches\n.*Unexpected keyword argument"):
        hp.RunConfig(**given, train={"steps": 2, "batch": 4, "batches": 3})


def test_the_schema_knows_every_key_and_what_it_means():
    schema = config_schema()
    sections = {
        name: schema["$defs"][one["$ref"].rpartition("/")[2]]
        for name, one in schema["properties"].items()
        if "$ref" in one
    }
    assert set(schema["properties"]) - set(sections) == {"extends"}
    assert len(sections) == 12
    for name, section in sections.items():
        assert section["additionalProperties"] is False
        for key, value in section["properties"].items():
            assert value.get("description"), f"{name}.{key} says nothing about itself"
    assert sections["optimizer"]["properties"]["name"]["enum"] == ["adamw", "adam", "sgd"]


def _command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "hyper_parallel.cli", *arguments],
        capture_output=True,
        text=True,
        env=command_environment(),
    )


def test_the_commands_import_no_framework_and_print_for_programs():
    shown = _command("config", "run.toml", "--set", "train.seed=3", "--nproc", "2")
    assert shown.returncode == 0, shown.stderr
    assert "seed = 3                                      # --set\n" in shown.stdout
    assert "nproc = 2                                     # --nproc\n" in shown.stdout
    schema = _command("schema")
    assert json.loads(schema.stdout) == config_schema()
    code = (
        "import sys; from hyper_parallel.trainer.config import load_config; load_config('run.toml'); "
        "print([name for name in ('torch', 'mindspore', 'numpy', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=command_environment())
    assert done.stdout == "[]\n", done.stderr


MIXTURE = """extends = "run.toml"
[data]
kind = "mixture"
[[data.sources]]
kind = "corpus"
weight = 3
[[data.sources]]
kind = "synthetic"
num_samples = 7
"""


def test_a_mixture_of_sources_from_python():
    data = {"kind": "mixture", "sources": [{"kind": "corpus", "weight": 2.0}, {"kind": "synthetic"}]}
    config = hp.RunConfig(model={"name": "llama-demo"}, data={**data, "isolate": False}, train={"steps": 1, "batch": 2})
    assert [(one.kind, one.weight) for one in config.data.sources] == [("corpus", 2.0), ("synthetic", 1.0)]


def test_a_mixture_of_sources(tmp_path):
    (tmp_path / "mixture.toml").write_text(MIXTURE)
    loaded = load_config("mixture.toml")
    assert [(one.kind, one.weight, one.num_samples) for one in loaded.config.data.sources] == [
        ("corpus", 3.0, 1024),
        ("synthetic", 1.0, 7),
    ]
    (tmp_path / "resolved.toml").write_text(resolved_toml(loaded))
    assert load_config("resolved.toml").config == loaded.config
    (tmp_path / "mixture.toml").write_text(
        MIXTURE.replace("num_samples", "num_sample").replace("weight = 3", "weight = 0")
    )
    with pytest.raises(ValueError) as raised:
        load_config("mixture.toml")
    assert str(raised.value).splitlines() == [
        "mixture.toml:6: data.sources[0].weight: must be above 0, got 0",
        "mixture.toml:9: data.sources[1].num_sample: no such key; did you mean 'num_samples'?",
    ]


def test_evaluation_needs_samples_of_its_own():
    with pytest.raises(ValueError, match=r"^--set: eval\.data: is missing: every = 5 evaluates on samples of \[eval"):
        load_config("run.toml", ["eval.every=5"])
    assert load_config("run.toml", ["eval.every=5", "data.validation=0.1"]).config.eval.data is None
    assert load_config("run.toml", ["eval.every=5", "eval.data.kind=synthetic"]).config.eval.data.length == 512
