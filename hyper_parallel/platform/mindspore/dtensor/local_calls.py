"""Calling operators on blocks: the innermost step of the dispatcher, and what it must know about results beforehand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base import tensors
from hyper_parallel.platform.mindspore.dtensor.tensor_type import DTensorBase, as_dtensor, is_distributed
from hyper_parallel.platform.mindspore.mends.empty_blocks import (
    REFUSALS,
    has_no_elements,
    results_of_nothing,
    silent,
    tensors_in,
)

_make = private_api.make_subclass

# Results of more elements than this are not computed only to learn their shapes.
_MAX_ELEMENTS_FOR_SHAPES = 1 << 22


def _block(value: Any) -> Any:
    """The value with every DTensor in it, also in lists, replaced by its block; a list without one stays that list."""
    if type(value) is list or type(value) is tuple:
        blocks = [_block(item) for item in value]
        changed = any(block is not item for block, item in zip(blocks, value, strict=True))
        return type(value)(blocks) if changed else value
    return value._completed()._local if is_distributed(value) else value


Calling = Callable[[Any, Any, list[Any], dict[str, Any], Any], Any]


class _Calling:
    """Who calls operators on blocks, while somebody records what is called."""

    taken: Calling | None = None


_calling = _Calling()


def set_calling(call: Calling | None) -> None:
    """Let ``call`` take the arguments of :func:`call_operator` in its place; None: nobody."""
    _calling.taken = call


def call_operator(
    func: Callable[..., Any],
    instead: Callable[..., Any] | None,
    blocks: list[Any],
    named: dict[str, Any],
    shapes_of_nothing: list[tuple[int, ...]] | None,
) -> Any:
    """``func`` on blocks; ``instead``: the same where all blocks have elements; the shapes of results without any."""
    if shapes_of_nothing is not None:
        return results_of_nothing(func, blocks, named, shapes_of_nothing)
    return func(*blocks, **named) if named else (instead or func)(*blocks)


def result_wrapper(
    kind: type, layouts: tuple[Any, ...], shapes: tuple[Any, ...], brings_blocks: bool
) -> Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]:
    """A function that calls an operator on blocks and makes DTensors of its results, in their order."""
    del brings_blocks  # a block is never turned into a DTensor itself, so it may be returned as it is
    layout, shape = (layouts[0], tuple(shapes[0])) if layouts else (None, None)
    gives_nothing = _gives_nothing(layouts, shapes)
    local_shapes = (
        [one.local_shape(tuple(of)) for one, of in zip(layouts, shapes, strict=True)] if gives_nothing else []
    )
    # Found at the first call, since all calls of a plan have the same operator and blocks of the same sizes.
    writes: bool | None = None
    instead: Callable[..., Any] | None = None

    def run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal writes, instead
        blocks = []
        for value in args:
            blocks.append(value._local if type(value) is kind else _block(value))  # a comprehension costs a call
        if writes is None:
            writes = func.__name__[-1:] == "_"
            if not any(map(getattr(func, "not_for", has_no_elements), tensors_in(blocks))):
                instead = getattr(func, "on_elements", None)
        if gives_nothing or _calling.taken is not None:
            named = {name: _block(value) for name, value in kwargs.items()}
            call = _calling.taken or call_operator
            result = call(func, instead, blocks, named, local_shapes if gives_nothing else None)
        elif kwargs:
            result = func(*blocks, **{name: _block(value) for name, value in kwargs.items()})
        else:
            result = (instead or func)(*blocks)
        if type(result) is Tensor and not writes:
            made = _make(kind, result)
            made._local = result
            made._layout = layout
            made._global_shape = shape
            return made
        return _labelled(result, args, writes)

    def _labelled(result: Any, args: tuple[Any, ...], writes: bool) -> Any:
        """Results that are written into an argument, several, of another type, or none."""
        if isinstance(result, Tensor):
            if is_distributed(result):
                return result
            if writes and args and is_distributed(args[0]):
                args[0].written()
                return args[0]
            return as_dtensor(kind, result, layout, shape)
        if isinstance(result, (tuple, list)):
            return _wrap_several(kind, result, layouts, shapes)
        return result

    return run


def _gives_nothing(layouts: tuple[Any, ...], shapes: tuple[Any, ...]) -> bool:
    """Whether this rank's blocks of all results are without elements."""
    if not layouts or layouts[0].mesh.get_coordinate() is None:
        return False
    return all(0 in layout.local_shape(tuple(shape)) for layout, shape in zip(layouts, shapes, strict=True))


def _wrap_several(kind: type, results: Any, layouts: tuple[Any, ...], shapes: tuple[Any, ...]) -> Any:
    described = iter(zip(layouts, shapes, strict=True))
    wrapped = []
    for item in results:
        if isinstance(item, Tensor):
            layout, shape = next(described)
            item = item if isinstance(item, DTensorBase) else as_dtensor(kind, item, layout, shape)
        wrapped.append(item)
    make = getattr(results, "_make", type(results))
    return make(wrapped)


def label_all(kind: type, results: Any, layouts: list[Any], shapes: list[Any]) -> Any:
    """The tensors of a list as DTensors; those without a layout stay plain."""
    labelled = [
        result if layout is None else as_dtensor(kind, result, layout, shape)
        for result, layout, shape in zip(results, layouts, shapes, strict=True)
    ]
    return type(results)(labelled)


def blocks_of(args: Any, kwargs: Any, gives_nothing: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every DTensor replaced by its block as a plain tensor.

    ``gives_nothing``: the results have no elements on this rank, so that nothing flows back into the arguments.
    """
    prepare = _silent_block if gives_nothing else _block
    return tuple(prepare(value) for value in args), {name: prepare(value) for name, value in kwargs.items()}


def _silent_block(value: Any) -> Any:
    return silent(_block(value))


def call_on_blocks(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``func`` on the blocks of all DTensors among its arguments, as if they were plain tensors."""
    args, kwargs = blocks_of(args, kwargs)
    return func(*args, **kwargs)


def without_interception(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, or an autograd function's ``apply``, on the blocks of DTensors."""
    return call_on_blocks(func, args, kwargs)


def output_shapes(func: Callable[..., Any], args: Any, kwargs: Any) -> list[tuple[int, ...]]:
    """The global shapes of the tensors that ``func`` returns, found by calling it on tensors without memory.

    A few functions of MindSpore cannot do that; these are called on small zeros. So are all while other threads run:
    MindSpore's device of tensors without memory is that of the whole process, and would take their operators too.
    """
    infer = getattr(func, "shapes", None)
    if infer is not None:
        return infer(*args, **kwargs)
    is_small = sum(_num_elements(value) for value in (*args, *kwargs.values())) <= _MAX_ELEMENTS_FOR_SHAPES
    with private_api.no_grad():
        if is_small and _other_threads_run():
            result = _on_zeros(func, args, kwargs, None)
        else:
            try:
                with ms.DeviceCtx("meta"):
                    result = _call_with(func, args, kwargs, _without_memory)
                if result is None:  # as of a primitive that does not know tensors without memory
                    raise RuntimeError(f"{func} has no result on tensors without memory")
            except REFUSALS as error:
                private_api.start_recording()  # MindSpore stops recording when an operator fails
                if not is_small:
                    raise
                result = _on_zeros(func, args, kwargs, error)
    results = result if isinstance(result, (tuple, list)) else [result]
    return [tuple(item.shape) for item in results if isinstance(item, Tensor)]


def _other_threads_run() -> bool:
    """Besides those of the library, which call no operators."""
    mine = threading.current_thread()
    return any(one is not mine and not one.name.startswith("hyper_parallel") for one in threading.enumerate())


def _on_zeros(func: Callable[..., Any], args: Any, kwargs: Any, cause: Exception | None) -> Any:
    try:
        return _call_with(func, args, kwargs, _zeros)
    except REFUSALS as error:
        private_api.start_recording()
        raise type(error)(_first_line(error)) from cause


def _call_with(func: Callable[..., Any], args: Any, kwargs: Any, make: Callable[[Any], Any]) -> Any:
    def replaced(value: Any) -> Any:
        if type(value) is list or type(value) is tuple:
            return type(value)([replaced(item) for item in value])
        return make(value)

    return func(*[replaced(value) for value in args], **{name: replaced(value) for name, value in kwargs.items()})


def _without_memory(value: Any) -> Any:
    if isinstance(value, Tensor) and (isinstance(value, DTensorBase) or value.ndim):
        return mint.empty(tuple(value.shape), dtype=value.dtype)
    return value


def _zeros(value: Any) -> Any:
    return tensors.zeros(tuple(value.shape), dtype=value.dtype) if isinstance(value, DTensorBase) else value


def _num_elements(value: Any) -> int:
    if isinstance(value, (tuple, list)):
        return sum(_num_elements(item) for item in value)
    number = 1
    if isinstance(value, DTensorBase):
        for size in value._global_shape:
            number *= size
    return number


def _first_line(error: Exception) -> str:
    """MindSpore's errors go on with the call stack of its C++ code."""
    return str(error).strip().partition("\n")[0]


def depends_on_values(error: Exception) -> bool:
    """Whether :func:`output_shapes` failed because the shapes follow from values, which tensors without memory lack."""
    return "meta" in str(error)


def zeros_kept_in_graph(tensor: Any) -> Any:
    """Zeros that keep ``tensor`` in the graph, with a gradient of zeros."""
    return tensor.masked_fill(tensors.ones(tuple(tensor.shape), dtype=ms.bool_), 0)
