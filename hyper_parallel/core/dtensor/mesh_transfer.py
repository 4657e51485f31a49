"""Moving a tensor between two meshes: other shapes over the same ranks, overlapping ranks, disjoint ranks.

Every rank of either mesh computes, from the two layouts alone, which boxes of its block the others need; one all-to-all
over the union of the ranks carries them, each byte once. A rank outside a mesh holds an empty block there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.layout import Layout, Shape
from hyper_parallel.core.dtensor.redistribution_plan import remember
from hyper_parallel.core.dtensor.tensor_redistribution import redistribute_local
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.region import Region


def transfer_local(tensor: Any, source: Layout, target: Layout, shape: Shape) -> Any:
    """This rank's block under ``target``; called by every rank of either mesh."""
    tensor = launch_transfer(tensor, source, target.reduced(), shape).wait()
    if target.has_partial and target.mesh.get_coordinate() is not None:
        tensor = redistribute_local(tensor, target.reduced(), target, shape)
    return tensor


def launch_transfer(tensor: Any, source: Layout, target: Layout, shape: Shape) -> Any:
    """As :func:`transfer_local`, only launched: a handle whose ``wait()`` gives the block. Nothing may be pending in
    ``target``.
    """
    assert not target.has_partial, target
    if source.has_partial:
        reduced = source.reduced()
        if source.mesh.get_coordinate() is not None:
            tensor = redistribute_local(tensor, source, reduced, shape)
        source = reduced
    return _bound_transfer(source, target, shape)(tensor)


def outside_shape(shape: Shape) -> Shape:
    """The shape of the empty block of a rank outside the mesh."""
    return (0,) * len(shape)


def bytes_moved(source: Layout, target: Layout, shape: Shape, item_size: int) -> int:
    """Bytes that cross between ranks when a tensor goes from one mesh to another, pending reductions apart."""
    holders = _holders(source.reduced(), shape)
    moved = 0
    for rank in target.mesh.rank_list:
        wanted = target.local_region(shape, target.mesh.coordinate_of(rank))
        for region, ranks in holders.items():
            both = region.overlap(wanted)
            if both is not None and rank not in ranks:
                moved += both.num_elements * item_size
    return moved


def _bound_transfer(source: Layout, target: Layout, shape: Shape) -> Callable[[Any], Any]:
    platform = get_platform()
    key = (target, shape, platform.world_generation())
    bound = source.plans.get(key)
    if bound is None:
        bound = _bind(source, target, shape)
        remember(source, key, bound)
    return bound


def _bind(source: Layout, target: Layout, shape: Shape) -> Callable[[Any], Any]:
    platform = get_platform()
    rank = platform.get_rank()
    union = sorted({*source.mesh.rank_list, *target.mesh.rank_list})
    if rank not in union:
        raise RuntimeError(f"rank {rank} is part of neither {source.mesh} nor {target.mesh} and holds nothing to move")
    holders = _holders(source, shape)
    mine = source.local_region(shape) if rank in source.mesh.rank_list else None
    wanted = target.local_region(shape) if rank in target.mesh.rank_list else None
    sends: list[Region | None] = [None] * len(union)
    receives: list[Region | None] = [None] * len(union)
    kept = None
    for place, other in enumerate(union):
        if other not in target.mesh.rank_list:
            continue
        theirs = target.local_region(shape, target.mesh.coordinate_of(other))
        for region, ranks in holders.items():
            both = region.overlap(theirs)
            if both is None:
                continue
            sender = other if other in ranks else ranks[place % len(ranks)]
            if sender == rank and other == rank:
                assert mine is not None and wanted is not None
                kept = (both.inside(mine), both.inside(wanted))
            elif sender == rank:
                assert mine is not None
                sends[place] = both.inside(mine)
            elif other == rank:
                assert wanted is not None
                receives[union.index(sender)] = both.inside(wanted)
    group = platform.create_group(union)
    local_shape = outside_shape(shape) if wanted is None else wanted.sizes
    return lambda tensor: platform.exchange_blocks(tensor, sends, receives, kept, local_shape, group)


def _holders(layout: Layout, shape: Shape) -> dict[Region, list[int]]:
    """The ranks that hold each block, in mesh order."""
    holders: dict[Region, list[int]] = {}
    for rank in layout.mesh.rank_list:
        holders.setdefault(layout.local_region(shape, layout.mesh.coordinate_of(rank)), []).append(rank)
    return holders
