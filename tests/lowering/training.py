"""Training with and without lowered modules, for comparison bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import hyper_parallel as hp
from tests.tensor_parallel.hugging_face import VOCABULARY, build, in_double, whole

STEPS, ROWS = 3, 4

Seen = dict[str, Any]


def ids_and_labels(step: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Another batch for each step; a third of the labels is ignored, another third in each."""
    random = torch.Generator().manual_seed(step + 1)
    ids = torch.randint(3, VOCABULARY, (ROWS, length), generator=random)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=random) < 0.3, -100)
    return ids, labels


def model_of(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """A model of Hugging Face, or our Llama; the same weights on every call."""
    if name != "ours":
        return build(name, dtype)
    torch.manual_seed(0)
    config = hp.models.LlamaConfig(
        vocab_size=VOCABULARY, dim=16, num_blocks=2, num_heads=4, num_kv_heads=2, hidden_dim=24
    )
    return hp.models.Llama(config).to(dtype)


def blocks_of(name: str) -> str:
    """The paths of a model's blocks; of a mixture of experts those of its attention."""
    if name.startswith("mixtral"):
        return "model.layers.*.self_attn"
    return {"ours": "blocks.*", "gpt2": "transformer.h.*", "gpt2_dropout": "transformer.h.*"}.get(
        name, "model.layers.*"
    )


def train(
    name: str,
    degrees: str,
    *,
    backend: str | None = None,
    lengths: tuple[int, ...] = (9, 9, 9),
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[Seen, hp.Lowering | None]:
    """Everything that must be equal: losses, norms, all gradients and their absence, weights; and what was lowered."""
    model = model_of(name, dtype)
    hp.manual_seed(3)
    torch.manual_seed(5)
    run = hp.parallelize(model, degrees, **options)
    lowering = None if backend is None else hp.lower(model, blocks_of(name), backend=backend)
    optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2, eps=1e-6)
    mine = run.mine(range(ROWS))
    seen: Seen = {}
    with in_double():
        for step, length in enumerate(lengths):
            optimizer.zero_grad()
            ids, labels = (one[mine.start : mine.stop] for one in ids_and_labels(step, length))
            batch = (ids[:, :-1], labels[:, 1:]) if name == "ours" else ()
            named = {} if name == "ours" else {"input_ids": ids, "labels": labels}
            seen[f"loss {step}"] = run.forward_backward(*batch, **named).detach().clone()
            seen[f"norm {step}"] = whole(run.clip_grad_norm_(1.0))
            for path, parameter in run.named_parameters():
                seen[f"grad {step} of {path}"] = None if parameter.grad is None else whole(parameter.grad).clone()
            optimizer.step()
    return seen | {f"weight of {path}": whole(one) for path, one in run.named_parameters()}, lowering


def train_on_one_device(name: str, lengths: tuple[int, ...] = (9, 9, 9), dtype: torch.dtype = torch.float64) -> Seen:
    """The same by the plain model on whole batches, without this library."""
    model = model_of(name, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    seen: Seen = {}
    with in_double():
        for step, length in enumerate(lengths):
            optimizer.zero_grad()
            ids, labels = ids_and_labels(step, length)
            if name == "ours":
                loss = model(ids[:, :-1], labels[:, 1:])
            else:
                loss = model(input_ids=ids, labels=labels, use_cache=False).loss
            loss.backward()
            seen[f"loss {step}"] = loss.detach().clone()
            seen[f"norm {step}"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for path, one in model.named_parameters():
                seen[f"grad {step} of {path}"] = None if one.grad is None else one.grad.clone()
            optimizer.step()
    return seen | {f"weight of {path}": one.detach() for path, one in model.named_parameters()}


def largest_difference(got: Seen, want: Seen) -> tuple[float, str]:
    """The largest difference of anything, relative to its own largest value, and what it is of."""
    assert got.keys() == want.keys()
    worst, where = 0.0, ""
    for name, value in want.items():
        assert (value is None) == (got[name] is None), name
        if value is None or torch.equal(value, got[name]):
            continue
        difference = (got[name] - value).abs().max().item() / max(value.abs().max().item(), 1e-30)
        if not difference <= worst:
            worst, where = difference, name
    return worst, where


def count_of(lowering: Any, what: str) -> list[int]:
    """How many calls of each region were ``what``."""
    return [region.num_calls[what] for region in lowering.regions.values()]


def both_ways(
    make: Callable[[], Any], path: str, calls: list[Callable[[Any], Any]], **options: Any
) -> tuple[list[Any], list[Any], Any]:
    """What each call gives on a module by dispatch and on one lowered at ``path``; and the lowering."""
    plain, lowered = make(), make()
    lowering = hp.lower(lowered, path, **options)
    results: list[list[Any]] = []
    for model in (plain, lowered):
        hp.manual_seed(1)
        torch.manual_seed(2)
        results.append([call(model) for call in calls])
    return results[0], results[1], lowering
