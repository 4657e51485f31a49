"""What a framework must give HyperParallel, and nothing else.

``platform.py`` is the contract; ``torch/`` and ``mindspore/`` are the only folders that import a framework.
"""

from hyper_parallel.platform.platform import (
    EXISTING_COMM_GROUPS,
    Platform,
    PlatformType,
    get_mindspore_platform,
    get_platform,
    get_torch_platform,
)

__all__ = [
    "EXISTING_COMM_GROUPS",
    "Platform",
    "PlatformType",
    "get_mindspore_platform",
    "get_platform",
    "get_torch_platform",
]
