"""What all ranks together hold, when they do not all hold the same: pipeline stages, meshes of parts of the world."""

from __future__ import annotations

import hashlib
from typing import Any

from hyper_parallel.core.distributed_checkpoint.planning.chunks import ObjectSpec, Spec, Specs, TensorSpec
from hyper_parallel.core.distributed_checkpoint.planning.standard_planner import local_box


def merge_specs(by_rank: list[Specs]) -> dict[str, Spec]:
    """One description of each name, with the ranks that hold it."""
    everyone = len(by_rank)
    found: dict[str, dict[int, Spec]] = {}
    for rank, specs in enumerate(by_rank):
        for key, spec in specs.items():
            found.setdefault(key, {})[rank] = spec
    return {key: _merged(key, specs, everyone) for key, specs in found.items()}


def _merged(key: str, specs: dict[int, Spec], num_ranks: int) -> Spec:
    holders = tuple(specs) if len(specs) < num_ranks else None
    first_rank, first = next(iter(specs.items()))
    for rank, spec in specs.items():
        if type(spec) is not type(first) or (isinstance(spec, TensorSpec) and _kind(spec) != _kind(first)):
            raise ValueError(
                f"'{key}' is {_named(first)} on rank {first_rank} and {_named(spec)} on rank {rank}; give what differs "
                "between ranks different names"
            )
    if isinstance(first, ObjectSpec):
        return ObjectSpec(holders)
    assert isinstance(first, TensorSpec)
    if not first.layouts:
        return first._replace(holders=holders)
    # Groups of ranks may each hold the whole tensor on a mesh of their own. Those that cut it alike share the work.
    layouts: list[Any] = []
    seen: set[int] = set()
    for spec in specs.values():
        assert isinstance(spec, TensorSpec)
        layout = spec.layouts[0]
        ranks = set(layout.mesh.rank_list)
        alike = not layouts or (
            layout.shard_axes == layouts[0].shard_axes and layout.mesh.shape == layouts[0].mesh.shape
        )
        if layout in layouts or not alike or ranks & seen or not ranks <= set(specs):
            continue
        layouts.append(layout)
        seen |= ranks
    if not layouts:
        absent = sorted(set(first.layouts[0].mesh.rank_list) - set(specs))
        raise ValueError(f"'{key}' has {first.layouts[0]}, but it is missing on ranks {absent} of that mesh")
    return first._replace(layouts=tuple(layouts))


def fingerprint(specs: Specs) -> bytes:
    """Equal on all ranks that hold the same names, shapes, dtypes and layouts."""
    texts: dict[Any, str] = {}
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(specs):
        spec = specs[key]
        layouts = getattr(spec, "layouts", ())
        if layouts not in texts:
            texts[layouts] = repr([layout.to_dict() for layout in layouts])
        described = (key, *spec[:2], texts[layouts]) if layouts or len(spec) > 1 else (key,)
        digest.update(repr(described).encode())
    return digest.digest()


def alone(specs: Specs, rank: int) -> dict[str, Spec]:
    """The same for a process that saves by itself: what it holds must be whole."""
    result: dict[str, Spec] = {}
    for key, spec in specs.items():
        if isinstance(spec, TensorSpec) and spec.layouts:
            if local_box(spec, rank)[1] != spec.shape:
                raise ValueError(
                    f"'{key}' is sharded over several ranks ({spec.layouts[0]}), so one process cannot save it; call "
                    "save on all ranks without no_dist"
                )
            spec = spec._replace(layouts=())
        result[key] = spec
    return result


def _kind(spec: Any) -> Any:
    return spec.shape, spec.dtype, bool(spec.layouts)


def _named(spec: Spec) -> str:
    if isinstance(spec, ObjectSpec):
        return "an object"
    return f"a {'distributed ' if spec.layouts else ''}tensor of shape {spec.shape} and dtype {spec.dtype}"
