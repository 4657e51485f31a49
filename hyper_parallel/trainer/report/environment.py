"""Where a run ran: versions, hosts and devices, gathered without loading anything that is not loaded."""

from __future__ import annotations

import os
import platform as python_platform
import socket
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hyper_parallel import __version__
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.report.flops import device_name

__all__ = ["environment_facts"]

_FRAMEWORKS = {"PYTORCH": "PyTorch", "MINDSPORE": "MindSpore"}
_PACKAGES = ("torch", "torch-npu", "mindspore", "numpy", "transformers")


def environment_facts() -> dict[str, Any]:
    """What rank 0 knows of its process and its host."""
    platform = get_platform()
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "framework": _FRAMEWORKS[platform.platform_type.name],
        "device": device_name(),
        "host": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": python_platform.platform(terse=True),
        "versions": {"hyper-parallel": __version__, "python": python_platform.python_version(), **found},
    }
