"""The model that a config asks for, without memory, and its first values."""

from __future__ import annotations

import dataclasses
import importlib
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from hyper_parallel.analysis.model_source import parse_config
from hyper_parallel.core.modules.deferred import deferred_init
from hyper_parallel.core.modules.lora import add_lora
from hyper_parallel.models.sizes import build_reference, model_size
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import PlatformType
from hyper_parallel.trainer.config.reading import read_text
from hyper_parallel.trainer.config.sections.model import DEFAULT_TARGETS

if TYPE_CHECKING:
    from hyper_parallel.parallel.parallel import Parallel
    from hyper_parallel.trainer.config.sections.model import LoraConfig, ModelConfig

__all__ = ["build_model", "give_values", "model_vocabulary"]

_MOST_SAID = 400  # characters of an error of transformers, which may list all the models there are


def build_model(config: ModelConfig, dtype: str) -> Any:
    """The model with parameters of ``dtype`` that have no memory yet, the same on every rank."""
    platform = get_platform()
    with deferred_init():
        if config.name is not None:
            model = build_reference(dataclasses.replace(model_size(config.name), **config.args))
        elif config.hugging_face is not None:
            model = _hugging_face(config)
        else:
            module, _, function = str(config.build).partition(":")
            model = getattr(importlib.import_module(module), function)(**config.args)
            if not isinstance(model, platform.Module):
                raise TypeError(f"model.build: {config.build} returned a {type(model).__name__}, not a model")
        model = platform.cast_parameters(model, dtype)
        if dtype == "float64" and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # transformers' grouped kernel does not take float64
    if config.lora is not None:
        _add_adapters(model, config.lora)
    return model


def _add_adapters(model: Any, config: LoraConfig) -> None:
    targets = config.targets
    if targets == DEFAULT_TARGETS:  # Names of many models; those of this one.
        platform = get_platform()
        linears = [
            path for path, one in platform.get_cells_and_names(model) if platform.linear_weight_dims(one) is not None
        ]
        targets = tuple(one for one in targets if any(fnmatchcase(path, one) for path in linears)) or targets
    try:
        add_lora(model, rank=config.rank, alpha=config.alpha, dropout=config.dropout, targets=targets)
    except ValueError as error:
        raise ValueError(f"model.lora.targets: {error}") from None


def _hugging_face(config: ModelConfig) -> Any:
    if get_platform().platform_type is not PlatformType.PYTORCH:
        raise ValueError("model.hugging_face: models of Hugging Face are PyTorch's; set HYPER_PARALLEL_PLATFORM=torch")
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise ValueError(
            'model.hugging_face: transformers is not installed; pip install "hyper-parallel[transformers]"'
        ) from None
    path = Path(str(config.hugging_face))
    values = parse_config(read_text(path / "config.json" if path.is_dir() else path))
    try:
        kind = transformers.AutoConfig.for_model(values.pop("model_type"), **{**values, **config.args})
        return transformers.AutoModelForCausalLM.from_config(kind)
    except Exception as error:  # its configs and models check themselves, each in its own way
        said = shorten(str(error), _MOST_SAID)
        raise ValueError(f"model.hugging_face: transformers cannot build the model of '{path}': {said}") from None


def give_values(run: Parallel, config: ModelConfig, seed: int) -> None:
    """Draw the first values, or read them; every rank its own part."""
    if config.from_scratch:
        run.materialize(seed=seed)
    else:
        run.load_hugging_face(config.weights, cast=True)


def model_vocabulary(model: Any) -> int | None:
    """How many token ids a model knows; None if it does not say."""
    config = getattr(model, "config", None)
    for holder in (config, getattr(config, "text_config", None)):
        size = getattr(holder, "vocab_size", None)
        if isinstance(size, int):
            return size
    return None
