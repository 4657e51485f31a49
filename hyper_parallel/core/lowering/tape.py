"""The tape: what a call of a module did, line by line, as Python that a person can read and that runs again.

Each local operator, each edge of the autograd graph, each collective and each draw of random numbers is one line.
Backward is not on it: the lines are recorded by the framework's autograd when they run, as those of any program.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.lowering.spelling import Ref, Spelling


@dataclass
class Line:
    """``results = function(*args, **kwargs)``; tensors among the arguments are :class:`Ref`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Any  # a Ref, None for what is no tensor, or a list or tuple of these
    has_gradients: bool  # whether the framework records its gradient
    stays: bool  # it writes, sends, draws or checks: it runs though nobody uses its results
    on_host: bool = False  # it is about the host (a draw, a check) and cannot be part of a compiled graph
    draws: bool = False  # from the framework's own generator
    writes: bool = False  # into a tensor

    @property
    def made(self) -> list[str]:
        """The names of its results."""
        return names_in(self.results)

    @property
    def used(self) -> list[str]:
        """The names of its arguments."""
        return names_in((self.args, self.kwargs))


class Identity:
    """A constant in a key: equal to itself only, and kept as long as the key."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass
class Tape:
    """A program: the names of its inputs, its lines, and the names of its results."""

    inputs: list[str]
    lines: list[Line]
    outputs: list[str]
    has_gradients: bool  # whether the call that was recorded was to be differentiated
    grad_modes: Callable[[bool], Any]  # a context in which the framework records gradients, or does not
    paths: dict[str, str] = field(default_factory=dict)  # name of an input -> where it is found

    def __post_init__(self) -> None:
        self._drop_dead_lines()
        self._number_anew()

    def _number_anew(self) -> None:
        """Names in order; the numbers of lines that were dropped depend on what was planned while it was recorded."""
        made = dict.fromkeys(name for line in self.lines for name in line.made)
        names = {name: f"v{number}" for number, name in enumerate(made, 1)}
        for line in self.lines:
            for ref in refs_in((line.args, line.kwargs, line.results)):
                ref.name = names.get(ref.name, ref.name)
        self.outputs = [names.get(name, name) for name in self.outputs]

    def _drop_dead_lines(self) -> None:
        live, kept = set(self.outputs), []
        for line in reversed(self.lines):
            if line.stays or live.intersection(line.made):
                live.update(line.used)
                kept.append(line)
        self.lines = kept[::-1]
        self._live = live

    @property
    def used_inputs(self) -> list[str]:
        """The inputs that any line or result needs, each once: a tied weight is under two paths."""
        return [name for name in dict.fromkeys(self.inputs) if name in self._live]

    def source(self, name: str = "lowered") -> str:
        """The program as Python."""
        return self._written(name, self.used_inputs, self.lines, self.outputs)[0]

    def program(self) -> Callable[..., Any]:
        """The tape as a function of ``used_inputs`` that gives the results as a tuple."""
        return self._function(self.used_inputs, self.lines, self.outputs)

    def split(self) -> tuple[Callable[..., Any] | None, Callable[..., Any], tuple[Any, ...]]:
        """What is about the host, with all it needs, as a function of ``used_inputs``, None where there is nothing; the
        rest as a function of these and of what the first gives; and what tells this rest from another one: its text
        and its constants.
        """
        wanted: set[str] = set()
        before: list[Line] = []
        for line in reversed(self.lines):
            if line.on_host or wanted.intersection(line.made):
                wanted.update(line.used)
                before.append(line)
        rest = [line for line in self.lines if not line.on_host]
        given = [name for line in self.lines if line.on_host for name in line.made]
        inputs = [*self.used_inputs, *given]
        text, constants = self._written("lowered", inputs, rest, self.outputs)
        program = (text, *map(Identity, constants.values()))
        first = self._function(self.used_inputs, before[::-1], given) if before else None
        return first, self._function(inputs, rest, self.outputs), program

    def reach(self) -> list[set[str]] | None:
        """For each result the inputs that its gradient may reach; None where these are the same for all."""
        if any(line.writes for line in self.lines):
            return None
        found = {name: {name} for name in self.inputs}
        for line in self.lines:
            behind: set[str] = set()
            for name in line.used if line.has_gradients else ():
                behind |= found.get(name, set())
            found |= dict.fromkeys(line.made, behind)
        reached = [found[name] for name in self.outputs]
        return reached if any(one != reached[0] for one in reached) else None

    def _function(self, inputs: Sequence[str], lines: Sequence[Line], outputs: Sequence[str]) -> Callable[..., Any]:
        text, constants = self._written("lowered", inputs, lines, outputs)
        space = dict(constants)
        exec(compile(text, "<lowered>", "exec"), space)
        made: Callable[..., Any] = space["lowered"]
        return made

    def _written(
        self, name: str, inputs: Sequence[str], lines: Sequence[Line], outputs: Sequence[str]
    ) -> tuple[str, dict[str, Any]]:
        spelling = Spelling()
        for taken in (*self.inputs, *(one for line in self.lines for one in line.made), "grad_mode", name):
            spelling.fresh(taken)
        body: list[str] = []
        inside = self.has_gradients
        for line in lines:
            if line.has_gradients != inside:
                inside = line.has_gradients
                if inside != self.has_gradients:
                    body.append(f"    with grad_mode({inside}):")
            indent = "    " if inside == self.has_gradients else "        "
            body.append(f"{indent}{_results(line)}{_call(spelling, line)}")
        body.append(f"    return ({', '.join(outputs)}{',' if outputs else ''})")
        head = [f"def {name}({', '.join(inputs)}):"]
        places = [f"    # {one} = {self.paths[one]}" for one in inputs if self.paths.get(one, one) != one]
        constants = {**spelling.constants, "grad_mode": self.grad_modes}
        return "\n".join([*spelling.legend(), *head, *places, *body]) + "\n", constants


def _results(line: Line) -> str:
    if not line.made:
        return ""
    if isinstance(line.results, Ref):
        return f"{line.results.name} = "
    items = ["_" if one is None else one.name for one in line.results]
    return f"{', '.join(items)}{',' if len(items) == 1 else ''} = "


def _call(spelling: Spelling, line: Line) -> str:
    given = [spelling.text(value) for value in line.args]
    odd = {name: value for name, value in line.kwargs.items() if not name.isidentifier() or keyword.iskeyword(name)}
    given += [f"{name}={spelling.text(value)}" for name, value in line.kwargs.items() if name not in odd]
    given += [f"**{spelling.text(odd)}"] if odd else []
    return f"{spelling.function(line.function)}({', '.join(given)})"


def names_in(value: Any) -> list[str]:
    """The names of the tensors in nested lists, tuples, dicts and slices."""
    return [ref.name for ref in refs_in(value)]


def refs_in(value: Any) -> list[Ref]:
    """The tensors in nested lists, tuples, dicts and slices."""
    if isinstance(value, Ref):
        return [value]
    if isinstance(value, (list, tuple)):
        return [ref for item in value for ref in refs_in(item)]
    if isinstance(value, dict):
        return [ref for item in value.values() for ref in refs_in(item)]
    if isinstance(value, slice):
        return refs_in((value.start, value.stop, value.step))
    return []
