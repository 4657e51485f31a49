"""Attention as its definition says, on one device and step by step, and the cases that are compared with it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import hyper_parallel as hp
from tests.frameworks import assert_close, backward, distribute_tensor, grad_of, leaf, ours


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 7919 + math.prod(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def documents_of(tokens: int) -> np.ndarray:
    """Documents of lengths 3, 5, 2, 7, ... in a row."""
    lengths = [3, 5, 2, 7, 4, 9]
    ids = [number for number in range(tokens) for _ in range(lengths[number % len(lengths)])]
    return np.array(ids[:tokens])


def positions_in(documents: np.ndarray) -> np.ndarray:
    return np.array([int((documents[:index] == here).sum()) for index, here in enumerate(documents)])


def seen_by_definition(kind: str, batch: int, queries: int, keys: int) -> tuple[dict[str, Any], torch.Tensor]:
    """The arguments of a Visibility, and the whole mask that they mean, (batch, queries, keys)."""
    rows, columns = torch.arange(queries)[None, :, None], torch.arange(keys)[None, None, :]
    everything = torch.ones(batch, queries, keys, dtype=torch.bool)
    causal = everything & (columns <= rows)
    if kind == "full":
        return {}, everything
    if kind == "causal":
        return {"causal": True}, causal
    if kind == "window":
        return {"causal": True, "window": 3}, causal & (rows - columns < 3)
    if kind == "both sides":
        return {"window": (2, 1)}, everything & (rows - columns <= 2) & (columns - rows <= 1)
    documents = torch.from_numpy(documents_of(keys))
    same = documents[None, :, None] == documents[None, None, :]
    if kind == "packed":
        return {"causal": True, "documents": documents.numpy()}, causal & same
    if kind == "packed positions":
        given = {"documents": documents.numpy(), "positions": positions_in(documents.numpy())}
        return {"causal": True, "window": 4, **given}, causal & same & (rows - columns < 4)
    if kind == "padded":  # to the left in the first row, to the right in the others
        valid = torch.ones(batch, keys, dtype=torch.bool)
        valid[0, : keys // 3] = False
        valid[1:, keys - keys // 4 :] = False
        return {"causal": True, "valid": valid.numpy()}, causal & valid[:, None, :]
    if kind == "function":
        return {"causal": True, "function": lambda b, h, q, k: (q + k) % 3 != 1}, causal & ((rows + columns) % 3 != 1)
    raise ValueError(kind)


KINDS = ["full", "causal", "window", "both sides", "packed", "packed positions", "padded", "function"]


@dataclass(frozen=True)
class Case:
    """One call of attention."""

    tokens: int = 16
    heads: int = 4
    key_heads: int = 4
    seen: str = "causal"
    batch: int = 2
    width: int = 8
    value_width: int = 8
    options: tuple[tuple[str, Any], ...] = ()
    has_sinks: bool = False
    dtype: torch.dtype = field(default=torch.float64)

    def inputs(self) -> list[torch.Tensor]:
        """Queries, keys, values, the gradient of the output, and the sinks."""
        shapes = [
            (self.batch, self.heads, self.tokens, self.width),
            (self.batch, self.key_heads, self.tokens, self.width),
            (self.batch, self.key_heads, self.tokens, self.value_width),
            (self.batch, self.heads, self.tokens, self.value_width),
        ]
        found = [values(*shape, seed=seed, dtype=self.dtype) for seed, shape in enumerate(shapes)]
        return [*found, values(self.heads, seed=9, dtype=self.dtype)] if self.has_sinks else found

    def expected(self, kept: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The output and the gradients on one device, by the definition; ``kept`` multiplies the weights."""
        query, key, value, gradient, *sinks = [tensor.clone().requires_grad_() for tensor in self.inputs()]
        options = dict(self.options)
        shared = self.heads // self.key_heads
        scores = query @ key.repeat_interleave(shared, 1).transpose(-2, -1)
        scores = scores * options.get("scale", 1 / math.sqrt(self.width))
        if options.get("soft_cap"):
            scores = options["soft_cap"] * (scores / options["soft_cap"]).tanh()
        _, seen = seen_by_definition(self.seen, self.batch, self.tokens, self.tokens)
        scores = scores.masked_fill(~seen[:, None], -math.inf)
        if sinks:
            extra = sinks[0].reshape(1, -1, 1, 1).expand(self.batch, -1, self.tokens, 1)
            weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1).masked_fill(~seen.any(-1)[:, None, :, None], 0.0)
        if kept is not None:
            weights = weights * kept
        output = weights @ value.repeat_interleave(shared, 1)
        leaves = (query, key, value, *sinks)
        return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]

    def visible(self) -> hp.Visibility:
        arguments, _ = seen_by_definition(self.seen, self.batch, self.tokens, self.tokens)
        return hp.Visibility(**arguments)

    def run(self, mesh: Any = None, cuts: Any = None, **more: Any) -> list[Any]:
        """Output and gradients of our operator, whole: of plain tensors, or of those that lie as ``cuts`` say."""
        query, key, value, gradient, *sinks = self.inputs()
        leaves = [leaf(tensor) for tensor in (query, key, value, *sinks)]
        given = [*leaves]
        if mesh is not None:
            whole = [hp.Replicate() if cut.is_shard() and cut.dim != 1 else cut for cut in cuts]
            whole = [hp.Shard(0) if cut.is_shard() else cut for cut in whole]
            given = [distribute_tensor(tensor, mesh, cuts) for tensor in leaves[:3]]
            given += [distribute_tensor(tensor, mesh, whole) for tensor in leaves[3:]]
            weighting = distribute_tensor(ours(gradient), mesh, cuts)
        else:
            weighting = ours(gradient)
        named = {"sinks": given[3]} if sinks else {}
        options = {**dict(self.options), **more}
        output = hp.attention(*given[:3], visible=self.visible(), **named, **options)
        backward((output * weighting).sum() if mesh is None else (output * weighting).sum().full_tensor())
        found = [output, *(grad_of(tensor) for tensor in (given if mesh is not None else leaves))]
        return [value.full_tensor() if isinstance(value, hp.DTensor) else value for value in found]


def check(case: Case, mesh: Any = None, cuts: Any = None, tolerance: float = 1e-10, **more: Any) -> None:
    """Our operator gives what the definition gives, and all gradients."""
    for name, mine, want in zip(
        ("output", "query", "key", "value", "sinks"), case.run(mesh, cuts, **more), case.expected(), strict=False
    ):
        assert_close(mine, want, rtol=tolerance, atol=tolerance, msg=f"{name} of {case}")
