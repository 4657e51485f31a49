"""Optimizer steps on distributed parameters at the cost of plain ones.

Note [A step on blocks]
An optimizer that treats every element by itself gives on each rank's blocks what it gives on the whole tensors. Run
operator by operator, a step on DTensors still asks thousands of small questions (every ``p.grad``, every list argument
that PyTorch's parser looks through). So the ``step`` of such optimizers first asks one: does everything lie alike,
each parameter, its gradient and its state, nothing pending? Then the step runs on a stand-in of the optimizer: the same
class and settings, plain aliases of the blocks for parameters. Gradients and states, which nobody else may use during a
step, shed their class for its time: a class assignment costs a twentieth of an alias. State that the step makes is
labelled with its parameter's layout, so between steps the optimizer's ``state`` holds DTensors. Whatever is not exactly
so (another class, also a subclass; ``differentiable``; layouts that differ) takes the ordinary way through the
operators, as do optimizers that mix elements (Adafactor, LBFGS, Muon).

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

from hyper_parallel.platform.torch.base.dtensor_base import DTensorBase, as_dtensor
from hyper_parallel.platform.torch.private_api import NoInterception

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
_NO_STATE: State = {}


def install_optimizer_steps(kind: type) -> None:
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
            stand_in.step(step)
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
        get_state = optimizer.state.get
        with NoInterception():
            # per group: (a parameter, its gradient, its state)
            self._given = [
                [(p, _grad_of(p) if type(p) is kind else None, get_state(p)) for p in group["params"]]
                for group in optimizer.param_groups
            ]
        self.is_exact = all(map(self._layouts_agree, optimizer.param_groups, self._given))

    def _layouts_agree(self, group: dict[str, Any], given: list[tuple[Any, Any, State | None]]) -> bool:
        if group.get("differentiable") or any(isinstance(value, DTensorBase) for value in group.values()):
            return False
        kind = self._kind
        for parameter, gradient, state in given:
            if type(parameter) is not kind:
                if type(parameter) not in _PLAIN:
                    return False
                continue
            if gradient is None:
                continue
            layout, shape = parameter._layout, parameter._global_shape
            if type(gradient) is not torch.Tensor and (type(gradient) is not kind or gradient._layout is not layout):
                return False
            if state:
                for key, value in state.items():
                    if key in _NUMBERS:
                        if isinstance(value, DTensorBase):
                            return False
                    elif type(value) is kind:
                        if value._layout is not layout or value._global_shape != shape:
                            return False
                    elif value is not None:
                        return False
        layouts = {parameter._layout for parameter, _, _ in given if type(parameter) is kind}
        return all(layout.gradient() is layout for layout in layouts)

    def step(self, step: Callable[..., Any]) -> None:
        """Run ``step`` on the blocks, and give the optimizer what its stand-in has made."""
        original, kind = self._original, self._kind
        stand_in = object.__new__(type(original))
        states: defaultdict[Any, State] = defaultdict(dict)
        groups: list[dict[str, Any]] = []
        blocks: list[tuple[Any, Any, Any]] = []  # (a parameter, its gradient, its block)
        shed: list[Any] = []
        try:
            with NoInterception():
                for group, given in zip(original.param_groups, self._given, strict=True):
                    before = len(blocks)
                    self._shed(given, states, blocks, shed)
                    groups.append({**group, "params": [block for _, _, block in blocks[before:]]})
            stand_in.__dict__.update(original.__dict__, param_groups=groups, state=states)
            step(stand_in)
        finally:
            for value in shed:
                value.__class__ = kind
            for parameter, gradient, block in blocks:
                state = states.get(block)
                if gradient is not None and type(gradient) is torch.Tensor:
                    as_dtensor(kind, gradient, parameter._layout, parameter._global_shape)
                if not state:
                    continue
                original.state[parameter] = state
                if block is not parameter:
                    for key, value in state.items():
                        if type(value) is torch.Tensor and key not in _NUMBERS:
                            as_dtensor(kind, value, parameter._layout, parameter._global_shape)
        for name, value in stand_in.__dict__.items():
            if name not in ("param_groups", "state"):
                original.__dict__[name] = value

    def _shed(
        self,
        given: list[tuple[Any, Any, State | None]],
        states: defaultdict[Any, State],
        blocks: list[tuple[Any, Any, Any]],
        shed: list[Any],
    ) -> None:
        """Add the blocks of a group's parameters; their gradients and states are plain tensors from here on."""
        kind = self._kind
        for parameter, gradient, state in given:
            if type(parameter) is not kind:
                block = parameter
            elif gradient is None:
                continue
            else:
                block = _block_of(parameter)
                if type(gradient) is kind:
                    shed.append(gradient)
                    gradient.__class__ = torch.Tensor
                block.grad = gradient
                if state:
                    for value in state.values():
                        if type(value) is kind:
                            shed.append(value)
                            value.__class__ = torch.Tensor
            if state is not None:
                states[block] = state
            blocks.append((parameter, gradient, block))
