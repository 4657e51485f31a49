"""What real runs write for the page: operations, one step looked at closely, its trace, the environment."""

from __future__ import annotations

import json

import pytest

import hyper_parallel as hp
from hyper_parallel.data.config import DataConfig
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.metrics import read_metrics
from hyper_parallel.trainer.report.flops import flops_per_token, peak_of_device
from hyper_parallel.trainer.report.parts import read_parts
from hyper_parallel.trainer.report.run_data import RunData
from hyper_parallel.trainer.trainer import Trainer
from tests.frameworks import on_mindspore
from tests.world import run_on_ranks

platform = get_platform()
SIZES = {"dim": 32, "num_blocks": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 48, "max_length": 16}


def config_of(folder, steps=4, **sections):
    return hp.RunConfig(
        model={"name": "llama", "args": SIZES},
        data=DataConfig(kind="synthetic", length=16, vocab_size=256, isolate=False),
        train={"steps": steps, "batch": 4},
        log={"folder": str(folder), "every": 2, **sections.pop("log", {})},
        checkpoint={"every": 0, "background": False, **sections.pop("checkpoint", {})},
        **sections,
    )


# ---------------------------------------------------------------- two ranks


@pytest.mark.sweep("mindspore")  # At every change tests/trainer/test_mindspore_runs.py looks at what its runs recorded.
@run_on_ranks(2)
def test_a_run_on_two_ranks(tmp_path):
    config = config_of(tmp_path / "run", parallel={"tp": 2}, log={"trace_step": 3, "peak_flops": 1e9})
    Trainer(config).train()
    platform.barrier()
    if platform.get_rank():
        return
    run = RunData.read(tmp_path / "run")
    assert run.status == "finished"
    steps = run.of("step")
    flops, seconds = run.start["flops_per_token"], [one["tokens"] / one["tokens_per_second"] for one in steps]
    for one, taken in zip(steps, seconds, strict=True):
        assert one["mfu"] == pytest.approx(one["tokens"] * flops / taken / (2 * 1e9))
        assert sum(one["seconds"][name] for name in ("data", "forward_backward", "optimizer")) <= one["seconds"]["all"]
    parts = read_parts(tmp_path / "run")
    assert [(part["rank"], part["step"]) for part in parts] == [(0, 3), (1, 3)]
    for part in parts:
        rows = {row for row, *_ in part["spans"]}
        assert {"phases", "model", "modules"} < rows
        assert rows & {"collectives", "in flight"}
        assert [name for row, name, *_ in part["spans"] if row == "modules"] == ["blocks.0", "blocks.1"]
        assert {one["axes"] for one in part["communication"]} == {"tp"}
        assert part["memory"]["optimizer state"] >= 2 * part["memory"]["parameters"] > 0
        assert part["memory"]["gradients"] == part["memory"]["parameters"] < part["memory"]["peak"]
        begin, end = next((begin, end) for _, name, begin, end in part["spans"] if name == "forward and backward")
        for _, _, first, last in part["spans"]:
            assert first <= last
            assert last < end + 1e6
        inner = [(first, last) for row, _, first, last in part["spans"] if row in ("model", "modules")]
        assert all(begin <= first <= last <= end for first, last in inner)
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    events = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    assert len(events) == sum(len(part["spans"]) for part in parts)
    assert {one["pid"] for one in events} == {0, 1}
    names = {one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "thread_name"}
    assert {"phases", "modules"} < names
    assert "Communication of one step" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.sweep("mindspore")
@run_on_ranks(2)
def test_a_failure_is_on_the_page(tmp_path):
    config = config_of(tmp_path / "run", optimizer={"lr": 1e30, "name": "sgd"}, log={"peak_flops": 1e9})
    with pytest.raises(FloatingPointError):
        Trainer(config).train()
    platform.barrier()
    if platform.get_rank() == 0:
        page = (tmp_path / "run" / "report.html").read_text()
        assert 'class="verdict failed"' in page
        assert "FloatingPointError: step 2 has a loss of " in page


# ---------------------------------------------------------------- one rank


@run_on_ranks(1)
def test_a_run_of_one_process(tmp_path):
    """Without trace_step there is no trace; the second step is recorded; a resumed run says so."""
    folder = tmp_path / "run"
    Trainer(config_of(folder)).train()
    lines = list(read_metrics(folder))
    assert [one["event"] for one in lines[:2]] == ["start", "environment"]
    assert lines[0]["peak_from"].startswith("measured")
    assert lines[0]["peak_flops"] > 1e8
    assert not (folder / "trace.json").exists()
    assert [part["step"] for part in read_parts(folder)] == [2]
    assert read_parts(folder)[0]["communication"] == []
    page = (folder / "report.html").read_text()
    assert "every rank works by itself" in page
    assert "blocks.0 to blocks.1, all alike" in page
    Trainer(config_of(folder, steps=6)).train()
    run = RunData.read(folder)
    assert [(one["step"], bool(one["resumed_from"])) for one in run.of("start")] == [(0, False), (4, True)]
    assert [one["step"] for one in run.of("step")] == [1, 2, 3, 4, 5, 6]
    assert [part["step"] for part in run.parts] == [6]


def test_peaks():
    assert peak_of_device(3e12, "float32") == (3e12, "log.peak_flops")


# ---------------------------------------------------------------- operations of a token


class OneProcess:
    """A model by itself, asked as a run is."""

    def __init__(self, model):
        self.model, self.parts = model, [model]

    def named_parameters(self):
        found = {id(one): (name, one) for name, one in reversed(platform.parameters_dict(self.model).items())}
        return list(found.values())


def llama(**sizes):
    return OneProcess(hp.models.Llama(hp.models.LlamaConfig(**{**SIZES, "vocab_size": 50, **sizes})))


@pytest.mark.parametrize("tie_head", [False, True])
def test_operations_are_those_that_products_do(tie_head):
    """6 operations for each element of each matrix that a token meets, and attention."""
    block = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48
    products = 2 * block + 50 * 32
    attention = 12 * 2 * 4 * 8 * 16 / 2
    assert flops_per_token(llama(tie_head=tie_head), 16) == 6 * products + attention


@pytest.mark.skipif(on_mindspore, reason="the counter is PyTorch's")
def test_operations_are_those_that_pytorch_counts():
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    run = llama()
    ids = torch.randint(0, 50, (3, 16))
    with FlopCounterMode(display=False) as counter:
        run.model(ids).sum().backward()
    counted = sum(
        count for op, count in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm")
    )
    assert flops_per_token(run, 0) * ids.numel() == counted


@pytest.mark.skipif(on_mindspore, reason="models of Hugging Face are PyTorch's")
def test_experts_count_as_far_as_a_token_meets_them():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))

    block = 4 * 32 * 32 + 2 * 3 * 32 * 40 + 8 * 32  # attention, two experts, the router
    assert flops_per_token(OneProcess(model), 10) == 6 * (2 * block + 50 * 32) + 6 * 2 * 4 * 8 * 10


def test_a_model_that_does_not_tell():
    assert flops_per_token(OneProcess(object()), 10) is None
