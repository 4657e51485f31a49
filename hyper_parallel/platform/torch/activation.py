"""Activation memory from outside a module: recomputed in backward (checkpoint), or kept on the host until then (swap).

``ckpt_wrapper`` and ``swap_wrapper`` put a module under one or the other; its parameter names, state dict and
attributes stay those of the module. They nest: ``swap_wrapper(ckpt_wrapper(m))`` swaps what checkpoint keeps, the
inputs. How tensors are swapped is in ``swap.py``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, noop_context_fn

from hyper_parallel.platform.torch.swap import SwapPolicy, async_save_on_cpu, has_plain_bytes, saving_on_host

__all__ = [
    "CheckpointPolicy",
    "SwapPolicy",
    "async_save_on_cpu",
    "checkpoint",
    "ckpt_wrapper",
    "create_selective_checkpoint_contexts",
    "noop_context_fn",
    "swap_wrapper",
]


# ---------------------------------------------------------------------------------------------------------------------
# Recompute
# ---------------------------------------------------------------------------------------------------------------------


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)`` without keeping its activations: they are computed again in backward.

    ``torch.utils.checkpoint.checkpoint``, whose other keywords (``context_fn``, ``preserve_rng_state``) pass through.
    """
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Callable[..., Any] | list[Any], allow_cache_entry_mutation: bool = False
) -> tuple[Any, Any]:
    """The contexts (forward, recompute) of a checkpoint that keeps some results and computes the others again.

    ``policy_fn_or_list`` lists the operators to keep, or is ``policy(ctx, op, *args, **kwargs) -> CheckpointPolicy``.
    Use it as ``checkpoint(f, x, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))``.
    """
    return torch_checkpoint.create_selective_checkpoint_contexts(policy_fn_or_list, allow_cache_entry_mutation)


# ---------------------------------------------------------------------------------------------------------------------
# Wrappers
# ---------------------------------------------------------------------------------------------------------------------

_CHILD = "_wrapped_module"


def _without_child_name(text: str) -> str:
    return text.replace(f"{_CHILD}.", "")


def _clean_load_report(wrapper: _Wrapper, incompatible_keys: Any) -> None:
    for keys in (incompatible_keys.missing_keys, incompatible_keys.unexpected_keys):
        keys[:] = map(_without_child_name, keys)
    error_messages = wrapper.__dict__.pop("_load_error_messages", [])
    error_messages[:] = map(_without_child_name, error_messages)


class _Wrapper(nn.Module):
    """A module around another that looks like it: same parameter names and state dict, same attributes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_clean_load_report)
        self.add_module(_CHILD, module)

    @property
    def wrapped_module(self) -> nn.Module:
        return self._modules[_CHILD]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            wrapped = self.__dict__.get("_modules", {}).get(_CHILD)
            if wrapped is None:
                raise
        return getattr(wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        wrapped = self.__dict__.get("_modules", {}).get(_CHILD)
        if wrapped is None or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self.wrapped_module, name)

    def __getitem__(self, index: Any) -> Any:
        return self.wrapped_module[index]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The wrapper and the module in it, both under the module's name: parameter names are built from these."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.wrapped_module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped_module.state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # Private in name, but the method that torch documents for modules with a loading of their own. ``state_dict``
        # is a copy made for this module, whose child is served next, under the names that this gives.
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}{_CHILD}.{key[len(prefix) :]}"] = state_dict.pop(key)
        self.__dict__["_load_error_messages"] = error_msgs
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class _CheckpointWrapper(_Wrapper):
    def __init__(self, module: nn.Module, checkpoint_fn: Callable[..., Any], checkpoint_fn_kwargs: dict[str, Any]):
        self.__dict__["_checkpoint_fn"] = checkpoint_fn
        self.__dict__["_checkpoint_fn_kwargs"] = checkpoint_fn_kwargs
        super().__init__(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # All inputs go in by position: no clash with the checkpoint function's own keywords, and one that takes no
        # keywords (the reentrant kind) works too.
        run = functools.partial(_call_by_position, self.wrapped_module, len(args), tuple(kwargs))
        return self._checkpoint_fn(run, *args, *kwargs.values(), **self._checkpoint_fn_kwargs)


def _call_by_position(module: nn.Module, num_args: int, names: tuple[str, ...], *values: Any) -> Any:
    return module(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))


class _SwapWrapper(_Wrapper):
    def __init__(self, module: nn.Module, policy_fn: Callable[[torch.Tensor], Any] | None) -> None:
        self.__dict__["_policy_fn"] = policy_fn
        super().__init__(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module = self.wrapped_module
        staying = frozenset(
            tensor.untyped_storage().data_ptr()
            for tensor in itertools.chain(module.parameters(), module.buffers())
            if has_plain_bytes(tensor)
        )
        with saving_on_host(self._policy_fn, staying):
            return module(*args, **kwargs)


def _check_wrapper_arguments(caller: str, module: Any, role: str, function: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{caller}: module must be a torch.nn.Module, got {type(module).__name__}")
    if function is not None and not callable(function):
        raise TypeError(f"{caller}: {role} must be a function or None, got {type(function).__name__}")


def ckpt_wrapper(
    module: nn.Module, checkpoint_fn: Callable[..., Any] | None = None, **checkpoint_fn_kwargs: Any
) -> nn.Module:
    """``module`` with its forward under ``checkpoint_fn(function, *inputs, **checkpoint_fn_kwargs)``.

    The default is :func:`checkpoint`; ``context_fn=...`` makes it selective.
    """
    _check_wrapper_arguments("ckpt_wrapper", module, "checkpoint_fn", checkpoint_fn)
    return _CheckpointWrapper(module, checkpoint_fn or checkpoint, checkpoint_fn_kwargs)


def swap_wrapper(module: nn.Module, policy_fn: Callable[[torch.Tensor], Any] | None = None) -> nn.Module:
    """``module`` with its forward under :func:`async_save_on_cpu`; its parameters and buffers are never moved."""
    _check_wrapper_arguments("swap_wrapper", module, "policy_fn", policy_fn)
    return _SwapWrapper(module, policy_fn)
