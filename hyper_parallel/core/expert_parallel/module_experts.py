"""Modules of experts, ours and Hugging Face's, whose experts the operator computes.

Note [One call for all of them]
-------------------------------
Hugging Face's modules of experts are all called with (tokens, chosen experts, weights), whatever their model, and have
their weights stacked by the same names: ``gate_up_proj`` or ``up_proj``, ``down_proj``, and biases. A decorator of
transformers tells how they lie (``has_gate``, ``has_bias``, ``is_transposed``); whether gate and up are interleaved is
what ``_apply_gate`` knows. Such a module gets the operator in place of its forward; nothing of transformers is imported
or replaced.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.expert_parallel.experts_op import experts
from hyper_parallel.platform import get_platform

__all__ = ["RUNS_OPERATOR", "inner_dim", "is_module_of_experts", "use_operator"]

_platform = get_platform()

#: A module with this attribute calls ``experts`` itself, with parameters whose first dim is the expert.
RUNS_OPERATOR = "runs_experts_operator"
_OF_HUGGING_FACE = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def is_module_of_experts(module: Any) -> bool:
    """Whether the operator computes this module's experts, or can."""
    own = _platform.own_parameters(module)
    if not own or len({tuple(parameter.shape[:1]) for parameter in own.values()}) > 1:
        return False
    return bool(getattr(module, RUNS_OPERATOR, False)) or _is_of_hugging_face(module)


def _is_of_hugging_face(module: Any) -> bool:
    if not all(hasattr(module, name) for name in _OF_HUGGING_FACE) or getattr(module, "has_post_expert_norm", False):
        return False
    names = {"gate_up_proj" if module.has_gate else "up_proj", "down_proj"}
    names |= {f"{name}_bias" for name in names} if module.has_bias else set()
    return set(_platform.own_parameters(module)) == names


def inner_dim(module: Any, name: str) -> int | None:
    """The dim of a parameter that is an expert's inner features; None for one that has none, as ``down_proj_bias``."""
    is_down, is_transposed = name.startswith("down"), bool(getattr(module, "is_transposed", False))
    if name.endswith("bias"):
        return None if is_down else 1
    return 2 if is_down != is_transposed else 1


def use_operator(module: Any) -> None:
    """Let the operator compute the module's experts; see Note [One call for all of them]."""
    if not getattr(module, RUNS_OPERATOR, False):
        _platform.replace_forward(module, _forward)


def _forward(module: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    name = "gate_up_proj" if module.has_gate else "up_proj"
    up, dtype = getattr(module, name), hidden_states.dtype
    if up.dtype != dtype:  # transformers computes in the weights'
        hidden_states = _platform.tensor_type_cast(hidden_states, up.dtype)
    result = experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        up,
        module.down_proj,
        activation=module._apply_gate if module.has_gate else module.act_fn,
        up_bias=getattr(module, f"{name}_bias") if module.has_bias else None,
        down_bias=module.down_proj_bias if module.has_bias else None,
        is_transposed=module.is_transposed,
    )
    return result if result.dtype == dtype else _platform.tensor_type_cast(result, dtype)
