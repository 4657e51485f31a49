"""The model of a dry run: a size by name, a Hugging Face config, or a function that builds one."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hyper_parallel.models.llama_config import LlamaConfig
from hyper_parallel.models.sizes import build_reference, model_size
from hyper_parallel.parallel.micro_batches import named_batch
from hyper_parallel.platform import get_platform


@dataclass(frozen=True)
class ModelSource:
    """How a model is built; ``build(length)`` gives the model, and its inputs or None."""

    name: str
    build: Callable[[int], tuple[Any, Any]]
    dtype: str | None = None


def find_model(model: Any) -> ModelSource:
    """What ``model`` means: a name, a path, ``"module:function"``, a config or a function."""
    if isinstance(model, LlamaConfig):
        return _reference(f"{type(model).__name__.removesuffix('Config').lower()} of {model.num_blocks} blocks", model)
    if isinstance(model, Path) or (isinstance(model, str) and _looks_like_path(model)):
        return _hugging_face(Path(model))
    if isinstance(model, str):
        if ":" in model:
            return _built_by(_load_function(model), model)
        return _reference(model.lower(), model_size(model))
    if isinstance(model, get_platform().Module):
        raise TypeError(
            "dry_run takes a function that builds the model, not the model: it is built inside, without memory; write "
            f"dry_run(lambda: {type(model).__name__}(...))"
        )
    if callable(model):
        return _built_by(model, getattr(model, "__qualname__", type(model).__name__))
    raise TypeError(f"dry_run takes a name, a path of a config.json or a function that builds the model, got {model!r}")


def _looks_like_path(text: str) -> bool:
    return text.endswith(".json") or "/" in text or Path(text).is_dir()


def _reference(name: str, config: LlamaConfig) -> ModelSource:
    def build(length: int) -> tuple[Any, Any]:
        return build_reference(replace(config, max_length=max(length, config.max_length))), None

    return ModelSource(name, build, "bfloat16")


# ---------------------------------------------------------------- Hugging Face


def parse_config(text: str) -> Any:
    """What a config.json of transformers says, which writes numbers that JSON does not have as tables.

    >>> parse_config('{"time_step_limit": [0.0, {"__float__": "Infinity"}]}')
    {'time_step_limit': [0.0, inf]}
    """
    return json.loads(text, object_hook=lambda table: float(table["__float__"]) if "__float__" in table else table)


def _hugging_face(path: Path) -> ModelSource:
    path = path / "config.json" if path.is_dir() else path
    try:
        data = parse_config(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; give a Hugging Face config.json, or the folder with one") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict) or "model_type" not in data:
        raise ValueError(f"{path} is not the config of a Hugging Face model: it has no 'model_type'")

    def build(length: int) -> tuple[Any, Any]:
        return _model_of_config(data, str(path)), None

    return ModelSource(f"{path.parent.name or data['model_type']}", build, data.get("dtype") or data.get("torch_dtype"))


def _model_of_config(data: dict[str, Any], where: str) -> Any:
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        raise RuntimeError(f"{where} needs transformers; run: pip install 'hyper-parallel[transformers]'") from None
    transformers.logging.set_verbosity_error()
    known = {name: value for name, value in data.items() if name != "model_type"}
    try:
        config = transformers.AutoConfig.for_model(data["model_type"], **known)
        kind = getattr(transformers, (data.get("architectures") or [""])[0], None)
        return kind(config) if kind is not None else transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # its configs and models check themselves, each in its own way
        said = " ".join(str(error).split())
        raise ValueError(f"{where}: transformers cannot build this model: {said}") from error


# ---------------------------------------------------------------- a user's own


def _load_function(text: str) -> Callable[..., Any]:
    module_name, _, function_name = text.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{text!r}: the module {module_name!r} cannot be imported: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{text!r}: the module {module_name!r} has no function {function_name!r}")
    return function


def _built_by(function: Callable[..., Any], name: str) -> ModelSource:
    def build(length: int) -> tuple[Any, Any]:
        made = function()
        model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, get_platform().Module):
            raise TypeError(f"{name} must return a model, or a model and its inputs; got {type(model).__name__}")
        return model, inputs

    return ModelSource(name, build)


class _OwnLoss:
    """Of a model that is given no labels: its output is the loss, or has it, and counts as one."""

    def __init__(self, model: Any) -> None:
        self._name = type(model).__name__

    def __call__(self, outputs: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        loss: Any = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
        if not get_platform().is_tensor(loss) or loss.ndim:
            raise ValueError(
                f"{self._name} gives no loss to run backward from: it must return a tensor of one number, or an object "
                "with one as `loss`; wrap it in a module that computes the loss"
            )
        return loss, 1

    def count(self, batch: Mapping[str, Any]) -> Any:
        platform = get_platform()
        like = next(value for value in batch.values() if platform.is_tensor(value))
        return platform.index_tensor([[1]], like.device).reshape(())


def loss_of_inputs(model: Any, inputs: Any) -> Callable[..., Any] | None:
    """None for a model that gets labels, whose loss ``parallelize`` knows."""
    named = named_batch(model, *((), inputs) if isinstance(inputs, Mapping) else (tuple(inputs), {}))
    return None if "labels" in named else _OwnLoss(model)


def inputs_for(model: Any, batch: int, length: int) -> Any:
    """Token ids, which are their own labels, as the model's forward function takes them."""
    platform = get_platform()
    ids = platform.token_ids(batch, length)
    names = platform.argument_names_of(model)
    if "input_ids" not in names:
        return (ids, ids)
    return {"input_ids": ids, "labels": ids}
