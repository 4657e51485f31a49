"""Writing a tape: what runs while a module is called, and why it may not be written down.

Note [A refusal changes nothing]
Recording is a call like any other: the operators run by dispatch and their results are the results of the call. Where
something cannot be written down faithfully, the recorder says why and stops writing; the call goes on. So a refusal
costs what was written so far, and the module runs by dispatch from then on.

Note [Names of tensors]
A tensor is known by its object. The recorder does not keep the objects, since what the dispatcher does may depend on
who else shares a memory; it is told when one is gone. A tensor that meets a line and has no name was made where nobody
looked, or before: it would be a constant of the tape, and is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.lowering.carried import carried_by
from hyper_parallel.core.lowering.constants import why_not_constant
from hyper_parallel.core.lowering.guards import Inputs
from hyper_parallel.core.lowering.program import Output
from hyper_parallel.core.lowering.spelling import Ref, Spelling
from hyper_parallel.core.lowering.tape import Line, Tape
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.checks.taps import is_traceable

_platform = get_platform()


_MOVED = "it seeds the framework's generator, or draws where no line does: draw by hyper_parallel, or outside"


class _Unfaithful(Exception):
    """An argument that cannot be written down."""


class LineFacts:
    """What the framework saw while a line ran."""

    __slots__ = ("mark", "on_host", "writes")

    def __init__(self, on_host: bool) -> None:
        self.on_host = on_host
        self.writes = False
        self.mark: Any = None  # of the framework's generator, before what may draw from it


class Recorder:
    """Writes the lines of one call; see Note [A refusal changes nothing]."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.reason: str | None = None
        self.depth = 0  # how many lines are running: what they call is a part of them
        self.facts = LineFacts(on_host=True)  # of the line that runs
        self._names: dict[int, tuple[str, Any]] = {}  # id of a tensor -> its name, a weak reference
        self._ambient = _platform.ambient_state()
        self._has_gradients = _platform.is_recording()
        self._num_made = 0
        self._mark = _platform.generator_mark()  # of the framework's generator, behind the last line that drew
        self.paths: dict[str, str] = {}  # name of an input -> where it is found

    # ---------------------------------------------------------------- what is known

    @property
    def writes(self) -> bool:
        """Whether the next call is to be a line."""
        return self.reason is None and self.depth == 0

    def refuse(self, reason: str) -> None:
        """Stop writing, because of ``reason``; the first one counts."""
        if self.reason is None:
            self.reason = reason
            self.lines = []

    def know(self, tensor: Any, name: str) -> None:
        """``tensor`` is ``name`` on the tape."""
        tensor = _platform.known_as(tensor)
        key = id(tensor)

        def gone(reference: Any) -> None:
            found = self._names.get(key)
            if found is not None and found[1] is reference:
                del self._names[key]

        self._names[key] = (name, weakref.ref(tensor, gone))

    def name_of(self, tensor: Any) -> str | None:
        """The name of a tensor; None for one that the tape does not know."""
        tensor = _platform.known_as(tensor)
        found = self._names.get(id(tensor))
        return found[0] if found is not None and found[1]() is tensor else None

    # ---------------------------------------------------------------- lines

    def record(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        stays: bool = False,
        on_host: bool = False,
        run: Callable[..., Any] | None = None,
    ) -> Any:
        """``function(*args, **kwargs)`` as one line; ``run`` is how it is called now, where that differs."""
        call = run or function
        if not self.writes:
            return call(*args, **kwargs)
        has_gradients = _platform.is_recording()
        written: tuple[Any, Any] | None = None
        try:
            reason = why_not_constant(function)
            if reason is not None:
                raise _Unfaithful(f"{_called(function)} is called: {reason}")
            written = (self._write(args), self._write(kwargs))
        except _Unfaithful as found:
            self.refuse(str(found))
        if written is not None and _platform.ambient_state() != self._ambient:
            self.refuse(
                f"{_called(function)} runs under other settings than the module was called with (autocast, a mode, "
                "hooks of saved tensors, recomputation inside): lower what is inside instead"
            )
        self.facts = facts = LineFacts(on_host)
        result = self.aside(call, args, kwargs)
        if self.reason is not None or written is None:
            return result
        try:
            results = self._made(function, result)
        except _Unfaithful as found:
            self.refuse(str(found))
            return result
        draws = False
        if facts.mark is not None:
            if facts.mark != self._mark:
                self.refuse(_MOVED)
            self._mark = self.aside(_platform.generator_mark, (), {})
            draws = facts.mark != self._mark
        stays = stays or facts.writes or draws or result is None
        self.lines.append(Line(function, *written, results, has_gradients, stays, on_host, draws, facts.writes))
        return result

    # ---------------------------------------------------------------- inputs and outputs

    def take_inputs(self, inputs: Inputs) -> list[str]:
        """Know the tensors of a call; their names on the tape. The same tensor has one."""
        names = []
        spelling = Spelling()
        for path, tensor in zip(inputs.names, inputs.tensors, strict=True):
            name = self.name_of(tensor)
            if name is None:
                name = spelling.fresh(
                    f"{path}_" if path[:1] == "v" and path[1:].isdigit() else path
                )  # lines are v1, v2, ...
                self.know(tensor, name)
            self.paths.setdefault(name, path)
            names.append(name)
        return names

    def finish(self, inputs: list[str], outputs: Any) -> tuple[Tape, Any] | None:
        """The tape, and the module's outputs with :class:`Output` in place of tensors; None after a refusal."""
        results: list[str] = []
        if _platform.generator_mark() != self._mark:
            self.refuse(_MOVED)
        if (_platform.is_recording(), _platform.ambient_state()) != (self._has_gradients, self._ambient):
            self.refuse("it leaves gradients, autocast or the default dtype switched: switch them outside")
        try:
            tree = self._outputs(outputs, inputs, results)
        except _Unfaithful as found:
            self.refuse(str(found))
        if self.reason is not None:
            return None
        tape = Tape(inputs, self.lines, results, self._has_gradients, _platform.grad_mode, self.paths)
        return tape, tree

    def _outputs(self, value: Any, inputs: list[str], results: list[str]) -> Any:
        if _platform.is_tensor(value):
            return self._output(value, inputs, results)
        kind = type(value)
        if kind in (tuple, list):
            return kind(self._outputs(item, inputs, results) for item in value)
        if kind is dict:
            return {name: self._outputs(item, inputs, results) for name, item in value.items()}
        if kind in (bool, int, float, str, type(None)):
            return value
        raise _Unfaithful(f"it returns a {kind.__name__}: return tensors in tuples, lists or dicts")

    def _output(self, tensor: Any, inputs: list[str], results: list[str]) -> Output:
        label = None
        if isinstance(tensor, DTensor):
            tensor = tensor._completed()
            if type(tensor) is not DTensor and not isinstance(tensor, _platform.Parameter):
                raise _Unfaithful(f"it returns a {type(tensor).__name__}, which is not an ordinary DTensor")
            label = (tensor._layout, tensor._global_shape)
        name = self.name_of(tensor)
        if name is None:
            raise _Unfaithful(f"it returns a tensor of shape {tuple(tensor.shape)} that no recorded operator made")
        if name in inputs:
            return Output(inputs.index(name), label, is_input=True)
        for attribute in _platform.attributes_of(tensor):
            raise _Unfaithful(f"it sets the attribute {attribute!r} of what it returns")
        results.append(name)
        place = len(results) - 1
        carries = []
        for one in carried_by(tensor):
            if self.name_of(one.tensor) is not None:
                carries.append((one.kind, one.key, self._output(one.tensor, inputs, results)))
        return Output(place, label, carries=tuple(carries))

    # ---------------------------------------------------------------- as a tap, see ``platform/checks/taps.py``

    def line(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Functions that are one line send, draw or check."""
        return self.record(function, args, kwargs, stays=True, on_host=not is_traceable(function))

    def aside(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the call does is a part of a line, or need not be repeated."""
        self.depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            self.depth -= 1

    def outside(self, what: str) -> None:
        """What is right inside of a line only."""
        if self.writes:
            self.refuse(what)

    # ---------------------------------------------------------------- arguments and results

    def _made(self, function: Callable[..., Any], result: Any) -> Any:
        if _platform.is_tensor(result):
            return self._new(result)
        if result is None:
            return None
        if isinstance(result, (tuple, list)):
            if any(item is not None and not _platform.is_tensor(item) for item in result):
                raise _Unfaithful(f"{_called(function)} gives values besides tensors, which the program may read")
            return [None if item is None else self._new(item) for item in result]
        raise _Unfaithful(
            f"{_called(function)} gives a {type(result).__name__}, which is no tensor: the program reads values, and "
            "may do otherwise on others"
        )

    def _new(self, tensor: Any) -> Ref:
        self._num_made += 1
        name = f"v{self._num_made}"
        self.know(tensor, name)
        return Ref(name)

    def _write(self, value: Any) -> Any:
        if _platform.is_tensor(value):
            name = self.name_of(value)
            if name is None:
                raise _Unfaithful(
                    f"a tensor of shape {tuple(value.shape)} is neither an input, a parameter or a buffer, nor made by "
                    "a recorded operator: its values would be baked in. Pass it as an argument, or register it as a "
                    "buffer"
                )
            return Ref(name)
        kind = type(value)
        if kind is list or (isinstance(value, tuple) and not hasattr(value, "_fields")):
            items = [self._write(item) for item in value]
            return items if kind is list else tuple(items)
        if kind is dict:
            return {name: self._write(item) for name, item in value.items()}
        if kind is slice:
            return slice(self._write(value.start), self._write(value.stop), self._write(value.step))
        reason = why_not_constant(value)
        if reason is not None:
            raise _Unfaithful(f"{_called(value) if callable(value) else kind.__name__} is an argument: {reason}")
        return value


def _called(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type):
        return f"{owner.__name__}.{function.__name__}"
    return getattr(function, "__name__", type(function).__name__)
