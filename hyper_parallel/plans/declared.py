"""What a model declares about its own parallelism.

Configs of Hugging Face have three: ``base_model_tp_plan`` (how a linear layer is cut, by path), ``base_model_ep_plan``
(where the experts are) and ``base_model_pp_plan`` (what runs before, in and behind the blocks, in order). Paths start
at the base model, which heads may be around; a model of several has a config for each.

Note [Declared, not believed]
A plan only decides what is cheap, so a wrong declaration cannot make numbers wrong. But it could make a plan costly, or
stop it. So what it says of a part of a block counts if it fits the part: names linear layers, some to be cut by outputs
and some by inputs, of which the last lead back to the width that the first start from. Otherwise names and sizes
decide, as for a model that declares nothing, and a note says so once. In a part that it does describe, layers that it
leaves out and whose names say nothing stay whole, as it means them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from hyper_parallel.plans.layers import below, sizes_of
from hyper_parallel.platform import get_platform

COLUMN, ROW, WHOLE = "column", "row", "whole"
_ROLE_OF_STYLE = {
    "colwise": COLUMN,
    "colwise_gather_output": COLUMN,
    "colwise_rep": COLUMN,
    "packed_colwise": COLUMN,
    "rowwise": ROW,
    "rowwise_rep": ROW,
    "rowwise_split_input": ROW,
    "packed_rowwise": ROW,
    "replicated_with_grad_allreduce": WHOLE,
    "replicate": WHOLE,
    "mla_kv_a_proj": WHOLE,
}
_EXPERTS = frozenset(("moe_tp_experts", "ep_dispatch_experts", "ep_router", "grouped_gemm"))
_noted: set[str] = set()


@dataclass(frozen=True)
class Declaration:
    """What was declared and fits, by paths of the model."""

    roles: dict[str, str] = field(default_factory=dict)  # of linear layers: COLUMN, ROW or WHOLE
    parts: frozenset[str] = frozenset()  # of blocks, in which these are
    mixtures: frozenset[str] = frozenset()
    stages: tuple[str, ...] = ()  # modules in the order in which they run; one of them is the list of blocks


def read_declaration(modules: Mapping[str, Any]) -> Declaration:
    """What the models among ``modules`` declare; see Note [Declared, not believed]."""
    roles: dict[str, str] = {}
    mixtures: set[str] = set()
    stages: tuple[str, ...] = ()
    for base, config in _base_models(modules):
        plan = _plan(config, "base_model_tp_plan")
        roles |= _fitting(_named(plan, base, modules), plan, config, modules)
        mixtures |= _mixtures({**plan, **_plan(config, "base_model_ep_plan")}, base, modules)
        declared = [_joined(base, name) for name in _plan(config, "base_model_pp_plan")]
        if declared and not stages:
            missing = [path for path in declared if path not in modules]
            if missing:
                _note(config, "base_model_pp_plan", f"the model has no {', '.join(map(repr, missing))}")
            else:
                stages = tuple(declared)
    parts = frozenset(str(_part_of(path)) for path, role in roles.items() if role != WHOLE)
    return Declaration(roles, parts, frozenset(mixtures), stages)


def _base_models(modules: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Path and config of the models that declarations are about: of those with one config, the one whose modules it
    names, which has heads and the like around it."""
    by_config: dict[int, tuple[Any, list[str]]] = {}
    for path, module in modules.items():
        config = getattr(module, "config", None)
        if config is not None and hasattr(module, "base_model_prefix"):
            by_config.setdefault(id(config), (config, []))[1].append(path)
    for config, paths in by_config.values():
        names = [*_plan(config, "base_model_tp_plan"), *_plan(config, "base_model_pp_plan")]
        names += _plan(config, "base_model_ep_plan")
        if names:
            yield max(paths, key=lambda path: sum(bool(_matching(one, path, modules)) for one in names)), config


def _plan(config: Any, name: str) -> dict[str, Any]:
    plan = getattr(config, name, None)
    return dict(plan) if isinstance(plan, Mapping) else {}


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _matching(pattern: str, base: str, modules: Mapping[str, Any]) -> list[str]:
    wanted = pattern.split(".")
    start = f"{base}." if base else ""
    found = []
    for path in modules:
        names = path.removeprefix(start).split(".") if path.startswith(start) else []
        if len(names) == len(wanted) and all(map(fnmatchcase, names, wanted)):
            found.append(path)
    return found


def _named(plan: dict[str, Any], base: str, modules: Mapping[str, Any]) -> dict[str, str]:
    """The linear layers of blocks that the plan names, with its styles."""
    platform = get_platform()
    return {
        path: style
        for pattern, style in plan.items()
        if style in _ROLE_OF_STYLE
        for path in _matching(pattern, base, modules)
        if platform.linear_weight_dims(modules[path]) is not None and _part_of(path) is not None
    }


def _fitting(styles: dict[str, str], plan: dict[str, Any], config: Any, modules: Mapping[str, Any]) -> dict[str, str]:
    """The roles in the parts of blocks that they fit."""
    of_layers = [name for name, style in plan.items() if style in _ROLE_OF_STYLE and ".experts." not in name]
    if of_layers and not styles:
        _note(config, "base_model_tp_plan", f"no linear layer is called {', '.join(map(repr, of_layers[:3]))}")
    parts: dict[str, list[str]] = {}
    for path in styles:
        parts.setdefault(str(_part_of(path)), []).append(path)
    fitting: dict[str, str] = {}
    for part, paths in parts.items():
        reason = _misfit(part, {path: styles[path] for path in paths}, modules)
        if reason is None:
            fitting |= {path: _ROLE_OF_STYLE[styles[path]] for path in paths}
        else:
            anywhere = ".".join("*" if name.isdigit() else name for name in part.split("."))
            _note(config, "base_model_tp_plan", f"in {anywhere!r} {reason}")
    return fitting


def _part_of(path: str) -> str | None:
    """The part of a block that a layer is in: two names behind the list of blocks; None outside of blocks."""
    names = path.split(".")
    number = next((place for place, name in enumerate(names) if name.isdigit()), None)
    return None if number is None else ".".join(names[: number + 2])


def _misfit(part: str, styles: Mapping[str, str], modules: Mapping[str, Any]) -> str | None:
    """Why the styles of the layers of one part cannot be meant; None if they can."""
    columns, rows = ([path for path in styles if _ROLE_OF_STYLE[styles[path]] == role] for role in (COLUMN, ROW))
    if not rows and all(styles[path] == "colwise_gather_output" for path in columns):
        return None
    if not columns or not rows:
        named = ", ".join(path.rpartition(".")[2] for path in columns or rows)
        return f"{named} are all {'colwise' if columns else 'rowwise'}"
    linears = [path for path in below(part, modules) if get_platform().linear_weight_dims(modules[path]) is not None]
    width = next(sizes_of(path, modules)[0] for path in linears if path not in rows)
    for path in rows:
        if sizes_of(path, modules)[1] != width:
            return (
                f"{path.rpartition('.')[2]} gives {sizes_of(path, modules)[1]} features, but the layers before it "
                f"start from {width}"
            )
    return None


def _mixtures(plan: dict[str, Any], base: str, modules: Mapping[str, Any]) -> set[str]:
    """The modules around declared experts, or the experts themselves where a block is around them."""
    found = set()
    for pattern, style in plan.items():
        name = pattern.rpartition(".")[2]
        if style not in _EXPERTS or name != "experts":
            continue
        for path in _matching(pattern, base, modules):
            around = path.rpartition(".")[0]
            found.add(path if around.rpartition(".")[2].isdigit() else around)
    return found


def _note(config: Any, name: str, reason: str) -> None:
    text = (
        f"plans: {name} of {type(config).__name__} does not fit the model: {reason}. Names and sizes of the layers "
        "decide there instead"
    )
    if text not in _noted:
        _noted.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)
