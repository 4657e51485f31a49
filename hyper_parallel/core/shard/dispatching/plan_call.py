"""One kind of call, planned once: what to do with each argument, which function to run, how to label the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hyper_parallel.core.dtensor.autograd_edges import move
from hyper_parallel.core.dtensor.comm_recorder import attributed
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout, Shape
from hyper_parallel.core.dtensor.shard_sizes import finish_checks
from hyper_parallel.core.shard.dispatching.copied_views import (
    clone_if_one_device_would_copy,
    is_view_call,
    link,
    local_is_view_but_global_is_not,
)
from hyper_parallel.core.shard.dispatching.input_edges import bring_input
from hyper_parallel.core.shard.dispatching.mixing import PartialWriteError, PlainScalarError, refuse_plain, same_mesh
from hyper_parallel.core.shard.dispatching.order_guard import watched
from hyper_parallel.core.shard.dispatching.reduce_later import keep_for_later
from hyper_parallel.core.shard.dispatching.strategy import Choice, choose
from hyper_parallel.core.shard.dispatching.strict_mode import check_implicit
from hyper_parallel.core.shard.rule_kit.rule_table import Rule, counts_scalars, find_rule
from hyper_parallel.core.shard.rule_kit.signature import LocalCall, OpCall, Signature, TensorSpec
from hyper_parallel.platform import get_platform

_platform = get_platform()
_needs_grad = _platform.needs_grad

# Note [Partial sums of narrow integers]
# Summands wrap modulo 2^n: in uint8, 5 may be the partial sum of 10 and 251, which in a wider type would be 261. So a
# sum of such a type is reduced before an operator that answers in another one, as ``x * 0.5`` and ``x.sum()`` do.
_WRAPPING_DTYPES = frozenset(
    _platform.str_to_dtype(name) for name in ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32")
)

Path = tuple[Any, ...]  # where a tensor is among the arguments: position or keyword, then positions in lists


def plan_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlannedCall | None:
    """The plan for calls like this one; None when no rule covers it."""
    described = describe_call(func, args, kwargs)
    if described is None:
        return None
    rule, call, paths = described
    signature = rule(call)
    if signature is None:
        return None
    choice = choose_for(call, signature)
    if choice is None:
        if not call.tensors[0].layout.has_partial:
            return None  # a dim that must be whole is cut: gathered, written and cut again
        layouts = ", ".join(str(spec.layout) for spec in call.tensors)
        in_place = _is_in_place(call)
        raise PartialWriteError(
            f"{call.name} cannot write into a tensor under {call.tensors[0].layout}: the result would have another "
            f"layout (inputs: {layouts}). A partial value only passes through linear operators: call reduce_partial() "
            + (f"first, or use {call.name.rstrip('_')}, which makes a new tensor" if in_place else "first")
        )
    sources = tuple(at_path(path, args, kwargs)._layout for path in paths)
    if any(layout.reduced_later for layout in sources):
        choice = keep_for_later(call, choice, sources, written_input(call, signature))
    planned = PlannedCall(call.name, paths, call, signature, choice, sources)
    planned.run = watched(planned.run, call, signature)
    return planned


def _lie_alike(source: Layout, target: Layout) -> bool:
    """Whether nothing moves from one to the other, though gradients may be reduced elsewhere."""
    return source.reduced(pending=False) is target.reduced(pending=False)


def at_path(path: Path, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The argument at ``path``."""
    found = args[path[0]] if isinstance(path[0], int) else kwargs[path[0]]
    for key in path[1:]:
        found = found[key]
    return found


def describe_call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Rule, OpCall, list[Path]] | None:
    """The rule for a call, the call in a rule's terms, and where its tensors are; None when no rule covers it."""
    name = _platform.get_op_name(func)
    rule = find_rule(name, func)
    if rule is None or kwargs.get("out") is not None:
        return None
    paths: list[Path] = []
    found: list[DTensor] = []
    may_have_scalars = not counts_scalars(name, func)
    _collect(name, (*args, *kwargs.values()), [*range(len(args)), *kwargs], paths, found, may_have_scalars)
    mesh = None
    for tensor in found:
        mesh = same_mesh(name, mesh, tensor)
    call = _describe(func, name, args, kwargs, found)
    return None if call is None else (rule, call, paths)


def choose_for(call: OpCall, signature: Signature) -> Choice | None:
    """The cheapest choice for a call; None when a tensor that it writes into would have to lie otherwise."""
    return choose(call, signature, written_input(call, signature))


def written_input(call: OpCall, signature: Signature) -> int | None:
    """Which of the tensors the operator writes into, if any."""
    return 0 if _is_in_place(call) else signature.writes


def _is_in_place(call: OpCall) -> bool:
    """Whether it writes into its first argument: by its name, or as it is asked to (``F.relu(x, inplace=True)``)."""
    return (call.name.endswith("_") and not call.name.endswith("__")) or call.kwargs.get("inplace") is True


def _collect(
    name: str, values: Any, keys: Any, paths: list[Path], found: list[DTensor], scalars: bool, prefix: Path = ()
) -> None:
    for key, value in zip(keys, values, strict=True):
        if isinstance(value, DTensor):
            paths.append((*prefix, key))
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(name, value, range(len(value)), paths, found, scalars, (*prefix, key))
        else:
            refuse_plain(name, value)
            if not scalars and _platform.is_tensor(value):
                raise PlainScalarError


def _describe(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], found: list[DTensor]
) -> OpCall | None:
    """The call in a rule's terms; None when the shapes of its results depend on values."""
    specs = {
        id(tensor): TensorSpec(tensor._layout.reduced(pending=False), tuple(tensor._global_shape), tensor.dtype)
        for tensor in found
    }

    def spec(value: Any) -> Any:
        return specs[id(value)] if isinstance(value, DTensor) else value

    try:
        outputs = _output_shapes(func, args, kwargs)
    except (RuntimeError, ValueError, TypeError, IndexError, ZeroDivisionError) as error:
        if _platform.depends_on_values(error):
            return None
        finish_checks()  # the ranks may disagree about a shape, which is then what is wrong
        inputs = ", ".join(f"{tuple(t._global_shape)} under {t._layout}" for t in found)
        kind = RuntimeError if isinstance(error, ZeroDivisionError) else type(error)
        raise kind(f"{name} on distributed tensors of global shape {inputs}: {error}") from error
    return OpCall(
        name,
        _platform.tree_map(spec, args),
        _platform.tree_map(spec, kwargs),
        tuple(specs[id(tensor)] for tensor in found),
        outputs,
    )


_shapes: dict[Any, tuple[Shape, ...]] = {}
_MAX_SHAPES = 65536


def _output_shapes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Shape, ...]:
    """The global shapes of the results, which the framework is asked for once whatever the layouts are."""
    try:
        key: Any = (func, _without_layouts(args), _without_layouts(tuple(kwargs.items())))
        known = _shapes.get(key)
    except TypeError:  # an argument that cannot be hashed, or whose values may matter
        key = known = None
    if known is None:
        known = tuple(tuple(shape) for shape in _platform.output_shapes(func, args, kwargs))
        if key is not None:
            if len(_shapes) >= _MAX_SHAPES:
                _shapes.clear()
            _shapes[key] = known
    return known


def _without_layouts(value: Any) -> Any:
    if isinstance(value, DTensor):
        return (value._global_shape, value.dtype)
    kind = type(value)
    if kind is tuple or kind is list:
        return (kind, *map(_without_layouts, value))
    if kind is slice:
        return (kind, *map(_without_layouts, (value.start, value.stop, value.step)))
    if _platform.is_tensor(value):
        raise TypeError("a plain tensor")
    return (kind, value)


def _done(value: Any) -> Any:
    is_meant = isinstance(value, DTensor) and value._layout.has_partial and value.dtype in _WRAPPING_DTYPES
    return value.reduce_partial() if is_meant else value


class PlannedCall:
    """What to do for calls with the same function, layouts, shapes and other arguments."""

    __slots__ = (
        "changes",
        "changes_positional",
        "choice",
        "copies_view",
        "gives_nothing",
        "is_direct",
        "local",
        "may_alias",
        "moves",
        "name",
        "output_layouts",
        "output_shapes",
        "partial_inputs",
        "passes",
        "paths",
        "rewritten",
        "run",
        "shapes",
        "updates",
        "wrap",
        "writes",
    )

    def __init__(
        self,
        name: str,
        paths: list[Path],
        call: OpCall,
        signature: Signature,
        choice: Choice,
        sources: tuple[Layout, ...],
    ) -> None:
        self.name = name
        self.paths = paths
        self.choice = choice
        self.local = signature.local
        written = written_input(call, signature)
        self.writes = written is not None
        self.shapes = tuple(spec.shape for spec in call.tensors)
        # (path, wanted layout, axes to vary along, layout to move from) of the arguments that do not go in as they are
        self.changes = [
            (path, target, axes, None if _lie_alike(source, target) else source)
            for path, source, target, axes in zip(paths, sources, choice.inputs, choice.varies, strict=True)
            if source is not target or axes
        ]
        self.changes_positional = all(len(path) == 1 and isinstance(path[0], int) for path, *_ in self.changes)
        self.moves = any(change[3] is not None for change in self.changes)
        self.output_layouts = choice.outputs
        self.output_shapes = tuple(_platform.list_to_size(shape) for shape in call.outputs)
        self.updates = [index for index in signature.updates if sources[index] is not choice.inputs[index]]
        self.rewritten = None
        if signature.rewrite is not None:
            self.rewritten = signature.rewrite(self._local_call(None, call.args, call.kwargs))
        if signature.needs_local is not None and not signature.needs_local(
            self._local_call(None, call.args, call.kwargs)
        ):
            self.local = None
        # The same on every rank: not where one rank only needs ``local``.
        is_always_local = signature.local is not None and signature.needs_local is None
        self.copies_view = (self.moves or is_always_local) and is_view_call(name, call.args)
        self.gives_nothing = self._gives_nothing()
        self.is_direct = not self.changes and self.local is None and self.rewritten is None
        self.wrap = _platform.result_wrapper(DTensor, self.output_layouts, self.output_shapes, not self.is_direct)
        # the shortest way that is right for this plan
        self.run: Callable[..., Any] = self._call
        if self.is_direct:
            self.run = self.wrap
        elif self.copies_view:
            self.run = self._copy_view
        elif not (self.moves or self.updates or self.local or self.rewritten) and self.changes_positional:
            self.run = self._vary
        if not self.moves and local_is_view_but_global_is_not(name, call.tensors[0].layout, self.shapes[0]):
            self.may_alias, self.run = self.run, self._apart
        self.partial_inputs = [
            index
            for index, (spec, target) in enumerate(zip(call.tensors, choice.inputs, strict=True))
            if index != written and spec.layout.has_partial and target.has_partial
        ]
        if self.partial_inputs:
            self.passes, self.run = self.run, self._pass_sums

    def _gives_nothing(self) -> bool:
        """Whether this rank's blocks of the results have no elements."""
        results = zip(self.output_layouts, self.output_shapes, strict=True)
        inside = self.output_layouts and self.output_layouts[0].mesh.get_coordinate() is not None
        return bool(inside) and all(0 in layout.local_shape(tuple(shape)) for layout, shape in results)

    def __call__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.run(func, args, kwargs)

    def _copy_view(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return link(self.name, self._call(func, args, kwargs), func, args, kwargs, may_share=False)

    def _apart(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return clone_if_one_device_would_copy(self.may_alias(func, args, kwargs), func, args, kwargs)

    def _pass_sums(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See Note [Partial sums of narrow integers]."""
        dtypes = {self._argument(index, args, kwargs).dtype for index in self.partial_inputs} & _WRAPPING_DTYPES
        if not dtypes:
            return self.passes(func, args, kwargs)
        if not self.writes:
            result = self.passes(func, args, kwargs)
            if dtypes == {(result[0] if isinstance(result, (list, tuple)) else result).dtype}:
                return result
        return func(*_platform.tree_map(_done, args), **_platform.tree_map(_done, kwargs))

    def _vary(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Everything lies as it should; only gradients of whole inputs are to be summed."""
        entered = None
        for (position,), target, axes, _ in self.changes:
            tensor = args[position]
            if _needs_grad(tensor):
                entered = entered or list(args)
                entered[position] = bring_input(tensor, target, axes)
        return self.wrap(func, tuple(entered) if entered else args, kwargs)

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = (args, kwargs)
        if self.changes:
            if self.moves:
                finish_checks()
                check_implicit(self.name, self.choice)
                args, kwargs = attributed(f"implicit for {self.name}", self._change, args, kwargs, chosen=self._chosen)
            else:
                args, kwargs = self._change(args, kwargs)
        if self.rewritten is not None:
            other, rest, keywords = self.rewritten
            first = args[0] if args else kwargs["input"]
            return self.wrap(other or func, (first, *rest), keywords)
        result = self._run(func, args, kwargs)
        for index in self.updates:
            self._bring_back(self._argument(index, *given), self._argument(index, args, kwargs), index)
        return result

    def _chosen(self) -> str:
        """How the arguments move, and why so."""
        moves = [
            f"argument {'.'.join(map(str, path))} from {source.described_dims()} to {target.described_dims()}"
            for path, target, _, source in self.changes
            if source is not None
        ]
        return f"{'; '.join(moves)}; cheapest of {self.choice.num_ways}, modelled cost {self.choice.cost:.3g}"

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.local is None:
            return self.wrap(func, args, kwargs)
        written = None if not self.writes else args[0] if args else kwargs["input"]
        blocks, named_blocks = _platform.blocks_of(args, kwargs, self.gives_nothing)
        call = self._local_call(func, blocks, named_blocks, written)
        local = self.local
        return self.wrap(lambda *a, **k: attributed(f"inside {self.name}", local, call), (), {})

    def _argument(self, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return at_path(self.paths[index], args, kwargs)

    def _bring_back(self, tensor: DTensor, changed: Any, index: int) -> None:
        """Copy what was written into the block that was made for the call into the argument itself."""
        edge = (self.choice.inputs[index], tensor._layout, self.shapes[index])
        block = attributed(f"written by {self.name}", move, _platform.detached(changed), *edge)
        _platform.fill_block(tensor, block)

    def _local_call(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], written: Any = None
    ) -> LocalCall:
        return LocalCall(
            func,
            args,
            kwargs,
            self.choice.inputs[0].mesh,
            self.choice.axes,
            self.choice.inputs,
            self.output_layouts,
            self.shapes,
            self.output_shapes,
            written,
        )

    def _change(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        new_args = list(args)
        if self.changes_positional:
            for (position,), target, axes, _ in self.changes:
                new_args[position] = bring_input(args[position], target, axes)
            return tuple(new_args), kwargs
        new_kwargs = dict(kwargs)
        entered: dict[tuple[int, Layout, tuple[int, ...]], Any] = {}
        for path, target, axes, _ in self.changes:
            holder: Any = new_args if isinstance(path[0], int) else new_kwargs
            for key in path[:-1]:
                holder[key] = list(holder[key]) if not isinstance(holder[key], list) else holder[key][:]
                holder = holder[key]
            tensor = holder[path[-1]]
            once = (id(tensor), target, axes)
            if once not in entered:
                entered[once] = bring_input(tensor, target, axes)
            holder[path[-1]] = entered[once]
        return tuple(new_args), new_kwargs
