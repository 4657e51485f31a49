"""Where a model is cut: which blocks, and what before and behind them, each stage has; decided on the whole model.

split = split_stages(model, 4, blocks=structure.blocks, ...)   # the whole model, with or without memory
parallelize_module(model, mesh["tp"], plan)                    # styles, recomputation: still of the whole model
stage = StageModel(model, split, index)                        # what belongs to other stages is gone
materialize(model)                                             # or load: this rank's part only
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.pipeline_parallel.stages.balance import balanced_counts
from hyper_parallel.core.pipeline_parallel.stages.first_blocks import Seen, StreamSpec, look
from hyper_parallel.core.pipeline_parallel.stages.holes import hole_of
from hyper_parallel.core.pipeline_parallel.stages.losses_of_blocks import gives_loss
from hyper_parallel.core.pipeline_parallel.stages.refusals import check_model
from hyper_parallel.platform import get_platform

__all__ = ["Split", "split_stages"]

_platform = get_platform()


@dataclass(frozen=True)
class Split:
    """A model in stages, by paths of modules and names of parameters of the whole model.

    ``prologue`` runs before the blocks, on stage 0, ``epilogue`` behind them, on the last one: modules with parameters;
    ``before`` has all modules that run before the blocks, ``stages`` the blocks of each stage. ``order`` are the
    trainable parameters with their dtypes in the model's order, each under the first of its names, and ``shared`` those
    that several stages hold a copy of, with these stages. ``dtypes`` has those of all parameters. ``stream`` is what is
    handed on for the inputs that were given, None if there were none; ``costs`` what the stages were balanced by.
    ``num_outputs`` is the length of the tuples that blocks give, 0 where they give the stream alone or with a loss.
    """

    stages: tuple[tuple[str, ...], ...]
    prologue: tuple[str, ...]
    epilogue: tuple[str, ...]
    before: frozenset[str]
    order: Mapping[str, Any]
    shared: Mapping[str, tuple[int, ...]]
    dtypes: frozenset[str]
    stream: StreamSpec | None
    costs: tuple[float, ...]
    num_outputs: int
    first_names: Mapping[str, str] = field(repr=False)

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.stages)

    @property
    def blocks(self) -> tuple[str, ...]:
        """The paths of all blocks, in order."""
        return tuple(path for stage in self.stages for path in stage)

    def stage_of(self, path: str) -> int | None:
        """The stage that a module with parameters belongs to; None for what surrounds the blocks."""
        for number, paths in enumerate(self.stages):
            if any(path == one or path.startswith(f"{one}.") for one in paths):
                return number
        if path in self.prologue:
            return 0
        return self.num_stages - 1 if path in self.epilogue else None

    def own_parameters(self, model: Any) -> dict[str, Any]:
        """The parameters that are left in a model, each under the first name that it has in the whole one."""
        found: dict[str, Any] = {}
        for name, parameter in _platform.named_state_parameters(model).items():
            found.setdefault(self.first_names.get(name, name), parameter)
        return found


def split_stages(
    model: Any,
    stages: int | Sequence[int],
    *,
    blocks: Sequence[str],
    prologue: Sequence[str] = (),
    inputs: Mapping[str, Any] | None = None,
    balance: str | Sequence[float] = "time",
) -> Split:
    """Decide on the stages of a model: how many, or how many blocks each has, which always wins.

    Call it on every rank on the whole model, before anything is parallelized; a model without memory is enough.
    ``blocks`` and ``prologue`` are paths, those that ``hyper_parallel.plans.structure_of`` finds. With ``inputs``,
    arguments of the model by name, it runs up to its second block once (on shapes where it has no memory): what is
    called before the first is the prologue, and a model whose blocks hand on more than the stream is refused.

    ``balance="time"`` counts weights by which activations are multiplied, the head's too, ``"bytes"`` the parameters
    that a stage holds; a list has measured costs: of what runs before the blocks, of each block, of what runs behind.
    No communication.
    """
    check_model(model, blocks)
    modules = dict(_platform.get_cells_and_names(model))
    unknown = [path for path in [*blocks, *prologue] if path not in modules]
    if unknown:
        raise ValueError(f"split_stages: {type(model).__name__} has no module {', '.join(map(repr, unknown))}")
    seen = None if inputs is None else look(model, blocks, inputs)
    before, behind = _ends(modules, blocks, prologue, seen)
    for path in before:
        hole_of(path, modules[path])  # refuses what cannot be left out
    costs = _costs(modules, blocks, before, behind, balance)
    counts = _counts(stages, costs, len(blocks), type(model).__name__)
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    paths = tuple(tuple(blocks[end - count : end]) for end, count in zip(ends, counts, strict=True))
    first_names = _first_names(model)
    named = _platform.named_state_parameters(model)
    order = {name: one.dtype for name, one in named.items() if first_names[name] == name and _platform.needs_grad(one)}
    split = Split(
        stages=paths,
        prologue=tuple(before),
        epilogue=tuple(behind),
        before=_all_before(modules, blocks, seen),
        order=order,
        shared={},
        dtypes=frozenset(_platform.dtype_name(one.dtype) for one in named.values()),
        stream=None if seen is None else seen.stream,
        costs=_costs_of_stages(costs, counts),
        num_outputs=0 if seen is None or gives_loss(modules[blocks[0]]) else seen.num_outputs,
        first_names=first_names,
    )
    _refuse_shared_modules(model, modules, split)
    split.shared.update(_shared(modules, split))  # type: ignore[attr-defined]
    return split


_CONTAINERS = ("ParameterDict", "ParameterList", "ParameterTuple")  # never called themselves


def _ends(
    modules: Mapping[str, Any], blocks: Sequence[str], prologue: Sequence[str], seen: Seen | None
) -> tuple[list[str], list[str]]:
    """The modules with parameters of their own before and behind the blocks."""
    before: list[str] = []
    behind: list[str] = []
    for path, module in modules.items():
        own = _platform.own_parameters(module)
        if not own or any(path == one or path.startswith(f"{one}.") for one in blocks):
            continue
        if not path or any(one.startswith(f"{path}.") for one in blocks):
            raise ValueError(
                f"split_stages: the parameter '{f'{path}.' if path else ''}{next(iter(own))}' belongs to the module "
                "around the blocks, and nothing tells on which stage it is used: move it into a module of its own"
            )
        is_first = path in seen.before if seen is not None else path in prologue
        around = path.rpartition(".")[0]
        if not is_first and seen is not None and around in seen.before and type(module).__name__ in _CONTAINERS:
            raise ValueError(
                f"split_stages: '{around}' runs before the blocks with parameters of '{path}' "
                f"({type(module).__name__}), and the shape of what it gives cannot be told on stages without them: "
                "leave it without (an adapter on an embedding, for instance), or use tp, dp_shard or cp for this model"
            )
        (before if is_first else behind).append(path)
    return before, behind


def _all_before(modules: Mapping[str, Any], blocks: Sequence[str], seen: Seen | None) -> frozenset[str]:
    """The modules that run before the blocks, without those around the blocks."""
    paths = list(modules)
    found = paths[: paths.index(blocks[0])] if seen is None else seen.before
    return frozenset(path for path in found if path and not any(one.startswith(f"{path}.") for one in blocks))


def _first_names(model: Any) -> dict[str, str]:
    first: dict[int, str] = {}
    named = _platform.named_state_parameters(model)
    return {name: first.setdefault(id(parameter), name) for name, parameter in named.items()}


def _refuse_shared_modules(model: Any, modules: Mapping[str, Any], split: Split) -> None:
    """A module has one place; parameters that are tied may have several."""
    owners: dict[int, str] = {}
    for path, module in modules.items():
        for parameter in _platform.own_parameters(module).values():
            owners.setdefault(id(parameter), path)
    for name, parameter in _platform.named_state_parameters(model).items():
        path = name.rpartition(".")[0]
        first = owners.get(id(parameter), path)
        if path not in modules and None is not split.stage_of(path) != split.stage_of(first):
            raise ValueError(
                f"split_stages: '{path}' and '{first}' are one module, in blocks of different stages, and it would be "
                "empty on one of them: let each block have a module of its own, and tie their parameters"
            )


def _shared(modules: Mapping[str, Any], split: Split) -> dict[str, tuple[int, ...]]:
    """Tied parameters of which several stages need a copy."""
    holders: dict[str, set[int]] = {}
    for path, module in modules.items():
        stage = split.stage_of(path)
        for name in _platform.own_parameters(module):
            whole = f"{path}.{name}" if path else name
            if stage is not None:
                holders.setdefault(split.first_names.get(whole, whole), set()).add(stage)
    return {name: tuple(sorted(stages)) for name, stages in holders.items() if len(stages) > 1}


def _costs(
    modules: Mapping[str, Any], blocks: Sequence[str], before: list[str], behind: list[str], balance: Any
) -> list[float]:
    """Of the prologue, each block and the epilogue."""
    if not isinstance(balance, str):
        costs = [float(cost) for cost in balance]
        if len(costs) != len(blocks) + 2 or not all(math.isfinite(cost) and cost >= 0 for cost in costs):
            raise ValueError(
                f"split_stages: balance= has {len(costs)} costs, {costs}; give one for what runs before the blocks, "
                f"one for each of the {len(blocks)} blocks and one for what runs behind, none of them negative"
            )
        return costs
    if balance not in ("time", "bytes"):
        raise ValueError(f"split_stages: balance={balance!r}; write 'time', 'bytes' or a list of costs")

    def cost(paths: list[str]) -> float:
        found: dict[int, float] = {}
        for path in paths:
            module = modules[path]
            for parameter in _platform.own_parameters(module).values():
                size = math.prod(parameter.shape)
                if balance == "bytes":
                    found[id(parameter)] = size * _platform.get_element_size(parameter)
                elif not _platform.is_embedding_module(module):
                    found[id(parameter)] = size
        return float(sum(found.values()))

    inside = [[path for path in modules if path == one or path.startswith(f"{one}.")] for one in blocks]
    return [cost(before), *map(cost, inside), cost(behind)]


def _counts(stages: int | Sequence[int], costs: list[float], num_blocks: int, name: str) -> tuple[int, ...]:
    if isinstance(stages, int):
        if not 1 <= stages <= num_blocks:
            raise ValueError(
                f"split_stages: {stages} stages of {name}, which has {num_blocks} blocks; give a number from 1 to "
                f"{num_blocks}"
            )
        return balanced_counts(costs[1:-1], stages, costs[0], costs[-1])
    counts = tuple(stages)
    if not counts or sum(counts) != num_blocks or min(counts) < 1:
        raise ValueError(
            f"split_stages: stages={list(counts)} are {sum(counts)} blocks, and {name} has {num_blocks}; give the "
            "number of blocks of each stage, at least one"
        )
    return counts


def _costs_of_stages(costs: list[float], counts: tuple[int, ...]) -> tuple[float, ...]:
    inner, found = list(costs[1:-1]), []
    for count in counts:
        found.append(sum(inner[:count]))
        del inner[:count]
    found[0] += costs[0]
    found[-1] += costs[-1]
    return tuple(found)
