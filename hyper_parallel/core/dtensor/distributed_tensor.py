"""DTensor: a tensor of the framework that knows its layout and its global shape.

Note [What a DTensor carries]
Always ``_layout`` and ``_global_shape``, on MindSpore also ``_local`` and ``_num_writes``. A computed one may remember
edges of the graph, ``_edges`` and ``_gathered_from``. The special kinds have ``_handle`` (in flight), ``_source`` (a
copied view), or ``_widths``, ``_parts`` and ``_in_order`` (fused output). Who sets and reads each, when it goes, and
what plain tensors carry: ``docs/architecture.md``; a test compares that list with the code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.dtensor.autograd_edges import (
    EmptyOutsideMesh,
    FromLocal,
    ToLocal,
    begun_later,
    redistribute_with_grad,
)
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.meshes.mesh_context import get_current_mesh
from hyper_parallel.core.dtensor.placement_types import Placement
from hyper_parallel.core.dtensor.shard_sizes import check_later, finish_checks, gather_global_shape, join_check
from hyper_parallel.core.dtensor.skip_dispatch import is_skipped, skipping
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.framework_of import kind_of

_platform = get_platform()


class DTensor(_platform.DTensorBase):  # type: ignore[name-defined]
    """A tensor of which every rank of a mesh holds a block.

    ``DTensor(local, mesh, placements)`` is :meth:`from_local`. ``placements`` is one placement per mesh axis,
    ``[Shard(0), Replicate()]``, or one alias per tensor dim, ``("dp", "None")``, ``(("dp", "tp"), "None")``.
    """

    def __new__(
        cls, local_tensor: Any, device_mesh: DeviceMesh | None = None, placements: Any = None, *, shape: Any = None
    ) -> DTensor:
        if cls is not DTensor and isinstance(local_tensor, DTensor):  # a framework's parameter of a distributed tensor
            return _platform.as_dtensor(
                cls, local_tensor._completed(), local_tensor._layout, local_tensor._global_shape
            )
        return cls.from_local(local_tensor, device_mesh, placements, shape=shape)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    # ---------------------------------------------------------------- what it is

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh it lies on."""
        return self._layout.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return self._layout.placements

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's block."""
        return tuple(_platform.detached(self).shape)

    def size(self, dim: int | None = None) -> Any:
        """The global shape, or the global size of ``dim``."""
        return self._global_shape if dim is None else self._global_shape[dim]

    def numel(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self._global_shape)

    nelement = numel

    def __repr__(self) -> str:
        values = repr(_platform.detached(self._completed()))
        return f"DTensor(shape={tuple(self._global_shape)}, {self._layout}, local={values})"

    def __len__(self) -> int:
        if not self._global_shape:
            raise TypeError("len() of a 0-d tensor")
        return self._global_shape[0]

    # ---------------------------------------------------------------- edges to plain tensors

    @staticmethod
    def from_local(
        local_tensor: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Any = None,
        *,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        run_check: bool = False,
        grad_placements: Any = None,
    ) -> DTensor:
        """The DTensor whose block on this rank is ``local_tensor``. Placements default to ``Replicate()`` on every
        axis.

        Without ``shape`` blocks are taken to be equal on all ranks; sizes that differ are found out at the first
        communication and raise. Uneven blocks need ``shape``, or ``run_check=True``, which asks all ranks for their
        sizes (and, where the value should be equal, compares the values). ``stride`` is accepted for symmetry with
        torch and describes nothing here: a block has its own strides. ``grad_placements`` is the layout in which the
        gradient is handed to ``local_tensor``, the law's by default: cut as the value is, whole where it is whole or
        pending.
        """
        del stride
        if not _platform.is_tensor(local_tensor) or isinstance(local_tensor, DTensor):
            raise TypeError(f"from_local takes this rank's local tensor as a plain tensor, got {kind_of(local_tensor)}")
        if not _platform.is_dense_tensor(local_tensor):
            raise TypeError("from_local cannot take a sparse or nested tensor; use to_dense() or to_padded_tensor()")
        mesh = resolve_mesh(device_mesh, "from_local")
        try:
            layout = resolve_layout(mesh, placements, local_tensor.ndim)
        except ValueError as error:
            if shape is None:
                join_check(local_tensor, mesh, run_check)
            raise ValueError(
                f"from_local: the local tensor of shape {tuple(local_tensor.shape)} on rank {mesh.get_rank()}: {error}"
            ) from None
        inside = mesh.get_coordinate() is not None
        if shape is not None:
            global_shape = tuple(int(size) for size in shape)
            if len(global_shape) != layout.ndim:
                raise ValueError(
                    f"from_local: shape={global_shape} has {len(global_shape)} dims, but the local tensor on rank "
                    f"{mesh.get_rank()} has {layout.ndim}: {tuple(local_tensor.shape)}"
                )
            expected = layout.local_shape(global_shape) if inside else tuple(local_tensor.shape)
            if tuple(local_tensor.shape) != expected:
                raise ValueError(
                    f"from_local: a tensor of shape {global_shape} under {layout} has a local tensor of shape "
                    f"{expected} on rank {mesh.get_rank()}, got {tuple(local_tensor.shape)}"
                )
        elif run_check:
            global_shape = gather_global_shape(local_tensor, layout)
        else:
            global_shape = _even_global_shape(local_tensor, layout)
            check_later(local_tensor, layout)
        if not inside:
            local_tensor = EmptyOutsideMesh.apply(local_tensor)
        if grad_placements is not None and _platform.needs_grad(local_tensor):
            wanted = _gradient_layout("from_local", layout, grad_placements, global_shape)
            block = FromLocal.apply(local_tensor, layout.gradient(), wanted, global_shape)
        else:
            block = _platform.alias(local_tensor)
        return _platform.as_dtensor(DTensor, block, layout, global_shape)

    def to_local(self, *, grad_placements: Any = None) -> Any:
        """This rank's block as a plain tensor: the same memory, connected for gradients.

        ``grad_placements`` is the layout in which the block's gradient arrives, the law's by default. Say
        ``grad_placements=[Partial()]`` for a replicated value of which every rank uses a different part.
        """
        tensor = self._completed()
        if grad_placements is None and self._layout.reduced_later:
            grad_placements = self._layout.reduced()
        if grad_placements is None or not _platform.needs_grad(tensor):
            return _platform.local_alias(tensor)
        arriving = _gradient_layout("to_local", self._layout, grad_placements, tuple(self._global_shape))
        return _platform.without_interception(
            ToLocal.apply, tensor, arriving, self._layout.gradient(), tuple(self._global_shape)
        )

    def full_tensor(self, *, grad_placements: Any = None) -> Any:
        """The whole value on every rank, as a plain tensor."""
        finish_checks()
        whole = self.redistribute(self.device_mesh, self._layout.replicated())
        return whole.to_local(grad_placements=grad_placements)

    # ---------------------------------------------------------------- moving

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Any = None, *, async_op: bool = False
    ) -> DTensor:
        """The same value under another layout (without ``placements``: whole on every rank), on this mesh or another.

        forward: the planned collectives (see :func:`hyper_parallel.explain`); backward: the same between the gradients'
        layouts. ``async_op`` returns at once: the result completes itself when it is first used, or at ``wait()``.
        """
        tensor = self._completed()
        mesh = self.device_mesh if device_mesh is None else resolve_mesh(device_mesh, "redistribute")
        shape = tuple(self._global_shape)
        target = resolve_layout(mesh, placements, len(shape))
        if target is self._layout:
            return self
        in_flight = begun_later() if async_op else None
        block = redistribute_with_grad(tensor, self._layout, target, shape, in_flight)
        if not in_flight:
            moved = _platform.as_dtensor(DTensor, block, target, self._global_shape)
            if (
                _platform.needs_grad(tensor)
                and mesh == self.device_mesh
                and not (self._layout.has_partial or target.has_partial)
            ):
                moved._gathered_from = (tensor, moved._version)  # for the operators: input_edges.py
            return moved
        pending = _platform.as_dtensor(PendingDTensor, block, target, self._global_shape)
        pending._handle = in_flight[0]
        return pending

    def reduce_partial(self) -> DTensor:
        """Pending reductions done, nothing else changed."""
        return self.redistribute(self.device_mesh, self._layout.reduced())

    @classmethod
    def _hand_on(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator on arguments that this kind of tensor has dealt with: another kind may have to look too."""
        types = [DTensor if kind is cls else kind for kind in types]
        for kind in types:
            if issubclass(kind, DTensor) and kind is not DTensor:
                return kind._on_operator(func, types, args, kwargs)
        return DTensor._on_operator(func, types, args, kwargs)

    def _completed(self) -> DTensor:
        """This tensor, with a transfer that is in flight finished: an ordinary DTensor."""
        return self

    def wait(self) -> DTensor:
        """Complete a redistribution in flight; the tensor itself."""
        return self._completed()

    # ---------------------------------------------------------------- conversions that keep the layout

    def detach(self) -> Any:
        """The same memory without gradient history; the layout stays.

        A method and not an operator: hooks of saved tensors (checkpointing) call it inside of operators, where nothing
        is intercepted, and compare the shapes of what they get with those of the DTensors that they were given.
        """
        tensor = self._completed()
        plain = _platform.detached(tensor)
        if skipping.exceptions and is_skipped("detach"):
            return plain
        return _platform.as_dtensor(DTensor, plain, tensor._layout, tensor._global_shape)

    def to(self, *args: Any, **kwargs: Any) -> DTensor:
        """Another dtype or device; the layout stays, but a reduction that the cast would change is done before."""
        return _platform.convert(self._completed(), *args, **kwargs)

    def cpu(self, *args: Any, **kwargs: Any) -> DTensor:
        """On the host; the layout stays."""
        return self.to("cpu", *args, **kwargs)

    def float(self, *args: Any, **kwargs: Any) -> DTensor:
        """In float32; the layout stays."""
        return self.to(_platform.str_to_dtype("float32"), *args, **kwargs)


class PendingDTensor(DTensor):
    """A redistribution in flight. Its first use, or ``wait()``, completes it and makes it an ordinary DTensor."""

    _handle: Any

    @classmethod
    def _on_operator(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        complete_all((args, kwargs))
        return cls._hand_on(func, types, args, kwargs)

    def _completed(self) -> DTensor:
        if isinstance(self, PendingDTensor):
            _platform.replace_block(self, self._handle.wait())
            del self._handle
            self.__class__ = DTensor
        return self

    # What reaches the memory without passing through an operator.

    @property
    def data(self) -> Any:
        """The same memory without gradient history, complete."""
        return self._completed().data

    @data.setter
    def data(self, value: Any) -> None:
        self._completed().data = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._completed().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._completed().__reduce_ex__(protocol)


def complete_all(tree: Any) -> None:
    """Complete all tensors among the arguments of an operator."""
    if isinstance(tree, DTensor):
        tree._completed()
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            complete_all(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            complete_all(item)


def resolve_mesh(device_mesh: DeviceMesh | None, where: str) -> DeviceMesh:
    """The mesh that was given, or the current one; ``where`` names the caller in the error."""
    mesh = device_mesh if device_mesh is not None else get_current_mesh()
    if mesh is None:
        raise ValueError(f"{where} needs a mesh: pass device_mesh=, or call it inside 'with mesh:'")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{where}: device_mesh must be a hyper_parallel DeviceMesh, got {type(mesh).__name__}")
    return mesh


def resolve_layout(mesh: DeviceMesh, placements: Any, ndim: int) -> Layout:
    """The layout meant by either spelling; None means whole on every rank."""
    if placements is None:
        return Layout.of(mesh, ((),) * ndim)
    return Layout.resolve(mesh, placements, ndim)


def _gradient_layout(where: str, layout: Layout, placements: Any, shape: tuple[int, ...]) -> Layout:
    """The layout that was asked for the gradient of a block under ``layout``: its blocks must have the same shapes."""
    wanted = Layout.resolve(layout.mesh, placements, len(shape))
    if wanted.shard_axes != layout.shard_axes:
        raise ValueError(
            f"{where}: grad_placements {list(wanted.placements)} shard otherwise than the value, which has "
            f"{list(layout.placements)}: the gradient of a local tensor has its shape, so only Replicate and Partial "
            "may differ"
        )
    return wanted


def _even_global_shape(local_tensor: Any, layout: Layout) -> tuple[int, ...]:
    sizes = layout.mesh.shape
    return tuple(
        size * math.prod(sizes[axis] for axis in axes)
        for size, axes in zip(local_tensor.shape, layout.shard_axes, strict=True)
    )


def rebuild_dtensor(local: Any, layout: dict[str, Any], shape: Any, requires_grad: bool, is_param: bool) -> DTensor:
    """A DTensor from its pickled parts; the mesh comes by description, so no process group is needed."""
    made = _platform.as_dtensor(DTensor, local, Layout.from_dict(layout), shape)
    if is_param:
        return _platform.as_parameter(made, requires_grad)
    made.requires_grad = requires_grad
    return made


_platform.set_rebuilder(rebuild_dtensor)
_platform.load_operators()
