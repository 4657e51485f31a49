"""What a checkpoint says about itself: the names that programs use, on one page."""

from hyper_parallel.core.distributed_checkpoint.base.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StoredBytes,
    TensorProperties,
    TensorStorageMetadata,
    dtype_name,
    dtype_size,
)

__all__ = [
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StoredBytes",
    "TensorProperties",
    "TensorStorageMetadata",
    "dtype_name",
    "dtype_size",
]
