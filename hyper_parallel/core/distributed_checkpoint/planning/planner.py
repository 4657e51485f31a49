"""Planners say what goes into a checkpoint and what comes out of it; storage says how it lies in files.

A save asks its planner for a local plan on every rank (the items that this rank writes) and then for each item's data.
A load asks for the items that this rank reads, and hands over what was read. Planners that cannot plan by arithmetic
set ``needs_global_plan``: then all local plans are gathered and the coordinator's ``build_global_plan`` may rewrite
them. :mod:`.standard_planner` has the two that ``save`` and ``load`` use by default.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hyper_parallel.core.distributed_checkpoint.base.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    dtype_size,
)


class WriteItemType(Enum):
    """What is written: a chunk of a tensor, or the bytes of an object."""

    TENSOR = "tensor"
    BYTE_IO = "byte_io"


class LoadItemType(Enum):
    """What is read: a box of a tensor, or the bytes of an object."""

    TENSOR = "tensor"
    BYTE_IO = "byte_io"


@dataclass(frozen=True)
class TensorWriteData:
    """A chunk to write: its box, and the properties and shape of the tensor that it belongs to."""

    chunk: ChunkStorageMetadata
    properties: TensorProperties
    size: tuple[int, ...]


@dataclass(frozen=True)
class WriteItem:
    """One thing that a rank writes. ``tensor_data`` is a :class:`TensorWriteData`, or a dict with its fields."""

    index: MetadataIndex
    type: WriteItemType
    tensor_data: Any = None
    bytes_io_data: Any = None

    def tensor_storage_size(self) -> int | None:
        """Bytes of the chunk; None for what is not a tensor."""
        if self.tensor_data is None:
            return None
        return math.prod(self.chunk.sizes) * dtype_size(self.properties.dtype)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The box of a tensor item."""
        return _of(self.tensor_data, "chunk")

    @property
    def properties(self) -> TensorProperties:
        """What the tensor of a tensor item is."""
        return _of(self.tensor_data, "properties")

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor of a tensor item."""
        return tuple(_of(self.tensor_data, "size"))


def _of(tensor_data: Any, name: str) -> Any:
    if type(tensor_data) is TensorWriteData:  # first, since it is quick to tell
        return getattr(tensor_data, name)
    return tensor_data[name] if isinstance(tensor_data, Mapping) else getattr(tensor_data, name)


@dataclass(frozen=True)
class ReadItem:
    """One thing that a rank reads: the box of ``lengths`` at ``storage_offsets`` in a stored chunk.

    It goes to the box at ``dest_offsets`` in this rank's block of the tensor ``dest_index``.
    """

    type: LoadItemType
    dest_index: MetadataIndex
    dest_offsets: tuple[int, ...]
    storage_index: MetadataIndex
    storage_offsets: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass
class SavePlan:
    """What one rank writes, in order."""

    items: list[WriteItem] = field(default_factory=list)
    storage_data: Any = None
    planner_data: Any = None


@dataclass
class LoadPlan:
    """What one rank reads."""

    items: list[ReadItem] = field(default_factory=list)
    storage_data: Any = None
    planner_data: Any = None


class SavePlanner(ABC):
    """Decides what every rank writes."""

    needs_global_plan = True

    @abstractmethod
    def configure_planner(self, state_dict: dict[str, Any], **kwargs: Any) -> None:
        """Take the state to save; ``rank``, ``world_size`` and ``is_coordinator`` come as keywords."""

    @abstractmethod
    def build_local_plan(self) -> SavePlan:
        """What this rank would write."""

    @abstractmethod
    def build_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On the coordinator: every rank's final plan, and the description of the whole checkpoint."""

    @abstractmethod
    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        """Accept this rank's part of the global plan."""

    @abstractmethod
    def get_data(self, item: WriteItem) -> Any:
        """The chunk as a tensor or an array, or the object's bytes."""


class LoadPlanner(ABC):
    """Decides what every rank reads, and takes it."""

    needs_global_plan = True

    @abstractmethod
    def configure_planner(self, state_dict: dict[str, Any], metadata: Metadata, **kwargs: Any) -> None:
        """Take the state to fill and the description of the checkpoint."""

    @abstractmethod
    def build_local_plan(self) -> LoadPlan:
        """What this rank reads."""

    @abstractmethod
    def build_global_plan(self, all_plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: every rank's final plan."""

    @abstractmethod
    def finalize_plan(self, plan: LoadPlan) -> LoadPlan:
        """Accept this rank's part of the global plan."""

    @abstractmethod
    def acquire_tensor(self, read_item: ReadItem) -> Any:
        """The place that the box goes to: a tensor, or a writable array of its bits."""

    @abstractmethod
    def apply_tensor(self, read_item: ReadItem, tensor: Any) -> None:
        """The place from :meth:`acquire_tensor` now holds what was read."""

    @abstractmethod
    def apply_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Take an object's bytes."""
