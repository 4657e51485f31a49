"""One run of a model up to its second block, to see what runs before the first, what comes in and what is handed on; on
shapes where the model has no memory yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.pipeline_parallel.stages.stream_arguments import beside_stream, stream_of
from hyper_parallel.platform import get_platform

__all__ = ["InputsDoNotFit", "Seen", "StreamSpec", "look"]

_platform = get_platform()


@dataclass(frozen=True)
class StreamSpec:
    """The tensor between two stages: its global shape, for the inputs that it was found with, and its dtype."""

    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True)
class Seen:
    """Paths of the modules that were called before the first block, the stream, and how many things blocks give.

    ``num_outputs`` is 0 where a block gives the stream alone, and else the length of its tuple. ``handed_on`` is the
    stream behind the first block, or before it where that did not run.
    """

    before: tuple[str, ...]
    stream: StreamSpec
    num_outputs: int
    handed_on: Any = field(default=None, compare=False)


class InputsDoNotFit(ValueError):
    """The run failed before the first block."""


class _Enough(Exception):
    """Leaves the run."""


def look(model: Any, blocks: Sequence[str], inputs: Mapping[str, Any], *, at_second: bool = True) -> Seen:
    """Run the model on ``inputs`` until its second block is called.

    Without ``at_second`` until the first one has run, and without gradients: where blocks have hooks that must be
    called in pairs.

    A model without memory runs on shapes; what its first block cannot do on shapes does not matter.
    """
    modules = dict(_platform.get_cells_and_names(model))
    if any(_platform.has_no_memory(one) for one in _platform.parameters_dict(model).values()):
        inputs = {name: _without_memory(value) for name, value in inputs.items()}
    called: list[str] = []
    streams: list[Any] = []
    outputs: list[Any] = []
    handles = []

    def note(path: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            if path in blocks[:2]:
                _check_given(path, args, kwargs)
            if path == blocks[0]:
                streams.append(stream_of(path, args, kwargs))
            elif outputs and path in blocks[1:2]:
                _check_handed_on(blocks[0], outputs[0], args, kwargs)
                raise _Enough
            if not streams:
                called.append(path)
                if path and _platform.own_parameters(module) and not any(one.startswith(f"{path}.") for one in blocks):
                    _check_called(path, module, args, kwargs)

        return hook

    def keep(module: Any, args: Any, output: Any) -> None:
        outputs.append(output)
        if len(blocks) == 1 or not at_second:
            raise _Enough

    for path, module in modules.items():
        handles.append(_platform.register_forward_pre_hook(module, note(path), prepend=True, with_kwargs=True))
    handles.append(_platform.register_forward_hook(modules[blocks[0]], keep))
    # Some models make a cache for all blocks first and fail on one block's; others look at values without one.
    keeps_cache = bool(getattr(getattr(model, "config", None), "use_cache", False))
    try:
        with _without_trace(model), _as_trained(model) if at_second else _platform.no_grad():
            try:
                model(**inputs)
            except (_Enough, _BesideStream):
                raise
            except Exception:
                if streams or not keeps_cache:
                    raise
                called.clear()
                model(**{**inputs, "use_cache": False})
    except _Enough:
        pass
    except Exception as error:
        if isinstance(error, _BesideStream):
            raise ValueError(str(error)) from None
        if not streams:
            raise InputsDoNotFit(
                f"split_stages: the run up to the first block '{blocks[0]}' failed: {type(error).__name__}: {error}. "
                "Give inputs= only what the model needs, such as its ids, or leave inputs= out: then the order in "
                "which modules were made is taken for the order in which they run"
            ) from error
    finally:
        for handle in handles:
            handle.remove()
    if not streams:
        raise ValueError(
            f"split_stages: the run ended without a call of '{blocks[0]}', so it is not the first block: let the "
            "model's list hold its blocks in the order in which they run, or give split_stages blocks= their paths"
        )
    stream = streams[0]
    if not _platform.is_tensor(stream):
        raise ValueError(
            f"split_stages: the block '{blocks[0]}' was called with a {type(stream).__name__}, so there is no stream "
            "to hand on: pass it as the block's first argument"
        )
    num_outputs = len(outputs[0]) if outputs and isinstance(outputs[0], (tuple, list)) else 0
    spec = StreamSpec(tuple(stream.shape), stream.dtype)
    handed_on = (outputs[0][0] if num_outputs else outputs[0]) if outputs else stream
    return Seen(tuple(dict.fromkeys(called)), spec, num_outputs, handed_on)


@contextmanager
def _as_trained(model: Any) -> Iterator[None]:
    """Context: every parameter asks for its gradient, so that what is computed with frozen ones is known too."""
    frozen = [
        one
        for one in _platform.parameters_dict(model).values()
        if not _platform.requires_grad(one) and one.is_floating_point()
    ]
    for parameter in frozen:
        parameter.requires_grad = True
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad = False


@contextmanager
def _without_trace(model: Any) -> Iterator[None]:
    """Context: an evaluation behind which buffers, where models count or average, and random numbers are as before."""
    modules = [module for _, module in _platform.get_cells_and_names(model)]
    places = [(one, table, name) for one in modules for table, name in _platform.tensor_names(one) if "buffer" in table]
    buffers = _platform.values_at(places)
    values = [None if one is None else _platform.copied(_platform.detached(one)) for one in buffers]
    drawn, was_training = _platform.get_draw_state(), _platform.set_training(model, False)
    try:
        yield
    finally:
        _platform.set_training(model, was_training)
        _platform.set_draw_state(drawn)
        for (module, table, name), buffer, value in zip(places, buffers, values, strict=True):
            vars(module)[table][name] = buffer
            if value is not None:
                _platform.load_into_param(buffer, value)


class _BesideStream(Exception):
    """Something that only other stages know beside the stream."""


def _check_called(path: str, module: Any, args: Any, kwargs: Any) -> None:
    """Refuse a module before the blocks whose output has no shape that stages without it could tell from its input."""
    if args and not _platform.is_tensor(args[0]):
        raise _BesideStream(
            f"split_stages: '{path}' ({type(module).__name__}) runs before the blocks and is called with a "
            f"{type(args[0]).__name__}, no tensor, so the shape of what it gives cannot be told on stages without it: "
            "use tp, dp_shard or cp for this model, or make it of buffers, which every stage has"
        )


def _check_given(path: str, args: Any, kwargs: Any) -> None:
    """Refuse what was computed with parameters before the blocks, which other stages do not have."""
    for name, one in beside_stream(path, args, kwargs):
        if _platform.needs_grad(one):
            raise _BesideStream(
                f"split_stages: the block '{path}' is given, beside the stream, a tensor of shape {tuple(one.shape)} "
                f"({name}) that was computed with parameters outside of the blocks, which are not there on later "
                "stages; only the stream travels: use tp, dp_shard or cp for this model, or let each block compute it "
                "with parameters of its own"
            )


def _check_handed_on(path: str, output: Any, args: Any, kwargs: Any) -> None:
    beside = [one for one in output[1:] if _platform.is_tensor(one)] if isinstance(output, (tuple, list)) else []
    given = [one for one in (*args, *kwargs.values()) if any(one is other for other in beside)]
    if given:
        shapes = ", ".join(str(tuple(one.shape)) for one in given)
        raise _BesideStream(
            f"split_stages: '{path}' hands a tensor of shape {shapes} on to the next block beside the stream; only the "
            "stream travels between stages: let the block give and take the stream alone"
        )


def _without_memory(value: Any) -> Any:
    if not _platform.is_tensor(value) or _platform.has_no_memory(value):
        return value
    return _platform.zeros(tuple(value.shape), value.dtype, _platform.meta_device)  # a dry run keeps integers' values
