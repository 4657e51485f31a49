"""The reference models by name: published sizes, and the models whose sizes are all given."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from hyper_parallel.models.llama_config import LlamaConfig
from hyper_parallel.models.llama_sizes import LLAMA_SIZES
from hyper_parallel.models.mixture_config import MixtureConfig
from hyper_parallel.models.mixture_sizes import MIXTURE_SIZES

__all__ = ["SIZES", "build_reference", "model_size"]

#: By name; "llama" and "mixture" have the sizes of their configs, which a run changes.
SIZES: dict[str, LlamaConfig] = {
    "llama": LlamaConfig(),
    **LLAMA_SIZES,
    "mixture": MixtureConfig(),
    **MIXTURE_SIZES,
}


def model_size(name: str) -> LlamaConfig:
    """The sizes of that name.

    >>> model_size("llama-70b").num_blocks, model_size("mixture-8x7b").num_blocks
    (80, 32)
    """
    found = SIZES.get(name.lower())
    if found is None:
        close = difflib.get_close_matches(name.lower(), SIZES, 1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"no model is called {name!r}{hint}; the names are {', '.join(SIZES)}")
    return found


def build_reference(config: LlamaConfig) -> Any:
    """The model of these sizes, of the framework in use."""
    models = importlib.import_module("hyper_parallel.models")
    return models.Mixture(config) if isinstance(config, MixtureConfig) else models.Llama(config)
