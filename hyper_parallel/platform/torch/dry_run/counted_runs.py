"""What a dry run asks of PyTorch: the counting mode, models and optimizers without memory, who is running."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hyper_parallel.platform.torch.base.dtensor_base import local_alias
from hyper_parallel.platform.torch.base.returnable_memory import resize_observers
from hyper_parallel.platform.torch.dry_run.user_lines import user_line
from hyper_parallel.platform.torch.private_api import NoInterception, next_node_number, node_number

__all__ = [
    "argument_names_of",
    "buffers_of",
    "building_without_memory",
    "cast_model",
    "counted",
    "make_optimizer",
    "optimizer_state_of",
    "token_ids",
    "watch_gradients",
    "watch_modules",
]


class _Counter:
    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self.to_host = mode.to_host

    def mark(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        for tensor in tensors:
            allocation = self._mode.allocation_of(tensor)
            if allocation is not None and allocation.kind is None:
                allocation.kind = kind


@contextlib.contextmanager
def counted(log: Any, device: str) -> Iterator[_Counter]:
    """Inside, operators run on shapes and are counted as on ``device``. Programs that train do not load any of it."""
    from hyper_parallel.platform.torch.dry_run.attention_kernels import attention_of
    from hyper_parallel.platform.torch.dry_run.counting_mode import CountingMode

    log.node_number, log.next_node_number = node_number, next_node_number
    mode = CountingMode(log, device)
    resize_observers.append(mode.resized)
    try:
        with attention_of(device), mode:
            yield _Counter(mode)
    finally:
        resize_observers.remove(mode.resized)


def building_without_memory() -> torch.device:
    return torch.device("meta")


@contextlib.contextmanager
def watch_modules(model: nn.Module, log: Any) -> Iterator[None]:
    """Tell ``log`` when the modules of ``model`` begin and end."""
    paths = {id(module): path for path, module in model.named_modules()}

    def enter(module: nn.Module, args: Any) -> None:
        if id(module) in paths:
            log.enter(paths[id(module)], user_line())

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in paths:
            log.leave()

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def watch_gradients(model: nn.Module, tell: Callable[[torch.Tensor], None]) -> None:
    def accumulated(parameter: torch.Tensor) -> None:
        with NoInterception():
            tell(torch.Tensor.grad.__get__(parameter))  # type: ignore[attr-defined]

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(accumulated)


def buffers_of(model: nn.Module) -> Iterator[torch.Tensor]:
    return model.buffers()


def cast_model(model: nn.Module, dtype: str) -> nn.Module:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype {dtype!r} is none for weights; use float32, bfloat16 or float16")
    return model.to(found)


def token_ids(batch: int, length: int) -> torch.Tensor:
    return torch.zeros(batch, length, dtype=torch.long, device="meta")


def argument_names_of(model: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(type(model).forward).parameters)[1:]


_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adafactor": torch.optim.Adafactor,
}


def make_optimizer(optimizer: Any, model: nn.Module, device: str) -> Any:
    """By name with PyTorch's own defaults, which on accelerators are one kernel for many parameters."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if callable(optimizer):
        return optimizer(parameters)
    kind = _OPTIMIZERS.get(str(optimizer).lower())
    if kind is None:
        raise ValueError(
            f"no optimizer is called {optimizer!r}; take {', '.join(_OPTIMIZERS)}, 'none', or a function that makes "
            "one from the parameters"
        )
    grouped = {} if device == "cpu" or kind is torch.optim.Adafactor else {"foreach": True}
    return kind(parameters, lr=1e-4, **grouped)


def optimizer_state_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield local_alias(value) if type(value) is not torch.Tensor else value
