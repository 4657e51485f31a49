"""Bad configs: each is refused with file, line, key and what is allowed, before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from hyper_parallel.trainer import main
from hyper_parallel.trainer.config import ConfigError, load_config
from hyper_parallel.trainer.forecast import Forecast
from tests.commands import command_environment

only_on = "torch"  # imports no framework: once is enough

GOOD = '[model]\nname = "llama-demo"\n[train]\nsteps = 40\nbatch = 8\n'  # what a case adds begins in line 6
JOINED = "data.isolate=false"  # which that model needs

BAD = {
    # keys
    "a misspelt section": ("[paralel]\ntp = 2\n", "6: paralel: no such key; did you mean 'parallel'?"),
    "a misspelt key": ("[parallel]\ndp_shrad = 2\n", "7: parallel.dp_shrad: no such key; did you mean 'dp_shard'?"),
    "a key of another section": (
        "[optimizer]\nseed = 3\n",
        "7: optimizer.seed: no such key; did you mean 'train.seed'?",
    ),
    "a key that is nothing": (
        "[recompute]\nzzz = 1\n",
        "7: recompute.zzz: no such key; the keys of [recompute] are mode",
    ),
    "a deep key": (
        "[model.lora]\nrnk = 8\n\n[parallel]\ntp = 1\n",
        "7: model.lora.rnk: no such key; did you mean 'rank'?",
    ),
    "a section that is a number": ("[x]\n", "6: x: no such key; the keys of a config are model, data, train,"),
    # kinds of values
    "a text for a number": (
        '[parallel]\ntp = "four"\n',
        "7: parallel.tp: must be a whole number or 'rest', got \"four\"",
    ),
    "a number in quotes": ('[optimizer]\nlr = "1e-3"\n', '7: optimizer.lr: must be a number, got "1e-3"'),
    "a part of a rank": ("[launch]\nnproc = 1.5\n", "7: launch.nproc: must be a whole number, got 1.5"),
    "no amount of memory": (
        '[launch]\ndevice_memory = "lots"\n',
        '7: launch.device_memory: must be an amount of memory such as "80GB", got "lots"',
    ),
    "more memory than numbers count": (
        f'[launch]\ndevice_memory = "{"9" * 400}GB"\n',
        '7: launch.device_memory: must be an amount of memory such as "80GB", got "999',
    ),
    "a flag for a number": ("[schedule]\nwarmup = true\n", "7: schedule.warmup: must be a whole number, got true"),
    "a number for a flag": ("[log]\ntensorboard = 1\n", "7: log.tensorboard: must be true or false, got 1"),
    "a number for a text": ("[log]\nfolder = 7\n", "7: log.folder: must be a text in quotes, got 7"),
    "an empty text": ('[log]\nfolder = ""\n', '7: log.folder: must be a text that is not empty, got ""'),
    "a text for a list": ('[optimizer]\nno_decay = "*norm*"\n', '7: optimizer.no_decay: must be a list, got "*norm*"'),
    "a number in a list of texts": (
        '[parallel]\nkeep_whole = ["a",\n  3]\n',
        "7: parallel.keep_whole[1]: must be a text in quotes, got 3",
    ),
    "a date": ("[train.seed]\nx = 2026-11-18\n", '6: train.seed: must be a whole number, got { x = "2026-11-18" }'),
    "infinity": ("[optimizer]\nlr = inf\n", "7: optimizer.lr: must be a finite number, got inf"),
    # ranges
    "no rank": ("[parallel]\ncp = 0\n", "7: parallel.cp: must be at least 1 or 'rest', got 0"),
    "a name that no file system has": (
        f'[checkpoint]\nfolder = "{"x" * 300}"\n',
        "7: checkpoint.folder: must be a folder that can be made; a name has at most 255 bytes here, and a path 4095",
    ),
    "a weight that adds up to no number": (
        '[[data.sources]]\nkind = "corpus"\nweight = 1e308\n',
        "8: data.sources[0].weight: must be at most 1e+12, got 1e+308",
    ),
    "a rate of zero": ("[optimizer]\nlr = 0\n", "7: optimizer.lr: must be above 0, got 0"),
    "a beta of one": ("[optimizer]\nbetas = [0.9, 1.0]\n", "7: optimizer.betas[1]: must be below 1, got 1.0"),
    "one beta": ("[optimizer]\nbetas = [0.9]\n", "7: optimizer.betas[1]: is missing"),
    "a part above one": ("[schedule]\nmin_ratio = 2.0\n", "7: schedule.min_ratio: must be at most 1, got 2.0"),
    "a negative decay": (
        "[optimizer]\nweight_decay = -0.1\n",
        "7: optimizer.weight_decay: must be at least 0, got -0.1",
    ),
    "nothing kept": ("[checkpoint]\nkeep_last = 0\n", "7: checkpoint.keep_last: must be at least 1, got 0"),
    # choices
    "an optimizer that is not": (
        '[optimizer]\nname = "adamW"\n',
        "7: optimizer.name: must be 'adamw', 'adam' or 'sgd', got \"adamW\"; did you mean 'adamw'?",
    ),
    "a schedule that is not": (
        '[schedule]\nname = "cosin"\n',
        "7: schedule.name: must be 'constant', 'linear', 'cosine' or 'wsd', got \"cosin\"; did you mean 'cosine'?",
    ),
    "a dtype that is not": (
        '[precision]\ncompute = "bf16"\n',
        "7: precision.compute: must be 'same', 'float32', 'bfloat16' or 'float16', got \"bf16\"",
    ),
    "two that rest": (
        '[parallel]\ntp = "rest"\n',
        "7: parallel.tp: is 'rest', as is dp_shard; only one can take what the others leave: give dp_shard a number",
    ),
    "a time that is not": (
        '[launch]\nstop_after = "11:50"\n',
        '7: launch.stop_after: must be a length of time such as "11h50m", "90s" or "1d", got "11:50"',
    ),
    # between keys
    "a host too many": (
        '[launch]\nhosts = 2\nmaster = "a:1"\nhost_rank = 2\n',
        "9: launch.host_rank: must be 0 to 1 with hosts = 2, got 2",
    ),
    "hosts that do not know each other": (
        "[launch]\nhosts = 2\n",
        '6: launch.master: is missing: 2 hosts must know where to meet, master = "host:port"',
    ),
    "a master without a port": (
        '[launch]\nmaster = "node1"\n',
        '7: launch.master: must be "host:port", such as "node1:29500", got \'node1\'',
    ),
    "degrees that do not fit": (
        "[parallel]\ntp = 3\n[launch]\nnproc = 4\n",
        '7: parallel.tp: degrees "tp=3": a multiple of 3 ranks, but the world has 4; what fits is "tp=4" or ',
    ),
    "degrees of another world": (
        "[launch]\nnproc = 8\n[parallel]\ndp_shard = 2\ntp = 2\n",
        '9: parallel.dp_shard: degrees "dp_shard=2, tp=2": 4 ranks, but the world has 8; what fits is "dp_shard=4, ',
    ),
    "experts that do not fit": (
        "[parallel]\nep = 3\n[launch]\nnproc = 4\n",
        '7: parallel.ep: degrees "dp_shard=4, ep=3": ep=3 must divide dp_shard x cp x tp = 4',
    ),
    "fewer samples than parts": (
        "[launch]\nnproc = 16\n",
        "5: train.batch: must be at least dp_replicate x dp_shard = 16, one sample for each part of the batch, got 8",
    ),
    "more parts than tokens": (
        "[data]\nlength = 2\n[parallel]\ncp = 4\n",
        "7: data.length: must be at least cp = 4, one token for each part of a sequence, got 2",
    ),
    "more stages than blocks": (
        "[parallel]\npp = 8\n",
        "7: parallel.pp: must be at most the blocks of llama-demo, num_blocks = 4, got 8",
    ),
    "more stages than blocks, by the schedule": (
        '[parallel]\npp = 4\nschedule = "zbv"\n',
        '7: parallel.pp: is too many for schedule = "zbv": 2 stages on each rank are 8 in all, of one block or more',
    ),
    "stages of a schedule that has its own": (
        "[parallel]\npp = 2\nstages_per_rank = 3\n",
        '8: parallel.stages_per_rank: must be left out: schedule = "1f1b" has 1 on each rank, got 3; interleaved, ',
    ),
    "experts of a model without": (
        "[parallel]\nep = 2\ndp_shard = 2\n",
        "7: parallel.ep: must be 1: llama-demo has no experts, got 2",
    ),
    "an order that the model does not know": (
        '[parallel]\ncp = 2\norder = "zigzag"\n',
        '8: parallel.order: must be "contiguous" for llama-demo, which counts positions by itself, got "zigzag"',
    ),
    "samples longer than the model's positions": (
        "[data]\nlength = 513\n",
        "7: data.length: must be at most max_length = 512 of llama-demo, got 513; for longer samples give it in ",
    ),
    "more ids than the model": (
        '[eval.data]\nkind = "synthetic"\nvocab_size = 300\n',
        "8: eval.data.vocab_size: has 300 token ids, but llama-demo only 256; give the tokenizer that belongs to ",
    ),
    "packed conversations for a model that mixes them": (
        '[data]\nkind = "chat"\npath = "run.toml"\n',
        "6: data.packing: must be false for llama-demo, which cannot keep the documents of a sample apart",
    ),
    "a number that no machine counts to": (
        "seed = 9223372036854775808\n",
        "6: train.seed: must be at most 9.22337e+18, got 9223372036854775808",
    ),
    "a time without end": (
        '[launch]\ntimeout = "99999999d"\n',
        "7: launch.timeout: must be a length of time above 0 and of at most 3650 days",
    ),
    "ports that there are not": (
        '[launch]\nmaster = "node1:65535"\nmax_restarts = 2\n',
        "7: launch.master: must have a port of at most 65535 - max_restarts = 65533, for each restart takes the next",
    ),
    "tokens of another width": (
        '[data]\nkind = "tokens"\ndtype = "uint32"\npath = "run.toml"\n',
        "9: data.path: must be a file of uint32 tokens, 4 bytes each; 'run.toml' has 1",
    ),
    "a folder that was not prepared": (
        '[data]\nkind = "tokens"\npath = "."\n',
        "8: data.path: must be a token file or a prepared folder; '.' is a folder without meta.json",
    ),
    "a folder without a tokenizer": (
        '[data]\ntokenizer = "."\n',
        "7: data.tokenizer: must be a folder with a tokenizer.json; '.' has none",
    ),
    "a file for a folder": ('[data]\ncache = "run.toml"\n', "7: data.cache: must be a folder, got 'run.toml'"),
    "a folder that is no checkpoint": (
        '[checkpoint]\nresume = "."\n',
        "7: checkpoint.resume: must be 'auto', 'never' or the folder of a checkpoint, got '.': it has no metadata.json",
    ),
    "a warm-up longer than the run": (
        "[schedule]\nwarmup = 50\n",
        "7: schedule.warmup: must be at most the steps of the run, train.steps = 40, got 50",
    ),
    "a trace after the end": (
        "[log]\ntrace_step = 41\n",
        "7: log.trace_step: must be one of the steps 1 to train.steps = 40, got 41",
    ),
    "checkpoints that nobody makes": (
        "[checkpoint]\nevery = 100\nkeep_every = 150\n",
        "8: checkpoint.keep_every: must be a multiple of every = 100, got 150",
    ),
    "nowhere to go on from": (
        '[checkpoint]\nresume = "nowhere"\n',
        "7: checkpoint.resume: must be 'auto', 'never' or the folder of a checkpoint, got 'nowhere'",
    ),
    "momentum of adamw": (
        "[optimizer]\nmomentum = 0.9\n",
        "7: optimizer.momentum: is of sgd; adamw has betas, got 0.9",
    ),
    "eps of sgd": (
        '[optimizer]\nname = "sgd"\neps = 1e-6\n',
        "8: optimizer.eps: is of adamw and adam; sgd has momentum, got 1e-06",
    ),
    "wsd without decay": (
        '[schedule]\nname = "wsd"\ndecay = 0.0\n',
        '8: schedule.decay: must be above 0 for wsd, got 0.0; without decay it is name = "constant"',
    ),
    "evaluation on nothing": (
        "[eval]\nevery = 5\n",
        "6: eval.data: is missing: every = 5 evaluates on samples of [eval.data]",
    ),
    "a file that is not": (
        '[data]\nkind = "text"\npath = "nowhere.txt"\n',
        "8: data.path: must be a file or folder of this machine; there is no 'nowhere.txt'",
    ),
    "adapters on noise": (
        "[model.lora]\nrank = 8\n",
        "6: model.lora: adapters on weights that are drawn at random train nothing useful; say where the weights are",
    ),
    # TOML
    "a text without quotes": (
        "[log]\nfolder = runs\n",
        '7: is not TOML: Invalid value; texts are in quotes, as in name = "llama-8b"',
    ),
    "a key twice": ("[log]\nevery = 1\nevery = 2\n", "8: is not TOML: Cannot overwrite a value"),
    "a table twice": ("[train]\nseed = 1\n", "6: is not TOML: Cannot declare ('train',) twice"),
    "a bracket left open": ("[optimizer]\nbetas = [0.9,\n", "7: is not TOML:"),
}

WHOLE = {
    "an empty file": (
        "",
        ["run.toml: model: is missing: Which model is trained", "run.toml: train: is missing: How long is trained"],
    ),
    "steps and epochs": (
        '[model]\nname = "llama-demo"\n[train]\nbatch = 2\nsteps = 4\nepochs = 1\n',
        ["run.toml:6: train.epochs: is given beside steps; keep one of them"],
    ),
    "neither steps nor epochs": (
        '[model]\nname = "llama-demo"\n[train]\nbatch = 2\n',
        ["run.toml:3: train.steps: is missing: give steps = 1000 or epochs = 1"],
    ),
    "no batch": ('[model]\nname = "llama-demo"\n[train]\nsteps = 2\n', ["run.toml:3: train.batch: is missing"]),
    "more microbatches than samples": (
        '[model]\nname = "llama-demo"\n[train]\nsteps = 2\nbatch = 2\nmicrobatches = 3\n',
        ["run.toml:6: train.microbatches: must be at most the samples of a step, batch = 2, got 3"],
    ),
    "too few samples for the schedule of a pipeline": (
        '[model]\nname = "llama-demo"\n[train]\nsteps = 2\nbatch = 3\n[parallel]\npp = 2\nschedule = "dual_pipe_v"\n',
        [
            "run.toml:5: train.batch: is too small: dual_pipe_v on 2 ranks needs 4 microbatches or more, and the batch "
            'has 3 rows for them; give a larger batch, or a schedule that takes any number, "1f1b" or "zbv"'
        ],
    ),
    "microbatches that a schedule does not take": (
        '[model]\nname = "llama-demo"\n[train]\nsteps = 2\nbatch = 9\nmicrobatches = 3\n[parallel]\npp = 2\n'
        'schedule = "dual_pipe_v"\n',
        [
            "run.toml:6: train.microbatches: does not fit schedule = 'dual_pipe_v': 3 microbatches do not work, 2 "
            "ranks must be filled from both ends with 4; give 4, got 3"
        ],
    ),
    "a model that is not": (
        '[model]\nname = "lama-8b"\n[train]\nsteps = 2\nbatch = 2\n',
        ["run.toml:2: model.name: must be one of llama, llama-demo", "got 'lama-8b'; did you mean 'llama-8b'?"],
    ),
    "a size that is not": (
        '[model]\nname = "llama"\nargs = { dims = 64 }\n[train]\nsteps = 2\nbatch = 2\n',
        ["run.toml:3: model.args.dims: llama has no such value; did you mean 'dim'?"],
    ),
    "a size of another kind": (
        '[model]\nname = "llama"\n[model.args]\ndim = 64.0\n[train]\nsteps = 2\nbatch = 2\n',
        ["run.toml:4: model.args.dim: must be a whole number, got 64.0"],
    ),
    "a base that is no number": (
        '[model]\nname = "llama"\n[model.args]\nrope_base = nan\nnorm_eps = 1e-5\n[train]\nsteps = 2\nbatch = 2\n',
        ["run.toml:4: model.args.rope_base: rope_base must be a finite number above 0, got nan"],
    ),
    "adapters that learn nothing": (
        '[model]\nname = "llama-demo"\nweights = "."\n[model.lora]\nrank = 2\ndropout = 1.0\ntargets = []\n'
        "[train]\nsteps = 2\nbatch = 2\n",
        [
            "run.toml:6: model.lora.dropout: must be below 1, got 1.0",
            "run.toml:7: model.lora.targets: must be a list of at least 1, got []",
        ],
    ),
    "epochs without end": (
        '[model]\nname = "llama-demo"\n[train]\nepochs = 1e308\nbatch = 2\n',
        ["run.toml:4: train.epochs: must be at most 1e+09, got 1e+308"],
    ),
    "sizes that do not fit": (
        '[model]\nname = "llama"\n[model.args]\nnum_heads = 7\n[train]\nsteps = 2\nbatch = 2\n',
        ["run.toml:4: model.args.num_heads: dim=128 must be num_heads=7 times an even number"],
    ),
    "no model": (
        '[model]\nweights = "scratch"\n[train]\nsteps = 2\nbatch = 2\n',
        ['run.toml:1: model.name: is missing: give name = "llama-8b", hugging_face = "folder" or build'],
    ),
    "two models": (
        '[model]\nname = "llama-demo"\nbuild = "a.b:c"\n[train]\nsteps = 2\nbatch = 2\n',
        ["run.toml:3: model.build: is given beside name; a run has one model: keep one of them"],
    ),
    "a folder without a model": (
        '[model]\nhugging_face = "nowhere"\n[train]\nsteps = 2\nbatch = 2\n',
        [
            "run.toml:2: model.hugging_face: must be a folder with a config.json, or the path of one",
            "there is no file 'nowhere'",
        ],
    ),
    "weights that are nowhere": (
        '[model]\nname = "llama-demo"\nweights = "nowhere"\n[train]\nsteps = 2\nbatch = 2\n',
        ["run.toml:3: model.weights: must be 'scratch' or a folder; there is no folder 'nowhere' here"],
    ),
    "weights without a file": (
        '[model]\nname = "llama-demo"\nweights = "."\n[train]\nsteps = 2\nbatch = 2\n',
        ["run.toml:3: model.weights: must be a folder with safetensors files; '.' has none"],
    ),
    "a value above all tables": (
        'parallel = 3\n[model]\nname = "llama-demo"\n[train]\nsteps = 2\nbatch = 2\n',
        ["run.toml:1: parallel: must be a table, [parallel], got 3"],
    ),
    "a parent that is not": ('extends = "base.toml"\n', ["run.toml:1: extends: there is no file 'base.toml'"]),
    "a name that no file has": ('extends = "\\u0000"\n', ["run.toml:1: extends: there is no file '\\x00'"]),
    "itself as a parent": ('extends = "run.toml"\n', ["extends: goes in a circle: run.toml extends run.toml"]),
    "two parents": ('extends = ["a", "b"]\n', ["run.toml:1: extends: must be the path of one file, got ['a', 'b']"]),
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def _mistakes(text, *sets):
    with open("run.toml", "w") as file:
        file.write(text)
    with pytest.raises(ConfigError) as raised:
        load_config("run.toml", [JOINED, *sets])
    return [str(mistake) for mistake in raised.value.mistakes]


def test_without_the_mistake_it_is_good(tmp_path):
    (tmp_path / "run.toml").write_text(GOOD)
    assert load_config("run.toml", [JOINED]).config.train.steps == 40
    assert len(BAD) + len(WHOLE) >= 40


@pytest.mark.parametrize("case", BAD)
def test_one_mistake(case):
    added, said = BAD[case]
    found = _mistakes(GOOD + added)
    assert found[0].startswith(f"run.toml:{said}"), found
    assert len(found) == 1, found


@pytest.mark.parametrize("case", WHOLE)
def test_a_whole_file(case):
    text, said = WHOLE[case]
    found = "\n".join(_mistakes(text))
    assert all(part in found for part in said), found
    assert found.count("run.toml:") >= 1


def test_what_only_pytorch_has_is_refused_on_mindspore(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    text = '[model]\nhugging_face = "config.json"\nweights = "scratch"\n[train]\nsteps = 2\nbatch = 2\n'
    text += '[precision]\ncompile = "inductor"\n'
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "mindspore")
    assert [line.partition(",")[0] for line in _mistakes(text)] == [
        "run.toml:2: model.hugging_face: is for PyTorch",
        'run.toml:8: precision.compile: must be "local" or "none" on MindSpore',
    ]


def test_all_mistakes_at_once_in_the_order_of_the_file():
    text = (
        '[train]\nstep = 5\nbatch = 2\n[parallel]\ntp = "four"\n[optimizer]\nname = "adamw2"\n[model]\nname = "lama"\n'
    )
    found = _mistakes(text, "optimizer.lr=-1", "schedule.warmup", "log.every=never")
    assert [line.split(": ")[:2] for line in found] == [
        ["run.toml:2", "train.step"],
        ["run.toml:5", "parallel.tp"],
        ["run.toml:7", "optimizer.name"],
        ["run.toml:9", "model.name"],
        ["--set", "must be of the form section.key=value, got 'schedule.warmup'"],
        ["--set", "optimizer.lr"],
        ["--set", "log.every"],
    ]


def test_checks_between_keys_are_made_beside_other_mistakes():
    found = _mistakes(GOOD + "[optimizer]\nlr = -1\n[schedule]\nwarmup = 50\n")
    assert [line.split(": ")[1] for line in found] == ["optimizer.lr", "schedule.warmup"]


def test_what_follows_from_a_mistake_is_not_a_second_one():
    found = _mistakes('[model]\nname = "llama-demo"\n[train]\nsteps = "4"\nbatch = 2\n[schedule]\nwarmup = 50\n')
    assert [line.split(": ")[1] for line in found] == ["train.steps"]


def test_a_mistake_of_the_parent_is_at_its_own_line(tmp_path):
    (tmp_path / "base.toml").write_text("\n[parallel]\ntp = 0\n")
    assert _mistakes(f'extends = "base.toml"\n{GOOD}') == [
        "base.toml:3: parallel.tp: must be at least 1 or 'rest', got 0"
    ]


def test_hugging_face_models_say_where_their_weights_are_from(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 4}))
    rest = "[train]\nsteps = 2\nbatch = 2\n"
    text = f'[model]\nhugging_face = "hf"\n[model.args]\nnum_layers = 2\n{rest}'
    assert _mistakes(text) == [
        "run.toml:1: model.weights: is missing: say 'scratch' to draw new values, or the folder whose weights are "
        "trained on",
        "run.toml:4: model.args.num_layers: 'hf/config.json' has no such value; did you mean 'num_hidden_layers'?",
    ]
    (tmp_path / "hf" / "config.json").write_text('\ufeff{"model_type": "llama"}', encoding="utf-8")
    assert "known are model_type" in _mistakes(text.replace("num_layers", "zzz"))[1]
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": -1, "vocab_size": 0}')
    assert _mistakes(text.replace("num_layers = 2", "vocab_size = -3"))[1:] == [
        "run.toml:2: model.hugging_face: num_hidden_layers of 'hf/config.json' must be at least 1, got -1",
        "run.toml:4: model.args.vocab_size: vocab_size of 'hf/config.json' must be at least 1, got -3",
    ]
    (tmp_path / "hf" / "config.json").write_text("{}")
    assert "is not the config of a Hugging Face model: it has no 'model_type'" in _mistakes(text)[0]
    (tmp_path / "hf" / "config.json").write_text("{")
    assert "run.toml:2: model.hugging_face: 'hf/config.json' is not JSON:" in _mistakes(text)[0]


BUILDER = """
import a_framework_that_is_not_installed

def build(width: int, *, depth: int = 2, name: str):
    pass

class Model:
    def __init__(self, width, depth=3):
        pass
"""


@pytest.mark.parametrize(
    ("build", "args", "said"),
    [
        ("models.tiny:build", "width = 3\nname = 'a'", None),
        ("models.tiny:Model", "width = 3", None),
        (
            "models.tiny:build",
            "width = 3\nname = 'a'\ndept = 3",
            "7: model.args.dept: build has no such argument; did ",
        ),
        ("models.tiny:build", "name = 'a'", "4: model.args.width: is missing: build needs it"),
        ("models.tiny:build", "width = 2.5\nname = 'a'", "5: model.args.width: must be a whole number, got 2.5"),
        ("models.tiny:biuld", "width = 3", "has no function 'biuld'; did you mean 'models.tiny:build'?"),
        ("models.tiy:build", "", "3: model.build: there is no module 'models.tiy' in this folder or on Python's path"),
        ("models.tiny", "", "3: model.build: must be of the form \"package.module:function\", got 'models.tiny'"),
    ],
)
def test_a_function_of_the_user_is_checked_without_being_run(tmp_path, build, args, said):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("raise SystemExit('this package was run')")
    (tmp_path / "models" / "tiny.py").write_text(BUILDER)
    text = f'\n[model]\nbuild = "{build}"\n[model.args]\n{args}\n[train]\nsteps = 2\nbatch = 2\n'
    if said is None:
        (tmp_path / "run.toml").write_text(text)
        assert load_config("run.toml").config.model.build == build
    else:
        (found,) = _mistakes(text)
        assert said in found


@pytest.mark.parametrize(
    ("content", "sets", "said"),
    [
        ("", [], "run.toml:8: data.path: the data is empty: 'text.txt' hold no text"),
        ("a few words", [], "run.toml:8: data.path: "),  # fewer tokens than a sample
        ("words " * 99, ["train.batch=100"], "--set: train.batch: a batch of 100 samples from data that has 9 would"),
        (
            "words " * 99,
            ["train.epochs=2", "train.batch=3", "schedule.warmup=7"],
            "--set: schedule.warmup: must be at most the steps of the run, 6 for its epochs, got 7",
        ),
        ("words " * 99, ["data.validation=0.99"], "run.toml:8: data.path: the training part of 9 samples is empty"),
        ("words " * 99, ["log.folder=/proc/run"], "--set: log.folder: cannot be written to: No such file or directory"),
    ],
)
def test_what_only_a_look_at_the_data_tells_is_said_before_a_start(content, sets, said, capsys):
    with open("text.txt", "w") as file:
        file.write(content)
    with open("run.toml", "w") as file:
        file.write(GOOD + '[data]\nkind = "text"\npath = "text.txt"\nlength = 64\ncache = "cache"\n')
    assert main.start(load_config("run.toml", [JOINED, "launch.forecast=false", *sets])) == 2
    assert capsys.readouterr().err.startswith(said)
    assert sorted(os.listdir()) == ["cache", "run.toml", "text.txt"]


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        ("model.args: no such size", "run.toml:3: model.args: no such size\n1 mistake; nothing was started\n"),
        ("parallelize: no way: none", "run.toml:1: model: parallelize: no way: none\n1 mistake; nothing was started\n"),
    ],
)
def test_what_only_building_the_model_tells_is_said_at_its_key(refused, said, monkeypatch, capsys):
    monkeypatch.setattr(main, "forecast_run", lambda config: Forecast(1, "", refused=refused))
    with open("run.toml", "w") as file:
        file.write(GOOD.replace("[train]", "[model.args]\ndim = 64\n[train]") + '[data]\ncache = "cache"\n')
    assert main.start(load_config("run.toml", [JOINED, "data.kind=synthetic"])) == 2
    assert capsys.readouterr().err == said
    assert os.listdir() == ["run.toml"]


def test_the_command_refuses_in_seconds_and_leaves_nothing_behind(tmp_path):
    (tmp_path / "run.toml").write_text(f"{GOOD}[parallel]\ndp_shrad = 2\n")
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "hyper_parallel.cli", "config", "run.toml", "--nproc", "0", "--set", JOINED],
        capture_output=True,
        text=True,
        env=command_environment(),
    )
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used < 3  # seconds of the processor
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "run.toml:7: parallel.dp_shrad: no such key; did you mean 'dp_shard'?",
        "--nproc: launch.nproc: must be at least 1, got 0",
        "2 mistakes; nothing was started",
    ]
    assert os.listdir() == ["run.toml"]
