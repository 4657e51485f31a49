"""Folders as Hugging Face has them: weights for a model that is split, and all that ``from_pretrained`` looks for."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hyper_parallel.core.distributed_checkpoint.foreign.hugging_face import load_hugging_face, save_hugging_face
from hyper_parallel.core.modules.deferred import materialize
from hyper_parallel.core.modules.first_names import noted_first_names
from hyper_parallel.core.modules.lora import is_of_adapter
from hyper_parallel.parallel.adapter_files import merged_state, refuse_peft
from hyper_parallel.parallel.state_names import renamed_model, shared_names
from hyper_parallel.plans.hub_files import hub_mapping
from hyper_parallel.platform import get_platform

__all__ = ["load_folder", "require_memory", "save_folder"]

_platform = get_platform()

# Files of a tokenizer, by the names that transformers gives them.
_OF_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
)


def load_folder(parts: Sequence[Any], folder: Any, **options: Any) -> Any:
    """Fill models from a folder; those without memory get it first. Every rank reads its own bytes; adapters are not in
    the files."""
    found = None
    for part in parts:
        refuse_peft(part, "load_hugging_face", "load the weights before get_peft_model, with from_pretrained")
        _give_memory(part)
        state = _platform.get_model_state_dict(part, options=None)
        state = {name: value for name, value in state.items() if not is_of_adapter(name)}
        state = renamed_model(_with_first_names(state, part), shared_names(part))
        rules = hub_mapping(part, {name: tuple(value.shape) for name, value in state.items()})
        found = load_hugging_face(state, folder, **{"mapping": rules, **options})
    return found


def _with_first_names(state: dict[str, Any], model: Any) -> dict[str, Any]:
    """With a tied parameter whose first name is another stage's also under that one: files have one of the two."""
    first = noted_first_names(model)
    return {**{first.get(name, name): value for name, value in state.items()}, **state}


def _give_memory(model: Any) -> None:
    """Memory for parameters that have none; its values come from files, so nothing is drawn."""
    if any(map(_platform.has_no_memory, _platform.parameters_dict(model).values())):
        materialize(model, init=_fill_with_zeros)


def require_memory(model: Any) -> None:
    """An error for a model with parameters or buffers that have no memory, hence no values."""
    if any(map(_platform.has_no_memory, _platform.parameters_dict(model).values())):
        raise RuntimeError(
            f"{type(model).__name__} has no values yet: it was built without memory; call materialize() or "
            "load_hugging_face(folder) of what parallelize returned"
        )
    if any(map(_platform.has_no_memory, _platform.state_tensors(model))):
        raise RuntimeError(
            f"buffers of {type(model).__name__} have no memory, and nothing says what is in them; build the model "
            "under hp.deferred_init(), which computes buffers, not on the meta device"
        )


def _fill_with_zeros(model: Any) -> None:
    for parameter in _platform.parameters_dict(model).values():
        parameter.fill_(0.0)


def save_folder(model: Any, folder: Any, *, tokenizer: Any = None, **options: Any) -> None:
    """The weights, with adapters merged into them, by all ranks; by one of them the config, generation config and the
    tokenizer's files.
    """
    refuse_peft(
        model,
        "save_hugging_face",
        "write them by save_adapters(folder), and merge them where that is opened: "
        "PeftModel.from_pretrained(model, folder).merge_and_unload()",
    )
    path = Path(folder)
    first = noted_first_names(model)
    state = {first.get(name, name): value for name, value in merged_state(model).items()}
    state = renamed_model(state, shared_names(model))
    save_hugging_face(state, path, **{"mapping": functools.partial(hub_mapping, model), **options})
    if _platform.get_rank() == 0:
        for name in ("config", "generation_config"):
            save = getattr(getattr(model, name, None), "save_pretrained", None)
            if save is not None:
                save(path)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(path)
        elif tokenizer is not None:
            _copy_tokenizer(Path(tokenizer), path)
    if _platform.get_world_size() > 1:
        _platform.barrier()


def _copy_tokenizer(source: Path, target: Path) -> None:
    found = [source / name for name in _OF_TOKENIZERS if (source / name).is_file()]
    if not found:
        raise ValueError(
            f"save_hugging_face: '{source}' has no file of a tokenizer ({', '.join(_OF_TOKENIZERS[:3])}, ...)"
        )
    for file in found:
        shutil.copyfile(file, target / file.name)
