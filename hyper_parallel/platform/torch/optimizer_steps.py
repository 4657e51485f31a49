"""Optimizer steps on distributed parameters at the cost of plain ones.

Note [A step on blocks]
An optimizer that treats every element by itself gives on each rank's blocks what it gives on the whole tensors. Run
operator by operator, a step on DTensors still asks thousands of small questions (every ``p.grad``, every list argument
that PyTorch's parser looks through). So the ``step`` of such optimizers first asks one: does everything lie alike,
each parameter, its gradient and its state, nothing pending? Then the step runs on a stand-in of the optimizer: the same
class and settings, plain aliases of the blocks for tensors. Memory is shared, so what it writes is written; state it
makes is labelled with its parameter's layout and put into the optimizer's own ``state``, which only ever holds
DTensors. Whatever is not exactly so (another class, also a subclass; ``differentiable``; layouts that differ) takes the
ordinary way through the operators, as do optimizers that mix elements (Adafactor, LBFGS, Muon).

PyTorch has no hook that may take a step over (hooks run before and after it, and not when it raises), so the ``step``
of the classes below is replaced. Hooks, profiling and schedulers are around it as before and see the optimizer itself.
The names that are not public are here: ``Optimizer.profile_hook_step`` with its mark ``hooked``, and the lists of types
that may take list operators, into which PyTorch enters its own distributed tensor too.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import optim
from torch.optim import optimizer as _optimizer_module
from torch.utils import _foreach_utils

from hyper_parallel.platform.torch.dtensor_base import DTensorBase, _NoInterception, as_dtensor

# Of these every step is element by element, and these are all their states that are one number per parameter.
_ELEMENT_WISE = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.Adadelta, optim.Adamax, optim.NAdam),
    *(optim.RAdam, optim.ASGD, optim.Rprop),
)
_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_grad_of = torch.Tensor.grad.__get__  # type: ignore[attr-defined]
_block_of = torch.Tensor.detach

State = dict[str, Any]


def let_optimizers_take(kind: type) -> None:
    """Let ``torch.optim`` and ``torch.nn.utils`` use list operators for tensors of ``kind``, as for plain ones, and
    element-wise optimizers step on their blocks.
    """
    for supported in (_optimizer_module._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if kind not in supported:
            supported.append(kind)
    for optimizer, step in [(optimizer, optimizer.step) for optimizer in _ELEMENT_WISE]:  # AdamW has Adam's step
        if getattr(step, "hooked", False):  # some optimizer was made before: hooks stay around the step
            own = _on_blocks(optimizer, step.__wrapped__, kind)  # type: ignore[attr-defined]
            hooked = optim.Optimizer.profile_hook_step(own)
            hooked.hooked = True  # type: ignore[attr-defined]
            optimizer.step = hooked  # type: ignore[method-assign]
        else:
            optimizer.step = _on_blocks(optimizer, step, kind)  # type: ignore[method-assign]


def _on_blocks(optimizer_class: type, step: Callable[..., Any], kind: type) -> Callable[..., Any]:
    @functools.wraps(step)
    def step_on_blocks(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        if type(self) is not optimizer_class or not _has_any(self, kind) or torch.compiler.is_compiling():
            return step(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stand_in = _StandIn(self, kind)
        if stand_in.is_exact:
            try:
                step(stand_in.optimizer)
            finally:
                stand_in.hand_back()
        else:
            step(self)
        return loss

    return step_on_blocks


def _has_any(optimizer: Any, kind: type) -> bool:
    return any(type(p) is kind for group in optimizer.param_groups for p in group["params"])


class _StandIn:
    """An optimizer of the same class and settings on the blocks of the parameters; see Note [A step on blocks]."""

    def __init__(self, optimizer: Any, kind: type) -> None:
        self._original = optimizer
        self._kind = kind
        self._given: list[tuple[Any, Any, State]] = []  # (a parameter, its block, the blocks of its state)
        self.is_exact = True
        states: defaultdict[Any, State] = defaultdict(dict)
        with _NoInterception():
            groups = [self._group(group, states) for group in optimizer.param_groups]
        self.optimizer = object.__new__(type(optimizer))
        self.optimizer.__dict__.update(optimizer.__dict__, param_groups=groups, state=states)

    def _group(self, group: dict[str, Any], states: defaultdict[Any, State]) -> dict[str, Any]:
        if group.get("differentiable") or any(isinstance(value, DTensorBase) for value in group.values()):
            self.is_exact = False
        blocks: list[torch.Tensor] = []
        for parameter in group["params"]:
            if not self.is_exact:
                break
            state = self._original.state.get(parameter)
            block = parameter
            if type(parameter) is self._kind:
                gradient = _grad_of(parameter)
                if gradient is None:
                    continue
                block = self._block(parameter, gradient)
                state = None if state is None else self._state(parameter, state)
            elif type(parameter) not in _PLAIN:
                self.is_exact = False
            if state is not None:
                states[block] = dict(state)
            self._given.append((parameter, block, state or {}))
            blocks.append(block)
        return {**group, "params": blocks}

    def _block(self, parameter: Any, gradient: Any) -> torch.Tensor:
        layout = parameter._layout
        if type(gradient) is not torch.Tensor:
            if gradient._layout is not layout:
                self.is_exact = False
            gradient = _block_of(gradient)
        if layout.has_partial:
            self.is_exact = False
        block = _block_of(parameter)
        block.grad = gradient
        return block

    def _state(self, parameter: Any, state: State) -> State:
        layout, shape = parameter._layout, parameter._global_shape
        blocks = {}
        for key, value in state.items():
            if type(value) is self._kind:
                if value._layout is not layout or value._global_shape != shape or key in _NUMBERS:
                    self.is_exact = False
                value = _block_of(value)
            elif isinstance(value, torch.Tensor) and (key not in _NUMBERS or value.dim()):
                self.is_exact = False
            blocks[key] = value
        return blocks

    def hand_back(self) -> None:
        """Give the optimizer what its stand-in has made."""
        states, own_states, kind = self.optimizer.state, self._original.state, self._kind
        for parameter, block, given in self._given:
            state = states.get(block)
            if not state:
                continue
            own = own_states[parameter]
            for key, value in state.items():
                if value is given.get(key):
                    continue
                if block is not parameter and isinstance(value, torch.Tensor) and key not in _NUMBERS:
                    value = as_dtensor(kind, value, parameter._layout, parameter._global_shape)
                own[key] = value
        for name, value in self.optimizer.__dict__.items():
            if name not in ("param_groups", "state"):
                self._original.__dict__[name] = value
