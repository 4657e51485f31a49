"""A tape made to run: the tensors of a call go in, its outputs come out with their layouts and all they carry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.lowering.carried import carry
from hyper_parallel.core.lowering.tape import Tape
from hyper_parallel.platform import get_platform

_platform = get_platform()

Label = tuple[Any, Any]  # layout and global shape


@dataclass
class Output:
    """A tensor that the call gives: its place among the tape's outputs, or among the inputs that it is."""

    place: int
    label: Label | None  # None: a plain tensor
    is_input: bool = False
    carries: tuple[tuple[str, Any, Output], ...] = ()  # kind, key, what


class Program:
    """A tape with the way in and out; call it with the tensors of a call whose key it was recorded for."""

    def __init__(self, tape: Tape, tree: Any) -> None:
        self.tape = tape
        self.tree = tree  # the outputs of the module, with Output in place of tensors
        places = {name: place for place, name in enumerate(tape.inputs)}
        self.taken = [places[name] for name in tape.used_inputs]
        self.run: Callable[..., Any] = tape.program()
        self.backend = "local"
        self.before: Callable[..., Any] | None = None  # of a compiled program: what is about the host

    def __call__(self, tensors: list[Any]) -> Any:
        given = [tensors[place] for place in self.taken]
        if self.before is not None:
            given += _platform.run_locally(self.before, given)
        return _built(self.tree, tensors, _platform.run_locally(self.run, given))

    def compile(self, tell: Callable[[str], None], shared: dict[Any, Any]) -> None:
        """Compile what is on the tape; where that cannot be, ``tell`` is told and the tape runs as it is.

        Programs of one text and the same constants are one program, of which ``shared`` has the code.
        """
        if any(line.draws for line in self.tape.lines):
            tell("it draws from the framework's own generator, which compiled code has its own of; it runs uncompiled")
            return
        before, graph, text = self.tape.split()
        reach = self.tape.reach()
        places = None if reach is None else [[name in one for name in self.tape.used_inputs] for one in reach]

        def failed(why: str) -> Any:
            tell(f"it cannot be compiled and runs uncompiled: {why}")
            self.before, self.run, self.backend = None, self.tape.program(), "local"

        self.before, self.run, self.backend = (
            before,
            _platform.compiled(graph, failed, text, shared, places),
            "inductor",
        )


def _built(tree: Any, tensors: list[Any], results: Any) -> Any:
    kind = type(tree)
    if kind is Output:
        if tree.is_input:
            return tensors[tree.place]
        value = results[tree.place]
        if tree.label is not None:
            value = _platform.as_dtensor(DTensor, value, *tree.label)
        for what, key, other in tree.carries:
            carry(value, what, key, _built(other, tensors, results))
        return value
    if kind is tuple or kind is list:
        return kind([_built(item, tensors, results) for item in tree])
    if kind is dict:
        return {name: _built(item, tensors, results) for name, item in tree.items()}
    return tree


def make_program(tape: Tape, tree: Any, backend: str, tell: Callable[[str], None], shared: dict[Any, Any]) -> Program:
    """The program of a tape under ``backend``."""
    program = Program(tape, tree)
    if backend == "inductor":
        program.compile(tell, shared)
    return program
