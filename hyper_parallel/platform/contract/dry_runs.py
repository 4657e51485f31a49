"""What a framework must provide for runs without memory. Optional: the dry run is made on PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any


class DryRuns:
    """Counting a run on tensors without memory; the defaults say that the framework cannot."""

    @staticmethod
    def counted(log: Any, device: str) -> AbstractContextManager[Any]:
        """Context: operators run on shapes, and ``log`` is told of memory and operations as ``device`` would need them.

        Gives an object whose ``mark(tensors, kind)`` names what memory is for.
        """
        raise RuntimeError(_NOT_HERE)

    @staticmethod
    def building_without_memory() -> AbstractContextManager[Any]:
        """Context: models built inside have neither parameters nor buffers with memory."""
        raise RuntimeError(_NOT_HERE)

    @staticmethod
    def watch_modules(model: Any, log: Any) -> AbstractContextManager[None]:
        """Context: ``log.enter(path, line)`` when a module of ``model`` begins, ``log.leave()`` when it ends."""
        raise RuntimeError(_NOT_HERE)

    @staticmethod
    def watch_gradients(model: Any, tell: Callable[[Any], None]) -> None:
        """Call ``tell(gradient)`` whenever a parameter has got one."""
        raise RuntimeError(_NOT_HERE)

    @staticmethod
    def buffers_of(model: Any) -> Iterator[Any]:
        """The tensors of a model that are not trained."""
        raise RuntimeError(_NOT_HERE)

    @staticmethod
    def cast_model(model: Any, dtype: str) -> Any:
        """The model with its floating-point parameters and buffers in ``dtype``."""
        raise RuntimeError(_NOT_HERE)

    @staticmethod
    def token_ids(batch: int, length: int) -> Any:
        """Integers (batch, length) to feed a language model with."""
        raise RuntimeError(_NOT_HERE)

    @staticmethod
    def argument_names_of(model: Any) -> tuple[str, ...]:
        """The names of the arguments of a model's forward function."""
        raise RuntimeError(_NOT_HERE)

    @staticmethod
    def make_optimizer(optimizer: Any, model: Any, device: str) -> Any:
        """The optimizer of that name as on ``device``, or the one that the function ``optimizer(parameters)`` makes."""
        raise RuntimeError(_NOT_HERE)

    @staticmethod
    def optimizer_state_of(optimizer: Any) -> Iterator[Any]:
        """The tensors that an optimizer keeps from step to step."""
        raise RuntimeError(_NOT_HERE)


_NOT_HERE = (
    "the dry run executes PyTorch's tensors without memory, and this process runs on another framework: set "
    "HYPER_PARALLEL_PLATFORM=torch for it"
)
