"""Single-device models for the tests, and the comparison of a parallel copy with one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hyper_parallel as hp
from tests.tensor_parallel.small_modules import whole


class Attention(nn.Module):
    """Plain attention that reads the number of heads from its projections, so that it runs on a part of them."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int | None = None, qk_norm: bool = False) -> None:
        super().__init__()
        self.head_width = width // num_heads
        kv_width = self.head_width * (num_kv_heads or num_heads)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, kv_width)
        self.v = nn.Linear(width, kv_width)
        self.o = nn.Linear(width, width)
        self.q_norm = nn.LayerNorm(self.head_width) if qk_norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

        q, k, v = self.q_norm(heads(self.q(x))), heads(self.k(x)), heads(self.v(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.o(mixed.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, hidden: int, **attention: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, **attention)
        self.mlp = Mlp(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(
        self,
        vocabulary: int = 12,
        width: int = 8,
        num_heads: int = 4,
        num_blocks: int = 2,
        tied: bool = False,
        **kw: Any,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, 12, **kw) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sp_plan(local: bool = False) -> dict[str, Any]:
    """Sequence parallelism: activations between the half blocks are cut on the sequence."""
    cut, whole = hp.Shard(1), hp.Replicate()
    gathered = hp.PrepareModuleInput(input_layouts=cut, desired_input_layouts=whole, use_local_output=local)
    down = hp.RowwiseParallel(output_layouts=cut, use_local_output=local)
    return {
        "embed": hp.RowwiseParallel(output_layouts=cut, use_local_output=local),
        "blocks.*.norm?": hp.SequenceParallel(use_local_output=local),
        "blocks.*.attention": gathered,
        "blocks.*.attention.[qkv]": hp.ColwiseParallel(),
        "blocks.*.attention.o": down,
        "blocks.*.mlp": gathered,
        "blocks.*.mlp.up": hp.ColwiseParallel(),
        "blocks.*.mlp.down": down,
        "norm": hp.SequenceParallel(use_local_output=local),
        "head": hp.ColwiseParallel(input_layouts=cut, output_layouts=whole),
    }


def same_as_one_device(
    model: nn.Module,
    parallelize: Callable[[nn.Module], nn.Module],
    inputs: tuple[torch.Tensor, ...],
    num_steps: int = 2,
    loss_of: Callable[[torch.Tensor], torch.Tensor] | None = None,
    check_all: bool = True,
) -> nn.Module:
    """Values, every gradient and the weights after AdamW steps equal those of ``model`` itself; the parallel copy."""
    loss_of = loss_of or (lambda out: (out.sin() * torch.arange(1, out.shape[-1] + 1, dtype=out.dtype)).sum())
    ours = parallelize(copy.deepcopy(model))
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in ours.named_parameters()] == names
    theirs_step, our_step = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, ours))
    for step in range(num_steps):
        want, got = model(*inputs), ours(*inputs)
        torch.testing.assert_close(whole(got), want, msg=lambda text, s=step: f"output of step {s}: {text}")
        want_loss, got_loss = loss_of(want), loss_of(whole(got))
        want_loss.backward()
        got_loss.backward()
        for name, parameter, mine in zip(names, model.parameters(), ours.parameters(), strict=True):
            assert parameter.grad is not None or not check_all, name
            if parameter.grad is not None:
                assert mine.grad is not None, f"{name} has no gradient"
                torch.testing.assert_close(
                    whole(mine.grad), parameter.grad, msg=lambda text, n=name: f"gradient of {n}: {text}"
                )
        for optimizer in (theirs_step, our_step):
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter, mine in zip(names, model.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(
            whole(mine.detach()), parameter.detach(), msg=lambda text, n=name: f"{n} after the steps: {text}"
        )
    return ours


def parts_joined(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``got`` with what a plan made of one parameter put together again, under the names of ``want``."""
    left, made = dict(got), {}
    for name, value in want.items():
        if name in left:
            made[name] = left.pop(name)
            continue
        packed = name.removesuffix("in_proj_weight")
        if packed != name:
            names = [f"{packed}{letter}_proj_weight" for letter in "qkv"]
        else:
            names = [other for other in left if other.startswith(f"{name}_")]
        parts = [left.pop(other) for other in names]
        if parts:
            rows = sum(part.shape[0] for part in parts)
            made[name] = torch.cat(parts, 0 if rows == value.shape[0] else 1)
    return made | left
