"""What local implementations share: their arguments by name, the groups over which letters are cut, and sums over them.

Note [Numbers come from the call]
The plan of a rule that ignores scalars serves all calls that differ only in numbers. So such a rule must not decide by
one, nor its local implementation close over one: it reads them from the arguments of each call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.layout import Layout, Shape
from hyper_parallel.core.shard.rule_kit.signature import Labels, LocalCall, OpCall
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.region import Region

_platform = get_platform()

_SPELLINGS = {"axis": "dim", "keepdims": "keepdim", "self": "input"}


def arguments(call: OpCall | LocalCall, *names: str, **defaults: Any) -> dict[str, Any]:
    """The arguments of a call by name, with numpy's ``axis`` and ``keepdims`` under the framework's own names."""
    given = dict(defaults)
    given.update(zip(names, call.args, strict=False))
    given.update({_SPELLINGS.get(name, name): value for name, value in call.kwargs.items()})
    return given


def call_with(call: LocalCall, names: Sequence[str], **changed: Any) -> Any:
    """The plain call on the blocks with some arguments, whose positions ``names`` gives, replaced."""
    args, kwargs = list(call.args), dict(call.kwargs)
    for name, value in changed.items():
        place = names.index(name)
        if name in kwargs or place >= len(args):
            kwargs[name] = value
        else:
            args[place] = value
    return call.func(*args, **kwargs)


def is_sharded(call: LocalCall, letters: Iterable[str | None]) -> bool:
    """Whether any of the letters is cut."""
    return any(call.axes.get(letter) for letter in letters if letter is not None)


def group_of(call: LocalCall, letters: Iterable[str | None]) -> Any:
    """The group of the ranks that hold the parts of ``letters`` together; None when all of them are whole."""
    axes = sorted({axis for letter in letters if letter is not None for axis in call.axes.get(letter, ())})
    axes = [axis for axis in axes if call.mesh.shape[axis] > 1]
    return call.mesh.get_group(tuple(axes)) if axes else None


def block_region(call: LocalCall, labels: Labels, shape: Shape) -> Region:
    """Where this rank's block of a tensor with these labels and this global shape lies."""
    axes = [() if letter is None else call.axes.get(letter, ()) for letter in labels]
    return Layout.of(call.mesh, axes).local_region(shape)


def num_elements(call: LocalCall, labels: Labels, shape: Shape, dims: Iterable[int]) -> tuple[int, int]:
    """How many elements this rank has along ``dims`` together, and how many there are."""
    block = block_region(call, labels, shape).sizes
    dims = list(dims)
    return math.prod(block[dim] for dim in dims), math.prod(shape[dim] for dim in dims)


def sum_over(part: Any, group: Any) -> Any:
    """The sum over the group, to be used by every rank in the same way. forward: all-reduce; backward: identity."""
    return part if group is None else _platform.differentiable_all_reduce(part, "sum", group)


def shared_sum(part: Any, group: Any) -> Any:
    """The sum over the group, to be used with the rank's own values. forward: all-reduce; backward: all-reduce."""
    return part if group is None else _platform.vary(sum_over(part, group), group)


def all_reduced(own: Any, op: str, group: Any) -> Any:
    """``own``, which is overwritten, reduced over the group, without a gradient."""
    return own if group is None else _platform.all_reduce(own, group, op=op)


def varied(value: Any, group: Any) -> Any:
    """A whole value that meets the rank's own. forward: identity; backward: all-reduce."""
    return value if group is None else _platform.vary(value, group)


def in_working_precision(tensor: Any) -> Any:
    """Half-precision values as float32, in which the framework's own kernels add them up; others as they are."""
    if _platform.get_element_size(tensor) >= 4 or not tensor.is_floating_point():
        return tensor
    return _platform.tensor_type_cast(tensor, "float32")


def refuse_integers(call: LocalCall, block: Any) -> None:
    """An error, on ranks without elements too, for operators that one device has for floating-point numbers only."""
    if not block.is_floating_point():
        raise TypeError(
            f"{_platform.get_op_name(call.func)} of a distributed tensor of global shape {call.input_shapes[0]} under "
            f"{call.inputs[0]} is for floating-point numbers, not for {_platform.dtype_name(block.dtype)}: convert it"
        )
