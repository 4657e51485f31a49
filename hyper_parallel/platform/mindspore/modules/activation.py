"""Activation memory from outside a module: recomputed in backward (checkpoint), or kept on the host until then (swap).

``ckpt_wrapper`` and ``swap_wrapper`` put a module under one or the other; its parameter names, state dict and
attributes stay those of the module. They nest.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Iterator
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base import start
from hyper_parallel.platform.mindspore.base.tensors import detached
from hyper_parallel.platform.mindspore.dtensor.services import random_state
from hyper_parallel.platform.mindspore.dtensor.tensor_type import as_dtensor, is_distributed, plain_kind
from hyper_parallel.platform.mindspore.mends import dropout_masks
from hyper_parallel.platform.shared.module_wrappers import CHILD, Checkpointed, Lookalike, check_wrapper_arguments
from hyper_parallel.platform.shared.trees import map_leaves

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


# ---------------------------------------------------------------- recompute


class CheckpointPolicy(enum.Enum):
    """What a selective checkpoint does with the result of one operator."""

    MUST_SAVE = 0
    PREFER_SAVE = 1
    MUST_RECOMPUTE = 2
    PREFER_RECOMPUTE = 3


def noop_context_fn() -> tuple[Any, Any]:
    """The contexts (forward, recompute) that change nothing."""
    return contextlib.nullcontext(), contextlib.nullcontext()


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = False,
    context_fn: Callable[[], tuple[Any, Any]] | None = None,
    **kwargs: Any,
) -> Any:
    """``function(*args, **kwargs)`` without keeping its activations: they are computed again in backward.

    Random numbers are drawn again as in the first run; the masks of MindSpore's own dropout are kept for that on a CPU.
    """
    # MindSpore would stop the second run early by an exception, which leaves its stack of cells in disorder.
    if not use_reentrant:
        function = _RepeatedDraws(_Relabelled(function, args, kwargs))
        kwargs |= {"early_stop": False, "context_fn": context_fn or noop_context_fn}
    return ms.recompute(function, *args, use_reentrant=use_reentrant, **kwargs)


class _Relabelled:
    """A function that gets distributed tensors again where MindSpore hands their blocks to its second run: it does so
    where recomputes nest, since it keeps the arguments of an inner one like other tensors that are saved.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._function = function
        self._labels: list[Any] = []
        self._has_run = False
        map_leaves(lambda value: self._labels.append(_label_of(value)), (args, kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._has_run and any(self._labels):
            labels = iter(self._labels)
            args, kwargs = map_leaves(lambda value: _labelled(value, next(labels)), (args, kwargs))
        self._has_run = True
        return self._function(*args, **kwargs)


def _label_of(value: Any) -> tuple[type, Any, Any] | None:
    return (plain_kind(type(value)), value._layout, value._global_shape) if is_distributed(value) else None


def _labelled(value: Any, label: tuple[type, Any, Any] | None) -> Any:
    if label is None or is_distributed(value):
        return value
    kind, layout, shape = label
    return as_dtensor(kind, value, layout, shape)


class _RepeatedDraws:
    """A function that draws the random numbers of its first call again in each later one, without a trace."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._state: Any = None
        self._masks: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._state is None:
            self._state = (random_state.get(),)
            with dropout_masks.active(self._masks, again=False):
                return self._function(*args, **kwargs)
        now = random_state.get()
        random_state.set(self._state[0])
        try:
            with dropout_masks.active(list(self._masks), again=True):
                return self._function(*args, **kwargs)
        finally:
            random_state.set(now)


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Callable[..., Any] | list[Any], allow_cache_entry_mutation: bool = False
) -> tuple[Any, Any]:
    """The contexts (forward, recompute) of a checkpoint that keeps some results and computes the others again.

    ``policy_fn_or_list`` lists the names of the operators to keep, or is ``policy(ctx, op, *args, **kwargs)`` that
    gives a ``CheckpointPolicy``; ``op.name`` is MindSpore's name of the operator ("MatMulExt").
    Use it as ``checkpoint(f, x, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))``.
    """
    if callable(policy_fn_or_list):
        policy = policy_fn_or_list
    else:
        kept_names = {getattr(op, "name", op) for op in policy_fn_or_list}

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if op.name in kept_names else CheckpointPolicy.PREFER_RECOMPUTE

    kept: dict[str, list[Any]] = {}
    return _Keeping(policy, kept), _Replaying(policy, kept, allow_cache_entry_mutation)


class _SelectionContext:
    """What a policy is told: whether this is the second run."""

    def __init__(self, is_recompute: bool) -> None:
        self.is_recompute = is_recompute


def _is_kept(policy: Callable[..., Any], is_recompute: bool, func: Any, args: Any, kwargs: Any) -> bool:
    choice = policy(_SelectionContext(is_recompute), func, *args, **kwargs)
    if isinstance(choice, bool):
        return choice
    if not isinstance(choice, CheckpointPolicy):
        raise TypeError(f"the policy of a selective checkpoint must give a CheckpointPolicy, got {choice!r}")
    return choice in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class _Keeping(ms.MsDispatchMode):
    """The first run: results that the policy names are kept."""

    def __init__(self, policy: Callable[..., Any], kept: dict[str, list[Any]]) -> None:
        super().__init__()
        self._policy, self._kept = policy, kept

    def __ms_dispatch__(self, func: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _is_kept(self._policy, False, func, args, kwargs):
            self._kept.setdefault(func.name, []).append((result, _versions(result)))
        return result


class _Replaying(ms.MsDispatchMode):
    """The second run: kept results are handed out in their order."""

    def __init__(self, policy: Callable[..., Any], kept: dict[str, list[Any]], may_change: bool) -> None:
        super().__init__()
        self._policy, self._kept, self._may_change = policy, kept, may_change

    def __ms_dispatch__(self, func: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_kept(self._policy, True, func, args, kwargs):
            return func(*args, **kwargs)
        results = self._kept.get(func.name)
        if not results:
            raise RuntimeError(
                f"selective checkpoint: the second run calls {func.name} more often than the first; the function must "
                "do the same both times"
            )
        result, versions = results.pop(0)
        if not self._may_change and versions != _versions(result):
            raise RuntimeError(
                f"selective checkpoint: the kept result of {func.name} was changed in place; use the out-of-place "
                f"form, "
                "or allow_cache_entry_mutation=True"
            )
        return result


def _versions(result: Any) -> list[int]:
    tensors = result if isinstance(result, (tuple, list)) else [result]
    return [private_api.version_of(tensor) for tensor in tensors if isinstance(tensor, Tensor)]


# ---------------------------------------------------------------- swap


class SwapPolicy(enum.Enum):
    """What to do with one saved tensor; ``policy_fn`` may return it or a bool (true: swap)."""

    KEEP = "keep"
    SWAP = "swap"


@contextlib.contextmanager
def async_save_on_cpu(policy_fn: Callable[[Tensor], bool | SwapPolicy] | None = None) -> Iterator[None]:
    """Tensors saved for backward inside go to host memory and come back when they are needed.

    ``policy_fn(tensor)`` says which (default: all); parameters are never asked for. On a CPU everything is in host
    memory, so nothing is copied.
    """
    if policy_fn is not None and not callable(policy_fn):
        raise TypeError(f"async_save_on_cpu: policy_fn must be a function or None, got {type(policy_fn).__name__}")
    with ms.saved_tensors_hooks(functools.partial(_pack, policy_fn), lambda packed: packed.unpack()):
        yield


def _pack(policy_fn: Callable[[Tensor], Any] | None, tensor: Tensor) -> _Kept | _Moved:
    if getattr(tensor, "param_info", None) is not None or tensor.numel() == 0:  # a parameter comes as a plain tensor
        return _Kept(tensor)
    choice = True if policy_fn is None else policy_fn(tensor)
    if not isinstance(choice, (bool, SwapPolicy)):
        raise TypeError(f"the swap policy must return a bool or a SwapPolicy, got {choice!r} for {_describe(tensor)}")
    if choice is False or choice is SwapPolicy.KEEP or not start.on_ascend():
        return _Kept(tensor)
    return _Moved(tensor)


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


class _Kept:
    """A saved tensor that stays where it is."""

    def __init__(self, tensor: Tensor) -> None:
        # Without its graph: an operator that saves its own output would keep itself alive.
        self._tensor = tensor if private_api.is_leaf(tensor) else detached(tensor)
        self._version = private_api.version_of(tensor)

    def unpack(self) -> Tensor:
        now = private_api.version_of(self._tensor)
        if now != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{_describe(self._tensor)}] was saved at version {self._version} and is at version {now}; use the "
                "out-of-place form of that operation"
            )
        return self._tensor


class _Moved:
    """A saved tensor as a copy in host memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = detached(tensor).to("CPU", non_blocking=True)
        self._device = tensor.device

    def unpack(self) -> Tensor:
        return self._host.to(self._device, non_blocking=True)


# ---------------------------------------------------------------- wrappers


class _Wrapper(Lookalike, nn.Cell):
    """A module around another that looks like it: same parameter names, same attributes."""

    _CHILDREN = "_cells"

    def __init__(self, module: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.insert_child_to_cell(CHILD, module)

    def cells_and_names(self, cells: Any = None, name_prefix: str = "") -> Iterator[tuple[str, nn.Cell]]:
        """The wrapper and the module in it, both under the module's name: parameter names are built from these."""
        seen = cells if cells is not None else set()
        if self not in seen:
            seen.add(self)
            yield name_prefix, self
            yield from self.wrapped_module.cells_and_names(seen, name_prefix)

    def parameters_and_names(self, name_prefix: str = "", expand: bool = True) -> Iterator[tuple[str, Parameter]]:
        return self.wrapped_module.parameters_and_names(name_prefix, expand)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped_module.load_state_dict(*args, **kwargs)


class _CheckpointWrapper(Checkpointed, _Wrapper):
    def construct(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_checkpointed(*args, **kwargs)


class _SwapWrapper(_Wrapper):
    def __init__(self, module: nn.Cell, policy_fn: Callable[[Tensor], Any] | None) -> None:
        self.__dict__["_policy_fn"] = policy_fn
        super().__init__(module)

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        with async_save_on_cpu(self._policy_fn):
            return self.wrapped_module(*args, **kwargs)


_check_wrapper_arguments = functools.partial(check_wrapper_arguments, nn.Cell, "mindspore.nn.Cell")


def ckpt_wrapper(
    module: nn.Cell, checkpoint_fn: Callable[..., Any] | None = None, **checkpoint_fn_kwargs: Any
) -> nn.Cell:
    """``module`` with its forward under ``checkpoint_fn(function, *inputs, **checkpoint_fn_kwargs)``.

    The default is :func:`checkpoint`; ``context_fn=...`` makes it selective.
    """
    _check_wrapper_arguments("ckpt_wrapper", module, "checkpoint_fn", checkpoint_fn)
    return _CheckpointWrapper(module, checkpoint_fn or checkpoint, checkpoint_fn_kwargs)


def swap_wrapper(module: nn.Cell, policy_fn: Callable[[Tensor], Any] | None = None) -> nn.Cell:
    """``module`` with its forward under :func:`async_save_on_cpu`; its parameters are never moved."""
    _check_wrapper_arguments("swap_wrapper", module, "policy_fn", policy_fn)
    return _SwapWrapper(module, policy_fn)
