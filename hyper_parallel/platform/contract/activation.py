"""What a framework must provide: recompute and swap of activations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class ActivationMemory(ABC):
    """Activations that are computed again, or kept on the host."""

    @property
    @abstractmethod
    def checkpoint(self) -> Callable[..., Any]:
        """``checkpoint(fn, *args)``: drop the activations of ``fn`` and compute them again in backward."""

    @property
    @abstractmethod
    def noop_context_fn(self) -> Callable[[], Any]:
        """The context function that changes nothing."""

    @staticmethod
    @abstractmethod
    def ckpt_wrapper(module: Any, checkpoint_fn: Any = None, **checkpoint_fn_kwargs: Any) -> Any:
        """The module with its forward under :attr:`checkpoint`; parameter names stay."""

    @staticmethod
    @abstractmethod
    def swap_wrapper(module: Any, policy_fn: Any = None) -> Any:
        """The module with its saved activations kept in host memory until backward; parameter names stay."""

    @staticmethod
    @abstractmethod
    def create_selective_checkpoint_contexts(policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False) -> Any:
        """The two contexts (forward, recompute) that keep what the policy names and recompute the rest."""

    @staticmethod
    @abstractmethod
    def async_save_on_cpu(policy_fn: Any = None) -> Any:
        """Context: tensors saved for backward inside are kept in host memory, copied beside the computation."""
