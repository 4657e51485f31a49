"""What a framework must provide: parameters that are whole only while a part of a model runs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.platform.shared.region import Region


class ReturnableMemory(ABC):
    """Memory that is given back and comes again, while the tensors that were made over it stay.

    A tensor made before :meth:`release` may be read again after :meth:`renew`, as soon as the values are back. Nobody
    reads one in between.
    """

    num_elements: int
    num_bytes: int

    @abstractmethod
    def renew(self) -> None:
        """Have memory; the values are unset. Does nothing when there is some."""

    @abstractmethod
    def release(self) -> None:
        """Give the memory back. Does nothing when there is none."""

    @abstractmethod
    def part(self, offset: int, length: int) -> Any:
        """The elements from ``offset``, as a vector that a collective may write into; call it while there is memory."""

    @abstractmethod
    def settle(self) -> None:
        """What collectives write into parts has come: see to it that the tensors have these values."""

    @abstractmethod
    def tensor(self, offset: int, shape: tuple[int, ...]) -> Any:
        """A tensor over the elements from ``offset``, called inside ``forward`` of an autograd function.

        Not a view: writes into the memory are no writes into this tensor for autograd. Code that asks takes it for a
        parameter.
        """

    def tensors(self, places: Sequence[tuple[int, tuple[int, ...]]]) -> list[Any]:
        """:meth:`tensor` for each offset and shape."""
        return [self.tensor(offset, shape) for offset, shape in places]

    @abstractmethod
    def fill_columns(self, rows: Any, columns: Sequence[tuple[int, int, int]]) -> None:
        """For each (start, width, offset): ``rows[:, start : start + width]`` goes to the elements from ``offset``."""

    @abstractmethod
    def fill_boxes(self, rows: Any, start: int, offset: int, shape: Sequence[int], boxes: Sequence[Region]) -> None:
        """``rows[r, start:]`` has the values of box r of the tensor of that shape at ``offset``, in row-major order."""


class ShardMemory(ABC):
    """The local tensors of parameters, one behind the other, to be sent in one piece."""

    @abstractmethod
    def adopt(self, parameter: Any, offset: int) -> None:
        """Let the parameter's local tensor, values and all, be at ``offset``; between two of them is undefined."""

    @abstractmethod
    def holds(self, parameters: Sequence[Any], offsets: Sequence[int]) -> bool:
        """Whether every parameter's local tensor is still where :meth:`adopt` has put it."""

    @abstractmethod
    def part(self, offset: int, length: int) -> Any:
        """The elements from ``offset`` as a vector, with the values that the parameters have now."""


class ParameterUnits(ABC):
    """Whole parameters in a module's forward, and what their gradients need in backward."""

    @staticmethod
    @abstractmethod
    def returnable_memory(num_elements: int, dtype: Any, device: Any) -> ReturnableMemory:
        """Memory for the whole values of parameters, released."""

    @staticmethod
    @abstractmethod
    def shard_memory(num_elements: int, dtype: Any, device: Any, pinned: bool) -> ShardMemory:
        """Memory for the local tensors of parameters; ``pinned``: in host memory, for copies to a device."""

    @staticmethod
    @abstractmethod
    def is_container(module: Any) -> bool:
        """Whether it is a list or dict of modules that has no forward of its own."""

    @staticmethod
    @abstractmethod
    def items_of(module: Any) -> list[Any]:
        """The modules directly inside a module, in their order."""

    @staticmethod
    @abstractmethod
    def parameter_at(module: Any, name: str) -> Any:
        """The parameter that is registered under that name, whatever shadows it; None when there is none."""

    @staticmethod
    @abstractmethod
    def which_need_grad(parameters: Sequence[Any]) -> tuple[bool, ...]:
        """For each parameter, whether it asks for a gradient."""

    @staticmethod
    @abstractmethod
    def shadow(module: Any, name: str, tensor: Any) -> None:
        """Let ``module.<name>`` be ``tensor``; the registered parameter of that name stays as it is."""

    @staticmethod
    @abstractmethod
    def unshadow(module: Any, name: str) -> None:
        """Take back :meth:`shadow`; does nothing when there is none."""

    # The same for lists, and what else is done for every parameter of a unit in every step: a framework may be quicker.

    @classmethod
    def parameters_at(cls, places: Sequence[tuple[Any, str]]) -> list[Any]:
        """:meth:`parameter_at` for each place, a module and a name."""
        return [cls.parameter_at(module, name) for module, name in places]

    @classmethod
    def all_detached(cls, parameters: Sequence[Any]) -> list[Any]:
        """The local tensor of each distributed parameter, without gradient history."""
        return [cls.detached(parameter) for parameter in parameters]  # type: ignore[attr-defined]

    @staticmethod
    def all_seen_as_parameters(tensors: list[Any]) -> list[Any]:
        """The same tensors, which pass for parameters where a program asks."""
        return tensors

    @staticmethod
    def addresses_of(parameters: Sequence[Any]) -> tuple[int, ...] | None:
        """Where the local tensors lie; None where a framework cannot tell."""
        del parameters
        return None

    @classmethod
    def take_grads(cls, leaves: Sequence[Any]) -> list[Any]:
        """The gradients that backward has left in leaves, as plain local tensors; the leaves have none afterwards."""
        found = []
        for leaf in leaves:
            gradient = cls.get_grad(leaf)  # type: ignore[attr-defined]
            if gradient is not None:
                cls.set_grad(leaf, None)  # type: ignore[attr-defined]
                gradient = cls.detached(gradient)  # type: ignore[attr-defined]
            found.append(gradient)
        return found

    @classmethod
    def shadow_all(cls, places: Sequence[tuple[Any, str]], tensors: Sequence[Any]) -> None:
        """:meth:`shadow` at each place, a module and a name."""
        for (module, name), tensor in zip(places, tensors, strict=True):
            cls.shadow(module, name, tensor)

    @classmethod
    def unshadow_all(cls, places: Sequence[tuple[Any, str]]) -> None:
        """:meth:`unshadow` at each place."""
        for module, name in places:
            cls.unshadow(module, name)

    @classmethod
    def add_all_to_grad(cls, parameters: Sequence[Any], blocks: Sequence[Any]) -> None:
        """:meth:`add_to_grad` for each parameter whose block is not None."""
        for parameter, block in zip(parameters, blocks, strict=True):
            if block is not None:
                cls.add_to_grad(parameter, block)

    @classmethod
    def parts_of(cls, vector: Any, places: Sequence[tuple[int, tuple[int, ...]]]) -> list[Any]:
        """For each offset and shape the elements of a vector from there, as a tensor that shares its memory."""
        return [vector[offset : offset + math.prod(shape)].reshape(shape) for offset, shape in places]

    @staticmethod
    @abstractmethod
    def before_backward(tensors: Sequence[Any], call: Callable[[], None]) -> bool:
        """Call ``call()`` in every backward before the gradient of one of ``tensors`` goes on, perhaps several times.

        Also when one of them is a view that is written to later. Whether any of them is differentiable.
        """

    @staticmethod
    @abstractmethod
    def after_backward(call: Callable[[], None]) -> None:
        """Call ``call()`` at the end of the backward that runs now; not when it raises."""

    @staticmethod
    @abstractmethod
    def runs_in_backward() -> bool:
        """Whether this thread runs a backward: a forward that runs then is recomputed."""

    @staticmethod
    @abstractmethod
    def is_recording() -> bool:
        """Whether autograd records operators now."""

    @staticmethod
    @abstractmethod
    def mark_not_differentiable(ctx: Any, tensors: Sequence[Any]) -> None:
        """In ``forward`` of an autograd function: no gradient is to be computed for these results."""

    @staticmethod
    @abstractmethod
    def leave_gradients_missing(ctx: Any) -> None:
        """In ``forward`` of an autograd function: ``backward`` gets None for results that nothing was computed from.

        Where the framework cannot tell it gets zeros.
        """

    @staticmethod
    @abstractmethod
    def adds_to_leaves(ctx: Any) -> bool:
        """In ``backward`` of an autograd function: whether what it returns is added to the gradients of all its inputs,
        which are leaves, and nobody wants to see it before (no hooks). False: the gradients must be returned.
        """

    @staticmethod
    @abstractmethod
    def add_to_grad(parameter: Any, block: Any) -> None:
        """Add ``block``, which nobody else uses, to the gradient of a tensor, or of a distributed one's local tensor.

        The tensor is a leaf, or computed and then only asked by :meth:`take_grads`.
        """

    @staticmethod
    @abstractmethod
    def writes_into(parameters: Sequence[Any]) -> tuple[int, ...]:
        """How often each parameter was written to; numbers that differ after a write."""

    @staticmethod
    @abstractmethod
    def accumulate(total: Any, gradient: Any, dtype: Any) -> Any:
        """``total + gradient`` in ``dtype``, into the memory of ``total``; without ``total`` a copy of ``gradient``."""

    @staticmethod
    @abstractmethod
    def scale(tensor: Any, factor: float) -> Any:
        """``tensor * factor`` in its dtype, into its own memory where the framework can."""
