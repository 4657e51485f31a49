"""How experts and tokens that lie in some layouts come together: chosen for each call, from layouts and sizes alone.

Note [Five ways]
----------------
On each axis of the mesh of the experts tokens may be sharded, replicated, or *own*: the tokens are not distributed over
it, and every rank has rows of its own there, as of a batch.

| tokens       | experts      | way                                                     | forward sends            |
|--------------|--------------|---------------------------------------------------------|--------------------------|
| sharded, own | replicated   | local; the weights' gradients are summed over the axis  | nothing                  |
| sharded, own | ``Shard(0)`` | dispatch, local experts, combine                        | 2 (n-1)/n T k            |
| replicated   | ``Shard(0)`` | local experts on their tokens, a partial sum            | later, 2 (n-1)/n T       |
| replicated   | ``Shard(0)`` | a slice of tokens, dispatch, combine; rows stay sharded | 2 (n-1)/n T k / n        |
| replicated   | features     | a part of every expert's inner features, a partial sum  | later, 2 (n-1)/n T       |

Rows that a rank sends, for its T tokens with k choices each, on n ranks. Of the two ways for replicated tokens the
slice is chosen where it sends less, with the gather of its rows that may follow, (n-1)/n T: where k < n / 2.
Replicated tokens are sliced too where experts are replicated and their gradients are reduced later anyway (context
parallelism): it costs nothing, and no rank computes what another does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.later_reduction import reduced_later
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh_axes import axes_within
from hyper_parallel.core.expert_parallel.expert_weights import ExpertWeights

__all__ = ["WAYS", "Way", "choose_way"]

WAYS = ("auto", "dispatch", "partial")


@dataclass(frozen=True)
class Way:
    """What one call does. Axes are those of the experts' mesh, but for ``tokens`` and ``result``."""

    tokens: Layout | None  # under which tokens go in; None: plain
    result: Layout | None
    dispatch: tuple[int, ...]  # axes over which rows travel
    partial: tuple[int, ...]  # axes along which each rank computes its experts' or features' part of every row
    features: tuple[int, ...]  # those of them that cut features
    varying: frozenset[int]
    entering: tuple[int, ...]  # axes of the tokens' mesh over which their gradients are summed
    experts: Layout  # of (experts, inner features)

    @property
    def name(self) -> str:
        """For who asks."""
        if self.dispatch:
            return "dispatch and combine"
        if self.features:
            return "sharded features, a partial sum"
        return "local experts, a partial sum" if self.partial else "local"


def choose_way(tokens: Any, num_choices: int, of: ExpertWeights, wanted: str) -> Way:
    """See Note [Five ways]. ``tokens`` is the layout of (tokens, features), None of plain ones."""
    down = of.down._layout
    mesh: DeviceMesh = down.mesh
    inner = 1 if of.is_transposed else 2
    experts = _larger(mesh, down.shard_axes[0])
    features = _larger(mesh, down.shard_axes[inner])
    places = () if tokens is None else axes_within(tokens.mesh, mesh)
    if places is None:
        raise ValueError(
            f"experts: tokens lie on {tokens.mesh}, which is not made of axes of {mesh}, where the experts lie; cut "
            'both out of one mesh, as in mesh["cp", "tp"] and mesh["ep", "cp", "tp"]'
        )
    own = [axis for axis in range(mesh.ndim) if axis not in places and mesh.shape[axis] > 1]
    if set(own) & set(features):
        names = [str(mesh.axis_label(axis)) for axis in own if axis in features]
        raise ValueError(
            f"experts: their features are sharded over {', '.join(names)}, where every rank has tokens of its own; "
            "distribute the tokens over that axis, or shard by expert, Shard(0)"
        )
    _check_features(of, features)
    rows = [places[axis] for axis in tokens.shard_axes[0]] if tokens is not None else []
    rows = [axis for axis in rows if axis not in features and mesh.shape[axis] > 1]
    replicated = [axis for axis in experts if axis not in rows and axis not in own]
    slices = _slices(replicated, experts, num_choices, mesh, wanted)
    if slices:
        rows += replicated
    later = down.reduced_later if tokens is not None else ()
    rows += [axis for axis in later if axis not in (*rows, *own, *experts, *features)]
    dispatch = experts if slices or not replicated else ()
    partial = (*features, *(() if dispatch else experts))
    varying = frozenset((*rows, *own, *experts, *features))
    wanted_tokens = result = None
    entering: tuple[int, ...] = ()
    if tokens is not None:
        at = {axis: place for place, axis in enumerate(places)}
        wanted_tokens = Layout.of(tokens.mesh, (tuple(at[axis] for axis in rows), ()))
        entering = tuple(sorted(at[axis] for axis in partial))
        sums = ["sum" if axis in entering else None for axis in range(tokens.mesh.ndim)]
        result = wanted_tokens.with_partials(sums)
    layout = Layout.of(mesh, (experts, features))
    return Way(wanted_tokens, result, dispatch, partial, features, varying, entering, layout)


def _larger(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def _slices(replicated: list[int], experts: tuple[int, ...], num_choices: int, mesh: DeviceMesh, wanted: str) -> bool:
    """Whether replicated tokens are sliced and sent; if rows travel over some axes, they do over all."""
    if wanted not in WAYS:
        raise ValueError(f"experts: way={wanted!r} is none of {', '.join(map(repr, WAYS))}")
    if not replicated:
        return False
    if len(replicated) < len(experts) or wanted == "dispatch":
        return True
    return wanted == "auto" and 2 * num_choices < math.prod(mesh.shape[axis] for axis in experts)


def _check_features(of: ExpertWeights, features: tuple[int, ...]) -> None:
    """Inner features may be sharded where the activation takes each by itself; gate and up in one tensor it pairs."""
    if not features:
        return
    dim = 2 if of.is_transposed else 1
    inner = int(of.down.shape[1 if of.is_transposed else 2])
    wrong = [tuple(weight.shape) for weight in of.up if int(weight.shape[dim]) != inner]
    if wrong:
        raise ValueError(
            f"experts: inner features are sharded, and up {wrong[0]} has gate and up in one tensor, whose blocks are "
            f"not pairs; give two tensors, up=(gate, up), of {inner} inner features each, or shard by expert, Shard(0)"
        )


def weight_layouts(way: Way, of: ExpertWeights) -> list[Layout]:
    """The layout under which each of ``of.tensors`` goes in, with gradients that are reduced later where they were."""
    experts, features = way.experts.shard_axes
    mesh = way.experts.mesh
    first, second = ((experts, (), features), (experts, features, ()))
    up, down = (first, second) if of.is_transposed else (second, first)
    dims: list[Any] = [up] * len(of.up) + [down]
    dims += [(experts, features)] * len(of.up_bias or ())
    dims += [] if of.down_bias is None else [(experts, ())]
    return [
        reduced_later(Layout.of(mesh, cut), [axis for axis in tensor._layout.reduced_later if axis in way.varying])
        for tensor, cut in zip(of.tensors, dims, strict=True)
    ]
