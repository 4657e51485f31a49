"""Unmodified Hugging Face models, fully sharded: equal to one device, with their own loss."""

import copy
import itertools

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.world import run_on_ranks, small_or_sweep

pytest.importorskip("transformers", reason='these models are in an extra: pip install "hyper-parallel[transformers]"')

from tests.fully_shard.parity import (
    assert_all_sharded,
    assert_same_gradients,
    mesh_of,
    my_part,
    trains_as_one_device,
    units,
)
from tests.tensor_parallel.hugging_face import VOCABULARY, build, in_double

only_on = "torch"  # models of transformers, which are PyTorch's

_MODELS = ("llama", "llama_tied", "qwen3", "qwen3_untied")
_WAYS = ("shard", "hybrid", "automatic units", "tensor parallel", "recompute")
_SMALL = [("llama_tied", "automatic units"), ("qwen3_untied", "hybrid")]
TIMEOUT = 600  # seconds; the first test on a world imports transformers on every rank


def _ids() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (8, 6), generator=torch.Generator().manual_seed(1))


def _loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids).loss


def _sharder(way: str, mesh: hp.DeviceMesh):
    def shard(model: torch.nn.Module) -> None:
        data = mesh
        if way == "tensor parallel":
            hp.parallelize_module(model, mesh["tp"], hp.plans.for_model(model))
            data = mesh["dp"]
        if way == "recompute":
            model.gradient_checkpointing_enable()
            model.train()
        if way != "automatic units":
            for layer in model.model.layers:
                hp.fully_shard(layer, mesh=data)
        hp.fully_shard(model, mesh=data, units="auto" if way == "automatic units" else None)

    return shard


@run_on_ranks(4, timeout=TIMEOUT)
@pytest.mark.parametrize("case", small_or_sweep(itertools.product(_MODELS, _WAYS), _SMALL))
def test_trains_as_one_device(case) -> None:
    """Loss, every gradient, their norm and the weights after five steps of AdamW, to 1e-9.

    torch's fully_shard refuses the tied ones when head and embedding are in different units.
    """
    name, way = case
    shape, names = {"hybrid": ((2, 2), ("replicate", "shard")), "tensor parallel": ((2, 2), ("dp", "tp"))}.get(
        way, ((4,), ("dp",))
    )
    mesh = mesh_of(*shape, names=names)
    model = build(name)
    with in_double():
        data = mesh["dp"] if way == "tensor parallel" else mesh
        ours = trains_as_one_device(model, _sharder(way, mesh), _ids(), data, num_steps=5, run=_loss)
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == (name in ("llama_tied", "qwen3"))
    assert len(units(ours)) == (2 if way == "automatic units" else 3)
    assert_all_sharded(ours)


@run_on_ranks(2, timeout=TIMEOUT)
@pytest.mark.parametrize("name", small_or_sweep(_MODELS, ["llama"]))
def test_loss_as_the_model_computes_it(name) -> None:
    """Nothing is replaced: norms and loss are in float32, whatever the weights are."""
    mesh = mesh_of()
    model = build(name)
    ours = copy.deepcopy(model)
    _sharder("shard", mesh)(ours)
    want, got = _loss(model, _ids()), _loss(ours, my_part(_ids(), mesh))
    want.backward()
    got.backward()
    mean = get_platform().all_reduce(got.detach().clone(), None, op="avg")
    torch.testing.assert_close(mean, want.detach(), rtol=1e-6, atol=1e-6)
    assert_same_gradients(model, ours, 1e-5)
