"""What a framework must provide: a tensor type whose operators can be intercepted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class DTensorType(ABC):
    """A tensor type whose operators can be intercepted; it knows nothing of layouts."""

    #: Whether a subclass of DTensor is asked by its ``_on_operator`` before an operator runs on it.
    asks_subclasses = False

    @staticmethod
    def replaced_functions() -> list[tuple[str, str, str]]:
        """(name, state, reason) of the framework's functions that are replaced; state: "ours", "theirs", "missing"."""
        return []

    @staticmethod
    @abstractmethod
    def as_dtensor(kind: Any, plain: Any, layout: Any, shape: Any) -> Any:
        """Make ``plain`` itself a DTensor; the caller must own it."""

    @staticmethod
    @abstractmethod
    def alias(tensor: Any) -> Any:
        """A plain tensor with the same memory and gradient history, to be turned into a DTensor."""

    @staticmethod
    @abstractmethod
    def local_alias(tensor: Any) -> Any:
        """The block as a plain tensor: the same memory and the same gradient history."""

    @staticmethod
    @abstractmethod
    def detached(tensor: Any) -> Any:
        """The block as a plain tensor without gradient history."""

    @staticmethod
    @abstractmethod
    def without_interception(func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a C function, or an autograd function's ``apply``, directly on the blocks of DTensors."""

    @staticmethod
    @abstractmethod
    def graph_function(func: Any) -> Any:
        """Our form of a function about the autograd graph and not about values; None for other functions."""

    @staticmethod
    @abstractmethod
    def set_dispatcher(intercept: Any) -> Any:
        """Let ``intercept(kind, func, types, args, kwargs)`` answer every operator that meets a DTensor."""

    @staticmethod
    def install_masked_functions(promise: Any, refuse: Any) -> None:
        """Let functions of the framework that mask with plain tensors of their own be called with DTensors."""
        del promise, refuse  # most frameworks have none

    @staticmethod
    @abstractmethod
    def set_rebuilder(rebuild: Any) -> Any:
        """Let ``rebuild(local, layout_dict, shape, requires_grad, is_param)`` make DTensors of pickled parts."""

    @staticmethod
    @abstractmethod
    def body_of(func: Any) -> Any:
        """The twin of a Python-written function that does not ask to be intercepted; None for a C function."""

    @staticmethod
    @abstractmethod
    def is_intercepted(func: Any) -> Any:
        """Whether calling ``func`` with DTensors leads to the dispatcher by itself, as for operators of a library."""

    @staticmethod
    @abstractmethod
    def is_framework_service(func: Any) -> Any:
        """Whether ``func`` asks about, or marks, the tensor object and not its values."""
