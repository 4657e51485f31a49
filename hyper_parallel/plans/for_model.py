"""``for_model``: the plan for a model, as a dict from paths to styles that ``parallelize_module`` takes.

Note [What a plan says]
Embedding of the vocabulary: cut by rows. In each block the layers that begin a pair are cut by outputs, those that end
one by inputs; the head by the vocabulary, so that the loss never needs all logits in one place. All else is whole. A
layer that begins several pairs at once, as one for query, key and value, is cut as one, and its result is gathered to
be told apart; with ``split_fused`` it becomes as many parameters, each cut.
Between the halves of a block activations are whole, or with sequence parallelism cut on the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hyper_parallel.core.dtensor.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.modules.module_paths import match_paths
from hyper_parallel.core.tensor_parallel.fused_and_head_styles import FusedColwiseParallel
from hyper_parallel.core.tensor_parallel.gather_inputs import GatherInputs
from hyper_parallel.core.tensor_parallel.parameter_styles import ReplicateParameters, ShardAttention, ShardParameters
from hyper_parallel.core.tensor_parallel.single_device_code import (
    ComputeReplicated,
    SingleDeviceCode,
    SingleDeviceModel,
)
from hyper_parallel.core.tensor_parallel.style import ColwiseParallel, ParallelStyle, RowwiseParallel
from hyper_parallel.plans.layers import is_below
from hyper_parallel.plans.roles import BY_HAND, PlanError, Roles, read_roles
from hyper_parallel.plans.structure import structure_of
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.framework_of import kind_of

Plan = dict[str, list[ParallelStyle]]


def for_model(
    model: Any,
    *,
    sequence_parallel: bool = False,
    plain_outputs: bool = True,
    split_fused: bool = False,
    keep_whole: Iterable[str] = (),
    experts: Iterable[str] = (),
) -> Plan:
    """The plan that cuts ``model``, made from its structure, for :func:`hyper_parallel.parallelize_module`.

    ``sequence_parallel`` cuts the activations between the halves of a block on the sequence: a reduce-scatter and an
    all-gather take the place of each all-reduce, and norms and dropout are shared out. With ``plain_outputs`` the model
    returns plain whole tensors, as on one device; without, logits stay cut on the vocabulary. With ``split_fused`` one
    weight for query, key and value, or for gate and up, becomes parameters of their own, which saves gathers and gives
    them other names. Modules and parameters that match a path of ``keep_whole`` (with ``*`` and ``**``) are not cut.
    ``experts`` are paths of modules of experts whose parameters are laid out already, and which take distributed
    tokens. A model that cannot be read is a ``PlanError`` (a ValueError) that names the module.

    >>> from hyper_parallel import models
    >>> plan = for_model(models.Llama(models.LlamaConfig(num_blocks=2)))
    >>> plan["blocks.*.feed_forward.down"]
    [RowwiseParallel(input_layouts=Shard(-1), output_layouts=Replicate(), use_local_output=False)]
    """
    platform = get_platform()
    if not isinstance(model, platform.Module):
        raise TypeError(f"plans.for_model takes a model, got {kind_of(model)}")
    if isinstance(keep_whole, str):
        raise TypeError(f"plans.for_model: keep_whole takes a list of paths; write keep_whole=[{keep_whole!r}]")
    paths = [path for path, _ in platform.get_cells_and_names(model)]
    known = [*paths, *platform.parameters_dict(model, remove_duplicate=False)]
    for pattern in keep_whole:
        match_paths(known, {pattern: None}, "plans.for_model: keep_whole", "module")
    roles = read_roles(model, tuple(keep_whole))
    if not (roles.columns or roles.attentions):
        raise PlanError(_nothing_to_shard(model))
    between = Shard(_sequence_dim(model, roles)) if sequence_parallel else Replicate()
    experts = frozenset(experts)
    plan = _plan_of(model, roles, between, split_fused, experts)
    plan.setdefault("", []).insert(0, SingleDeviceModel(plain_outputs=plain_outputs))
    for path in _called_alone(roles.blocks, paths):
        plan.setdefault(path, []).insert(0, SingleDeviceCode())
    return _with_stars({path: plan[path] for path in paths if path in plan}, paths)


def unsharded(model: Any, experts: Iterable[str] = ()) -> Plan:
    """The plan that leaves every parameter whole, for a model that ``for_model`` cannot read.

    Its code runs on distributed activations as it is, but for mixtures of experts, which get whole ones unless
    ``experts`` has their modules.
    """
    platform = get_platform()
    modules = dict(platform.get_cells_and_names(model))
    structure = structure_of(model)
    plan: Plan = {"": [SingleDeviceModel(plain_outputs=False)]}
    for path in _called_alone(list(structure.blocks), list(modules)):
        plan.setdefault(path, []).append(SingleDeviceCode())
    for path in structure.mixtures:
        if _has_experts(path, experts):
            continue
        plan.setdefault(path, []).append(ComputeReplicated())
    return plan


def _has_experts(mixture: str, experts: Iterable[str]) -> bool:
    return any(path == mixture or is_below(path, mixture) for path in experts)


def _called_alone(blocks: list[str], paths: list[str]) -> list[str]:
    """What is called without the model around it: blocks, by recompute, and the owners of blocks, as the encoder is by
    ``generate``."""
    lists = {block.rpartition(".")[0] for block in blocks}
    owners = {path for path in paths if path and any(one.startswith(f"{path}.") for one in lists)}
    return [path for path in paths if path in blocks or path in owners - lists]


def _plan_of(
    model: Any, roles: Roles, between: Placement, split_fused: bool, experts: frozenset[str] = frozenset()
) -> Plan:
    platform = get_platform()
    plan: Plan = {}

    def give(paths: Iterable[str], make: Any) -> None:
        for path in paths:
            plan.setdefault(path, []).append(make())

    give(roles.vocabularies, lambda: RowwiseParallel(output_layouts=between, use_local_output=False))
    give(roles.parts, GatherInputs)
    for path in roles.columns:
        parts = roles.fused.get(path) if split_fused else None
        style = (
            FusedColwiseParallel(parts, use_local_output=False) if parts else ColwiseParallel(use_local_output=False)
        )
        plan.setdefault(path, []).append(style)
    give(roles.rows, lambda: RowwiseParallel(output_layouts=between, use_local_output=False))
    give(roles.attentions, lambda: GatherInputs(output=between))
    give(roles.attentions, ShardAttention if split_fused else lambda: ShardParameters(_PACKED))
    outs = [f"{path}.out_proj" if path else "out_proj" for path in roles.attentions]
    give(outs, lambda: ShardParameters({"weight": Shard(1)}))
    mixtures = [path for path in roles.mixtures if not _has_experts(path, experts)]
    give(mixtures, lambda: ComputeReplicated(output=between))
    give((path for path in roles.mixtures if path not in mixtures), lambda: GatherInputs(output=between))
    give(roles.heads, GatherInputs)
    give(roles.heads, lambda: ColwiseParallel(use_local_output=False))
    sharded = {*roles.vocabularies, *roles.columns, *roles.rows, *roles.attentions, *outs, *roles.heads}
    mixed = tuple(f"{path}." for path in mixtures)
    modules = list(platform.get_cells_and_names(model))
    # A parameter that a cut layer shares with the module around it (BERT's head: its bias) lies as the layer says.
    shared = {
        id(value) for path, module in modules if path in sharded for value in platform.own_parameters(module).values()
    }
    for path, module in modules:
        if path in sharded or path in experts or path in mixtures or (mixed and path.startswith(mixed)):
            continue
        own = platform.own_parameters(module)
        replicated = [name for name, value in own.items() if id(value) not in shared]
        if replicated:
            plan.setdefault(path, []).append(ReplicateParameters(None if len(replicated) == len(own) else replicated))
    return plan


# Of nn.MultiheadAttention. The three parts of in_proj_weight lie behind each other: a cut of the whole is not a cut of
# each, so what is computed with it moves between ranks before the heads are told apart.
_PACKED = {
    "in_proj_weight": Shard(0),
    "in_proj_bias": Shard(0),
    "q_proj_weight": Shard(0),
    "k_proj_weight": Shard(0),
    "v_proj_weight": Shard(0),
}


def _sequence_dim(model: Any, roles: Roles) -> int:
    """1, or 0 for the framework's own transformers unless they are told that the batch comes first."""
    modules = dict(get_platform().get_cells_and_names(model))
    firsts = {bool(modules[path].batch_first) for path in roles.attentions}
    if len(firsts) > 1:
        raise PlanError(
            "plans.for_model: some attention modules have batch_first=True and some have not, so there is no one dim "
            "of the sequence; use sequence_parallel=False"
        )
    return 0 if firsts == {False} else 1


def _nothing_to_shard(model: Any) -> str:
    platform = get_platform()
    largest, name, size = "", "", -1
    for path, module in platform.get_cells_and_names(model):
        for parameter_name, parameter in platform.own_parameters(module).items():
            if parameter.numel() > size:
                largest, name, size = path, f"{type(module).__name__}.{parameter_name}", parameter.numel()
    where = f"; its largest parameter is {name} of {largest!r}" if name else ", and it has no parameters"
    return (
        f"plans.for_model: found no linear layers in {type(model).__name__} of which one leads into the other"
        f"{where}: {BY_HAND}"
    )


def _with_stars(plan: Plan, paths: list[str]) -> Plan:
    """Entries of blocks that are alike but for their number as one entry with ``*``."""
    numbers: dict[str, list[str]] = {}
    for path in paths:
        numbers.setdefault(_starred(path), []).append(path)
    made: Plan = {}
    for path, styles in plan.items():
        starred = _starred(path)
        alike = numbers[starred]
        if starred == path or len({repr(plan.get(other)) for other in alike}) > 1:
            made[path] = styles
        else:
            made.setdefault(starred, styles)
    return made


def _starred(path: str) -> str:
    return ".".join("*" if name.isdigit() else name for name in path.split("."))
