"""What a framework must provide: modules and their parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SeenLoss:
    """A call of one of the framework's loss functions.

    ``count``: how many numbers a mean is over, a number or a tensor; None where it is not one of all its numbers.
    """

    name: str
    reduction: str
    count: Any
    value: Any


class Modules(ABC):
    """Modules and parameters."""

    @staticmethod
    @abstractmethod
    def get_cell_construct(cell: Any) -> Callable[..., Any]:
        """The module's forward function."""

    @staticmethod
    @abstractmethod
    def get_cells_and_names(cell: Any) -> Iterable[tuple[str, Any]]:
        """(name, module) of the module and all below it."""

    @staticmethod
    @abstractmethod
    def parameters_dict(cell: Any, remove_duplicate: bool = True) -> dict[str, Any]:
        """The parameters by name: a tied one under its first name, or, without ``remove_duplicate``, under all."""

    @staticmethod
    @abstractmethod
    def search_parameter_by_name(cell: Any, param_name: str) -> Any:
        """Where a parameter lives, for :meth:`update_parameter_by_name`; None when there is none of that name."""

    @staticmethod
    @abstractmethod
    def update_parameter_by_name(cell: Any, result: Any, new_param: Any) -> None:
        """Put ``new_param`` where :meth:`search_parameter_by_name` found the old one."""

    @staticmethod
    @abstractmethod
    def set_layout_into_parameter(param: Any, layout: Any) -> Any:
        """Record ``layout`` on the parameter."""

    @staticmethod
    @abstractmethod
    def get_param_local_shape(param: Any) -> Any:
        """The shape of this rank's part."""

    @staticmethod
    @abstractmethod
    def get_param_local_data(param: Any) -> Any:
        """This rank's part, without gradient."""

    @staticmethod
    @abstractmethod
    def update_param_data(param: Any, data: Any) -> None:
        """Let the parameter hold ``data`` from now on."""

    @staticmethod
    @abstractmethod
    def load_into_param(param: Any, data: Any) -> None:
        """Copy ``data`` into the parameter's own memory; shapes must agree."""

    @staticmethod
    @abstractmethod
    def get_param_type_size(param: Any) -> int:
        """Bytes per element."""

    @staticmethod
    @abstractmethod
    def is_linear_module(module: Any) -> bool:
        """Whether it is the framework's dense layer."""

    @staticmethod
    @abstractmethod
    def is_embedding_module(module: Any) -> bool:
        """Whether it is the framework's embedding."""

    @classmethod
    def linear_weight_dims(cls, module: Any) -> tuple[int, int] | None:
        """The dims of a dense layer's ``weight`` that stand for its outputs and its inputs; None for other modules."""
        return (0, 1) if cls.is_linear_module(module) else None

    @staticmethod
    def weight_name(module: Any) -> str:
        """What a dense layer or an embedding calls its weight."""
        del module
        return "weight"

    @staticmethod
    def linear_function(module: Any) -> Callable[[Any, Any, Any], Any] | None:
        """``(x, weight, bias or None) -> output`` of a dense layer; None for a module that computes something else.

        A layer for which None is given keeps its own forward.
        """
        del module
        return None

    @staticmethod
    @abstractmethod
    def linear(x: Any, weight: Any) -> Any:
        """``x`` times the transpose of ``weight``, which has a dim for outputs and one for inputs."""

    @staticmethod
    @abstractmethod
    def dropout(x: Any, probability: float) -> Any:
        """``x`` with elements zeroed by chance, and the others scaled up."""

    @staticmethod
    def replace_forward(module: Any, forward: Callable[..., Any]) -> None:
        """Let ``forward(module, ...)`` compute the module's output; hooks stay around it."""
        raise TypeError(f"the forward function of a {type(module).__name__} cannot be replaced on this platform")

    @classmethod
    def own_parameters(cls, module: Any) -> dict[str, Any]:
        """The parameters that belong to the module itself, by their names there; not those of modules inside it."""
        return {name: parameter for name, parameter in cls.parameters_dict(module).items() if "." not in name}

    @staticmethod
    @abstractmethod
    def state_tensors(module: Any) -> Iterator[Any]:
        """The parameters and buffers of a module and of those inside it, each once."""

    @staticmethod
    @abstractmethod
    def cast_parameters(module: Any, dtype: str) -> Any:
        """The module with its floating-point parameters and buffers in ``dtype``, with or without memory."""

    @staticmethod
    @abstractmethod
    def set_training(module: Any, modes: bool | dict[Any, bool]) -> dict[Any, bool]:
        """Let the module and those inside it train or not; what each did before, to be given back here.

        Modules that came in between, as forwards may replace some, do as ``module`` itself.
        """

    @staticmethod
    def reset_parameters(
        module: Any, parameters: list[Any], fill_random: Callable[..., Any], around: Callable[[Any], Any]
    ) -> None:
        """Give ``parameters``, distributed ones, the initial values that the modules inside were built for.

        From the inside out; other parameters keep theirs. ``fill_random(parameter, kind, **arguments)`` overwrites one
        with random values that do not depend on its layout; kinds are those of ``core/dtensor/random/random_fill.py``.
        ``around(module)`` is a context for what that module's own code fills.
        """
        del parameters, fill_random, around
        raise TypeError(
            f"the modules of a {type(module).__name__} have no way of their own to make initial values on this "
            "platform; give materialize an init= function"
        )

    def without_memory(self) -> Any:
        """Context: modules built inside have parameters without memory, and buffers as usual."""
        return self.init_on_device(self.meta_device)

    @staticmethod
    def watch_losses() -> AbstractContextManager[list[SeenLoss]]:
        """Context: the calls of loss functions inside, as far as the framework tells of them."""
        return nullcontext([])

    @staticmethod
    @abstractmethod
    def watch_uses(parameter: Any, on_gradient: Callable[[], None], on_step: Callable[[str], None]) -> None:
        """Call ``on_gradient`` when backward brings the parameter a gradient, and ``on_step`` with its kind before an
        optimizer that holds the parameter steps.
        """

    @staticmethod
    def install_parameter(module: Any, name: str, parameter: Any) -> None:
        """Let ``parameter`` be the module's own parameter of that name."""
        setattr(module, name, parameter)

    @staticmethod
    @abstractmethod
    def take_out_tensors(module: Any) -> None:
        """Leave the module itself without parameters and buffers; their names stay, for tensors without memory or None.

        Modules inside keep theirs. What was taken out is in no list of parameters and in no state.
        """

    @staticmethod
    def plain_parameters_behind(tensor: Any, known: Iterable[Any]) -> list[Any]:
        """The plain parameters that ``tensor`` was computed from, up to where a layout changed.

        ``known`` are those that are looked for where the graph itself does not show them; empty where a framework does
        not show its graph.
        """
        del tensor, known
        return []

    @staticmethod
    def use_separate_projections(module: Any) -> None:
        """Let an attention module of the framework that has one weight for query, key and value compute with three."""
        raise TypeError(f"a {type(module).__name__} of this framework has no weights that can be separated")

    @staticmethod
    def has_no_memory(tensor: Any) -> bool:
        """Whether the tensor has a shape only, as those on :attr:`meta_device`."""
        del tensor
        return False

    @staticmethod
    @abstractmethod
    def register_forward_pre_hook(
        module: Any, hook: Callable[..., Any], prepend: bool = False, with_kwargs: bool = False
    ) -> Any:
        """Call ``hook`` before forward; a handle with ``remove()``."""

    @staticmethod
    @abstractmethod
    def register_full_backward_hook(module: Any, hook: Callable[..., Any], prepend: bool = False) -> Any:
        """Call ``hook`` after the module's gradients are computed; a handle with ``remove()``."""

    @staticmethod
    @abstractmethod
    def register_full_backward_pre_hook(module: Any, hook: Callable[..., Any], prepend: bool = False) -> Any:
        """Call ``hook`` before the module's gradients are computed; a handle with ``remove()``."""

    @staticmethod
    @abstractmethod
    def init_parameters(module: Any, stage_index: int) -> None:
        """Give memory and initial values to parameters that have none; None module or negative stage: ValueError."""

    @property
    @abstractmethod
    def meta_device(self) -> Any:
        """The device whose tensors have a shape and no memory."""

    runs_without_memory = True
    """Whether a model on :attr:`meta_device` can be run, on shapes."""

    @abstractmethod
    def init_on_device(self, device: Any, include_buffers: bool = False) -> Any:
        """Context: parameters (and buffers) of modules built inside live on ``device``."""

    @staticmethod
    @abstractmethod
    def micro_batch(micro_batch_num: int, args_batch_dim: Any = None, kwargs_batch_dim: Any = None) -> Any:
        """Decorator: split a call's inputs along their batch dims, call once per part, return the list of results."""
