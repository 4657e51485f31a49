"""Single-device modules in the words of every framework, and the comparison of a parallel copy with one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.frameworks import assert_close, ours
from tests.frameworks.functions import gelu, softmax
from tests.frameworks.models import TABLE, Module, embedding, fill, linear, module_list


class Mlp(Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = linear(width, hidden)
        self.down = linear(hidden, width)

    def forward(self, x: Any) -> Any:
        return self.down(gelu(self.up(x)))


class Attention(Module):
    """It reads the number of heads from its projections, so that it runs on a part of them."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.q, self.k, self.v, self.o = (linear(width, width) for _ in range(4))

    def forward(self, x: Any) -> Any:
        rows, length, _ = x.shape
        q, k, v = (
            part(x).reshape(rows, length, -1, self.head_width).permute(0, 2, 1, 3) for part in (self.q, self.k, self.v)
        )
        mixed = softmax(q @ k.permute(0, 1, 3, 2) * self.head_width**-0.5, -1) @ v
        return self.o(mixed.permute(0, 2, 1, 3).reshape(rows, length, -1))


class Block(Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, num_heads)
        self.mlp = Mlp(width, 12)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Decoder(Module):
    def __init__(self, vocabulary: int, tied: bool = False, num_blocks: int = 2) -> None:
        super().__init__()
        self.embed = embedding(vocabulary, 8)
        self.blocks = module_list(*(Block(8, 4) for _ in range(num_blocks)))
        self.head = linear(8, vocabulary, bias=False)
        if tied:
            self.head.weight = getattr(self.embed, TABLE)

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tp_plan() -> dict[str, Any]:
    """Plain tensor parallelism of a :class:`Decoder`."""
    return {
        "embed": hp.RowwiseParallel(),
        "blocks.*.attention.[qkv]": hp.ColwiseParallel(),
        "blocks.*.attention.o": hp.RowwiseParallel(),
        "blocks.*.mlp.up": hp.ColwiseParallel(),
        "blocks.*.mlp.down": hp.RowwiseParallel(),
        "head": hp.ColwiseParallel(output_layouts=hp.Replicate()),
    }


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, hp.DTensor) else value


def same_as_one_device(
    make: Callable[[], Any], parallelize: Callable[[Any], Any], *inputs: torch.Tensor, **named: torch.Tensor
) -> Any:
    """The output and every gradient of ``make()`` are those of its parallel copy, which is returned."""
    modules = fill(make()), parallelize(fill(make()))
    found = []
    for module in modules:
        parameters = {name: one for name, one in get_platform().parameters_dict(module).items() if one.requires_grad}

        def loss_of(module: Any = module) -> tuple[Any, Any]:
            out = module(*ours(inputs), **ours(named))
            factors = ours(torch.arange(1.0, out.shape[-1] + 1))
            return (whole(out) * factors).sum(), out

        (loss, out), gradients = hp.value_and_grad(loss_of, list(parameters.values()))()
        found.append({"loss": loss, "output": whole(out)} | dict(zip(parameters, map(whole, gradients), strict=True)))
    expected, mine = found
    assert mine.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(mine[name], value, rtol=1e-3, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
    return modules[1]
