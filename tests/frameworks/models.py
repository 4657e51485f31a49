"""Small modules that are written once: a class derives from ``Module`` and has a ``forward``, on every framework."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.platform import get_platform
from tests.frameworks.values import on_mindspore, ours, parameter

if on_mindspore:
    from mindspore import nn

    class Module(nn.Cell):
        """A cell whose computation is called ``forward``."""

        def construct(self, *args: Any, **kwargs: Any) -> Any:
            return self.forward(*args, **kwargs)

    def linear(num_inputs: int, num_outputs: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> Any:
        return nn.Dense(num_inputs, num_outputs, has_bias=bias, dtype=ours(dtype))

    def embedding(num_rows: int, width: int) -> Any:
        return nn.Embedding(num_rows, width)

    def sequential(*modules: Any) -> Any:
        return nn.SequentialCell(*modules)

    def module_list(*modules: Any) -> Any:
        return nn.CellList(list(modules))

    def dropout(p: float) -> Any:
        return nn.Dropout(p=p)

    def set_training(module: Any, training: bool = True) -> Any:
        return module.set_train(training)

else:
    from torch import nn

    Module = nn.Module

    def linear(num_inputs: int, num_outputs: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> Any:
        return nn.Linear(num_inputs, num_outputs, bias=bias, dtype=dtype)

    def embedding(num_rows: int, width: int) -> Any:
        return nn.Embedding(num_rows, width)

    def sequential(*modules: Any) -> Any:
        return nn.Sequential(*modules)

    def module_list(*modules: Any) -> Any:
        return nn.ModuleList(modules)

    def dropout(p: float) -> Any:
        return nn.Dropout(p)

    def set_training(module: Any, training: bool = True) -> Any:
        return module.train(training)


class Norm(Module):
    """A gain and a shift, and what a norm keeps: one buffer that belongs to the state and one that does not."""

    def __init__(self, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = parameter(torch.ones(width, dtype=dtype))
        self.bias = parameter(torch.zeros(width, dtype=dtype))
        self.register_buffer("seen", ours(torch.zeros(width, dtype=dtype)))
        self.register_buffer("scratch", ours(torch.zeros(1, dtype=dtype)), persistent=False)

    def forward(self, x: Any) -> Any:
        return x * self.weight + self.bias


class Block(Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = Norm(4, dtype)
        self.linear = linear(4, 4, dtype=dtype)

    def forward(self, x: Any) -> Any:
        return self.linear(self.norm(x))


TABLE = "embedding_table" if on_mindspore else "weight"  # what an embedding calls its weight


class TiedModel(Module):
    """An embedding, a block, and a head whose weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = embedding(6, 4)
        self.block = Block()
        self.head = linear(4, 6, bias=False)
        self.head.weight = getattr(self.embedding, TABLE)
        self.scale = parameter(torch.ones(()))

    def forward(self, ids: Any) -> Any:
        return self.head(self.block(self.embedding(ids))) * self.scale


def fill(module: Any, seed: int = 0) -> Any:
    """The module with the same values of its parameters on every framework and for every caller."""
    generator = torch.Generator().manual_seed(seed)
    for one in get_platform().parameters_dict(module).values():
        values = torch.randn(tuple(one.shape), generator=generator, dtype=torch.float64)
        get_platform().load_into_param(one, get_platform().tensor_type_cast(ours(values * 0.5), one.dtype))
    return module
