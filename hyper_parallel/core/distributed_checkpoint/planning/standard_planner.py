"""The planners that ``save`` and ``load`` use: by arithmetic on layouts, without asking another rank."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from hyper_parallel.core.distributed_checkpoint.base.grids import slices
from hyper_parallel.core.distributed_checkpoint.base.metadata import (
    STORABLE_DTYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from hyper_parallel.core.distributed_checkpoint.base.shown_text import listed
from hyper_parallel.core.distributed_checkpoint.format.json_state import check_encoding, decode_object, encode_object
from hyper_parallel.core.distributed_checkpoint.planning.chunks import (
    ObjectSpec,
    Ranks,
    Spec,
    Specs,
    TensorSpec,
    plan_chunks,
)
from hyper_parallel.core.distributed_checkpoint.planning.flatten import Leaf, flatten
from hyper_parallel.core.distributed_checkpoint.planning.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.region import Region, Shape


def spec_of(name: str, leaf: Leaf, verb: str) -> Spec:
    """What a leaf of a state dict is, or an error if a checkpoint cannot hold it."""
    if not leaf.is_tensor:
        return ObjectSpec()
    platform = get_platform()
    tensor = leaf.value
    dtype = platform.dtype_name(tensor.dtype)
    if dtype not in STORABLE_DTYPES:
        raise TypeError(
            f"'{name}' has dtype {dtype}, which a checkpoint cannot hold; view it as one of bytes, or cast it"
        )
    if not isinstance(tensor, platform.DTensorBase):
        try:
            shape = tuple(tensor.shape)
        except RuntimeError as error:
            raise TypeError(f"'{name}' has no shape ({error}), so a checkpoint cannot hold it") from error
        return TensorSpec(shape, dtype, (), None, bool(getattr(tensor, "requires_grad", False)))
    layout = tensor.layout
    if layout.has_partial:
        raise ValueError(
            f"'{name}' is partial ({layout}), so no rank holds its values; call reduce_partial() on it "
            f"before you {verb}"
        )
    return TensorSpec(tuple(tensor.shape), dtype, (layout,), None, bool(getattr(tensor, "requires_grad", False)))


def local_box(spec: TensorSpec, rank: int) -> Region:
    """The part of a tensor that ``rank`` holds; empty outside of its mesh."""
    return _local_box(spec.shape, spec.layouts, spec.holders, rank)


@functools.lru_cache(maxsize=4096)
def _local_box(shape: Shape, layouts: tuple[Any, ...], holders: Ranks | None, rank: int) -> Region:
    for layout in layouts:
        if rank in layout.mesh.rank_list:
            return layout.local_region(shape, layout.mesh.coordinate_of(rank))
    whole = not layouts and (holders is None or rank in holders)
    return Region.whole(shape if whole else (0,) * len(shape))


class StandardSavePlanner(SavePlanner):
    """Every tensor in the chunks that its layout makes, each written once; objects as JSON.

    ``allow_pickle`` writes as a pickle what JSON cannot hold; loading it must be allowed too.
    """

    needs_global_plan = False

    def __init__(self, *, allow_pickle: bool = False) -> None:
        self._allow_pickle = allow_pickle
        self._encodings: dict[str, str] = {}

    def configure_planner(self, state_dict: dict[str, Any], **kwargs: Any) -> None:
        self._leaves = flatten(state_dict)
        self.specs: dict[str, Spec] = {name: spec_of(name, leaf, "save") for name, leaf in self._leaves.items()}
        self._rank, self._world_size = kwargs.get("rank", 0), kwargs.get("world_size", 1)
        self._arrays: dict[str, tuple[Any, tuple[int, ...]]] = {}

    def set_specs(self, specs: Specs) -> None:
        """Plan with what all ranks together hold, where that is more than what this rank can see."""
        self.specs = dict(specs)
        self._arrays.clear()

    def build_local_plan(self) -> SavePlan:
        items = []
        properties: dict[tuple[str, bool], TensorProperties] = {}
        for key, offsets, sizes, _ in plan_chunks(self.specs, self._world_size, self._rank):
            spec = self.specs[key]
            if isinstance(spec, ObjectSpec):
                items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
                continue
            kind = (spec.dtype, spec.requires_grad)
            if kind not in properties:
                properties[kind] = TensorProperties(*kind)
            data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties[kind], spec.shape)
            items.append(WriteItem(MetadataIndex(key, offsets), WriteItemType.TENSOR, data))
        return SavePlan(items)

    def build_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans as they are, and what they hold together; ``save`` does without this by arithmetic."""
        described: dict[str, Any] = {
            key: TensorStorageMetadata(TensorProperties(spec.dtype, spec.requires_grad), spec.shape, [])
            for key, spec in self.specs.items()
            if isinstance(spec, TensorSpec) and 0 in spec.shape  # Nobody writes a chunk of those.
        }
        for plan in all_plans:
            for item in plan.items:
                if item.type is WriteItemType.BYTE_IO:
                    described[item.index.fqn] = BytesStorageMetadata()
                    continue
                tensor = TensorStorageMetadata(item.properties, item.tensor_shape, [])
                described.setdefault(item.index.fqn, tensor).chunks.append(item.chunk)
        return all_plans, Metadata(described)

    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def get_data(self, item: WriteItem) -> Any:
        """The chunk's bits as an array that is a view of the tensor; the chunk itself if it is on a device; an object's
        bytes."""
        key = item.index.fqn
        if item.type is WriteItemType.BYTE_IO:
            data, self._encodings[key] = encode_object(self._leaves[key].value, key, self._allow_pickle)
            return data
        if key not in self._arrays:
            tensor = self._leaves[key].value
            _complete(tensor)
            spec = self.specs[key]
            assert isinstance(spec, TensorSpec)
            platform = get_platform()
            try:
                in_host = platform.is_in_host_memory(tensor)
                array = platform.raw_array(tensor) if in_host else platform.detached(tensor)
            except (TypeError, ValueError) as error:
                raise type(error)(f"'{key}' cannot be saved: {error}") from error
            self._arrays[key] = array, local_box(spec, self._rank)[0]
        array, base = self._arrays[key]
        chunk = item.chunk
        if chunk.sizes == tuple(array.shape):
            return array
        return array[slices(chunk.offsets, chunk.sizes, base)]

    def encoding_of(self, key: str) -> str:
        """How the object's bytes of :meth:`get_data` are to be read."""
        return self._encodings.get(key, "json")


class StandardLoadPlanner(LoadPlanner):
    """Every rank reads the parts of chunks that its own blocks need.

    ``allow_partial_load`` leaves alone what the checkpoint lacks, which is an error otherwise. ``allow_pickle`` loads
    objects that were saved as pickles: only from sources that you trust.
    """

    needs_global_plan = False

    def __init__(self, allow_partial_load: bool = False, *, allow_pickle: bool = False) -> None:
        self._allow_partial_load = allow_partial_load
        self._allow_pickle = allow_pickle

    def configure_planner(self, state_dict: dict[str, Any], metadata: Metadata, **kwargs: Any) -> None:
        self._leaves = flatten(state_dict)
        self._metadata = metadata
        self._index = kwargs.get("index")
        self._rank = kwargs.get("rank", 0)
        self.specs: dict[str, Spec] = {name: spec_of(name, leaf, "load") for name, leaf in self._leaves.items()}
        described = metadata.state_dict_metadata
        missing = [name for name in self.specs if name not in described]
        if missing and not self._allow_partial_load:
            raise ValueError(
                f"the checkpoint lacks {len(missing)} of the {len(self.specs)} entries to load: {listed(missing)}. It "
                f"has {listed(described) or 'nothing'}. Pass planner=StandardLoadPlanner(allow_partial_load=True) to "
                "leave them as they are"
            )
        for name in missing:
            del self.specs[name]
        self._arrays: dict[str, Any] = {}
        self._left: dict[str, int] = {}

    def build_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, spec in self.specs.items():
            before = len(items)
            items += self._items(key, spec)
            self._left[key] = len(items) - before
        return LoadPlan(items)

    def _items(self, key: str, spec: Spec) -> Iterator[ReadItem]:
        if isinstance(spec, ObjectSpec):
            if not self._is_object(key):
                raise ValueError(f"'{key}' is a tensor in the checkpoint, but not in the state to load into")
            check_encoding(self._encoding(key), key, self._allow_pickle)
            at = MetadataIndex(key)
            yield ReadItem(LoadItemType.BYTE_IO, at, (), at, (), ())
            return
        if self._is_object(key):
            raise ValueError(f"'{key}' is an object in the checkpoint, but a tensor in the state to load into")
        shape, dtype = self._shape_and_dtype(key)
        if (shape, dtype) != (spec.shape, spec.dtype):
            raise ValueError(
                f"'{key}' has shape {shape} and dtype {dtype} in the checkpoint, but shape {spec.shape} and dtype "
                f"{spec.dtype} in the state to load into"
            )
        box = local_box(spec, self._rank)
        if 0 in box[1]:
            return
        dest = MetadataIndex(key, box[0])
        for number, chunk in self._touching(key, box):
            to, at, sizes = _meeting(chunk, box)
            yield ReadItem(LoadItemType.TENSOR, dest, to, MetadataIndex(key, chunk[0], number), at, sizes)

    # The index of a checkpoint in our format answers faster than its Metadata.

    def _is_object(self, key: str) -> bool:
        if self._index is not None:
            return key in self._index.objects
        return isinstance(self._metadata.state_dict_metadata[key], BytesStorageMetadata)

    def _shape_and_dtype(self, key: str) -> tuple[tuple[int, ...], str]:
        if self._index is not None:
            stored = self._index.tensors[key]
            return stored.shape, stored.dtype
        described = self._metadata.state_dict_metadata[key]
        assert isinstance(described, TensorStorageMetadata)
        return tuple(described.size), described.properties.dtype

    def _touching(self, key: str, box: Region) -> Iterator[tuple[int, Region]]:
        if self._index is not None:
            yield from self._index.tensors[key].touching(box)
            return
        described = self._metadata.state_dict_metadata[key]
        assert isinstance(described, TensorStorageMetadata)
        for number, chunk in enumerate(described.chunks):
            if Region(chunk.offsets, chunk.sizes).overlap(box) is not None:
                yield number, Region(chunk.offsets, chunk.sizes)

    def build_global_plan(self, all_plans: list[LoadPlan]) -> list[LoadPlan]:
        return all_plans

    def finalize_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def acquire_tensor(self, read_item: ReadItem) -> np.ndarray[Any, Any]:
        """The place in this rank's block as an array of bits."""
        key = read_item.dest_index.fqn
        array = self._arrays.get(key)
        if array is None:
            tensor = self._leaves[key].value
            _complete(tensor)
            try:
                array = self._arrays[key] = get_platform().raw_array(tensor)
            except (TypeError, ValueError) as error:
                raise type(error)(f"'{key}' cannot be loaded into: {error}") from error
            if _meets_itself(array):
                raise ValueError(
                    f"'{key}' cannot be loaded into: several of its elements are one place in memory, as expand() makes"
                    " them; pass its contiguous()"
                )
        if read_item.lengths == array.shape:
            return array
        return array[slices(read_item.dest_offsets, read_item.lengths)]

    def apply_tensor(self, read_item: ReadItem, tensor: Any) -> None:
        key = read_item.dest_index.fqn
        self._left[key] -= 1
        if self._left[key] == 0:
            get_platform().set_raw(self._leaves[key].value, self._arrays.pop(key))

    def apply_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.put_object(read_item, self.decoded(read_item, value))

    def decoded(self, read_item: ReadItem, value: Any) -> Any:
        """The object that its bytes make, which is put nowhere yet."""
        key = read_item.dest_index.fqn
        return decode_object(value, self._encoding(key), key, self._allow_pickle)

    def put_object(self, read_item: ReadItem, value: Any) -> None:
        """Put an object where it belongs."""
        leaf = self._leaves[read_item.dest_index.fqn]
        leaf.container[leaf.place] = value

    def _encoding(self, key: str) -> str:
        described = self._metadata.state_dict_metadata[key]
        assert isinstance(described, BytesStorageMetadata)
        return described.encoding


@functools.lru_cache(maxsize=4096)
def _meeting(chunk: Region, box: Region) -> tuple[Any, Any, Any]:
    """Where the part that a chunk and a box share starts in the box and in the chunk, and its sizes."""
    shared = Region.overlap(chunk, box)
    assert shared is not None
    offsets, sizes = shared
    in_box, in_chunk = (tuple(at - b for at, b in zip(offsets, base, strict=True)) for base in (box[0], chunk[0]))
    return in_box, in_chunk, sizes


def _meets_itself(array: np.ndarray[Any, Any]) -> bool:
    """Whether two elements of an array share memory."""
    dims = [(abs(stride), size) for size, stride in zip(array.shape, array.strides, strict=True) if size > 1]
    end = array.itemsize  # of what the dims before span
    for stride, size in sorted(dims):
        if stride < end:
            return stride == 0 or _share_places(array)
        end += stride * (size - 1)
    return False


def _share_places(array: np.ndarray[Any, Any]) -> bool:
    """The same for dims that interleave, counted: strides of 3 and 2 elements, for instance, may or may not meet."""
    offsets: Any = np.zeros((), np.int64)
    for size, stride in zip(array.shape, array.strides, strict=True):
        offsets = np.add.outer(offsets, np.arange(size) * stride)
    return bool((np.diff(np.sort(offsets, axis=None)) < array.itemsize).any())


def _complete(tensor: Any) -> None:
    """A distributed tensor may still be on its way from another layout."""
    if isinstance(tensor, get_platform().DTensorBase):
        tensor.wait()
