"""What a framework must provide: operators called on the local tensors of DTensors, and views."""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from typing import Any


class LocalCalls(ABC):
    """Calling operators on blocks. The defaults for views: results never share memory with inputs."""

    @staticmethod
    @abstractmethod
    def call_on_blocks(func: Any, args: Any, kwargs: Any) -> Any:
        """``func`` on the blocks of all DTensors among its arguments, as if they were plain tensors."""

    @staticmethod
    @abstractmethod
    def blocks_of(args: Any, kwargs: Any, gives_nothing: bool = False) -> Any:
        """The arguments with every DTensor replaced by its block as a plain tensor.

        ``gives_nothing``: the results have no elements on this rank, so that nothing flows back into the arguments.
        """

    @staticmethod
    @abstractmethod
    def result_wrapper(kind: Any, layouts: Any, shapes: Any, brings_blocks: Any) -> Any:
        """A function that calls an operator on blocks and makes DTensors of its results, in their order."""

    @staticmethod
    @abstractmethod
    def label_all(kind: Any, results: Any, layouts: Any, shapes: Any) -> Any:
        """The tensors of a list as DTensors, in place; those without a layout stay plain."""

    @staticmethod
    @abstractmethod
    def result_like(func: Any, results: Any) -> Any:
        """The results in the named tuple that ``func`` gives."""

    @staticmethod
    @abstractmethod
    def output_shapes(func: Any, args: Any, kwargs: Any) -> Any:
        """The global shapes of the tensors that ``func`` returns, found by calling it on tensors without memory."""

    @staticmethod
    @abstractmethod
    def depends_on_values(error: Any) -> Any:
        """Whether ``error`` of :func:`output_shapes` says that the shapes follow from the values."""

    @staticmethod
    @abstractmethod
    def zeros_kept_in_graph(tensor: Any) -> Any:
        """Zeros that keep ``tensor`` in the graph, with a gradient of zeros."""

    @staticmethod
    @abstractmethod
    def vary(data: Any, group: Any) -> Any:
        """Let a value that is whole on every rank meet values that differ from rank to rank."""

    @staticmethod
    @abstractmethod
    def needs_grad(tensor: Any) -> Any:
        """Whether autograd records what is done with ``tensor`` now."""

    @staticmethod
    @abstractmethod
    def requires_grad(tensor: Any) -> Any:
        """Whether ``tensor``, plain or distributed, has or asks for a gradient."""

    @staticmethod
    @abstractmethod
    def is_leaf(tensor: Any) -> Any:
        """Whether ``tensor`` was made by the program and not by an operator that is recorded."""

    @staticmethod
    @abstractmethod
    def copied(tensor: Any) -> Any:
        """The plain tensor's values in other memory; recorded."""

    @staticmethod
    @abstractmethod
    def write_mark(tensor: Any) -> Any:
        """(a value that changes when the plain tensor is written to, its place in the graph)."""

    @staticmethod
    @abstractmethod
    def set_function_handler(handler: Any) -> Any:
        """Let ``handler(function, args, kwargs)`` answer a user's autograd function that is given DTensors."""

    @staticmethod
    @abstractmethod
    def apply_function(function: Any, args: Any, kwargs: Any) -> Any:
        """A user's autograd function as the framework runs it, whatever its arguments."""

    @staticmethod
    @abstractmethod
    def count_on_one_rank(gradient: Any, mesh: Any, axes: Any) -> Any:
        """The gradient of a sum pending over ``axes`` as a whole value: one rank counts it in its own gradient."""

    @staticmethod
    @abstractmethod
    def carry_random_state(get_state: Any, set_state: Any) -> Any:
        """Let the framework's saved random state carry what ``get_state`` gives, for ``set_state`` to restore."""

    @staticmethod
    @abstractmethod
    def install_addressed_draws(is_active: Any, drawn: Any) -> Any:
        """While ``is_active()``, let the framework's random functions on plain tensors take their values from
        ``drawn(kind, shape, dtype, device, **parameters)``, those of kind uniform, normal, bernoulli or randint."""

    @staticmethod
    def addressed_form(func: Any) -> Any:
        """``func`` as :func:`install_addressed_draws` has it, while that is active; None for all other functions."""
        del func
        return None

    @staticmethod
    def generator_mark() -> Any:
        """A value that changes when the framework's own generator is drawn from; None where that cannot be seen."""
        return None

    @staticmethod
    @abstractmethod
    def counting_versions() -> Any:
        """Context: new tensors count how often they are written to, also where the framework would leave that out."""

    @staticmethod
    @abstractmethod
    def counts_writes(tensor: Any) -> bool:
        """Whether ``tensor``, and what is made of it now, counts how often it is written to."""

    @staticmethod
    @abstractmethod
    def owns_memory(tensor: Any) -> Any:
        """Whether no other tensor shares the memory of ``tensor``."""

    @staticmethod
    def argument_names(func: Any) -> tuple[str, ...]:
        """The names of a function's arguments in their order; empty when they are not known."""
        try:
            return tuple(inspect.signature(func).parameters)
        except (TypeError, ValueError):
            return ()

    @staticmethod
    def exclude_from_compile(kind: type) -> None:
        """Let compiled code, where the framework has a compiler, run operators on tensors of ``kind`` as they are."""
        del kind

    @staticmethod
    def view_ops() -> frozenset[str]:
        """Names of the operators whose result shares the memory of their first argument."""
        return frozenset()

    @staticmethod
    def version_of(tensor: Any) -> int | None:
        """How often the memory of ``tensor`` was written to; None where that is not counted."""
        return None

    @staticmethod
    def recording() -> Any:
        """Context: autograd records what is done inside, also under :func:`no_grad`."""
        return contextlib.nullcontext()

    @staticmethod
    def shares_memory(first: Any, second: Any) -> bool:
        """Whether two blocks lie in one memory."""
        return False

    @staticmethod
    def block_strides(tensor: Any) -> Any:
        """How a block lies in memory, for :func:`would_be_view`."""
        return None

    @staticmethod
    def would_be_view(calls: Any, shape: Any, block: Any) -> bool:
        """Whether the result of the last call shares memory with its argument on one device: the first is given a whole
        tensor whose blocks lie as ``block`` says, and each other one what the one before it gives."""
        return False
