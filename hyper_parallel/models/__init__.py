"""Reference models: plain single-device code, one folder per framework, and each one's plan on a page of its own.

``Llama`` and ``Mixture``, which has mixtures of experts (``MoE``) in its blocks, are models of the framework in use.
Both frameworks' models name their parts alike, so ``llama_plan`` and ``mixture_plan`` cut either. Names are imported on
first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import PlatformType

_HOME_OF = {
    "LlamaConfig": "llama_config",
    "MixtureConfig": "mixture_config",
    "MixtureLoss": "mixture_loss",
    "MoEConfig": "moe_config",
    "expert_load": "expert_balance",
    "llama_mapping": "hub_names",
    "llama_plan": "plan_of_llama",
    "mixture_mapping": "hub_names",
    "mixture_plan": "plan_of_mixture",
    "update_expert_bias": "expert_balance",
}
_HOME_IN_FOLDER_OF = {
    "FeedForward": "feed_forward",
    "GroupedExperts": "grouped_experts",
    "Llama": "llama",
    "Mixture": "mixture",
    "MoE": "moe",
    "TokenChoiceTopKRouter": "moe",
}
_FOLDER_OF = {PlatformType.PYTORCH: "torch", PlatformType.MINDSPORE: "mindspore"}

__all__ = sorted([*_HOME_OF, *_HOME_IN_FOLDER_OF])


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        home = _HOME_OF[name]
    elif name in _HOME_IN_FOLDER_OF:
        home = f"{_FOLDER_OF[get_platform().platform_type]}.{_HOME_IN_FOLDER_OF[name]}"
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
