"""What may meet in one operator: distributed tensors of one mesh, numbers, and plain tensors without dims.

Other plain tensors are an error, unless the program says that they are whole: see :class:`implicit_replication`.

Note [A mesh and a part of it]
A tensor on ``mesh["tp"]`` and one on ``mesh`` meet in two cases. A parameter has the same values along axes that its
layout does not mention, or data parallelism would be wrong anyway: it is taken as replicated there. So is any tensor
under :class:`implicit_replication`, where plain tensors are. Otherwise it is an error: the ranks along the other axes
may have different tensors. That they have is what :class:`samples_differ_beyond` says, and then neither may be.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh_axes import axes_within, widened
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.membership import followed_by_threads

_platform = get_platform()


class MixedTensorsError(RuntimeError):
    """Plain and distributed tensors meet in one operator.

    Not a TypeError: Python's operators would turn that into "unsupported operand type(s)".
    """


class PartialWriteError(RuntimeError):
    """An in-place operator would have to change how the tensor it writes into lies."""


def finish_sum_in_place(tensor: DTensor) -> bool:
    """Do the pending sum of a tensor in its own memory, recorded; not (False) where another tensor shares the memory
    and would still be labelled as pending, nor for a leaf whose gradient is asked for.
    """
    if not _platform.owns_memory(tensor) or (tensor.is_leaf and _platform.needs_grad(tensor)):
        return False
    reduced = tensor.reduce_partial()
    _platform.fill_block(tensor, _platform.local_alias(reduced))
    tensor._layout = reduced._layout
    for remembered in ("_edges", "_gathered_from"):
        tensor.__dict__.pop(remembered, None)
    return True


class OtherSamplesError(MixedTensorsError):
    """A distributed tensor on axes along which ranks have other samples meets tensors of this rank's samples."""

    def __init__(self, tensor: DTensor, axes: list[str], what: str) -> None:
        super().__init__(
            f"{what}, which is distributed over {', '.join(axes)}, meets tensors that are other ones on each rank of "
            "these axes, those of its samples. A parameter is whole inside of the call of the module it is in, and "
            "not elsewhere: call that module itself, as module(x), not its forward or another method, and return from "
            "there what other modules need of it. A penalty on weights belongs into the optimizer (weight_decay)"
        )
        self.tensor, self.axes = tensor, axes


class _Replicating(threading.local):
    def __init__(self) -> None:
        self.depth = 0
        self.alike_on: DeviceMesh | None = None


replicating = followed_by_threads(_Replicating())


class implicit_replication:
    """Inside, a plain tensor that meets a distributed one is taken as whole on every rank, its gradient too; a tensor
    on some axes of a mesh that meets one on all of them, as replicated on the others.

    That is true where all ranks run the same single-device code on the same inputs: masks, positions and tables that a
    model makes for itself. It is the caller's promise; nothing is compared. Holds for its own thread only, and nests.
    """

    def __enter__(self) -> implicit_replication:
        replicating.depth += 1
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        replicating.depth -= 1


@contextmanager
def samples_differ_beyond(mesh: DeviceMesh) -> Iterator[None]:
    """Inside, plain tensors may be alike on the ranks of ``mesh``, and nowhere else: others have other samples."""
    before, replicating.alike_on = replicating.alike_on, mesh
    try:
        yield
    finally:
        replicating.alike_on = before


def _require_alike(tensor: DTensor) -> None:
    """Raise if ranks of the tensor's mesh have different samples."""
    alike, mesh = replicating.alike_on, tensor.device_mesh
    if alike is None or mesh is alike:
        return
    known = alike.mesh_dim_names or ()
    axes = [str(mesh.axis_label(axis)) for axis in range(mesh.ndim) if mesh.shape[axis] > 1]
    beyond = [axis for axis in axes if axis not in known]
    if beyond:
        raise OtherSamplesError(tensor, beyond, f"a tensor of shape {tuple(tensor.shape)}")


class PlainScalarError(RuntimeError):
    """A plain tensor without dims meets a distributed one, and the call is to be made again with it whole.

    Where it needs a gradient each rank would get that from its own block only, and rules count tensors.
    """


def plain_as_replicated(
    args: tuple[Any, ...], kwargs: dict[str, Any], scalars: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with plain tensors as whole DTensors on the mesh of the DTensors among them.

    Those with dims only under :class:`implicit_replication`, those without only where they need a gradient, or all with
    ``scalars``. An error where others have other plain tensors: see :func:`samples_differ_beyond`.
    """
    with_dims, are_others = replicating.depth > 0, replicating.alike_on is not None

    def is_meant(value: Any) -> bool:
        return _platform.is_dense_tensor(value) and (
            with_dims if value.ndim else scalars or _platform.needs_grad(value)
        )

    has_plain, widest = False, None
    stack: list[Any] = [*args, *kwargs.values()]
    while stack:
        value = stack.pop()
        if isinstance(value, DTensor):
            if widest is None or value.device_mesh.ndim > widest.device_mesh.ndim:
                widest = value
        elif isinstance(value, (list, tuple)):
            stack.extend(value)
        elif not has_plain:
            has_plain = is_meant(value) or (are_others and _platform.is_dense_tensor(value) and value.ndim > 0)
    if not has_plain or widest is None:
        return args, kwargs
    _require_alike(widest)
    found = widest.device_mesh

    def replicated(value: Any) -> Any:
        if isinstance(value, DTensor) or not is_meant(value):
            return value
        layout = Layout.of(found, ((),) * value.ndim)
        return _platform.as_dtensor(DTensor, _platform.alias(value), layout, value.shape)

    return _platform.tree_map(replicated, args), _platform.tree_map(replicated, kwargs)


def refuse_plain(name: str, value: Any) -> None:
    """Raise if ``value`` is a plain tensor with dims."""
    if _platform.is_tensor(value) and not _platform.is_dense_tensor(value):
        raise MixedTensorsError(
            f"{name}: a sparse or nested tensor meets a distributed one; make it dense first, with to_dense() or "
            "to_padded_tensor(), and turn it into one with distribute_tensor"
        )
    if _platform.is_tensor(value) and value.ndim > 0:
        raise MixedTensorsError(
            f"{name}: a plain tensor of shape {tuple(value.shape)} meets a distributed one; turn it into one with "
            "distribute_tensor (every rank holds all of it) or DTensor.from_local (it is the local tensor); around "
            "code that makes such tensors itself, the same on every rank: with hyper_parallel.implicit_replication()"
        )


class MixedMeshesError(ValueError):
    """Tensors on different meshes meet in one operator."""


def same_mesh(name: str, mesh: DeviceMesh | None, tensor: DTensor) -> DeviceMesh:
    """The mesh of ``tensor``, which must be ``mesh`` unless that is None."""
    if mesh is not None and tensor.device_mesh is not mesh and tensor.device_mesh != mesh:
        raise MixedMeshesError(
            f"{name}: the tensors are on different meshes, {mesh} and {tensor.device_mesh}; redistribute one of them"
        )
    return tensor.device_mesh


def on_one_mesh(
    args: tuple[Any, ...], kwargs: dict[str, Any], error: MixedMeshesError
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with tensors on a part of a mesh on the whole of it; see Note [A mesh and a part of it].

    ``error`` is what is raised where that may not be.
    """
    found: list[DTensor] = []
    _platform.tree_map(lambda value: found.append(value) if isinstance(value, DTensor) else None, (args, kwargs))
    widest = max(found, key=lambda one: one.device_mesh.ndim)
    mesh = widest.device_mesh
    for tensor in found:
        is_part = tensor.device_mesh != mesh and axes_within(tensor.device_mesh, mesh) is not None
        if tensor.device_mesh != mesh and not (
            is_part and (replicating.depth or isinstance(tensor, _platform.Parameter))
        ):
            hint = "; or, where it is replicated on the other axes: with hyper_parallel.implicit_replication()"
            raise MixedMeshesError(f"{error}{hint if is_part else ''}") from None
    _require_alike(widest)

    def on_mesh(value: Any) -> Any:
        return on_wider_mesh(value, mesh) if isinstance(value, DTensor) else value

    return _platform.tree_map(on_mesh, args), _platform.tree_map(on_mesh, kwargs)


def on_wider_mesh(tensor: DTensor, mesh: DeviceMesh) -> DTensor:
    """A tensor on a part of ``mesh`` on the whole of it, replicated on the other axes; backward: nothing."""
    layout = widened(tensor._layout, mesh)
    if layout is tensor._layout:
        return tensor
    return _platform.as_dtensor(DTensor, tensor.to_local(), layout, tensor._global_shape)


_platform.install_masked_functions(implicit_replication, refuse_plain)
