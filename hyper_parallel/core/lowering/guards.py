"""When a tape may be used: everything that the recorded call depended on, as a key; another key is another tape.

Note [What is guarded]
Of each tensor that comes in (arguments, parameters, buffers): layout by identity, global shape, shape, strides and
dtype of the block, device, whether it needs a gradient and is a leaf, and what it carries (``carried.py``); which of
the tensors are the same. All other arguments, by kind and value. Of each module inside what ``module_facts.py`` reads.
Autocast, whether gradients are recorded, modes; whether plain tensors are taken as whole, whether dispatch is skipped,
whether draws have addresses; the world. For what no guard can see there is ``verify_every``.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.random.sample_address import current
from hyper_parallel.core.dtensor.skip_dispatch import skipping
from hyper_parallel.core.lowering.carried import Carried, carried_by
from hyper_parallel.core.lowering.constants import why_not_constant
from hyper_parallel.core.lowering.module_facts import SIMPLE, ModuleGuard
from hyper_parallel.core.shard.dispatching.mixing import replicating
from hyper_parallel.platform import get_platform

_platform = get_platform()


class CannotGuard(Exception):
    """A call that depends on what no guard can compare."""


class Inputs:
    """The tensors that a call brings, in order, and the key of the call."""

    __slots__ = ("key", "labels", "names", "tensors")

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self.names: list[str] = []
        self.labels: list[Any] = []  # for the key
        self.key: tuple[Any, ...] = ()

    def add(self, name: str, tensor: Any, label: Any) -> None:
        self.tensors.append(tensor)
        self.names.append(name)
        self.labels.append(label)

    def known_as(self) -> list[tuple[Any, ...]]:
        """The keys under which the call may be known. Where a block is computed again, the model is not around, which
        may have let plain tensors count as whole.
        """
        return [(mixes, *self.key[1:]) for mixes in (True, False)] if _platform.runs_in_backward() else [self.key]


def _add_tensor(inputs: Inputs, name: str, tensor: Any, wants_carried: bool) -> None:
    kind = type(tensor)
    if isinstance(tensor, DTensor):
        tensor = tensor._completed()
        if not isinstance(tensor, _platform.Parameter) and type(tensor) is not DTensor:
            raise CannotGuard(f"the argument {name} is a {type(tensor).__name__}, which is not an ordinary DTensor")
        inputs.add(name, tensor, (tensor._layout, tuple(tensor._global_shape)))
    elif isinstance(tensor, _platform.Parameter) or (kind is _platform.Tensor and _platform.is_dense(tensor)):
        inputs.add(name, tensor, None)
    else:
        raise CannotGuard(f"the argument {name} is a {kind.__name__}, sparse, nested, or a kind with rules of its own")
    if wants_carried:
        for one in carried_by(tensor):
            _add_carried(inputs, name, one)


def _add_carried(inputs: Inputs, name: str, one: Carried) -> None:
    label: tuple[Any, ...] = (one.kind, one.key)
    if isinstance(one.tensor, DTensor):
        label = (*label, one.tensor._layout, tuple(one.tensor._global_shape))
    inputs.add(f"{name}_{one.kind}", one.tensor, label)


def _add_value(inputs: Inputs, key: list[Any], name: str, value: Any, wants_carried: bool) -> None:
    kind = type(value)
    if kind in SIMPLE:
        key.append(kind)
        key.append(value or repr(value))  # 0.0 is -0.0
    elif _platform.is_tensor(value):
        key.append("tensor")
        _add_tensor(inputs, name, value, wants_carried)
        for attribute, item in _platform.attributes_of(value).items():
            key.append(attribute)
            _add_value(inputs, key, f"{name}_{attribute}", item, wants_carried)
    elif kind in (tuple, list):
        key.append((kind, len(value)))
        for place, item in enumerate(value):
            _add_value(inputs, key, f"{name}_{place}", item, wants_carried)
    elif kind is dict:
        key.append((kind, tuple(value)))
        for one, item in value.items():
            _add_value(inputs, key, f"{name}_{one}", item, wants_carried)
    elif isinstance(value, type) or _platform.is_framework_constant(value):
        key.append(value)
    elif hasattr(kind, "constant_parts") and why_not_constant(value) is None:
        key.append((kind, *value.constant_parts()))
    else:
        raise CannotGuard(
            f"the argument {name} is a {kind.__name__}, an object that may hold anything: pass its tensors and numbers"
            + (", or use_cache=False" if "Cache" in kind.__name__ else "")
        )


def is_recomputed_later() -> bool:
    """Whether a call is computed again in backward, or is just that: then inputs come without what they carried."""
    return _platform.saves_otherwise() or _platform.runs_in_backward()


def describe_call(guard: ModuleGuard, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """The tensors and the key of a call; raises :class:`CannotGuard`."""
    inputs = Inputs()
    key: list[Any] = []
    wants_carried = not is_recomputed_later()
    for place, value in enumerate(args):
        _add_value(inputs, key, f"arg{place}", value, wants_carried)
    for name, value in kwargs.items():
        key.append(name)
        _add_value(inputs, key, name, value, wants_carried)
    num_given = len(inputs.tensors)
    for path, value in zip(guard.paths, _platform.values_at(guard.places), strict=True):
        if value is not None:
            _add_tensor(inputs, path, value, False)
        else:
            key.append(path)
    facts = _platform.facts_of(inputs.tensors)
    ids = [id(tensor) for tensor in inputs.tensors]
    if len(set(ids)) != len(ids):
        key.append(tuple(ids.index(one) for one in ids))
    inputs.key = (
        replicating.depth > 0,
        _platform.world_generation(),
        _platform.ambient_key(),
        tuple(skipping.exceptions),
        current.address is None,
        guard.facts(),
        tuple(key),
        tuple(inputs.labels),
        *facts[:num_given],
        *[one[:-1] for one in facts[num_given:]],  # in backward, values of parameters are leaves
    )
    return inputs
