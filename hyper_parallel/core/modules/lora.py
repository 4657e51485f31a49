"""Low-rank adapters (LoRA): linear layers whose weights stay as they are and to which a product of two small ones adds.

Note [An adapter is two parameters of the layer]
The layer computes ``W x + (alpha / rank) B A dropout(x)``; A and B are its own parameters ``lora_A`` and ``lora_B``,
so names of all others are those of the model without adapters, and every parallelism meets plain parameters: a style
lays A along its inputs as the weight and B along its outputs, fully_shard shards them, checkpoints hold them. All ranks
of a line have one value or parts of one, never copies that train apart. Add adapters before the model is split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import init_device_mesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.dtensor.random import random_state
from hyper_parallel.core.dtensor.random.random_fill import fill_random_, random_block
from hyper_parallel.core.modules.linear_layers import HoldsProduct, linear_function
from hyper_parallel.platform import get_platform

DOWN, UP = "lora_A", "lora_B"
_ADAPTER = "hyper_parallel_adapter"
_LISTED = 8


class Adapter(HoldsProduct):
    """What a layer with an adapter computes."""

    def __init__(self, linear: Any, rank: int, alpha: float, dropout: float) -> None:
        self.linear, self.rank, self.alpha, self.dropout = linear, rank, alpha, dropout

    @property
    def scale(self) -> float:
        """The factor of the addition."""
        return self.alpha / self.rank

    def multiply(self, module: Any, x: Any, weight: Any, bias: Any) -> Any:
        """The layer's output of ``x``, with the addition."""
        platform = get_platform()
        narrow = x
        if self.dropout and module.training:
            narrow = platform.dropout(x, self.dropout)
        narrow = platform.linear(platform.linear(narrow, getattr(module, DOWN)), getattr(module, UP))
        return self.linear(x, weight, bias) + narrow * self.scale

    def forward(self, module: Any, x: Any) -> Any:
        """The forward of a layer that no style acts on."""
        return self.multiply(module, x, module.weight, module.bias)

    @staticmethod
    def placements(weight: tuple[Placement, ...], dims: tuple[int, int]) -> dict[str, tuple[Placement, ...]]:
        """Of A and B by name, beside a weight with ``dims`` for outputs and inputs."""
        outputs, inputs = dims
        return {
            DOWN: tuple(Shard(1) if one.is_shard() and one.dim % 2 == inputs else Replicate() for one in weight),  # type: ignore[attr-defined]
            UP: tuple(Shard(0) if one.is_shard() and one.dim % 2 == outputs else Replicate() for one in weight),  # type: ignore[attr-defined]
        }


def add_lora(
    model: Any, *, rank: int, alpha: float = 16.0, dropout: float = 0.0, targets: Iterable[str] = ("*",)
) -> list[str]:
    """Give linear layers an adapter and freeze everything else, in place; the paths of these layers.

    ``targets`` are patterns of paths, ``"*.q_proj"``, of which each must match a linear layer. The adapters' output is
    multiplied by ``alpha / rank``; ``dropout`` is the part of their inputs that is zeroed in training. A begins with
    random values, the same on every rank, and B with zeros, so the model computes what it did. Call it before
    :func:`hyper_parallel.parallelize`; parameters without memory get theirs from ``materialize``.

    >>> import torch, hyper_parallel as hp
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    >>> hp.add_lora(model, rank=2, targets=["2"])
    ['2']
    >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    ['2.lora_A', '2.lora_B']
    """
    platform = get_platform()
    modules = dict(platform.get_cells_and_names(model))
    if any(adapter_of(module) is not None for module in modules.values()):
        raise ValueError(f"add_lora: {type(model).__name__} has adapters already; add them once")
    if any(isinstance(value, DTensor) for value in platform.parameters_dict(model).values()):
        raise ValueError("add_lora: the model is split already; add adapters before it is parallelized")
    paths = _matching(modules, tuple(targets), type(model).__name__)
    for parameter in platform.parameters_dict(model).values():
        parameter.requires_grad = False
    for path in paths:
        _adapt(modules[path], Adapter(linear_function(modules[path]), rank, alpha, dropout))
    return paths


def _matching(modules: dict[str, Any], targets: tuple[str, ...], model: str) -> list[str]:
    platform = get_platform()
    linears = [path for path, module in modules.items() if platform.linear_weight_dims(module) is not None]
    for pattern in targets:
        if not any(fnmatchcase(path, pattern) for path in linears):
            known = ", ".join(sorted({path.rpartition(".")[2] for path in linears})[:_LISTED]) or "none"
            raise ValueError(
                f"add_lora: no linear layer of {model} is called {pattern!r}; their last names are {known}, and "
                "targets are patterns of whole paths: '*.name'"
            )
    paths = [path for path in linears if any(fnmatchcase(path, pattern) for pattern in targets)]
    for path in paths:
        # nn.MultiheadAttention takes the weight of its out_proj and never calls the layer.
        is_called = not hasattr(modules[path.rpartition(".")[0]], "in_proj_weight")
        if linear_function(modules[path]) is None or not is_called:
            raise ValueError(
                f"add_lora: {path!r}, a {type(modules[path]).__name__}, computes more than a linear layer or is not "
                "called as one, so an adapter would not be seen; leave it out of targets"
            )
    return paths


def _adapt(module: Any, adapter: Adapter) -> None:
    platform = get_platform()
    weight = platform.own_parameters(module)["weight"]
    outputs, inputs = (weight.shape[dim] for dim in platform.linear_weight_dims(module))  # type: ignore[union-attr]
    deferred = platform.has_no_memory(weight)
    with platform.without_memory() if deferred else nullcontext():
        for name, shape in ((DOWN, (adapter.rank, inputs)), (UP, (outputs, adapter.rank))):
            made = platform.new_zero_parameter(shape, weight.dtype, True, weight.device)
            platform.install_parameter(module, name, made)
    setattr(module, _ADAPTER, adapter)
    platform.replace_forward(module, _forward)
    if not deferred:
        _fill(platform.own_parameters(module)[DOWN])


def _forward(module: Any, x: Any) -> Any:
    return getattr(module, _ADAPTER).forward(module, x)


def adapter_of(module: Any) -> Adapter | None:
    """The adapter of a linear layer; None if it has none."""
    return getattr(module, _ADAPTER, None)


def adapted_layers(model: Any) -> Iterator[tuple[str, Any, Adapter]]:
    """Path, layer and adapter of all layers that have one."""
    for path, module in get_platform().get_cells_and_names(model):
        adapter = adapter_of(module)
        if adapter is not None:
            yield path, module, adapter


def is_of_adapter(name: str) -> bool:
    """Whether a parameter of this name is one of an adapter."""
    return name.rpartition(".")[2] in (DOWN, UP)


def fill_adapters(model: Any, made: Iterable[int]) -> None:
    """First values for those A among the parameters with these ids; B has its zeros."""
    wanted = set(made)
    for _, module, _ in adapted_layers(model):
        down = get_platform().own_parameters(module).get(DOWN)  # None: another stage has the layer
        if id(down) in wanted:
            _fill(down)


def _fill(down: Any) -> None:
    """Uniform values as those of a linear layer, from random numbers that are the same under every layout."""
    platform = get_platform()
    bound = 1 / math.sqrt(down.shape[1])
    values = {"low": -bound, "high": bound}
    with platform.no_grad():
        if isinstance(down, DTensor):
            fill_random_(down, "uniform", **values)
            return
        alone = init_device_mesh(platform.get_device_type(), (1,), rank_list=(platform.get_rank(),), init_backend=False)
        layout = Layout.of(alone, ((), ()))
        shape = tuple(down.shape)
        block = random_block("uniform", values, random_state.next_draw(), layout, shape, down.dtype, down.device)
        platform.load_into_param(down, block)
