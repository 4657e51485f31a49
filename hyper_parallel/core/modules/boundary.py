"""Where a parallel module begins and ends: plain tensors become distributed ones, and plain again behind it.

Note [One edge for q, k and v]
Plain code hands one tensor to three projections, and each makes a distributed tensor of it. If these were three, the
gradients would be summed over the ranks three times. So a computed tensor remembers what was made of it, by layout,
until it is written to; and a plain tensor that left a module remembers the distributed one it was, so that its gather
and a sum behind it become one reduce-scatter. A leaf does not remember: it would be kept alive by its own edge.

Note [Lengths of blocks]
A plain block does not tell how long the whole is, and a rank cannot guess by itself: the others might guess otherwise
and wait for each other in different collectives. So where the module does not know the length (a linear layer knows its
inputs), blocks are taken to be equal, and the ranks compare their sizes behind the program's back. Uneven blocks stay
distributed: ``use_local_output=False``.

Note [Values on a wider mesh]
A boundary on ``mesh["tp"]`` takes values on ``mesh`` too: it moves them along ``tp`` and leaves the other axes alone. A
value that is sharded on another axis does not leave as a plain block: nothing would tell the next module of that axis,
and code in between would compute with a part of the batch or the sequence as if it were the whole.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.autograd_edges import FromLocal
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh_axes import axes_within, on_axes, replicated_elsewhere, widened
from hyper_parallel.core.dtensor.placement_types import Partial
from hyper_parallel.core.modules.module_parameters import compute_mesh
from hyper_parallel.core.modules.plain_parameters import refuse_sharded_uses
from hyper_parallel.platform import get_platform

_platform = get_platform()

Spelling = tuple[Any, ...]  # one placement per mesh axis, or one alias per tensor dim

MEMORY = "_hyper_parallel_wrapped"
_MAX_TAKEN = 4096


class InputBoundary:
    """A value on its way into a module: taken to lie under ``given`` when it is plain, moved to ``wanted``.

    Both are about the axes of ``mesh``; see Note [Values on a wider mesh]. Without ``given`` a plain value stays plain;
    without ``wanted`` a value stays where it lies.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        given: Spelling | None,
        wanted: Spelling | None,
        where: str,
        lengths: dict[int, int] | None = None,
    ) -> None:
        self.mesh, self.given, self.wanted, self.where = mesh, given, wanted, where
        self.plain_mesh = compute_mesh(mesh)  # on which plain values lie
        self.lengths = lengths or {}  # dim -> length of the whole, where the module knows it
        self._layouts: dict[tuple[Any, int], Layout] = {}
        self._targets: dict[Layout, Layout] = {}
        self._taken: set[tuple[Layout, tuple[int, ...], Any]] = set()
        self._is_checked = False

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, DTensor):
            if self.given is None or not _platform.is_tensor(value):
                return value
            value = self._wrap(value)
        target = self._target(value._layout)
        return value if value._layout is target else value.redistribute(target.mesh, target)

    def _target(self, layout: Layout) -> Layout:
        """Where a value under ``layout`` is moved to."""
        target = self._targets.get(layout)
        if target is not None:
            return target
        if axes_within(self.mesh, layout.mesh) is None:
            raise ValueError(
                f"{self.where}: the input is on {layout.mesh}, but the module was parallelized on {self.mesh}; "
                "redistribute it, or parallelize both on one mesh"
            )
        target = layout if self.wanted is None else on_axes(layout, self._layout(self.wanted, layout.ndim))
        if len(self._targets) >= _MAX_TAKEN:
            self._targets.clear()
        self._targets[layout] = target
        return target

    def _layout(self, placements: Spelling, ndim: int) -> Layout:
        try:
            return self._layouts[placements, ndim]
        except KeyError:
            pass
        try:
            layout = Layout.resolve(self.mesh, placements, ndim)
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from None
        self._layouts[placements, ndim] = layout
        return layout

    def _wrap(self, plain: Any) -> DTensor:
        assert self.given is not None
        layout = widened(self._layout(self.given, plain.ndim), self.plain_mesh)
        memory = getattr(plain, MEMORY, None)
        if memory is not None:
            remembered, version = memory.get(layout, (None, None))
            if remembered is not None and version == _written(plain):
                return remembered
        needs_grad = _platform.needs_grad(plain)
        if needs_grad and not self._is_checked and not layout.is_replicated:
            refuse_sharded_uses(plain, layout, self.where)
            self._is_checked = True
        shape = self._global_shape(plain, layout)
        if shape is None:
            return DTensor.from_local(plain, self.plain_mesh, layout)
        if not needs_grad or _platform.is_leaf(plain):
            return self._from_local(plain, layout, shape)
        self._check_block(plain, layout, shape)
        lawful = layout.gradient()
        wrapped = _platform.as_dtensor(DTensor, FromLocal.apply(plain, lawful, lawful, shape), layout, shape)
        remember_wrapped(plain, layout, wrapped)
        return wrapped

    def _from_local(self, plain: Any, layout: Layout, shape: tuple[int, ...]) -> DTensor:
        """:meth:`DTensor.from_local`, which checks; what it has taken once is not checked again."""
        known = (layout, shape, plain.shape)
        if known in self._taken and _platform.is_dense_tensor(plain):
            return _platform.as_dtensor(DTensor, _platform.alias(plain), layout, shape)
        made = DTensor.from_local(plain, self.plain_mesh, layout, shape=shape)
        if self.plain_mesh.get_coordinate() is not None:
            if len(self._taken) >= _MAX_TAKEN:
                self._taken.clear()
            self._taken.add(known)
        return made

    def _global_shape(self, plain: Any, layout: Layout) -> tuple[int, ...] | None:
        """The shape of the whole; None when it is not known."""
        if layout.is_replicated:
            return tuple(plain.shape)
        shape = list(plain.shape)
        for dim, axes in enumerate(layout.shard_axes):
            if axes:
                length = self.lengths.get(dim - layout.ndim)
                if length is None:
                    return None
                shape[dim] = length
        return tuple(shape)

    def _check_block(self, plain: Any, layout: Layout, shape: tuple[int, ...]) -> None:
        expected = layout.local_shape(shape)
        if tuple(plain.shape) != expected:
            raise ValueError(
                f"{self.where}: a tensor of shape {shape} under {layout} has a local tensor of shape {expected} on "
                f"rank {self.mesh.get_rank()}, got a plain tensor of shape {tuple(plain.shape)}"
            )


class OutputBoundary:
    """A value on its way out of a module: moved to ``wanted`` (None: as it lies), and plain if ``local``."""

    def __init__(self, mesh: DeviceMesh, wanted: Spelling | None, local: bool, where: str) -> None:
        self.local = local
        self.keeps_partial = wanted is None or any(isinstance(one, Partial) for one in wanted)
        self.move = InputBoundary(mesh, None, wanted, where)

    def __call__(self, value: Any) -> Any:
        value = self.move(value)
        return self.plain(value) if self.local and isinstance(value, DTensor) else value

    def plain(self, value: DTensor) -> Any:
        """This rank's block; see Note [Values on a wider mesh]."""
        if not replicated_elsewhere(value._layout, self.move.mesh):
            raise ValueError(
                f"{self.move.where}: its output lies under {value._layout}, and as a plain local tensor it would lose "
                f"what is not on the axes of {self.move.mesh}; keep it distributed with use_local_output=False"
            )
        return to_plain_local(value)


def _written(plain: Any) -> tuple[int, int]:
    """What changes when a tensor is written to, or given other memory, where the framework counts writes."""
    version = getattr(plain, "_version", None)
    return (0, 0) if version is None else (version, plain.data_ptr())


def remembered_by(plain: Any) -> dict[Layout, DTensor]:
    """What a plain tensor was or what was made of it, by layout, as long as nobody wrote to it."""
    memory = getattr(plain, MEMORY, None)
    if memory is None:
        return {}
    written = _written(plain)
    return {layout: wrapped for layout, (wrapped, version) in memory.items() if version == written}


def remember_wrapped(plain: Any, layout: Layout, wrapped: DTensor) -> None:
    """Let a plain tensor remember that ``wrapped`` is what it is under ``layout``."""
    memory = getattr(plain, MEMORY, None)
    if memory is None:
        memory = {}
        setattr(plain, MEMORY, memory)
    memory[layout] = (wrapped, _written(plain))


def to_plain_local(value: DTensor) -> Any:
    """This rank's block as a plain tensor that remembers what it was."""
    plain = value.to_local()
    if _platform.needs_grad(plain) and not value.is_leaf:
        remember_wrapped(plain, value._layout, value)
    return plain
