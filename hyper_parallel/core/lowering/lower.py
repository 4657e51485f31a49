"""``lower``: modules of a parallel model run as plain local programs, without dispatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hyper_parallel.core.lowering.region import Region
from hyper_parallel.core.modules.module_paths import match_paths
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.framework_of import require_module

_platform = get_platform()
BACKENDS = ("local", "inductor")


class Lowering:
    """What :func:`lower` has done: the lowered modules by path, their programs, and why some run by dispatch."""

    def __init__(self, regions: dict[str, Region]) -> None:
        self.regions = regions

    def __getitem__(self, path: str) -> Region:
        return self.regions[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.regions)

    def __len__(self) -> int:
        return len(self.regions)

    @property
    def source(self) -> str:
        """The recorded program of the first module that has one, as Python."""
        recorded = [region for region in self.regions.values() if region.tapes]
        return (recorded or list(self.regions.values()))[0].source

    @property
    def refusals(self) -> dict[str, list[str]]:
        """By path, why calls ran by dispatch."""
        return {path: region.refusals for path, region in self.regions.items() if region.refusals}

    def restore(self) -> None:
        """Run by dispatch from now on, as before."""
        for region in self.regions.values():
            region.restore()

    def __repr__(self) -> str:
        lines = [
            f"  {path}: {len(one.tapes)} recorded, "
            + ", ".join(f"{count} {what}" for what, count in one.num_calls.items())
            for path, one in self.regions.items()
        ]
        lines += [f"  {path}: {reason}" for path, why in self.refusals.items() for reason in why]
        return "\n".join([f"Lowering of {len(self.regions)} modules", *lines])


def lower(
    model: Any,
    paths: str | list[str] | tuple[str, ...] = "",
    *,
    backend: str = "local",
    verify_every: int | None = None,
) -> Lowering:
    """Let modules of a parallel model run as plain local programs: what a call does is recorded once, and run without
    dispatch from then on.

    ``paths``: which modules, as in plans: ``"blocks.*"``; ``""`` is the model. Call it when the model is parallel.
    ``backend``: ``"local"`` runs the recorded program as it is, with the bits of dispatch; ``"inductor"`` compiles it.
    ``verify_every=n`` compares every n-th call with dispatch, values and gradients, and raises where they differ.

    forward and backward: the collectives of dispatch. See ``docs/lowering.md`` for what is recorded and refused.
    """
    require_module("lower", model)
    if backend not in BACKENDS:
        raise ValueError(f"lower: backend={backend!r} is none of {', '.join(map(repr, BACKENDS))}")
    refused = _platform.why_no_backend(backend)
    if refused is not None:
        raise ValueError(f"lower: backend={backend!r}: {refused}")
    if verify_every is not None and (
        isinstance(verify_every, bool) or not isinstance(verify_every, int) or verify_every < 1
    ):
        raise ValueError(f"lower: verify_every is a number of calls from 1, or None, got {verify_every!r}")
    wanted = dict.fromkeys([paths] if isinstance(paths, str) else paths)
    modules = dict(_platform.get_cells_and_names(model))
    found = {path: modules[path] for path in match_paths(modules, wanted, "lower", "module")}
    inside = [(outer, inner) for outer in found for inner in found if outer != inner and _is_inside(inner, outer)]
    if inside:
        raise ValueError(
            f"lower: {inside[0][1]!r} is inside of {inside[0][0]!r}, which is lowered as a whole: name one of them"
        )
    for path, module in found.items():
        if _platform.is_called_otherwise(module):
            raise ValueError(f"lower: {path or 'the model'} is lowered or compiled already")
    shared: dict[Any, Any] = {}
    return Lowering({path: Region(path, module, backend, verify_every, shared) for path, module in found.items()})


def _is_inside(inner: str, outer: str) -> bool:
    return outer == "" or inner.startswith(f"{outer}.")
