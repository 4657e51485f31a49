"""Reference models: plain single-device code, one folder per framework, and each one's plan on a page of its own.

``Llama`` is the model of the framework in use. Both frameworks' models name their parts alike, so ``llama_plan``
cuts either. Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import PlatformType

_HOME_OF = {"LlamaConfig": "llama_config", "llama_plan": "plan_of_llama"}
_FOLDER_OF = {PlatformType.PYTORCH: "torch", PlatformType.MINDSPORE: "mindspore"}

__all__ = ["Llama", "LlamaConfig", "llama_plan"]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        home = _HOME_OF[name]
    elif name == "Llama":
        home = f"{_FOLDER_OF[get_platform().platform_type]}.llama"
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
