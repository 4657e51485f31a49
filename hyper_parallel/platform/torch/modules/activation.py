"""Activation memory from outside a module: recomputed in backward (checkpoint), or kept on the host until then (swap).

``ckpt_wrapper`` and ``swap_wrapper`` put a module under one or the other; its parameter names, state dict and
attributes stay those of the module. They nest: ``swap_wrapper(ckpt_wrapper(m))`` swaps what checkpoint keeps, the
inputs. How tensors are swapped is in ``swap.py``.

Note [What a policy cannot keep]
The replay of a selective checkpoint hands out a kept result instead of calling its operator again. For an operator
that writes into its argument (c10d's collectives do) that means that nothing is written; a kept view is one of memory
that the replay does not use; and a buffer that was written to after it was made holds the second state at once. Any of
these makes gradients silently wrong, and none is worth keeping: they always run again, whatever the policy says.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, noop_context_fn

from hyper_parallel.platform.shared.module_wrappers import CHILD, Checkpointed, Lookalike, check_wrapper_arguments
from hyper_parallel.platform.torch.modules.swap import SwapPolicy, async_save_on_cpu, has_plain_bytes, saving_on_host
from hyper_parallel.platform.torch.private_api import OpOverload

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
    Collectives, writes, views and new buffers always run again; see Note [What a policy cannot keep].
    """
    asked = policy_fn_or_list
    if isinstance(asked, list):
        kept: Any = [op for op in asked if not (isinstance(op, OpOverload) and _always_runs_again(op))]
    elif callable(asked):

        def kept(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
            choice = asked(ctx, op, *args, **kwargs)
            return CheckpointPolicy.MUST_RECOMPUTE if _always_runs_again(op) else choice
    else:
        kept = asked
    return torch_checkpoint.create_selective_checkpoint_contexts(kept, allow_cache_entry_mutation)


_COLLECTIVES = """
    allreduce_ allreduce_coalesced_ allgather_ _allgather_base_ allgather_coalesced_ allgather_into_tensor_coalesced_
    reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_ reduce_ broadcast_ gather_ scatter_ alltoall_
    alltoall_base_ send recv_ recv_any_source_ barrier monitored_barrier_
"""


def never_keep_collectives() -> None:
    """Let PyTorch's own selective checkpoints run collectives again too, for policies that do not come by us."""
    for name in _COLLECTIVES.split():
        torch_checkpoint.SAC_IGNORED_OPS.add(getattr(torch.ops.c10d, name).default)
    torch_checkpoint.SAC_IGNORED_OPS.add(torch.ops.aten.detach_copy.default)


_MAKES_BUFFER = re.compile(r"(new_)?(empty|zeros|ones|full|rand|randn|randint|arange)(_like|_strided)?")


@functools.cache
def _always_runs_again(op: Any) -> bool:
    if not isinstance(op, OpOverload):
        return False
    # The copy that a collective works on, see ``own_copy``.
    if op.namespace == "c10d" or op is torch.ops.aten.detach_copy.default:
        return True
    shares_memory = any(result.alias_info is not None for result in op._schema.returns)
    return shares_memory or (op.namespace == "aten" and bool(_MAKES_BUFFER.fullmatch(op.overloadpacket.__name__)))


# ---------------------------------------------------------------------------------------------------------------------
# Wrappers
# ---------------------------------------------------------------------------------------------------------------------


def _without_child_name(text: str) -> str:
    return text.replace(f"{CHILD}.", "")


def _clean_load_report(wrapper: _Wrapper, incompatible_keys: Any) -> None:
    for keys in (incompatible_keys.missing_keys, incompatible_keys.unexpected_keys):
        keys[:] = map(_without_child_name, keys)
    error_messages = wrapper.__dict__.pop("_load_error_messages", [])
    error_messages[:] = map(_without_child_name, error_messages)


class _Wrapper(Lookalike, nn.Module):
    """A module around another that looks like it: same parameter names and state dict, same attributes."""

    _CHILDREN = "_modules"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(_clean_load_report)
        self.add_module(CHILD, module)

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
            state_dict[f"{prefix}{CHILD}.{key[len(prefix) :]}"] = state_dict.pop(key)
        self.__dict__["_load_error_messages"] = error_msgs
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


class _CheckpointWrapper(Checkpointed, _Wrapper):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_checkpointed(*args, **kwargs)


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


_check_wrapper_arguments = functools.partial(check_wrapper_arguments, nn.Module, "torch.nn.Module")


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
