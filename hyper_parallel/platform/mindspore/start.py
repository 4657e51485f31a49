"""What must hold before MindSpore is used, and the one choice between Ascend and a CPU.

Imported first by the platform. MindSpore runs operators synchronously on a CPU from here on: its asynchronous pipeline
raises errors in later calls or aborts the process, and each result costs a millisecond. On Ascend it is left as it is.
"""

from __future__ import annotations

import functools
import os
import warnings

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


_check_version()
mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
if not on_ascend():
    mindspore.runtime.launch_blocking()
private_api.start_recording()
