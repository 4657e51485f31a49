"""Layout: the one description of where a tensor's data lies.

A layout is a mesh, for each tensor dim the ordered tuple of mesh axes that cut it, and for each axis a pending
reduction or none. Placements per axis and aliases per dim are two spellings of it. Layouts are immutable and interned:
equal means identical, so caches key on identity and nothing is copied.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.placement_types import REDUCE_OPS, Partial, Placement, Replicate, Shard
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.region import Region

Shape = tuple[int, ...]
DimAxes = tuple[tuple[int, ...], ...]
Partials = tuple["str | None", ...]

_interned: weakref.WeakValueDictionary[tuple[Any, ...], Layout] = weakref.WeakValueDictionary()
_intern_lock = threading.Lock()


def chunk_interval(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of block ``index`` when ``size`` elements are cut in ``parts``: the one rule of the library.

    >>> [chunk_interval(5, 4, i) for i in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    block = -(-size // parts)
    start = min(index * block, size)
    return start, min(block, size - start)


class Layout:
    """Where a tensor's data lies on a mesh.

    >>> layout = Layout((2, 2), ("dp", "tp"), init_backend=False)("dp", "None")
    >>> layout.placements
    (Shard(0), Replicate())
    >>> layout.local_shape((5, 3), coordinate=(1, 0))
    (2, 3)
    """

    __slots__ = (
        "__weakref__", "_gradient", "_placed", "_placements", "_regions", "dim_axes", "mesh", "partials", "plans",
        "reduced_later",
    )  # fmt: skip

    _gradient: Layout | None
    _placed: set[Shape]  # what `deciding_region` was asked about
    _placements: tuple[Placement, ...] | None
    _regions: dict[tuple[Shape, Shape], Region]
    mesh: DeviceMesh
    dim_axes: DimAxes | None  # None: a mesh without a tensor yet, to be called with one
    partials: Partials
    reduced_later: tuple[int, ...]  # axes on which the gradient of this replicated value stays partial
    plans: dict[Any, Any]  # what the planner and the dispatcher remember about this layout

    def __new__(
        cls,
        device_matrix: Sequence[int],
        alias_name: Sequence[str],
        rank_list: Sequence[int] | None = None,
        init_backend: bool = True,
    ) -> Layout:
        """A mesh to be called with a tensor's aliases, as HyperParallel 1.0 spells it."""
        mesh = init_device_mesh(
            "cpu" if not init_backend else _device_type(),
            tuple(device_matrix),
            mesh_dim_names=tuple(alias_name),
            rank_list=rank_list,
            init_backend=init_backend,
        )
        return cls.from_device_mesh(mesh)

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> Layout:
        """A layout without a tensor; call it with aliases or placements to get one."""
        return cls._intern(device_mesh, None, (None,) * device_mesh.ndim)

    @classmethod
    def of(cls, mesh: DeviceMesh, dim_axes: Iterable[Iterable[int]], partials: Sequence[str | None] = ()) -> Layout:
        """The layout in which ``dim_axes[d]`` (axis indices, in the order of cutting) cut tensor dim d."""
        shard_axes = tuple(tuple(axes) for axes in dim_axes)
        return cls._intern(mesh, shard_axes, tuple(partials) or (None,) * mesh.ndim)

    @classmethod
    def from_placements(cls, mesh: DeviceMesh, placements: Sequence[Placement], ndim: int) -> Layout:
        """The layout of an ``ndim``-dimensional tensor with one placement per mesh axis."""
        if len(placements) != mesh.ndim:
            raise ValueError(
                f"{len(placements)} placements {list(placements)} for the {mesh.ndim} axes of {mesh}: give one per axis"
            )
        shard_axes: list[list[tuple[int | None, int]]] = [[] for _ in range(ndim)]
        partials: list[str | None] = [None] * mesh.ndim
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                if not -ndim <= placement.dim < ndim:
                    possible = (
                        f"so dim must be in [{-ndim}, {ndim - 1}]" if ndim else "it cannot be sharded; use Replicate()"
                    )
                    raise ValueError(
                        f"{placement} on axis {mesh.axis_label(axis)!r}: the tensor has {ndim} dims, {possible}"
                    )
                shard_axes[placement.dim % ndim].append((placement.order, axis))
            elif isinstance(placement, Partial):
                partials[axis] = placement.reduce_op
            elif not isinstance(placement, Replicate):
                raise TypeError(
                    f"placement {placement!r} on axis {mesh.axis_label(axis)!r}: use Shard(dim), Replicate() or "
                    "Partial(op)"
                )
        return cls._intern(
            mesh, tuple(_in_order(mesh, dim, axes) for dim, axes in enumerate(shard_axes)), tuple(partials)
        )

    @classmethod
    def from_aliases(cls, mesh: DeviceMesh, aliases: Sequence[Any], partials: Sequence[str | None] = ()) -> Layout:
        """The layout with one alias per tensor dim: an axis name, several in the order of cutting, or "None"."""
        shard_axes = []
        for alias in aliases:
            names = alias if isinstance(alias, (tuple, list)) else (alias,)
            shard_axes.append(tuple(mesh.axis_index(name) for name in names if name is not None and name != "None"))
        return cls.of(mesh, shard_axes, partials)

    @classmethod
    def resolve(cls, mesh: DeviceMesh, placements: Any, ndim: int) -> Layout:
        """The layout meant by either spelling, or by a layout itself, for a tensor of ``ndim`` dims."""
        if isinstance(placements, Layout):
            if placements.mesh != mesh:
                raise ValueError(f"{placements} is on another mesh than {mesh}")
            if placements.dim_axes is None or len(placements.dim_axes) != ndim:
                raise ValueError(f"{placements} does not describe a tensor of {ndim} dims")
            return placements
        if isinstance(placements, Placement):
            placements = (placements,)
        if not isinstance(placements, (tuple, list)):
            raise TypeError(f"placements must be a sequence of placements or aliases, got {placements!r}")
        if any(isinstance(item, Placement) for item in placements):
            return cls.from_placements(mesh, placements, ndim)
        if len(placements) != ndim:
            raise ValueError(
                f"{len(placements)} aliases {tuple(placements)} for a tensor of {ndim} dims: give one per dim, "
                '"None" for a dim that is not sharded'
            )
        return cls.from_aliases(mesh, placements)

    @classmethod
    def _intern(
        cls, mesh: DeviceMesh, dim_axes: DimAxes | None, partials: Partials, later: tuple[int, ...] = ()
    ) -> Layout:
        key = (mesh, dim_axes, partials, later)
        layout = _interned.get(key)
        if layout is None:
            _check(mesh, dim_axes, partials)
            with _intern_lock:
                layout = _interned.get(key)
                if layout is None:
                    layout = object.__new__(cls)
                    fields: Any = {"mesh": mesh, "dim_axes": dim_axes, "partials": partials, "reduced_later": later}
                    fields |= {"plans": {}, "_regions": {}, "_placed": set(), "_placements": None, "_gradient": None}
                    for name, value in fields.items():
                        object.__setattr__(layout, name, value)
                    _interned[key] = layout
        return layout

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Layout cannot be changed (setting {name!r}); make a new one")

    def __call__(self, *spelling: Any, ndim: int | None = None) -> Layout:
        """The layout of a tensor on this mesh: aliases per dim, or one sequence of placements with ``ndim``."""
        if len(spelling) == 1 and isinstance(spelling[0], (tuple, list)):
            inner = tuple(spelling[0])
            if inner and all(isinstance(item, Placement) for item in inner):
                spelling = inner
        if spelling and all(isinstance(item, Placement) for item in spelling):
            if ndim is None:
                raise ValueError(f"Layout({list(spelling)}): placements do not tell the tensor's dims; add ndim=")
            return Layout.from_placements(self.mesh, spelling, ndim)
        return Layout.from_aliases(self.mesh, spelling)

    # ---------------------------------------------------------------- the two spellings, and others

    @property
    def ndim(self) -> int:
        """The number of dims of the tensor."""
        return len(self.shard_axes)

    @property
    def shard_axes(self) -> DimAxes:
        """For each tensor dim the mesh axes that shard it, in order."""
        if self.dim_axes is None:
            raise ValueError(f"{self} has no tensor yet; call it with one alias per tensor dim")
        return self.dim_axes

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        placements = self._placements
        if placements is None:
            placements = self._make_placements()
            object.__setattr__(self, "_placements", placements)
        return placements

    def _make_placements(self) -> tuple[Placement, ...]:
        placements: list[Placement] = [Replicate() if op is None else Partial(op) for op in self.partials]
        for dim, axes in enumerate(self.dim_axes or ()):
            in_mesh_order = list(axes) == sorted(axes)
            for order, axis in enumerate(axes):
                placements[axis] = Shard(dim) if in_mesh_order else Shard(dim, order)
        return tuple(placements)

    @property
    def alias_tensor_map(self) -> tuple[Any, ...]:
        """One alias per tensor dim: "None", an axis name, or a tuple of names in the order of cutting."""
        labels = [tuple(self.mesh.axis_label(axis) for axis in axes) for axes in self.shard_axes]
        return tuple("None" if not names else names[0] if len(names) == 1 else names for names in labels)

    @property
    def tensor_map(self) -> tuple[Any, ...]:
        """As :attr:`alias_tensor_map` with axes counted from the right of the mesh shape, -1 for "None"."""
        last = self.mesh.ndim - 1
        return tuple(
            -1 if not axes else last - axes[0] if len(axes) == 1 else tuple(last - axis for axis in axes)
            for axes in self.shard_axes
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` reads back, for files and messages."""
        return {
            "device_type": self.mesh.device_type,
            "mesh_shape": list(self.mesh.shape),
            "mesh_dim_names": list(self.mesh.mesh_dim_names) if self.mesh.mesh_dim_names else None,
            "rank_list": list(self.mesh.rank_list),
            "cuts": None if self.dim_axes is None else [list(axes) for axes in self.dim_axes],
            "partials": list(self.partials),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Layout:
        """The layout that :meth:`to_dict` described; no process group is needed."""
        names = data["mesh_dim_names"]
        mesh = init_device_mesh(
            data["device_type"],
            tuple(data["mesh_shape"]),
            mesh_dim_names=None if names is None else tuple(names),
            rank_list=data["rank_list"],
            init_backend=False,
        )
        shard_axes = data["cuts"]
        return cls._intern(
            mesh, None if shard_axes is None else tuple(tuple(axes) for axes in shard_axes), tuple(data["partials"])
        )

    # ---------------------------------------------------------------- who holds what

    def local_region(self, shape: Sequence[int], coordinate: Sequence[int] | None = None) -> Region:
        """Where the local tensor at ``coordinate`` (this rank's when None) lies in a tensor of ``shape``."""
        if coordinate is None:
            coordinate = self.mesh.get_coordinate()
            if coordinate is None:
                raise RuntimeError(
                    f"rank {self.mesh.get_rank()} is not part of {self.mesh}, so it holds no part of {self}"
                )
        key = (tuple(shape), tuple(coordinate))
        region = self._regions.get(key)
        if region is None:
            region = self._compute_region(*key)
            if len(self._regions) >= 4096:
                self._regions.clear()
            self._regions[key] = region
        return region

    def deciding_region(self, shape: Sequence[int]) -> Region:
        """This rank's region, for code whose shapes follow from where it begins; see ``rank_questions.py``."""
        self._placed.add(tuple(shape))
        return self.local_region(shape)

    def _compute_region(self, shape: Shape, coordinate: Shape) -> Region:
        if len(shape) != self.ndim:
            raise ValueError(f"{self} describes a tensor of {self.ndim} dims, not one of shape {shape}")
        lengths, offsets = [], []
        for size, axes in zip(shape, self.shard_axes, strict=True):
            offset = 0
            for axis in axes:
                start, size = chunk_interval(size, self.mesh.shape[axis], coordinate[axis])
                offset += start
            lengths.append(size)
            offsets.append(offset)
        return Region(tuple(offsets), tuple(lengths))

    def local_shape(self, shape: Sequence[int], coordinate: Sequence[int] | None = None) -> Shape:
        """The shape of the part at ``coordinate`` (this rank's own when None)."""
        return self.local_region(shape, coordinate).sizes

    def local_offset(self, shape: Sequence[int], coordinate: Sequence[int] | None = None) -> Shape:
        """Where the part at ``coordinate`` starts in the global tensor."""
        return self.local_region(shape, coordinate).offsets

    # ---------------------------------------------------------------- relatives

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole value."""
        return not any(self.shard_axes) and not self.has_partial

    @property
    def has_partial(self) -> bool:
        """Whether a reduction is pending on some axis."""
        return any(op is not None for op in self.partials)

    def gradient(self) -> Layout:
        """The layout of the gradient, by the law: cut as the value is, whole where the value is whole or pending."""
        gradient = self._gradient
        if gradient is None:
            later = ["sum" if axis in self.reduced_later else None for axis in range(self.mesh.ndim)]
            gradient = self.reduced() if not self.reduced_later else self.with_partials(later)
            object.__setattr__(self, "_gradient", gradient)
        return gradient

    def reduced(self, pending: bool = True) -> Layout:
        """The same shards of an ordinary value, pending reductions done, or with ``pending=False`` as they are."""
        partials = () if pending else self.partials
        return self if not (self.has_partial and pending) and not self.reduced_later else self.with_partials(partials)

    def replicated(self) -> Layout:
        """The layout of the same tensor whole on every rank."""
        return Layout.of(self.mesh, ((),) * self.ndim)

    def with_partials(self, partials: Sequence[str | None]) -> Layout:
        """The same cuts with other pending reductions."""
        return Layout.of(self.mesh, self.shard_axes, partials)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{self.mesh.axis_label(a)}={n}" for a, n in enumerate(self.mesh.shape))
        if self.dim_axes is None:
            return f"Layout(mesh ({sizes}))"
        return f"Layout(mesh ({sizes}), dims {self.described_dims()})"

    def described_dims(self) -> str:
        """What is said of the dims: ``[dp, -]``, ``[-, -], partial sum over tp``."""
        dims = ", ".join("-" if not axes else "*".join(map(self.mesh.axis_label, axes)) for axes in self.shard_axes)
        partial = ", ".join(f"{op} over {self.mesh.axis_label(a)}" for a, op in enumerate(self.partials) if op)
        later = ", ".join(map(self.mesh.axis_label, self.reduced_later))
        return f"[{dims}]{', partial ' + partial if partial else ''}{', reduced later over ' + later if later else ''}"

    def __reduce__(self) -> Any:
        return Layout._intern, (self.mesh, self.dim_axes, self.partials, self.reduced_later)

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: Any) -> Layout:
        return self


def _in_order(mesh: DeviceMesh, dim: int, axes: list[tuple[int | None, int]]) -> tuple[int, ...]:
    """The axes that cut ``dim``, sorted by the orders that were given: all of them, all different, or none."""
    given = [order for order, _ in axes if order is not None]
    if not given:
        return tuple(axis for _, axis in axes)
    if len(given) < len(axes) or len(set(given)) < len(given):
        listed = ", ".join(f"{mesh.axis_label(axis)}: {Shard(dim, order)}" for order, axis in axes)
        raise ValueError(
            f"several axes of {mesh} shard dim {dim} ({listed}): give each its own order, or none of them one"
        )
    return tuple(axis for _, axis in sorted((order, axis) for order, axis in axes if order is not None))


def _check(mesh: DeviceMesh, dim_axes: DimAxes | None, partials: Partials) -> None:
    if len(partials) != mesh.ndim:
        raise ValueError(f"{len(partials)} partial reductions {partials} for the {mesh.ndim} axes of {mesh}")
    for op in partials:
        if op is not None and op not in REDUCE_OPS:
            raise ValueError(f"partial reduction {op!r} on {mesh}: the reductions are {', '.join(REDUCE_OPS)}")
    used: dict[int, int] = {}
    for dim, axes in enumerate(dim_axes or ()):
        for axis in axes:
            if not 0 <= axis < mesh.ndim:
                raise ValueError(f"axis {axis} shards dim {dim}, but {mesh} has {mesh.ndim} axes")
            if axis in used:
                raise ValueError(
                    f"axis {mesh.axis_label(axis)!r} of {mesh} shards dim {used[axis]} and dim {dim}: use it once"
                )
            if partials[axis] is not None:
                raise ValueError(
                    f"axis {mesh.axis_label(axis)!r} of {mesh} shards dim {dim} and has a partial {partials[axis]}: "
                    "choose one"
                )
            used[axis] = dim


def _device_type() -> str:
    return get_platform().get_device_type()
