"""What must hold before MindSpore is used, and the one choice between Ascend and a CPU.

Imported first by the platform. MindSpore runs operators synchronously on a CPU from here on: its asynchronous pipeline
raises errors in later calls or aborts the process, and each result costs a millisecond. On Ascend it is left as it is.
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import numpy

if int(numpy.__version__.partition(".")[0]) >= 2:
    raise ImportError(
        f"MindSpore 2.10 is built against numpy 1.x and fails at its first operator under numpy {numpy.__version__}; "
        "run: pip install 'numpy<2'"
    )

# MindSpore prints a warning for every library of an accelerator that it does not find.
os.environ.setdefault("GLOG_v", "3")

import mindspore

from hyper_parallel.platform.mindspore import private_api


def _check_version() -> None:
    version = mindspore.__version__
    if not f"{version}.".startswith(f"{private_api.CHECKED_VERSION}."):
        warnings.warn(
            f"HyperParallel's MindSpore platform was checked on MindSpore {private_api.CHECKED_VERSION} and this is "
            f"{version}; parts of MindSpore without a public name may differ (platform/mindspore/private_api.py lists "
            f"them). Install mindspore {private_api.CHECKED_VERSION}, or run the tests with --platform=mindspore first",
            RuntimeWarning,
            stacklevel=2,
        )


@functools.cache
def on_ascend() -> bool:
    """Whether this process computes on an Ascend device; asked once."""
    return mindspore.get_context("device_target") == "Ascend"


def _let_optimizers_step_unrecorded() -> None:
    """While operators are recorded ``nn.AdamWeightDecay`` leaves its parameters as they are, silently."""
    plain = mindspore.nn.Optimizer.__call__

    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with private_api.no_grad():
            return plain(self, *args, **kwargs)

    mindspore.nn.Optimizer.__call__ = call


def _refuse_optimizers_without_kernels() -> None:
    """``mint.optim.SGD`` and ``Adam`` leave parameters as they are, silently, for want of in-place kernels."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"mindspore.mint.optim.{type(self).__name__} does not update parameters on a CPU, which has no kernels for "
            "it; use mindspore.experimental.optim (AdamW, Adam, SGD) or mindspore.nn (Adam, AdamWeightDecay, SGD)"
        )

    for kind in (mindspore.mint.optim.Adam, mindspore.mint.optim.AdamW, mindspore.mint.optim.SGD):
        kind.__call__ = refuse


_check_version()
_let_optimizers_step_unrecorded()
mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
if not on_ascend():
    _refuse_optimizers_without_kernels()
    mindspore.runtime.launch_blocking()
private_api.start_recording()
