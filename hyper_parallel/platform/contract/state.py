"""What a framework must provide: the state of models and optimizers, and norms of gradients."""

from __future__ import annotations

import resource
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any


class State(ABC):
    """State dicts, optimizer state, raw bits and norms."""

    @staticmethod
    @abstractmethod
    def get_model_state_dict(model: Any, *, options: Any = None) -> dict[str, Any]:
        """Parameters and buffers by name, as ``options`` asks."""

    @staticmethod
    @abstractmethod
    def save_checkpoint(cell: Any, file_path: Any, ckpt_format: str = "safetensors") -> None:
        """Write a module's or dict's tensors to one file, whole or not at all."""

    @staticmethod
    @abstractmethod
    def load_checkpoint(file_path: Any, ckpt_format: str = "safetensors") -> dict[str, Any]:
        """The tensors of a file by name."""

    # What a checkpoint asks of models and optimizers. A framework whose optimizers do not tell keeps these errors.
    # What is abstract among these methods has a default in ``Platform``, written with the methods of other sections.

    @abstractmethod
    def named_state_parameters(self, model: Any) -> dict[str, Any]:
        """Every parameter under each of its names, the names as in ``get_model_state_dict``."""

    @abstractmethod
    def set_extra_states(self, model: Any, states: Any) -> None:
        """Give modules back what they have in the state dict besides tensors."""

    @abstractmethod
    def new_optimizer(self, name: str, groups: list[dict[str, Any]], options: dict[str, Any]) -> Any:
        """An optimizer of the framework by name, ``"adamw"``, ``"adam"`` or ``"sgd"``, over groups of parameters."""

    @abstractmethod
    def step_optimizer(self, optimizer: Any) -> None:
        """Let an optimizer change its parameters by the gradients that :meth:`get_grad` tells."""

    def peak_memory(self) -> int:
        """The most bytes that this process had at a time: of the device, or of the host on a CPU."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def device_memory(self) -> int | None:
        """The bytes of this process's device, or on a CPU those of the host that are free; None: not known."""
        return None

    def optimizer_groups(self, optimizer: Any) -> list[tuple[list[Any], dict[str, Any]]]:
        """(parameters, options as plain values) of each parameter group."""
        raise TypeError(f"a {type(optimizer).__name__} does not tell its parameters, so its state has no names")

    def set_optimizer_options(self, optimizer: Any, index: int, options: Any) -> None:
        """Set the options of one parameter group."""
        raise TypeError(f"a {type(optimizer).__name__} does not take options, group {index}: {options}")

    def optimizer_slots(self, optimizer: Any, parameter: Any) -> dict[str, Any]:
        """What the optimizer keeps for a parameter (moments and the like); empty before its first step."""
        raise TypeError(f"a {type(optimizer).__name__} does not tell what it keeps for a parameter")

    def blank_optimizer_slots(self, optimizer: Any, parameter: Any) -> dict[str, Any]:
        """Slots as the first step would make them, to load values into; the values in them mean nothing."""
        return {}

    def check_optimizer_state(self, optimizer: Any, slots: Any, options: Any) -> None:  # noqa: B027 - most have no need
        """Raise if the optimizer cannot go on from this: slots (or None) by parameter name, options by group."""

    def set_optimizer_slots(self, optimizer: Any, parameter: Any, slots: Any) -> None:
        """Let the optimizer keep copies of these slots for a parameter; None: as before its first step."""
        raise TypeError(f"a {type(optimizer).__name__} does not take what it keeps for a parameter")

    @abstractmethod
    def raw_array(self, tensor: Any) -> Any:
        """The bits of the tensor (of a DTensor: of its block) as a numpy array of unsigned integers, of its shape.

        The same memory where that is the host's, else a copy. What numpy knows by itself works without an override.
        """

    def set_raw(self, tensor: Any, array: Any) -> None:
        """Give the tensor (a DTensor: its block) these bits, unless ``array`` is its own memory already."""
        own = self.raw_array(tensor)
        place = own.__array_interface__["data"][0]
        if own.size == 0 or place == array.__array_interface__["data"][0]:
            return
        if self.raw_array(tensor).__array_interface__["data"][0] != place:
            raise TypeError("the bits of a tensor outside of the host's memory cannot be set on this platform")
        own[...] = array

    def is_in_host_memory(self, tensor: Any) -> bool:
        """Whether the bits of the tensor (of a DTensor: of its block) are where the host can look at them."""
        return True

    def copy_raw_to_host(self, copies: Iterable[tuple[Any, Any]]) -> None:
        """Fill each array of bytes with the bits of its tensor (of a DTensor: of its block), in row-major order.

        From a device through pinned memory that is kept, where there is such a thing.
        """
        for tensor, target in copies:
            memoryview(target)[:] = self.raw_array(tensor).tobytes()

    @staticmethod
    @abstractmethod
    def no_grad() -> Any:
        """Context: no gradients are recorded inside."""

    @staticmethod
    @abstractmethod
    def clip_grad_norm_(
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        """Scale the gradients so that their norm is at most ``max_norm``; the norm before."""

    @staticmethod
    @abstractmethod
    def clip_by_norm_(gradients: Any, total_norm: Any, max_norm: float, foreach: bool | None = None) -> None:
        """Scale gradients whose norm, together with that of others perhaps, is ``total_norm``, as clipping does."""

    @staticmethod
    @abstractmethod
    def total_of_norms(norms: Any, norm_type: float) -> Any:
        """What ``get_total_norm`` makes of tensors with these norms, in this order, to the bit; 0 for none."""

    @staticmethod
    @abstractmethod
    def set_global_norms(global_norms: Any) -> Any:
        """Let ``global_norms(tensors, order)`` give the norms of tensors of which some are distributed."""

    @staticmethod
    @abstractmethod
    def install_optimizer_steps(kind: Any) -> Any:
        """Let the framework's optimizers step on tensors of ``kind`` as cheaply as on plain ones."""

    @staticmethod
    @abstractmethod
    def block_norms(blocks: Any, norm_type: float, dtype: Any = None) -> Any:
        """One norm for each block, in the precision in which they are to be added up over ranks."""

    @staticmethod
    @abstractmethod
    def complete_norms(norms: Any, norm_type: float, group: Any) -> Any:
        """The norms of tensors from those of their parts on the group's ranks, by one reduction."""

    @staticmethod
    @abstractmethod
    def finished_norm(norm: Any, block: Any, dtype: Any = None) -> Any:
        """The norm in the dtype that the framework gives it for values like the block's."""
