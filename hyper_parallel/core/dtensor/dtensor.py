"""Distributed tensors: the names that programs use, on one page."""

from hyper_parallel.core.dtensor.distribute import distribute_module, distribute_tensor
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.factories import arange, empty, full, ones, rand, randn, zeros
from hyper_parallel.core.dtensor.skip_dispatch import SkipDTensorDispatch

__all__ = [
    "DTensor",
    "SkipDTensorDispatch",
    "arange",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "ones",
    "rand",
    "randn",
    "zeros",
]
