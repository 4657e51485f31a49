"""What a module becomes under ``fully_shard``: the same module whose calls see whole parameters, and a few methods.

Note [A call of a sharded module]
The class of the module is replaced by a subclass of it, which wraps ``__call__`` and not ``forward``: hooks of the user
and of other parallelisms run inside and see whole values, and an exception of any kind, Ctrl-C included, passes here
and leaves the module as it was. ``torch.compile`` of a block compiles what is inside.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from hyper_parallel.core.fully_shard.unit import Unit
from hyper_parallel.core.modules.left_early import LeftEarly
from hyper_parallel.platform import get_platform

_platform = get_platform()

_STATE = "_hyper_parallel_unit"
_kinds: dict[type, type] = {}
_kinds_lock = threading.Lock()


def unit_of(module: Any) -> Unit | None:
    """The unit that the module's calls bring, None for a module that was not sharded."""
    return getattr(module, _STATE, None)


def units_in(module: Any) -> Iterator[Unit]:
    """The units of the module and of those inside, each once."""
    seen: set[int] = set()
    for _, inner in _platform.get_cells_and_names(module):
        unit = unit_of(inner)
        if unit is not None and id(unit) not in seen:
            seen.add(id(unit))
            yield unit


def make_sharded(module: Any, unit: Unit) -> None:
    """Let the module bring ``unit`` when it is called, in place."""
    kind = type(module)
    with _kinds_lock:
        if kind not in _kinds:
            _kinds[kind] = type(kind.__name__, (HSDPModule, kind), {"__module__": kind.__module__})
    module.__class__ = _kinds[kind]
    object.__setattr__(module, _STATE, unit)


def reduce_gradients_of(units: Sequence[Unit]) -> None:
    """Reduce the gradients that these units have kept; every rank must call it, with the same units."""
    before = [(unit.gradients.reduces, unit.gradients.all_reduces) for unit in units]
    for unit in units:
        unit.gradients.reduces = unit.gradients.all_reduces = True
    try:
        for unit in units:
            unit.gradients.take_kept()
        for unit in units:
            unit.root.in_flight.drain()
    finally:
        for unit, (reduces, all_reduces) in zip(units, before, strict=True):
            unit.gradients.reduces, unit.gradients.all_reduces = reduces, all_reduces


class UnshardHandle:
    """Parameters on their way to this rank; ``wait()`` until they are there."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = list(units)

    def wait(self) -> None:
        for unit in self._units:
            unit.bring()
        self._units = []


class HSDPModule:
    """The methods of a module under :func:`fully_shard`. See Note [A call of a sharded module]."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit: Unit = vars(self)[_STATE]
        root = unit.root
        try:
            if unit.depth == 0:
                forward_pass = root.enter(unit)
                values = {one: forward_pass.values_of(one) for one in (unit, *unit.lenders)}
                unit.shadow(values)
                unit.note_writes(values[unit])
            unit.depth += 1
            if unit.casts_inputs:
                args, kwargs = unit.cast_inputs(args, kwargs)
            early: LeftEarly | None = None
            try:
                outputs = super().__call__(*args, **kwargs)  # type: ignore[misc]
            except LeftEarly as left:
                outputs, early = left.outputs, left
            if unit.mp_policy.output_dtype is not None and early is None:
                outputs = unit.cast_outputs(outputs)
            unit.depth -= 1
            if unit.depth == 0:
                unit.refuse_writes()
                unit.unshadow()
                root.leave(unit, self, outputs)
            if early is not None:
                raise early
            return outputs
        except LeftEarly:
            raise
        except BaseException:
            root.leave_by_error(unit)
            raise

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(
            f"a fully sharded {type(self).__mro__[2].__name__} cannot be deep-copied: its parameters lie in one "
            "memory, which both would share. Build the module again, call fully_shard on it, and load the state of the "
            "first: set_model_state_dict(copy, get_model_state_dict(model)); or copy before fully_shard"
        )

    # ---------------------------------------------------------------- whole parameters by hand

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Have the whole parameters of this module's own unit, until :meth:`reshard`; with ``async_op`` a handle.

        ``async_op``: the gather is only started, and ``handle.wait()`` completes it.
        """
        unit: Unit = vars(self)[_STATE]
        if unit.depth == 0:
            unit.refresh()
            unit.drop_stale()
        unit.is_unsharded = True
        unit.launch()
        handle = UnshardHandle([unit])
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Give the memory of the whole parameters of this module's own unit back."""
        unit: Unit = vars(self)[_STATE]
        unit.is_unsharded = False
        unit.free()

    # ---------------------------------------------------------------- gradients

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: gradients of later backwards are kept whole on this rank, and reduced with the first one after True.

        Sums over micro-batches cost no communication then, and the bytes of the whole gradients.
        """
        for unit in self._units(recurse):
            unit.gradients.reduces = bool(requires_gradient_sync)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: as ``set_requires_gradient_sync(False)``, for the micro-batches before the last."""
        self.set_requires_gradient_sync(is_last_backward)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """False: gradients of later backwards are reduced to shards, and between replicas with the first after True."""
        for unit in self._units(recurse):
            unit.gradients.all_reduces = bool(requires_all_reduce)

    def reduce_gradients(self) -> None:
        """Gradients are complete: reduce those that were kept, in all units inside; every rank must call it."""
        reduce_gradients_of(list(self._units(True)))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters inside, those in ``main_grad`` too."""
        for parameter in _platform.parameters_dict(self).values():
            if getattr(parameter, "main_grad", None) is not None:
                parameter.main_grad = None
        framework = getattr(super(), "zero_grad", None)
        if framework is not None:
            framework(set_to_none)
            return
        for parameter in _platform.parameters_dict(self).values():
            _platform.set_grad(parameter, None)

    def set_gradient_scaling_factor(self, factor: Any) -> None:
        """What sums of gradients over ranks are multiplied by; None: 1 / number of data ranks, or 1 under "sum"."""
        for root in {id(unit.root): unit.root for unit in self._units(True)}.values():
            root.scaling_factor = None if factor is None else float(factor)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """torch FSDP2's name: sums of gradients are divided by ``factor``."""
        self.set_gradient_scaling_factor(1.0 / float(factor))

    def set_reduce_op_type(self, reduce_op_type: str) -> None:
        """``"avg"``, the mean over the data ranks of the root, or ``"sum"``."""
        if reduce_op_type not in ("avg", "sum"):
            raise ValueError(f'set_reduce_op_type takes "avg" or "sum", got {reduce_op_type!r}')
        for unit in self._units(True):
            unit.root.reduce_op = reduce_op_type

    # ---------------------------------------------------------------- when parameters come and go

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether the whole parameters are given back between forward and backward."""
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, recurse: bool = True) -> None:
        """Whether the whole parameters are given back after backward."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = bool(reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """Start to gather these when this module's forward begins, in place of what ran after it in the last pass."""
        vars(self)[_STATE].forward_prefetch = _units_of(modules, "set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """Start to gather these when this module's backward begins, in place of what ran before it in forward."""
        vars(self)[_STATE].backward_prefetch = _units_of(modules, "set_modules_to_backward_prefetch")

    def set_bytes_in_flight(self, *, gathers: int | None = None, reductions: int | None = None) -> None:
        """How many bytes of the model that this module is in may be on their way besides what runs; None: the default.

        ``gathers``: of whole parameters that are gathered ahead, in forward and in backward. Default: those of the
        largest unit. 0 gathers nothing ahead. ``reductions``: of whole gradients that are reduced beside backward.
        Default: those of two of the largest units. 0 waits for each. All ranks must give the same.
        """
        for what, wanted in (("gathers", gathers), ("reductions", reductions)):
            if wanted is not None and (not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 0):
                raise ValueError(
                    f"set_bytes_in_flight: {what} is a number of bytes, 0 or more, or None for the default, "
                    f"got {wanted!r}"
                )
        root = vars(self)[_STATE].root
        root.most_gather_bytes, root.most_reduction_bytes = gathers, reductions

    def _units(self, recurse: bool) -> Iterator[Unit]:
        return units_in(self) if recurse else iter([vars(self)[_STATE]])


def _units_of(modules: Sequence[Any], where: str) -> list[Unit]:
    units = []
    for module in modules:
        unit = unit_of(module)
        if unit is None:
            raise ValueError(f"{where}: a {type(module).__name__} was not sharded; call fully_shard on it first")
        units.append(unit)
    return units
