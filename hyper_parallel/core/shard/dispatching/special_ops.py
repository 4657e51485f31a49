"""Operators that answer about the whole tensor, or write into one, in their own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.shard.dispatching.gather_fallback import run_gathered
from hyper_parallel.platform import get_platform

_platform = get_platform()

Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def _on_full_tensors(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """For questions with a plain answer (``item``, ``tolist``, ``equal``): every rank asks the whole values."""

    def full(value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value

    return func(*_platform.tree_map(full, args), **_platform.tree_map(full, kwargs))


SPECIAL_OPS: dict[str, Handler] = dict.fromkeys(
    (
        *(
            "item",
            "tolist",
            "equal",
            "allclose",
            "numpy",
            "is_nonzero",
            "__bool__",
            "__float__",
            "__int__",
            "__index__",
        ),
        *("__complex__", "__contains__", "__array__", "__dlpack__"),
    ),
    _on_full_tensors,
)


def _is_same_size(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    first, second = (*args, *kwargs.values())
    return tuple(first.shape) == tuple(second.shape)


SPECIAL_OPS["is_same_size"] = _is_same_size


def _with_zero_states(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Recurrent layers, which are gathered. Their modules make plain zeros for the first state: whole on any rank."""
    meshes: list[Any] = []
    _platform.tree_map(lambda value: meshes.append(value.device_mesh) if isinstance(value, DTensor) else None, args)

    def replicated(value: Any) -> Any:
        if isinstance(value, DTensor) or not _platform.is_tensor(value) or not value.ndim or bool(value.any()):
            return value
        return DTensor.from_local(value, meshes[0], shape=value.shape)

    return run_gathered(func, _platform.tree_map(replicated, args), kwargs)


_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
SPECIAL_OPS.update(dict.fromkeys((*_RECURRENT, *(f"{name}_cell" for name in _RECURRENT)), _with_zero_states))
