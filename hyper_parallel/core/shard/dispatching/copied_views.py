"""Views that could not stay in the memory of their base, and behave as if they had.

Note [A view that is a copy]
On one device ``y = x[1:3]`` is a window into ``x``: writing into one changes the other. Along a cut dim the rows must
be brought together, so ``y`` has memory of its own. Such a result is a :class:`CopiedView`, which knows its base and
how it was made from it. When something writes into it, what was written is brought back into the base at once; when the
base was written to since, it is made again before its next use. Versions, which count the writes into a memory, tell
both; all ranks run the same program, so they agree. Ordinary tensors pay nothing: only operators that meet such a view
look.

``reshape`` and its like give a view where the elements lie so that it is possible, and else a copy. That is asked only
when it matters, of the rank that holds the first block. A block with one row of a cut dim can be a view where the whole
is not: the transpose of (4, 2), cut to (4, 1), is contiguous on each rank. There the result gets memory of its own. So
does every ``reshape`` of a copied view, which is contiguous where the view on one device may not be, and every view of
a copied view that is a pending sum: the sum may be done in the memory of one and not of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor, complete_all
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.dispatching.mixing import PartialWriteError
from hyper_parallel.platform import get_platform

_platform = get_platform()
_VIEW_OPS = _platform.view_ops()
_WHERE_POSSIBLE = _VIEW_OPS & {"reshape", "reshape_as", "flatten", "ravel", "contiguous"}

_STRETCHES = frozenset({"expand", "expand_as", "broadcast_to"})


@dataclass
class _Source:
    """Where a view comes from: result number ``index`` of ``func(base, *args, **kwargs)``, or its only one."""

    base: DTensor
    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None
    version: int | None  # of the base when the view was last like it
    shares: bool  # the view lies in the memory of its base, which is such a view itself
    is_recorded: bool  # taken where gradients are recorded
    is_view: bool | None = None  # None: not asked yet

    def __post_init__(self) -> None:
        self.args, self.kwargs = _frozen(self.args), {name: _frozen(value) for name, value in self.kwargs.items()}

    def call(self, base: Any) -> Any:
        result = self.func(base, *self.args, **self.kwargs)
        return result if self.index is None else result[self.index]

    def has_overlaps(self, view: DTensor) -> bool:
        """Whether an element of the base is several ones of the view."""
        if self.name in _STRETCHES:
            return view.numel() > self.base.numel()
        given = dict(zip(("dimension", "size", "step"), self.args, strict=False)) | self.kwargs
        return self.name == "unfold" and given["size"] > given["step"]

    def is_view_on_one_device(self) -> bool:
        """Whether it is a view on one device too; see the note of this file."""
        if self.is_view is None:
            self.is_view = self.name not in _WHERE_POSSIBLE or self._ask_first_rank()
        return self.is_view

    def _ask_first_rank(self) -> bool:
        calls, base = [self.call], self.base
        while isinstance(base, CopiedView) and base._source is not None:
            calls.insert(0, base._source.call)
            base = base._source.base
        answer = _would_be_view(base, *calls)
        mesh = base.device_mesh
        if mesh.size() == 1:
            return answer
        sent = _platform.index_tensor([[int(answer)]], mesh.device_type)
        _platform.broadcast(sent, mesh.rank_list[0], mesh.get_group(tuple(range(mesh.ndim))))
        return bool(sent.item())


def _frozen(value: Any) -> Any:
    """What the program may change later (a position in a tensor, a list of sizes) as it is now."""
    if _platform.is_tensor(value):
        return value.clone()
    if isinstance(value, slice):
        return slice(_frozen(value.start), _frozen(value.stop), _frozen(value.step))
    return tuple(map(_frozen, value)) if type(value) in (list, tuple) else value


class CopiedView(DTensor):
    """A view with memory of its own; see Note [A view that is a copy]."""

    _layout: Layout
    _source: _Source | None = None

    @classmethod
    def _on_operator(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _platform.graph_function(func) is not None or _platform.is_framework_service(func):
            return DTensor._on_operator(func, types, args, kwargs)
        complete_all((args, kwargs))
        views: list[CopiedView] = []
        _find((args, kwargs), views)
        name = _platform.get_op_name(func)
        written = _written_by_name(name, args, kwargs)
        for view in views:
            if any(view is one for one in written):
                view._check_write(name)
        before = [_platform.version_of(view) for view in views]
        try:
            result = DTensor._on_operator(func, types, args, kwargs)
        except PartialWriteError:
            if not any(view._finish_sum() for view in written):
                raise
            result = DTensor._on_operator(func, types, args, kwargs)
        for view, version in zip(views, before, strict=True):
            if any(view is one for one in written) if version is None else _platform.version_of(view) != version:
                view._write_back()
        if args and isinstance(args[0], CopiedView) and is_view_call(name, args):
            return link(name, result, func, args, kwargs, may_share=True)
        return result

    def _completed(self) -> DTensor:
        """This view, like its base."""
        source = self._source
        if source is None:
            return self
        source.base._completed()
        if source.shares:
            return self
        version = _platform.version_of(source.base)
        if version is None or version != source.version:
            if not source.is_view_on_one_device():
                self._source = None
                return self
            is_recorded = source.is_recorded and not (self.is_leaf and self.requires_grad)
            with _platform.recording() if is_recorded else _platform.no_grad():
                again = source.call(source.base)
                again._source = None
                _platform.fill_block(self, _block(again.redistribute(self.device_mesh, self._layout)))
            source.version = version
        return self

    def _check_write(self, name: str) -> None:
        root: DTensor = self
        while isinstance(root, CopiedView) and root._source is not None:
            if root._source.has_overlaps(root):
                raise RuntimeError(
                    f"{name}: elements of a view by {root._source.name} overlap, and what is written into one along a "
                    "sharded dim would not be seen in the next: write into the tensor of global shape "
                    f"{tuple(root._source.base.shape)} itself, or into a clone()"
                )
            if root._source.name == "detach" or not root._source.is_view_on_one_device():
                return
            root = root._source.base
        if root is not self and root.is_leaf and _platform.needs_grad(root):
            raise RuntimeError(
                f"{name}: a view of a leaf that requires grad, of global shape {tuple(root.shape)} under "
                f"{root.layout}, is being written into; do it under no_grad, or write into a clone()"
            )

    def _as_it_is(self) -> DTensor:
        """The elements in this memory, whatever the base has."""
        return _platform.as_dtensor(DTensor, _block(self), self._layout, self._global_shape)

    def _finish_sum(self) -> bool:
        """Do a pending sum in the memory of this view; whether there was one."""
        if not self._layout.has_partial:
            return False
        reduced = self._as_it_is().reduce_partial()
        _platform.fill_block(self, _block(reduced))
        self._layout = reduced._layout
        return True

    def _write_back(self) -> None:
        source = self._source
        if source is None:
            return
        if not source.is_view_on_one_device():
            self._source = None
            return
        with _platform.no_grad() if source.name == "detach" else nullcontext():
            if not source.shares:
                self._finish_sum()
                _write_into(source, self)
                source.version = _platform.version_of(source.base)
            elif isinstance(source.base, CopiedView):
                source.base._write_back()

    # What reaches the memory without passing through an operator.

    def detach(self) -> Any:
        """The same memory without gradient history, as much a view as this one."""
        plain = super().detach()
        return _linked("detach", plain, DTensor.detach, self, (), {}, None, True) if self._source else plain

    @property
    def data(self) -> Any:
        """The same memory without gradient history, as much a view as this one."""
        plain = DTensor.data.fget(self._completed())
        return _linked("detach", plain, DTensor.detach, self, (), {}, None, True) if self._source else plain

    @data.setter
    def data(self, value: Any) -> None:
        self._source = None
        DTensor.data.fset(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = DTensor.__deepcopy__(self._completed(), memo)
        copied.__class__ = DTensor
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return DTensor.__reduce_ex__(self._completed(), protocol)


def is_view_call(name: str, args: tuple[Any, ...]) -> bool:
    """Whether the operator gives a view on one device: index tensors, lists and masks give copies."""
    if name not in _VIEW_OPS:
        return False
    if name != "getitem":
        return True
    entries = args[1] if isinstance(args[1], tuple) else (args[1],)
    return all(
        entry is None or entry is Ellipsis or type(entry) in (int, slice) or _is_position(entry) for entry in entries
    )


def _is_position(entry: Any) -> bool:
    """A whole number, also one in a tensor without dims."""
    if _platform.is_tensor(entry):
        return entry.ndim == 0 and _platform.dtype_name(entry.dtype).startswith(("int", "uint"))
    return hasattr(entry, "__index__") and not isinstance(entry, bool)


def local_is_view_but_global_is_not(name: str, layout: Layout, shape: Sequence[int]) -> bool:
    """Whether this rank's block has so few rows that ``name`` may give a view of it where one device copies."""
    if name not in _WHERE_POSSIBLE or layout.mesh.get_coordinate() is None:
        return False
    return any(here == 1 < whole for here, whole in zip(layout.local_shape(tuple(shape)), shape, strict=True))


def clone_if_one_device_would_copy(
    result: DTensor, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DTensor:
    """The result of ``reshape`` or its like, in memory of its own where one device would have copied."""
    base, rest, keywords = _base_and_rest(args, kwargs)
    if not _platform.shares_memory(result, base):
        return result
    return result if _would_be_view(base, lambda whole: func(whole, *rest, **keywords)) else result.clone()


def _would_be_view(base: DTensor, *calls: Callable[..., Any]) -> bool:
    """Whether the last call gives a view on one device, when each is given what the one before it gives."""
    return _platform.would_be_view(calls, tuple(base.shape), _platform.block_strides(base))


def link(
    name: str, result: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], may_share: bool
) -> Any:
    """The results of a view operator as views of its first argument, of which they are copies.

    ``may_share``: the argument is a copied view itself, and the results may be ordinary views of that.
    """
    base, rest, keywords = _base_and_rest(args, kwargs)
    if isinstance(result, (list, tuple)):
        views = [_linked(name, item, func, base, rest, keywords, index, may_share) for index, item in enumerate(result)]
        return type(result)(views)
    return _linked(name, result, func, base, rest, keywords, None, may_share)


def _base_and_rest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if args:
        return args[0], args[1:], kwargs
    return kwargs["input"], (), {key: value for key, value in kwargs.items() if key != "input"}


def _linked(
    name: str, item: Any, func: Any, base: Any, args: Any, kwargs: Any, index: int | None, may_share: bool
) -> Any:
    if not isinstance(item, DTensor) or not isinstance(base, DTensor):
        return item
    if item is base and name not in _WHERE_POSSIBLE:
        return item
    if item is not base and isinstance(item, CopiedView) and item._source is not None:
        return item
    shares = _platform.shares_memory(item, base)
    may_share = may_share and name not in _WHERE_POSSIBLE and not base._layout.has_partial
    # A copy of its own, where this rank has the row of which the others have zeros, where autograd would not let a part
    # of what was gathered be written into, and of a stretched dim, whose elements lie in one cell.
    is_fixed = _platform.needs_grad(item) or name in _STRETCHES
    if not (shares and may_share) and (shares or is_fixed):
        item = _platform.as_dtensor(DTensor, _block(item).clone(), item._layout, item._global_shape)
        shares = False
    item.__class__ = CopiedView
    version = _platform.version_of(base)
    item._source = _Source(base, name, func, args, kwargs, index, version, shares, _platform.is_recording())
    return item


def _block(tensor: DTensor) -> Any:
    return _platform.local_alias(tensor)


def _write_into(source: _Source, view: CopiedView) -> None:
    """Put the elements of a view where they come from."""
    base = source.base
    value = view._as_it_is()
    index = _index_of(source, base.ndim)
    if index is not None:
        base[index] = value
        return
    mesh = base.device_mesh
    whole = base.full_tensor().clone()
    source.call(whole).copy_(value.full_tensor())
    base.copy_(DTensor.from_local(whole, mesh, shape=base.shape).redistribute(mesh, base._layout.reduced()))


def _index_of(source: _Source, ndim: int) -> Any:
    """The index that takes the same part of the base, where it can be written as one."""
    if source.name == "getitem":
        return source.args[0]
    names = {"select": ("dim", "index"), "narrow": ("dim", "start", "length")}.get(source.name)
    if names is None:
        return None
    given = dict(zip(names, source.args, strict=False)) | source.kwargs
    if not all(type(given.get(name)) is int for name in names):
        return None
    dim, start = given["dim"] % ndim, given[names[1]]
    if source.name == "select":
        return (*(slice(None),) * dim, start)
    start = start if start >= 0 else start + source.base.shape[dim]
    return (*(slice(None),) * dim, slice(start, start + given["length"]))


def _written_by_name(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that an operator of this name writes into."""
    found: list[Any] = []
    if (name.endswith("_") and not name.endswith("__")) or name == "setitem":
        _find(args[:1], found)
    _find(kwargs.get("out"), found)
    return found


def _find(tree: Any, found: list[Any]) -> None:
    if isinstance(tree, CopiedView):
        if not any(tree is one for one in found):
            found.append(tree)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            _find(item, found)
    elif isinstance(tree, dict):
        for item in tree.values():
            _find(item, found)


_platform.exclude_from_compile(CopiedView)
