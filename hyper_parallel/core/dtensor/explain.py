"""A redistribution plan in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh_transfer import bytes_moved
from hyper_parallel.core.dtensor.redistribution_plan import (
    ALL_TO_ALL,
    EXCHANGE,
    Step,
    plan_redistribution,
    sent_elements,
)
from hyper_parallel.core.dtensor.tensor_redistribution import exchange_boxes, ranks_of_step

_WORDS = {
    "all_gather": "all-gather dim {dim} over {axes}",
    "slice": "slice dim {dim} over {axes} (no communication)",
    "all_to_all": "all-to-all over {axes}: gather dim {dim}, shard dim {to_dim}",
    "exchange": "exchange shards over {axes}",
    "all_reduce": "all-reduce ({op}) over {axes}",
    "reduce_scatter": "reduce-scatter ({op}) over {axes} into dim {dim}",
    "spread": "keep the value on the first rank of {axes}, neutral elsewhere (no communication)",
    "embed": "put the shard of dim {dim} into zeros over {axes} (no communication)",
}


def explain(src_layout: Layout, dst_layout: Layout, shape: Sequence[int], item_size: int = 4) -> str:
    """How a tensor of ``shape`` gets from one layout to another: steps, groups, bytes sent per rank, cost.

    >>> from hyper_parallel import Layout
    >>> mesh = Layout((2, 2), ("dp", "tp"), init_backend=False)
    >>> print(explain(mesh("dp", "None"), mesh("None", "None"), (4, 6)))
    Layout(mesh (dp=2, tp=2), dims [dp, -]) -> Layout(mesh (dp=2, tp=2), dims [-, -]), shape (4, 6)
      1. all-gather dim 0 over dp: groups of 2 ranks, 48 bytes sent per rank
    total: 48 bytes sent per rank, modelled cost 0.2
    """
    for given in (src_layout, dst_layout):
        if not isinstance(given, Layout):
            raise TypeError(f"explain takes two layouts, as in explain(a.layout, b.layout, a.shape), not {given!r}")
    size = tuple(int(length) for length in shape)
    lines = [f"{src_layout} -> {dst_layout}, shape {size}"]
    if src_layout.mesh != dst_layout.mesh:
        moved = bytes_moved(src_layout, dst_layout, size, item_size)
        ranks = len({*src_layout.mesh.rank_list, *dst_layout.mesh.rank_list})
        lines.append(f"  1. exchange shards between the meshes: one group of {ranks} ranks, {moved} bytes in all")
        return "\n".join(lines)
    plan = plan_redistribution(src_layout, dst_layout, size)
    total = 0
    for number, step in enumerate(plan.steps, 1):
        sent = _sent_elements(step, size) * item_size
        total += sent
        lines.append(f"  {number}. {_describe(step)}{_group(step, sent)}")
    if not plan.steps:
        lines.append("  nothing to do")
    lines.append(f"total: {total} bytes sent per rank, modelled cost {plan.cost:.1f}")
    return "\n".join(lines)


def _sent_elements(step: Step, shape: tuple[int, ...]) -> int:
    """Elements that the rank which sends most of all puts on the wire."""
    if step.kind not in (ALL_TO_ALL, EXCHANGE):
        return round(sent_elements(step, shape))
    first = (0,) * step.source.mesh.ndim  # no line of ranks has larger blocks than that of the first rank
    sent = []
    for coordinate in ranks_of_step(step, first):
        boxes = exchange_boxes(step, shape, coordinate)[0]
        sent.append(sum(box.num_elements for box in boxes if box is not None))
    return max(sent)


def _describe(step: Step) -> str:
    axes = "*".join(step.source.mesh.axis_label(axis) for axis in step.axes)
    fields: dict[str, Any] = {"axes": axes, "dim": step.dim, "to_dim": step.to_dim, "op": step.op}
    return _WORDS[step.kind].format(**fields)


def _group(step: Step, sent: int) -> str:
    if "no communication" in _WORDS[step.kind]:
        return ""
    return f": groups of {step.source.mesh.size(step.axes)} ranks, {sent} bytes sent per rank"
