"""Names in checkpoints: the same on both frameworks, for MindSpore calls the weight of an embedding otherwise, and each
with a place in the run that loads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.core.distributed_checkpoint.format.stored_files import read_metadata
from hyper_parallel.core.distributed_checkpoint.planning.flatten import Entries
from hyper_parallel.platform import get_platform

__all__ = ["more_state", "refuse_rest", "renamed_model", "renamed_optimizer", "shared_names"]

_platform = get_platform()
_MOST_SHOWN = 6


def shared_names(model: Any) -> dict[str, str]:
    """From names of this framework to those of both, where they differ."""
    names = {}
    for path, module in _platform.get_cells_and_names(model):
        own = _platform.weight_name(module)
        if own != "weight":
            start = f"{path}." if path else ""
            names[f"{start}{own}"] = f"{start}weight"
    return names


def renamed_model(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The state of a model by other names."""
    return {names.get(name, name): value for name, value in state.items()}


def renamed_optimizer(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The state of an optimizer by other names of parameters; each is kept apart, as stages have different ones."""
    return {kind: Entries(renamed_model(by_name, names)) for kind, by_name in state.items()}


def more_state(more: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """What is saved beside the run's own state, under names that are not its own."""
    taken = sorted({"model", "optimizer", "run"} & more.keys())
    if taken:
        raise ValueError(f"Parallel.{where}: {', '.join(taken)} is what its own state is called; take another name")
    return more


def refuse_rest(path: Any, state: Mapping[str, Any], mesh: Any) -> None:
    """An error where a checkpoint has weights, or what an optimizer keeps of them, that no rank has a place for.

    ``state``: of this rank; what it does not have of model and optimizer at all is not asked for.
    forward: all-reduce of a number for each entry over all ranks; no backward.
    """
    own = {f"model.{name}" for name in state["model"]}
    kinds = ["model."]
    if "optimizer" in state:
        kinds.append("optimizer.state.")
        own |= {
            f"optimizer.state.{name}.{slot}" for name, slots in state["optimizer"]["state"].items() for slot in slots
        }
    saved = sorted(name for name in read_metadata(path).state_dict_metadata if name.startswith(tuple(kinds)))
    places = _platform.index_tensor([[int(name in own) for name in saved]], _platform.get_device_type())
    if mesh.size() > 1:
        places = _platform.all_reduce(places, mesh.get_group(tuple(range(mesh.ndim))))
    found = _platform.tensor_to_numpy(places)[0]
    rest = [name for name, number in zip(saved, found, strict=True) if not number]
    if rest:
        shown = ", ".join(map(repr, rest[:_MOST_SHOWN])) + ", ..." * (len(rest) > _MOST_SHOWN)
        raise ValueError(
            f"the checkpoint '{path}' has {len(rest)} entries that this run has no place for: {shown}. It is of "
            "another model or optimizer: go on with that one, or begin anew in another folder"
        )
