"""A lowered call compared with dispatch on the values of the moment: outputs, and the gradients of all inputs.

Dispatch is the truth, and its results are the call's. Both draw the same random numbers.

Note [Ranks that compare together]
The comparison communicates as the call and its backward do, once more. So all ranks that share a mesh in the call must
compare, or none. They come here at the same call, since every call counts, however it runs. Whether a rank has a
program for its call is its own affair, though: it may see another local shape, or have refused. So they ask each other
first, and if a rank has none nobody compares; and behind the comparison, so that all raise or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.comm_recorder import attributed
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.random import random_state
from hyper_parallel.core.lowering.guards import Inputs
from hyper_parallel.core.lowering.program import Program
from hyper_parallel.platform import get_platform

if TYPE_CHECKING:
    from hyper_parallel.core.lowering.region import Region

_platform = get_platform()

TOLERANCE = {"local": 0.0, "inductor": 1e-5}  # relative to the largest value; wider for half precision


class LoweringMismatch(RuntimeError):
    """A lowered call gave other values than dispatch."""


def meshes_of(tensors: Iterable[Any], values: Any) -> list[DeviceMesh]:
    """The meshes of the distributed tensors among parameters and nested arguments, in their order."""
    found = dict.fromkeys(one._layout.mesh for one in (*tensors, *_tensors(values)) if isinstance(one, DTensor))
    return [mesh for mesh in found if mesh.size() > 1 and mesh.get_coordinate() is not None]


def all_agree(meshes: list[DeviceMesh], mine: bool) -> bool:
    """Whether ``mine`` is true on every rank of these meshes; see Note [Ranks that compare together]."""
    for mesh in meshes if len(meshes) < 2 else (*meshes, *meshes[:-1]):  # what the last one says reaches the first
        answer = _platform.index_tensor([[int(mine)]], mesh.device_type)
        group = mesh.get_group(tuple(range(mesh.ndim)))
        answer = attributed("lowering: ranks agree on a comparison", _platform.all_reduce, answer, group, False, "min")
        mine = bool(answer.tolist()[0][0])
    return mine


def run_verified(
    region: Region, program: Program, inputs: Inputs, dispatch: Callable[[], Any], meshes: list[DeviceMesh]
) -> Any:
    """The results of dispatch, after the program's were found equal; :class:`LoweringMismatch` where they are not."""
    if not _platform.saves_otherwise():
        return _compared(region, program, inputs, dispatch, meshes)
    states = _draw_states()
    with _platform.saving_as_ever():  # recomputation counts what is saved: what one call saves, and no more
        _compared(region, program, inputs, dispatch, meshes)
    _set_draw_states(states)
    region.note_dispatch(inputs)
    return dispatch()


def _draw_states() -> tuple[Any, Any]:
    return random_state.get_whole_state(), _platform.get_draw_state()


def _set_draw_states(states: tuple[Any, Any]) -> None:
    random_state.set_whole_state(states[0])
    _platform.set_draw_state(states[1])


def _compared(
    region: Region, program: Program, inputs: Inputs, dispatch: Callable[[], Any], meshes: list[DeviceMesh]
) -> Any:
    states = _draw_states()
    lowered = program(inputs.tensors)
    _set_draw_states(states)
    truth = dispatch()
    limit = max(TOLERANCE[program.backend], _platform.repeatability())
    is_alike = _shape(lowered) == _shape(truth)
    pairs = [("output", *pair) for pair in zip(_tensors(lowered), _tensors(truth), strict=True)] if is_alike else []
    if is_alike and _platform.is_recording():
        wanted = [
            (name, one) for name, one in zip(inputs.names, inputs.tensors, strict=True) if _platform.needs_grad(one)
        ]
        grads = [
            _platform.gradients_of_sum(_tensors(one), [tensor for _, tensor in wanted]) for one in (lowered, truth)
        ]
        pairs += [(f"gradient of {name}", *pair) for (name, _), *pair in zip(wanted, *grads, strict=True)]
    worst = None if is_alike else "output: the recorded program gives other values besides tensors than dispatch"
    for what, one, other in pairs:
        difference = _platform.relative_difference(one, other)
        if difference > limit * _platform.rounding(other):
            worst = f"{what}: the recorded program differs from dispatch by {difference:.3g} relative"
            break
    if not all_agree(meshes, worst is None):
        worst = worst or "the recorded program of another rank differs from dispatch"
        raise LoweringMismatch(
            f"lower: {region.path or 'the model'}, {worst}. "
            "It depends on something that no guard sees (a global, an object's state): make it an argument, or do not "
            "lower this module"
        )
    return truth


def _shape(value: Any) -> Any:
    """How outputs are nested, with the values among them that are no tensors."""
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_shape, value))
    if isinstance(value, dict):
        return (type(value), *value, *map(_shape, value.values()))
    return _platform.needs_grad(value) if _platform.is_tensor(value) else (type(value), value)


def _tensors(value: Any) -> list[Any]:
    if _platform.is_tensor(value):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    return []
