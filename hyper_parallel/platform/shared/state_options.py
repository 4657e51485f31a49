"""The options of ``get_model_state_dict``, the same on every framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_STATE_DICT_OPTIONS = ("full_state_dict", "cpu_offload", "ignore_frozen_params")
# These say how to load, or what to do with optimizers; they are taken so that one options object serves everywhere.
_OPTIONS_FOR_OTHERS = (
    "broadcast_from_rank0",
    "dsd_fqn_modifiers",
    "flatten_optimizer_state_dict",
    "keep_submodule_prefixes",
    "strict",
)


def read_options(options: Any) -> list[bool]:
    """(full_state_dict, cpu_offload, ignore_frozen_params) of a dict or an object such as torch's StateDictOptions."""
    if options is None:
        return [False] * len(_STATE_DICT_OPTIONS)
    if isinstance(options, Mapping):
        known = (*_STATE_DICT_OPTIONS, *_OPTIONS_FOR_OTHERS)
        unknown = [name for name in options if name not in known]
        if unknown:
            raise ValueError(
                f"get_model_state_dict: unknown option(s) {', '.join(map(repr, unknown))}; "
                f"the options are {', '.join(known)}"
            )
        return [bool(options.get(name, False)) for name in _STATE_DICT_OPTIONS]
    if not any(hasattr(options, name) for name in _STATE_DICT_OPTIONS):
        raise TypeError(
            "get_model_state_dict: options must be a dict or an object with attributes such as full_state_dict, got "
            f"{type(options).__name__}"
        )
    return [bool(getattr(options, name, False)) for name in _STATE_DICT_OPTIONS]
