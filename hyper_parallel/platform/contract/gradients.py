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
