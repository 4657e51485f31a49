"""Replicated values whose gradients stay partial sums on some axes, for whoever reduces them later.

Note [Who sums]
By the law the gradient of a replicated value is whole: every operator that varies along an axis sums it over the ranks
there, once for each use. A wrapper that reduces the gradients of all its parameters once a step (data parallelism,
fully sharded or not) would reduce them again. So it hands out its values under a layout that is *reduced later* on its
axes: there the gradient is ``Partial``, and stays so through all operators, until it reaches the wrapper. This is the
law's fourth line, and like the others it is a matter of layouts alone:

- Where an operator varies along such an axis, the parts of the gradient are what autograd computes: nothing to do.
- Where it does not, and all its inputs are reduced later, so is its result: each rank's part goes through the same
  derivatives. Casts, transposes, ``1 + weight`` cost nothing.
- Where such a value meets others that are replicated by the law, and nothing varies, the result is whole by the law,
  and so is its gradient: one rank passes it on, the others zeros. Nothing is sent.

A loss that is computed of such values alone is seeded on one rank; ``to_local()`` hands out a whole value.
"""

from __future__ import annotations

from collections.abc import Iterable

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.meshes.rank_grid import Axis


def reduced_later(layout: Layout, axes: str | Iterable[Axis]) -> Layout:
    """``layout``, replicated on ``axes``, with gradients that stay partial sums there; see Note [Who sums].

    For a wrapper that makes the values of parameters itself: the gradient of a block that it labels with this layout
    arrives as its rank's part. Axes of one rank have nothing to sum and are left out.

    >>> from hyper_parallel import init_device_mesh
    >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"), init_backend=False)
    >>> layout = reduced_later(Layout.from_aliases(mesh, ("tp", "None")), "cp")
    >>> layout.placements, layout.gradient().placements
    ((Replicate(), Shard(0)), (Partial(), Shard(0)))
    """
    mesh = layout.mesh
    numbers = {mesh.axis_index(axis) for axis in ([axes] if isinstance(axes, str) else axes)}
    sharding = {axis for inner in layout.shard_axes for axis in inner}
    for axis in sorted(numbers):
        if axis in sharding or layout.partials[axis] is not None:
            raise ValueError(
                f"{layout} is not replicated over {mesh.axis_label(axis)!r}: only the gradient of a replicated value "
                "can be left for a later reduction"
            )
    later = {*layout.reduced_later, *(axis for axis in numbers if mesh.shape[axis] > 1)}
    return Layout._intern(mesh, layout.dim_axes, layout.partials, tuple(sorted(later)))
