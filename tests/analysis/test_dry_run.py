"""The dry run as a user meets it: figures, verdicts, mistakes, ranks that do alike."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import json
import pkgutil
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel import analysis, models
from hyper_parallel.analysis.report import DryRun
from hyper_parallel.platform import get_platform
from tests.analysis.real_steps import write_config

SMALL = models.LlamaConfig(vocab_size=256, dim=64, num_blocks=2, num_heads=8, num_kv_heads=8, hidden_dim=160)


@pytest.mark.parametrize("name", [one.name for one in pkgutil.iter_modules(analysis.__path__)])
def test_examples_run(name):
    assert doctest.testmod(importlib.import_module(f"hyper_parallel.analysis.{name}")).failed == 0


# ---- figures ----


def test_figures_of_a_known_model():
    report = hp.dry_run("llama-8b", "tp=8", rank=5, length=1024, dtype="bfloat16")
    assert report.num_parameters == 8_030_261_248
    assert report.peak_by_kind["parameters"] == 2 * report.num_local_parameters
    assert report.flops == pytest.approx(6 * 7.5e9 * 1024 / 8, rel=0.1)  # six for each weight but the embedding's
    assert report.peak_bytes == sum(report.peak_by_kind.values())
    halves = [row for row in report.collectives if row.phase == "forward" and row.op == "reduce_scatter_tensor"]
    assert {(row.module, row.axes, row.count) for row in halves} == {
        ("(the model itself)", "tp", 1),
        ("blocks.*.attention.output", "tp", 32),
        ("blocks.*.feed_forward.down", "tp", 32),
    }
    assert all(row.num_bytes == row.count * 1024 * 4096 * 2 for row in halves)


@pytest.mark.sweep
def test_a_large_model_in_seconds():
    begin = time.process_time()
    report = hp.dry_run("llama-70b", "tp=8", rank=3)
    assert report.peak_bytes == pytest.approx(80.98e9, rel=0.01)
    assert time.process_time() - begin < 30  # 4 on a quiet machine: benchmarks/dry_run.py


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_devices_round_and_choose_kernels(device):
    on_cpu, on_device = (hp.dry_run(SMALL, "tp=2", length=64, device=one) for one in ("cpu", device))
    assert on_device.peak_by_kind["parameters"] >= on_cpu.peak_by_kind["parameters"]
    assert all(size % 512 == 0 for size in on_device.peak_by_kind.values())
    assert on_device.flops == pytest.approx(on_cpu.flops, rel=0.15)


def test_attention_of_the_device_keeps_no_scores():
    long = hp.dry_run(SMALL, length=256)
    scores = 8 * 256 * 256 * 2
    assert long.activations_by_module["blocks.0.attention"] < scores


def test_dp_is_short_for_dp_replicate_and_the_rest_of_a_world_is_dp_shard():
    report = hp.dry_run(SMALL, "dp=2, tp=2", length=64)
    assert report.degrees == {"dp_replicate": 2, "tp": 2}
    assert report == hp.dry_run(SMALL, {"dp_replicate": 2, "tp": 2}, length=64)
    rows = [row for row in report.collectives if row.axes == "dp_replicate" and row.cause.startswith("reduce ")]
    assert sum(row.num_bytes for row in rows) == pytest.approx(2 * report.num_local_parameters, rel=0.001)  # padded
    assert hp.dry_run(SMALL, "tp=2", world_size=4, length=64).degrees == {"dp_shard": 2, "tp": 2}


def test_micro_batches_keep_fewer_activations():
    whole, parts = (hp.dry_run("llama-demo", batch=4, length=256, microbatches=one) for one in (1, 4))
    assert parts.peak_by_kind["activations"] < 0.4 * whole.peak_by_kind["activations"]
    assert parts.flops == whole.flops and "batch 4 x 256 tokens in 4 parts" in str(parts)


def test_precision_is_that_of_parallelize():
    wide, narrow = (
        hp.dry_run(SMALL, "dp_shard=2", length=64, dtype="float32", precision=one) for one in (None, "bf16")
    )
    assert narrow.peak_by_kind["parameters"] == wide.peak_by_kind["parameters"]
    assert narrow.peak_bytes < wide.peak_bytes


def test_the_peak_names_its_line():
    report = hp.dry_run(SMALL, "tp=2", length=256, batch=4)
    source = importlib.import_module("hyper_parallel.models.torch.llama").__file__
    path, _, line = report.peak_line.rpartition(":")
    assert path == source
    assert "F.cross_entropy(" in Path(source).read_text().splitlines()[int(line) - 1]
    assert report.peak_phase == "forward"


def test_a_peak_in_backward_names_the_line_that_called_the_module():
    report = hp.dry_run("llama-demo", "tp=4", length=128)
    path, _, line = report.peak_line.rpartition(":")
    assert (report.peak_phase, report.peak_module) == ("backward", "head")
    assert "self.head(self.norm(x))" in Path(path).read_text().splitlines()[int(line) - 1]


def test_data_page_and_text_say_the_same():
    report = hp.dry_run(SMALL, "tp=2", length=64, device_memory="1GB")
    data = json.loads(json.dumps(report.as_data()))
    assert DryRun.from_data(data) == report
    page = report.html()
    assert json.loads(re.search(r'id="dry-run">(.*?)</script>', page)[1])[0]["peak_bytes"] == report.peak_bytes
    assert "prefers-color-scheme: dark" in page and not re.search(r"https?://|src=|@import", page)
    assert report.verdict() in page and report.verdict() in str(report)


# ---- whether it fits ----


def test_a_job_that_does_not_fit_says_by_how_much_and_why():
    report = hp.dry_run("llama-1b", "tp=1", length=512, device_memory="5GB")
    assert not report.fits and report.missing_bytes == report.peak_bytes - 5 * 10**9
    assert re.match(
        r"does not fit: peak \d+\.\d\d GB exceeds 5\.00 GB by \d+\.\d\d [GM]B on rank 0\. It holds 4\.94 GB optimizer "
        r"state, .*2\.47 GB parameters",
        report.verdict(),
    )
    wider = dataclasses.replace(report, device_memory=20 * 10**9)
    assert wider.fits and wider.verdict().startswith("fits: peak ")


# ---- models of others ----


class Reads(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.read = read

    def forward(self, x):
        y = self.layer(x)
        return self.read(y).sum()


def _item(y):
    return y * y.sum().item()


def _condition(y):
    return y if y.sum() > 0 else -y


def _nonzero(y):
    return y[y > 0]


def _running_total(y):
    total = torch.zeros(())
    total += y.detach().sum()
    return y * float(total)


@pytest.mark.parametrize("read", [_item, _condition, _nonzero, _running_total])
def test_a_value_that_is_read_names_the_line(read):
    def build():
        return Reads(read), (torch.zeros(2, 4, device="meta"),)

    with pytest.raises(RuntimeError, match=r"reads a value that follows from weights") as caught:
        hp.dry_run(build, plan={})
    first = read.__code__.co_firstlineno
    (line,) = re.findall(rf"{re.escape(__file__)}:(\d+) reads", str(caught.value))
    assert first < int(line) <= first + 3


def test_integers_are_real():
    def positions(y):
        ids = torch.arange(8, device=y.device).view(2, 4)
        assert ids.max().item() == 7  # known without weights
        rows = (ids > 2).nonzero()[:, 0]
        assert rows.tolist() == [0, 1, 1, 1, 1]
        return y[rows] + y[ids > 2].unsqueeze(-1)

    def build():
        return Reads(positions), (torch.zeros(2, 4, device="meta"),)

    assert hp.dry_run(build, plan={}).peak_bytes > 0


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mixtral"])
def test_hugging_face_models_run_unmodified(name, tmp_path):
    report = hp.dry_run(write_config(tmp_path, name, torch_dtype="bfloat16"), "tp=2", length=64)
    assert (report.dtype, report.world_size) == ("bfloat16", 2)
    assert report.num_collectives > 0 and report.flops > 0


def test_padded_batches_of_hugging_face_models(tmp_path):
    def build():
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
        mask = torch.ones(2, 16, dtype=torch.long)
        mask[1, 10:] = 0
        ids = torch.zeros(2, 16, dtype=torch.long)
        given = {"input_ids": ids, "attention_mask": mask, "labels": ids, "use_cache": False}
        return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)), given

    assert hp.dry_run(build, "tp=2").num_collectives > 0


def test_a_function_of_a_module_builds_the_model(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(
        "from hyper_parallel import models\ndef small():\n    return models.Llama(models.LlamaConfig(num_blocks=1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    report = hp.dry_run("my_models:small", "tp=2", length=32)
    assert (report.model, report.dtype) == ("my_models:small", "float32")
    sys.modules.pop("my_models")


def test_an_optimizer_of_ones_own_and_none():
    own = hp.dry_run(SMALL, length=32, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    assert own.peak_by_kind["optimizer state"] == own.peak_by_kind["parameters"]
    assert "optimizer state" not in hp.dry_run(SMALL, length=32, optimizer=None).peak_by_kind


# ---- mistakes ----


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "lama-70b"}, r"no model is called 'lama-70b' \(did you mean 'llama-70b'\?\); the names are"),
        ({"model": "no/such/config.json"}, "config.json does not exist; give a Hugging Face config.json"),
        ({"model": "no_such_module:build"}, "the module 'no_such_module' cannot be imported"),
        ({"model": "json:build"}, "the module 'json' has no function 'build'"),
        ({"model": nn.Linear(2, 2)}, r"write dry_run\(lambda: Linear\(...\)\)"),
        ({"model": 3}, "dry_run takes a name, a path"),
        ({"model": lambda: 3}, "must return a model, or a model and its inputs; got int"),
        ({"degrees": "tp"}, "'tp' is not of the form axis=number"),
        ({"degrees": "tp=3", "world_size": 8}, "a multiple of 3 ranks, but the world has 8; what fits is"),
        ({"degrees": {"tp": 0}}, "tp=0 must be a whole number from 1"),
        ({"degrees": {"dp": 2, "dp_replicate": 2}}, "dp is short for dp_replicate, and both are given"),
        ({"microbatches": 0}, "microbatches must be at least 1"),
        ({"rank": 4}, "rank 4 is not one of the 1 ranks 0 to 0"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"device": "tpu"}, "device 'tpu' is not known; take cpu, cuda, npu"),
        ({"device_memory": "lots"}, "'lots' is not an amount of memory; write it as 80GB"),
        ({"dtype": "int8"}, "dtype 'int8' is none for weights"),
        ({"optimizer": "adamm"}, "no optimizer is called 'adamm'; take adamw"),
    ],
)
def test_mistakes_say_what_to_write(given, said):
    with pytest.raises((ValueError, TypeError), match=said):
        hp.dry_run(**{"model": "llama-demo", "length": 32, **given})


def test_a_model_without_a_loss():
    with pytest.raises(ValueError, match="Linear gives no loss to run backward from"):
        hp.dry_run(lambda: (nn.Linear(4, 4), (torch.zeros(2, 4),)), plan={})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "has no 'model_type'"),
        ('{"model_type": "nothing"}', "transformers cannot build"),
        (
            '{"model_type": "llama", "hidden_size": "x"}',
            "transformers cannot build this model: .*hidden_size.* got str",
        ),
        ('{"model_type": "llama", "num_attention_heads": 0}', "transformers cannot build this model: "),
    ],
)
def test_broken_configs(text, said, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        hp.dry_run(tmp_path)


def test_nothing_is_left_behind():
    class Fails(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        hp.dry_run(lambda: (Fails(), (torch.zeros(1),)), plan={}, optimizer=None)
    assert hp.get_platform().get_world_size() == 1
    q = torch.zeros(1, 2, 4, 8, device="meta")
    assert nn.functional.scaled_dot_product_attention(q, q, q).shape == q.shape
    assert torch.ones(2, dtype=torch.long, device="meta").is_meta


# ---- ranks that do alike ----


def _figures(report):
    same = ("peak_bytes", "peak_by_kind", "resting_bytes", "flops_by_phase", "collectives", "num_local_parameters")
    return [getattr(report, name) for name in same]


def test_ranks_with_the_same_lengths_are_one_class():
    (report,) = hp.dry_run_classes(SMALL, "dp=4, tp=8", length=64)
    assert report.ranks == tuple(range(32))


def test_uneven_blocks_make_classes():
    reports = hp.dry_run_classes(dataclasses.replace(SMALL, dim=96, num_heads=12, num_kv_heads=4), "tp=6", length=60)
    assert [report.ranks for report in reports] == [(0, 1, 2, 3, 4), (5,)]


@pytest.mark.parametrize("degrees", ["dp=2, tp=3", "tp=5"])
def test_classes_are_right(degrees, tmp_path):
    """Each rank by itself gives the figures of its class, also where one rank adds a bias."""
    for model in (SMALL, write_config(tmp_path, "gpt2", n_layer=1)):
        reports = hp.dry_run_classes(model, degrees, length=60)
        for report in reports:
            for rank in report.ranks:
                assert _figures(hp.dry_run(model, degrees, rank=rank, length=60)) == _figures(report), rank
        assert sorted(rank for report in reports for rank in report.ranks) == list(range(reports[0].world_size))


def test_thousands_of_ranks_take_no_longer():
    (report,) = hp.dry_run_classes(SMALL, "dp=512, tp=8", length=64)
    assert len(report.ranks) == 4096


# ---- programs that ask for their rank ----


class _AsksForRank(nn.Module):
    """As many layers as the rank says: what no rank tells about another."""

    def __init__(self, ask):
        super().__init__()
        self.layer, self.ask = nn.Linear(8, 8), ask

    def forward(self, x):
        for _ in range(1 + self.ask()):
            x = self.layer(x)
        return x.sum()


def _mesh_of_two():
    return hp.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


_QUESTIONS = [
    lambda: get_platform().get_rank(),
    lambda: get_platform().get_group_local_rank(),
    lambda: _mesh_of_two().get_rank(),
    lambda: _mesh_of_two().get_coordinate()[0],
    lambda: _mesh_of_two().get_local_rank(),
]


@pytest.mark.parametrize("ask", _QUESTIONS)
def test_a_program_that_asks_for_its_rank_is_named_and_no_two_ranks_are_alike(ask):
    reports = hp.dry_run_classes(lambda: (_AsksForRank(ask), (torch.ones(2, 8),)), "dp=2", plan={})
    assert [report.ranks for report in reports] == [(0,), (1,)]
    assert reports[1].flops > reports[0].flops
    line = ask.__code__.co_firstlineno
    assert reports[0].notes == (
        f"{__file__}:{line} asks for the rank: ranks may differ, and no two are taken for alike. The figures hold for "
        "this rank only; run each that matters with rank= (--rank), or all with dry_run_classes (--all-classes)",
    )
    assert reports[0].notes[0] in str(reports[0])


def test_asking_for_groups_and_lengths_is_no_question_about_the_rank():
    def build():
        mesh = _mesh_of_two()
        assert mesh.get_group("dp") is not None and get_platform().get_world_size() == 2
        return _AsksForRank(lambda: 0), (torch.ones(2, 8),)

    (report,) = hp.dry_run_classes(build, "dp=2", plan={})
    assert report.ranks == (0, 1) and report.notes == ()


def test_every_stage_is_a_class_of_its_own():
    reports = hp.dry_run_classes("llama-demo", "pp=2, tp=2", batch=4, length=32)
    assert {report.microbatches for report in reports} == {4}
    assert [report.ranks for report in reports] == [(0, 1), (2, 3)]
    first, last = reports
    causes = [{(row.op, row.cause, row.count) for row in report.collectives} for report in reports]
    assert ("isend", "activations from stage 0 to stage 1", 4) in causes[0]
    assert ("isend", "gradients from stage 1 to stage 0", 4) in causes[1]
    assert first.num_local_parameters != last.num_local_parameters and first.peak_bytes != last.peak_bytes
