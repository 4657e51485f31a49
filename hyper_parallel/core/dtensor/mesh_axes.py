"""Some axes of a mesh: a layout on a part of a mesh, and what it says about a layout on the whole.

Note [Axes that nobody mentions]
Who acts on ``mesh["tp"]`` says nothing about the other axes of ``mesh``. Where it changes the layout of a tensor on the
whole mesh, these stay as they are; where it makes a tensor there, it is replicated on them.
"""

from __future__ import annotations

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.later_reduction import reduced_later
from hyper_parallel.core.dtensor.layout import Layout


def axes_within(part: DeviceMesh, mesh: DeviceMesh) -> tuple[int, ...] | None:
    """Where the axes of ``part`` are among those of ``mesh``; None unless ``part`` is made of axes of it.

    >>> from hyper_parallel import init_device_mesh
    >>> mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"), init_backend=False)
    >>> axes_within(mesh["tp"], mesh), axes_within(mesh["dp", "tp"], mesh), axes_within(mesh, mesh["tp"])
    ((2,), (0, 2), None)
    """
    if part is mesh or part == mesh:
        return tuple(range(mesh.ndim))
    names, known = part.mesh_dim_names, mesh.mesh_dim_names
    if names is None or known is None or not set(names) <= set(known) or mesh[names] != part:
        return None
    return tuple(known.index(name) for name in names)


def on_axes(layout: Layout, part: Layout) -> Layout:
    """``layout`` with what ``part`` says about the axes of its mesh; other axes as they are.

    A dim that both shard is sharded by the other axes first.

    >>> from hyper_parallel import init_device_mesh
    >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"), init_backend=False)
    >>> on_axes(
    ...     Layout.from_aliases(mesh, ("None", "cp", "tp")), Layout.from_aliases(mesh["tp"], ("None", "tp", "None"))
    ... )
    Layout(mesh (cp=2, tp=2), dims [-, cp*tp, -])
    """
    axes = axes_within(part.mesh, layout.mesh)
    if axes is None:
        raise ValueError(f"{part.mesh} is not made of axes of {layout.mesh}")
    wanted = tuple(tuple(axes[axis] for axis in inner) for inner in part.shard_axes)
    held = tuple(tuple(axis for axis in outer if axis in axes) for outer in layout.shard_axes)
    partials = list(layout.partials)
    for axis, op in zip(axes, part.partials, strict=True):
        partials[axis] = op
    later = [axis for axis in layout.reduced_later if axis not in axes]
    if held == wanted:
        return reduced_later(layout.with_partials(partials), later)
    kept = (tuple(axis for axis in outer if axis not in axes) for outer in layout.shard_axes)
    dims = [one + other for one, other in zip(kept, wanted, strict=True)]
    return reduced_later(Layout.of(layout.mesh, dims, partials), later)


def replicated_on(layout: Layout, part: DeviceMesh) -> Layout:
    """``layout`` with the axes of ``part`` replicated; other axes as they are."""
    return on_axes(layout, Layout.of(part, ((),) * layout.ndim))


def widened(layout: Layout, mesh: DeviceMesh) -> Layout:
    """``layout``, of a tensor on some axes of ``mesh``, on all of them: replicated on the others."""
    return layout if layout.mesh == mesh else on_axes(Layout.of(mesh, ((),) * layout.ndim), layout)


def replicated_elsewhere(layout: Layout, part: DeviceMesh) -> bool:
    """Whether every rank along the axes that ``part`` has not holds the same."""
    axes = axes_within(part, layout.mesh)
    others = [axis for axis in range(layout.mesh.ndim) if axes is None or axis not in axes]
    sharding = {axis for inner in layout.shard_axes for axis in inner}
    return not any(layout.mesh.shape[axis] > 1 and (axis in sharding or layout.partials[axis]) for axis in others)
