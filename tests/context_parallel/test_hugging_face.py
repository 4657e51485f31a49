"""Unmodified Hugging Face models over a sharded sequence: every scheme, order, mask and length gives one device's
numbers."""

import itertools

import pytest

pytest.importorskip("transformers", reason='these models are in an extra: pip install "hyper-parallel[transformers]"')

import numpy as np
import torch

import hyper_parallel as hp
from hyper_parallel.core.context_parallel.batch import ordered_batch, token_order
from hyper_parallel.core.context_parallel.hugging_face import attend, lazy_mask
from hyper_parallel.testing import threads
from tests.parallel.training import batch
from tests.tensor_parallel.hugging_face import assert_same, build, in_double, whole
from tests.world import small_or_sweep

only_on = "torch"

MODELS = ("llama", "qwen3", "mistral", "gpt2", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "mixtral")
SCHEMES = ("auto", "ring", "ulysses", "gather")
WORLDS = {"cp=2": 2, "cp=4": 4, "cp=2, tp=2": 4}
# (model, degrees, tokens, kind, attention, order)
SMALL = [
    ("llama", "cp=4", 13, "packed", "ring", "zigzag"),
    ("qwen3", "cp=2, tp=2", 13, "packed", "auto", "zigzag"),
    ("mistral", "cp=2", 12, "padded", "ulysses", "contiguous"),
    ("gemma2", "cp=2", 13, "causal", "ring", "striped"),
    ("gpt_oss", "cp=2", 12, "padded", "ring", "contiguous"),
    ("deepseek_v3", "cp=2", 13, "causal", "ring", "zigzag"),
    ("mixtral", "cp=4", 12, "causal", "hybrid", "contiguous"),
    ("gpt2", "cp=4", 3, "causal", "gather", "zigzag"),
]
MATRIX = [
    (model, degrees, tokens, kind, scheme, order)
    for number, (model, degrees, tokens, kind, scheme) in enumerate(
        itertools.product(MODELS, WORLDS, (12, 13, 3), ("causal", "packed", "padded"), SCHEMES)
    )
    for order in (("contiguous", "zigzag", "striped")[number % 3],)
    if number % 4 == 0  # every fourth; with the orders all pairs of columns come up
    and (model, degrees, tokens, kind, scheme, order) not in SMALL
]


def _given(tokens: int, kind: str) -> dict[str, torch.Tensor]:
    values = {name: value[:4, -tokens:].contiguous() for name, value in batch(max(tokens, 13)).items()}
    values["labels"][0] = values["input_ids"][0]
    if kind == "packed":
        first = max(1, tokens // 3)
        positions = torch.cat([torch.arange(first), torch.arange(tokens - first)])
        values["position_ids"] = positions.repeat(4, 1)
    if kind == "padded":
        values["attention_mask"] = torch.ones_like(values["input_ids"])
        values["attention_mask"][1, -2:] = values["attention_mask"][2, -1:] = 0
        values["labels"] = values["labels"].masked_fill(values["attention_mask"] == 0, -100)
    return values


def _on_one_device(name: str, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model = build(name)
    with in_double():
        # transformers looks for packed documents only where there is no cache
        loss = model(**given, use_cache=False).loss
        loss.backward()
    return {"loss": loss.detach()} | {key: one.grad for key, one in model.named_parameters()}


def _on_a_rank(name: str, given: dict[str, torch.Tensor], degrees: str, options: dict[str, object]) -> dict:
    run = hp.parallelize(build(name), degrees, **options)
    with in_double():
        loss = run.forward_backward(**given)
    return {"loss": loss} | {key: whole(one.grad) for key, one in run.named_parameters()}


@pytest.mark.parametrize("case", small_or_sweep([*SMALL, *MATRIX], SMALL), ids=lambda case: "-".join(map(str, case)))
def test_same_as_one_device(case) -> None:
    name, degrees, tokens, kind, attention, order = case
    given = _given(tokens, kind)
    build(name)
    want = _on_one_device(name, given)
    options = {"attention": attention, "order": order, "recompute": "full" if tokens == 12 else None}
    for got in threads(WORLDS[degrees], timeout=300).run(_on_a_rank, name, given, degrees, options):
        assert_same(got, want, rtol=1e-9, atol=1e-9)


def _logits(order: str, given: dict[str, torch.Tensor]) -> torch.Tensor:
    run = hp.parallelize(build("llama"), "cp=2", order=order, attention="ring", microbatches=2)  # with a cache
    with in_double(), torch.no_grad():
        return run(input_ids=given["input_ids"]).logits


def test_outputs_come_back_in_the_order_of_the_sequence() -> None:
    given = _given(13, "causal")
    model = build("llama")
    with in_double(), torch.no_grad():
        want = model(input_ids=given["input_ids"]).logits
    for got in threads(2).run(_logits, "striped", given):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def _refusals() -> list[str]:
    found = []
    given = _given(12, "causal")

    def refused(name: str, values: dict = given, **options: object) -> None:
        try:
            run = hp.parallelize(build(name), "cp=2", **options)
            with in_double():
                run.forward_backward(**values)
        except ValueError as error:
            found.append(str(error))
        else:
            found.append(f"{name}: not refused")

    refused("qwen3_next", order="zigzag")
    refused("mamba", order="zigzag")
    refused("falcon", order="striped")
    refused("bert_masked", order="zigzag")
    refused("llama4", order="zigzag")
    refused("roberta", order="striped")
    refused("bloom", attention="ring")
    refused("llama", order="sorted")
    refused("llama", attention="rings")
    pairs = torch.ones(4, 1, 12, 12, dtype=torch.bool).tril()
    refused("llama", {**given, "attention_mask": pairs}, order="zigzag")
    return found


def test_what_cannot_be_done_is_refused_by_name() -> None:
    for name in ("qwen3_next", "mamba", "falcon", "bert_masked", "llama4", "roberta", "bloom", "llama"):
        build(name)
    conv, mamba, falcon, bert, scales, padding, own, order, scheme, pairs = threads(2).run(_refusals)[0]
    assert "conv1d goes by the order of tokens" in conv and "order='contiguous'" in conv
    assert "MambaForCausalLM counts positions by itself" in mamba
    assert "FalconForCausalLM computes attention in a way of its own" in falcon
    assert "BertForMaskedLM computes its loss by itself" in bert
    assert "a plain tensor of (4, 12, 1, 1), which the model makes by itself and gives to mul, goes by the" in scales
    assert "RobertaForCausalLM does not count positions from 0 in every row" in padding
    assert "attention='ring': BloomForCausalLM does not compute attention by transformers'" in own
    assert "order='sorted' is none of 'contiguous', 'zigzag', 'striped'" in order
    assert "attention='rings' is none of" in scheme
    assert "attention_mask of shape (4, 1, 12, 12)" in pairs and "cannot be put in zigzag order" in pairs


def test_a_mask_that_models_make_and_do_not_use_or_compute_with() -> None:
    """Qwen2-MoE makes one with a window of no token, and gives it to no layer; DeepSeek-V3.2 takes rows of its mask."""
    masks = pytest.importorskip("transformers.masking_utils")
    nobody = masks.and_masks(masks.sliding_window_overlay(0), masks.causal_mask_function)
    sizes = {"batch_size": 2, "q_length": 6, "kv_length": 6}
    for given in ({}, {"attention_mask": torch.ones(2, 6, dtype=torch.long)}):
        assert lazy_mask(**sizes, **given, mask_function=nobody).relation((0, 6), (0, 6)) == "none"
    causal = lazy_mask(**sizes, mask_function=masks.causal_mask_function)
    with pytest.raises(TypeError, match=r"computes with its attention mask by itself \(\[\.\.\.\]\).* without cp"):
        causal[:, 0]
    with pytest.raises(TypeError, match=r"computes with its attention mask by itself \(\+\)"):  # BEiT, GIT
        torch.zeros(2, 4, 6, 6) + causal
    query, keys = torch.zeros(2, 4, 6, 8), torch.zeros(2, 4, 9, 8)  # DeepSeek-V4: with compressed ones behind
    with pytest.raises(ValueError, match=r"Module attends to 9 keys, and its mask is of 6 tokens: .* without cp"):
        attend(torch.nn.Module(), query, keys, keys, causal)


def test_labels_that_were_shifted_before_are_counted_as_they_are() -> None:
    given = _given(12, "causal")
    given["shift_labels"] = torch.cat([given["labels"][:, 1:], torch.full((4, 1), -100)], 1).masked_fill(
        given["input_ids"] % 3 == 0, -100
    )
    want = _on_one_device("llama", given)
    for order in ("contiguous", "zigzag"):
        for got in threads(2).run(_on_a_rank, "llama", given, "cp=2", {"order": order}):
            assert_same(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
def test_every_token_lies_somewhere_and_goes_back(name: str) -> None:
    for tokens, parts in itertools.product(range(1, 20), range(1, 6)):
        indices = token_order(name, tokens, parts)
        assert sorted(indices.tolist()) == list(range(tokens))
    ids = torch.arange(22).reshape(2, 11)
    values, order = ordered_batch({"input_ids": ids, "labels": ids}, name, 3, shifts_labels=True)
    if order is None:
        assert name == "contiguous"
        return
    assert torch.equal(order.restored(values["input_ids"]), ids)
    assert torch.equal(order.restored(values["shift_labels"])[:, :-1], ids[:, 1:])
    assert torch.equal(order.restored(values["position_ids"]), torch.arange(11).repeat(2, 1))


def test_ranks_have_equal_work_in_zigzag_order() -> None:
    """The pairs of a causal mask on the rank that has most, over the mean."""
    for name, most in {"contiguous": 1.75, "zigzag": 1.01, "striped": 1.05}.items():
        work = (token_order(name, 64, 4) + 1).reshape(4, 16).sum(1)
        assert np.max(work) / np.mean(work) < most, name
        assert name != "contiguous" or np.max(work) / np.mean(work) > 1.7


def _packing() -> bool:
    """What another first document does to the second one's logits, under cp."""
    run = hp.parallelize(build("llama"), "cp=2", order="zigzag", attention="ring")
    given = _given(12, "packed")
    other = given["input_ids"].clone()
    other[:, :4] = (other[:, :4] + 1) % 37

    def logits(ids: torch.Tensor) -> torch.Tensor:
        with in_double(), torch.no_grad():
            return run(input_ids=ids, position_ids=given["position_ids"], use_cache=False).logits[:, 4:]

    return bool(torch.equal(logits(given["input_ids"]), logits(other)))


def test_packed_documents_do_not_see_each_other() -> None:
    build("llama")
    assert threads(2).run(_packing) == [True, True]


def test_a_rank_of_a_pretend_world_without_memory() -> None:
    report = hp.dry_run(lambda: build("mistral"), "cp=4", batch=2, length=16)
    assert "rank 0 of 4 (cp 4)" in str(report)
