"""Attention of unmodified Hugging Face models over a sharded sequence, by the two interfaces that transformers has.

Note [A mask that is not there]
transformers composes a mask of small functions of (batch, head, query, key) and hands it to the mask function of the
attention that is chosen. Ours makes no tensor of it but a :class:`Visibility`: causal, windows, packed documents,
chunks and padding become coordinates of tokens, by which whole pairs of blocks are left out or taken; a function that
is none of these is asked about each pair of blocks that the rest leaves. What a model computes is what transformers
says, window, soft cap and sinks included.

Note [Documents in another order]
transformers finds packed documents by where positions start again. In zigzag or striped order they jump everywhere, so
there the documents are those that were found before the batch was permuted, and indices those of the sequence. A
model that does not look for documents (it gives its mask no positions) does not get them in another order either.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from hyper_parallel.core.context_parallel.attention import attention
from hyper_parallel.core.context_parallel.batch import TokenOrder, current_order
from hyper_parallel.core.context_parallel.blocks.visibility import Visibility
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.platform import get_platform

__all__ = ["NAME", "attend", "counts_from_zero", "follows_interface", "lazy_mask", "take_over_attention"]

_platform = get_platform()

NAME = "hyper_parallel"
_MASKING = "transformers.masking_utils"
_CAUSAL = Visibility(causal=True)
_EVERYTHING = Visibility()


def follows_interface(model: Any) -> bool:
    """Whether the attention of all parts of a Hugging Face model can be chosen."""
    parts = [part for _, part in _platform.get_cells_and_names(model) if hasattr(part, "_can_set_attn_implementation")]
    return bool(parts) and all(part._can_set_attn_implementation() for part in parts)


def counts_from_zero(model: Any) -> bool:
    """Whether a Hugging Face model's code says that without ``position_ids`` it counts tokens from 0 in every row.

    Others count from behind the padding, or from another number: what they count cannot be told from outside.
    """
    modules = {type(part).__module__ for _, part in _platform.get_cells_and_names(model)}
    texts = [_text_of(name) for name in modules if name.startswith("transformers")]
    return any(re.search(r'position_ids("?,| =) torch\.arange\(', text) for text in texts) and not any(
        re.search(r"position_ids\w* = .*cumsum|create_position_ids_from|get_rope_index", text) for text in texts
    )


@lru_cache(maxsize=256)
def _text_of(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except OSError:
        return ""


def take_over_attention(model: Any) -> bool:
    """Let a Hugging Face model compute attention by ours; False for one that computes it in a way of its own."""
    if not follows_interface(model):
        return False
    transformers: Any = importlib.import_module("transformers")
    transformers.AttentionInterface.register(NAME, attend)
    transformers.AttentionMaskInterface.register(NAME, lazy_mask)
    model.set_attn_implementation(NAME)
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Masks
# ---------------------------------------------------------------------------------------------------------------------


def lazy_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    q_offset: Any = 0,
    kv_offset: int = 0,
    attention_mask: Any = None,
    use_vmap: bool = False,
    **_: Any,
) -> Visibility:
    """Who sees whom, for transformers' ``AttentionMaskInterface``; see Note [A mask that is not there]."""
    order = current_order()
    if order is not None and (q_length, kv_length) != (len(order.indices),) * 2:
        raise ValueError(
            f"attention of {q_length} queries and {kv_length} keys, but {len(order.indices)} tokens lie in "
            f"{order.name} order: keys of other tokens (a cache, an encoder) need order='contiguous'"
        )
    given: dict[str, Any] = {}
    others: list[Callable[..., Any]] = []
    documents: list[Any] = []
    for part in _conjuncts(mask_function):
        if not _understood(part, given, documents, kv_length, order, attention_mask):
            others.append(part)
    if attention_mask is not None:
        given["valid"] = _padding(attention_mask, kv_length, kv_offset)
    if given.get("window") == 0:  # nobody sees anyone: a mask that no layer is given (Qwen2-MoE)
        given["window"], given["valid"] = None, np.zeros(kv_length, dtype=bool)
    if order is not None:
        given["positions"] = order.indices
        if others:
            names = ", ".join(getattr(other, "__qualname__", repr(other)) for other in others)
            raise ValueError(
                f"the model's mask is made by {names}, a function of the indices of tokens, and these lie in "
                f"{order.name} order; write order='contiguous'"
            )
    if documents:
        given["documents"] = _joined(documents)
    if others:
        given["function"] = _asked_in_blocks(others, use_vmap, kv_offset)
    return _MaskOfModel(kv_length, offset=int(q_offset) - kv_offset, **given)


class _MaskOfModel(Visibility):
    """What a model is given as its mask, to hand it on to :func:`attend`."""

    def __init__(self, num_keys: int, **given: Any) -> None:
        super().__init__(**given)
        self.num_keys = num_keys

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(_COMPUTED_WITH.format(f".{name}"))

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(_COMPUTED_WITH.format("[...]"))

    def __add__(self, other: Any) -> Any:
        raise TypeError(_COMPUTED_WITH.format("+"))

    __radd__ = __add__


_COMPUTED_WITH = (
    "the model computes with its attention mask by itself ({}), which under cp is no tensor of all pairs of tokens: "
    "such attention cannot be computed over a sharded sequence; write degrees without cp"
)


def _conjuncts(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    if _is_from_masking(function, "and_masks.<locals>.and_mask"):
        for part in _cells(function)["mask_functions"]:
            yield from _conjuncts(part)
    else:
        yield function


def _understood(
    function: Callable[..., Any],
    given: dict[str, Any],
    documents: list[Any],
    length: int,
    order: TokenOrder | None,
    attention_mask: Any,
) -> bool:
    """Take a condition over into the arguments of a :class:`Visibility`, if it is one of those."""
    if _is_from_masking(function, "causal_mask_function"):
        given["causal"] = True
    elif _is_from_masking(function, "bidirectional_mask_function"):
        pass
    elif _is_from_masking(function, "sliding_window_overlay.<locals>.inner_mask") and "window" not in given:
        given["window"] = int(_cells(function)["sliding_window"])
    elif _is_from_masking(function, "sliding_window_bidirectional_overlay.<locals>.inner_mask"):
        if "window" in given:
            return False
        given["window"] = (int(_cells(function)["sliding_window"]),) * 2
    elif _is_from_masking(function, "packed_sequence_mask_function.<locals>.inner_mask"):
        if order is None:
            documents.append(_on_host(_cells(function)["packed_sequence_mask"]))
        elif order.documents is not None:  # see Note [Documents in another order]
            documents.append(order.documents)
    elif _is_from_masking(function, "chunked_overlay.<locals>.inner_mask"):
        cells = _cells(function)
        indices = np.arange(length) if order is None else order.indices
        padding = _on_host(cells["left_padding"]).reshape(-1, 1)
        if order is not None and attention_mask is not None:  # transformers has counted by places
            marks = _on_host(attention_mask)[:, np.argsort(order.indices)] != 0
            padding = (np.cumsum(marks, -1) == 0).sum(-1, keepdims=True)
        documents.append((indices[None] - padding) // int(cells["chunk_size"]))
    else:
        return False
    return True


def _is_from_masking(function: Callable[..., Any], name: str) -> bool:
    return getattr(function, "__module__", "") == _MASKING and getattr(function, "__qualname__", "") == name


def _cells(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def _on_host(value: Any) -> np.ndarray:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return np.asarray(_platform.tensor_to_numpy(value)) if _platform.is_tensor(value) else np.asarray(value)


def _joined(documents: list[np.ndarray]) -> np.ndarray:
    """One number for each combination of numbers."""
    joined = np.atleast_2d(documents[0])
    for more in documents[1:]:
        more = np.atleast_2d(more)
        joined = joined * (int(np.ptp(more)) + 1 if more.size else 1) + (more - (more.min() if more.size else 0))
    return joined


def _padding(attention_mask: Any, length: int, offset: int) -> Any:
    """Which keys are tokens, of (batch, keys)."""
    mask = attention_mask.full_tensor() if isinstance(attention_mask, DTensor) else attention_mask
    missing = length + offset - mask.shape[-1]
    if missing > 0:
        mask = _platform.cat([mask, mask.new_zeros((mask.shape[0], missing))], -1)
    return mask[:, offset : offset + length]


def _asked_in_blocks(functions: list[Callable[..., Any]], use_vmap: bool, offset: int) -> Callable[..., Any]:
    """Conditions on index tensors; those that transformers calls on single numbers are mapped over them."""
    plain = [_on_whole_tensors(function) for function in functions]

    def condition(batch: Any, head: Any, query: Any, key: Any) -> Any:
        query, key = query + offset, key + offset
        seen = None
        for function in plain:
            if use_vmap:
                expand = importlib.import_module(_MASKING)._vmap_expansion_sdpa
                found = expand(function)(*(index.reshape(-1) for index in (batch, head, query, key)))
            else:
                found = function(batch, head, query, key)
            seen = found if seen is None else seen & found
        return seen

    return condition


def _on_whole_tensors(function: Any) -> Any:
    """The function with plain whole tensors in place of the distributed ones that it holds, also in its parts.

    It is asked about blocks, by each rank about its own: it must not communicate.
    """

    def whole(value: Any) -> Any:
        if isinstance(value, DTensor):
            return value.full_tensor()
        if isinstance(value, types.FunctionType):
            return _on_whole_tensors(value)
        return type(value)(map(whole, value)) if type(value) in (tuple, list) else value

    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return function
    cells = tuple(types.CellType(whole(cell.cell_contents)) for cell in function.__closure__)
    return types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure=cells
    )


# ---------------------------------------------------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------------------------------------------------


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Any = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Attention for transformers' ``AttentionInterface``: (batch, heads, tokens, width) to (batch, tokens, heads,
    width). The scheme is that of :func:`attention_scheme`."""
    if _platform.is_tensor(attention_mask) or kwargs.get("position_bias") is not None:
        return _by_tensor(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, softcap, s_aux, kwargs
        )
    visible = attention_mask
    if isinstance(visible, _MaskOfModel) and key.shape[2] != visible.num_keys:  # DeepSeek-V4: compressed ones behind
        raise ValueError(
            f"{type(module).__name__} attends to {key.shape[2]} keys, and its mask is of {visible.num_keys} tokens: "
            "what it adds to the keys by itself cannot be told under cp; write degrees without cp"
        )
    if visible is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        visible = _CAUSAL if causal and query.shape[2] > 1 else _EVERYTHING
        if visible is _CAUSAL and current_order() is not None:
            raise ValueError(
                f"{type(module).__name__} is causal and was given no mask, so it goes by the order of tokens, which "
                "is not that of the sequence; write order='contiguous'"
            )
    output = attention(
        query, key, value, visible=visible, scale=scaling, dropout=dropout, soft_cap=softcap, sinks=s_aux
    )
    return output.transpose(1, 2).contiguous(), None


def _by_tensor(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    softcap: float | None,
    s_aux: Any,
    kwargs: dict[str, Any],
) -> tuple[Any, None]:
    """With a mask or bias that is a tensor of all pairs of tokens: as transformers does it, by its own operators."""
    if isinstance(mask, Visibility):
        mask = mask.mask((0, query.shape[2]), (0, key.shape[2]), query)
    if softcap is None and s_aux is None:
        sdpa = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
        return sdpa(module, query, key, value, mask, dropout, scaling, is_causal, **kwargs)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ValueError(
            f"{type(module).__name__} has a soft cap or sinks and was given a mask of {tuple(mask.shape)}, and its "
            "module has no eager_attention_forward; give padding as (rows, tokens) and documents by position_ids"
        )
    found = {"softcap": softcap, "s_aux": s_aux}
    kwargs = {**kwargs, **{name: one for name, one in found.items() if one is not None}}
    if mask.dtype == _platform.str_to_dtype("bool"):
        mask = mask.new_zeros(tuple(mask.shape), dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    return eager(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)[0], None
