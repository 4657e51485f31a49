"""Putting the index of a checkpoint together from what the ranks report to have written."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.distributed_checkpoint.base.metadata import Metadata, TensorStorageMetadata
from hyper_parallel.core.distributed_checkpoint.format.index_check import boxes_problem
from hyper_parallel.core.distributed_checkpoint.format.index_file import (
    CheckpointIndex,
    StoredObject,
    StoredTensor,
    grid_or_boxes,
)
from hyper_parallel.core.distributed_checkpoint.format.shard_file import RankReport
from hyper_parallel.core.distributed_checkpoint.planning.chunks import (
    ObjectSpec,
    Specs,
    TensorSpec,
    grid_of,
    plan_chunks,
)
from hyper_parallel.core.distributed_checkpoint.planning.planner import SavePlan, WriteItemType
from hyper_parallel.platform import get_platform


def index_by_arithmetic(
    specs: Specs, reports: list[RankReport] | None, world_size: int | None = None
) -> CheckpointIndex:
    """The index of what all ranks hold. Who wrote which chunk is known, so a report is a list of places, in order.

    Without reports (on ranks other than the coordinator) the places and checksums are left out.
    """
    world_size = len(reports) if reports is not None else world_size or 1
    index = _empty_index(reports, world_size)
    for key, spec in specs.items():
        if isinstance(spec, TensorSpec):
            layout = _layout_number(index, spec)
            grid = grid_of(spec, world_size)
            index.tensors[key] = StoredTensor(
                spec.dtype, spec.shape, [], [], [], grid, None, layout, spec.requires_grad
            )
    if reports is None:
        index.objects |= {key: StoredObject(0, 0, 0, 0) for key, spec in specs.items() if isinstance(spec, ObjectSpec)}
        return index
    first_file = _first_files(reports)
    cursors = [iter(report.items) for report in reports]
    for key, _, _, owner in plan_chunks(specs, world_size):
        written = next(cursors[owner])
        file = first_file[owner] + written.file
        if isinstance(specs[key], ObjectSpec):
            index.objects[key] = StoredObject(
                file, written.start, written.length, written.crc32c, written.encoding or "json"
            )
            continue
        tensor = index.tensors[key]
        tensor.file.append(file)
        tensor.start.append(written.start)
        tensor.crc32c.append(written.crc32c)
    assert all(next(cursor, None) is None for cursor in cursors)
    return index


def index_of_plans(plans: list[SavePlan], metadata: Metadata, reports: list[RankReport]) -> CheckpointIndex:
    """The index of a planner's own global plan."""
    index = _empty_index(reports, len(reports))
    first_file = _first_files(reports)
    chunks: dict[str, list[Any]] = {}
    for rank, (plan, report) in enumerate(zip(plans, reports, strict=True)):
        for item, written in zip(plan.items, report.items, strict=True):
            key = item.index.fqn
            file = first_file[rank] + written.file
            if item.type is WriteItemType.BYTE_IO:
                index.objects[key] = StoredObject(
                    file, written.start, written.length, written.crc32c, written.encoding or "json"
                )
                continue
            box = item.chunk.offsets, item.chunk.sizes
            if 0 not in box[1]:
                chunks.setdefault(key, []).append((box, file, written.start, written.crc32c))
    for key, described in metadata.state_dict_metadata.items():
        if not isinstance(described, TensorStorageMetadata):
            continue
        stored = chunks.get(key, [])
        shape = tuple(described.size)
        grid, order = grid_or_boxes(shape, [box for box, *_ in stored])
        stored = [stored[number] for number in order]
        properties = described.properties
        index.tensors[key] = StoredTensor(
            properties.dtype,
            shape,
            [file for _, file, _, _ in stored],
            [start for *_, start, _ in stored],
            [crc for *_, crc in stored],
            grid,
            None if grid is not None else [box for box, *_ in stored],
            None,
            properties.requires_grad,
        )
    return index


def check_plans(plans: list[SavePlan], metadata: Metadata) -> None:
    """Raise unless the chunks of a planner's own global plan are what it says that the tensors have, each once."""
    written: dict[str, dict[Any, int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            key = item.index.fqn
            is_object = item.type is WriteItemType.BYTE_IO
            box = None if is_object else (tuple(item.chunk.offsets), tuple(item.chunk.sizes))
            before = written.setdefault(key, {}).get(box)
            if before is not None or key not in metadata.state_dict_metadata:
                what = f"'{key}'" if box is None else f"the chunk of '{key}' at {list(box[0])}"
                why = (
                    "the metadata does not name it"
                    if before is None
                    else f"rank {before} writes it, and rank {rank} too"
                )
                raise ValueError(f"build_global_plan gave a plan that cannot be saved: {what}: {why}")
            written[key][box] = rank
    for key, described in metadata.state_dict_metadata.items():
        if isinstance(described, TensorStorageMetadata):
            boxes = [box for box in written.get(key, {}) if box is not None and 0 not in box[1]]
            if problem := boxes_problem(boxes, tuple(described.size)):
                raise ValueError(f"build_global_plan gave a plan that cannot be saved: '{key}' {problem}")
        elif key not in written:
            raise ValueError(f"build_global_plan gave a plan that cannot be saved: nobody writes '{key}'")


def _empty_index(reports: list[RankReport] | None, world_size: int) -> CheckpointIndex:
    files = [file for report in reports or () for file in report.files]
    return CheckpointIndex(files, world_size=world_size, platform=get_platform().platform_type.name.lower())


def _first_files(reports: list[RankReport]) -> list[int]:
    """The number of each rank's first file among all."""
    numbers, at = [], 0
    for report in reports:
        numbers.append(at)
        at += len(report.files)
    return numbers


def _layout_number(index: CheckpointIndex, spec: TensorSpec) -> int | None:
    if not spec.layouts:
        return None
    described = spec.layouts[0].to_dict()
    if described not in index.layouts:
        index.layouts.append(described)
    return index.layouts.index(described)
