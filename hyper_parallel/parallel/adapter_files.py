"""Adapters on their way out: merged into the weights they belong to, or by themselves as peft reads them."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyper_parallel.core.distributed_checkpoint.foreign.hugging_face import save_hugging_face
from hyper_parallel.core.modules.lora import DOWN, UP, adapted_layers, is_of_adapter
from hyper_parallel.platform import get_platform

__all__ = ["has_adapters", "merged_state", "refuse_peft", "save_adapters"]

_platform = get_platform()


def has_adapters(model: Any) -> bool:
    """Whether a layer of the model has an adapter."""
    return next(adapted_layers(model), None) is not None


def merged_state(model: Any) -> dict[str, Any]:
    """The model's state without adapters; what they add is in the weights, under the weights' layouts.

    The model is left as it is. forward: what the product of B and A needs to lie as the weight does.
    """
    state = _platform.get_model_state_dict(model, options=None)
    merged = {name: value for name, value in state.items() if not is_of_adapter(name)}
    parameters = _platform.named_state_parameters(model)
    with _platform.no_grad():
        for path, module, adapter in _layers_of(model, state):
            name = _joined(path, "weight")
            weight = state[name]
            tied = [other for other, one in parameters.items() if one is parameters[name] and other != name]
            if tied:
                raise ValueError(
                    f"the adapter of {path!r} cannot be merged: its weight is also {tied[0]!r}, which has none; save "
                    "the adapters by themselves (save_adapters), or leave the layer out of targets"
                )
            down, up = state[_joined(path, DOWN)], state[_joined(path, UP)]
            addition = up @ down
            if _platform.linear_weight_dims(module) == (1, 0):
                addition = addition.T
            merged[name] = _laid_as(weight + addition * adapter.scale, weight)
    return merged


def save_adapters(model: Any, folder: Any, *, base: str | None = None) -> None:
    """Write a folder that ``peft.PeftModel.from_pretrained(model, folder)`` opens; every rank calls it.

    ``base`` is where the model is from, for programs that look for it.
    """
    if is_of_peft(model):
        _save_peft(model, Path(folder), base)
        return
    state = _platform.get_model_state_dict(model, options=None)
    layers = _layers_of(model, state)
    described = _of_all_ranks({path: _described(module, adapter) for path, module, adapter in layers})
    if not described:
        raise ValueError(f"save_adapters: {type(model).__name__} has no adapters; add_lora adds them")
    path = Path(folder)
    named = {
        f"base_model.model.{_joined(where, name)}.weight": state[_joined(where, name)]
        for where, _, _ in layers
        for name in (DOWN, UP)
    }
    config = json.dumps(_config(described, base), indent=2) + "\n"
    _write(named, path, lambda: (path / "adapter_config.json").write_text(config, encoding="utf-8"))


def _write(named: dict[str, Any], path: Path, write_config: Callable[[], Any]) -> None:
    aside = path / ".weights"
    save_hugging_face(named, aside)
    if _platform.get_rank() == 0:
        (aside / "model.safetensors").replace(path / "adapter_model.safetensors")
        shutil.rmtree(aside)
        write_config()
    if _platform.get_world_size() > 1:
        _platform.barrier()


# ---------------------------------------------------------------- those that peft has put into the model


def is_of_peft(model: Any) -> bool:
    """Whether peft has put adapters around layers of the model, or a prompt before it."""
    return isinstance(getattr(model, "peft_config", None), dict) and hasattr(model, "get_base_model")


def refuse_peft(model: Any, what: str, instead: str) -> None:
    """An error for a model inside of peft's adapters, whose names no folder of weights has."""
    if is_of_peft(model):
        raise ValueError(f"{what}: the model is inside of peft's adapters; {instead}")


def _save_peft(model: Any, path: Path, base: str | None) -> None:
    """As peft's ``save_pretrained``, from all ranks: other adapters than "default" in folders of their own."""
    peft: Any = importlib.import_module("peft")
    state = _platform.get_model_state_dict(model, options=None)
    for name, given in model.peft_config.items():
        named = peft.get_peft_model_state_dict(model, state_dict=state, adapter_name=name, save_embedding_layers=False)
        config = copy.copy(given)
        config.inference_mode = True
        config.base_model_name_or_path = base or config.base_model_name_or_path
        folder = path if name == "default" else path / name
        _write(named, folder, functools.partial(config.save_pretrained, folder))


# ---------------------------------------------------------------- ours


def _layers_of(model: Any, state: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Layers whose adapters this rank has: a stage of a pipeline has the modules of others without their parameters."""
    return [one for one in adapted_layers(model) if _joined(one[0], DOWN) in state]


def _described(module: Any, adapter: Any) -> dict[str, Any]:
    return {
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "fan_in_fan_out": _platform.linear_weight_dims(module) == (1, 0),
    }


def _of_all_ranks(own: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What any rank has, in the order of ranks: each stage of a pipeline has its own layers.

    forward: all ranks tell their layers to all.
    """
    if _platform.get_world_size() == 1:
        return own
    everybody: list[Any] = [None] * _platform.get_world_size()
    _platform.all_gather_object(everybody, own)
    return {path: described for layers in everybody for path, described in layers.items()}


def _config(layers: dict[str, dict[str, Any]], base: str | None) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        **next(iter(layers.values())),
        "fan_in_fan_out": any(described["fan_in_fan_out"] for described in layers.values()),
        "target_modules": list(layers),
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
    }


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _laid_as(value: Any, weight: Any) -> Any:
    layout = getattr(weight, "layout", None)
    return value if not hasattr(value, "redistribute") else value.redistribute(weight.device_mesh, layout)
