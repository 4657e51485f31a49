"""What a framework must provide: backward and gradients by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any


class Gradients(ABC):
    """Backward and gradients, in the same words on every framework."""

    @staticmethod
    @abstractmethod
    def backward(tensors: Any, gradients: Any = None, retain_graph: bool = False, create_graph: bool = False) -> None:
        """Add the gradients of ``tensors`` to the leaves they were computed from; scalars need no ``gradients``."""

    @staticmethod
    @abstractmethod
    def value_and_grad(fn: Callable[..., Any], weights: Sequence[Any]) -> Callable[..., Any]:
        """A function that calls ``fn`` and gives ``(value, gradients of the weights)``; no ``grad`` is touched."""

    @staticmethod
    @abstractmethod
    def get_grad(tensor: Any) -> Any:
        """The gradient that :meth:`backward` has added up in a leaf; None before."""

    @staticmethod
    @abstractmethod
    def set_grad(tensor: Any, gradient: Any) -> None:
        """Replace a leaf's gradient; None forgets it."""

    @staticmethod
    @abstractmethod
    def graph_root(tensor: Any) -> Any:
        """What :meth:`backward` can start from in place of a computed tensor, whose memory need not stay for it.

        The tensor itself where a framework cannot.
        """

    @staticmethod
    @abstractmethod
    def has_gradient_hooks(tensor: Any) -> bool:
        """Whether functions are called when :meth:`backward` brings the tensor's gradient, or has added it up."""

    @staticmethod
    @abstractmethod
    def new_thread_value(name: str) -> Any:
        """An object whose ``value``, None at first, each thread has for itself, under a name of its own.

        A thread in which backward runs has the value of the one that asked for it.
        """
