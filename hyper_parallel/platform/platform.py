"""One object for all that HyperParallel asks of a framework, and the choice of the framework.

Everything above this folder speaks to PyTorch or MindSpore only through a :class:`Platform`. To add a third framework,
read ``contract/``: subclass :class:`Platform`, set the class attributes, write a function for every abstract method as
its docstring says, let :func:`takes_from` find them by name, and add the framework to :func:`_find_platform`. A class
with a method missing cannot be instantiated, and Python's error lists what is missing.

Three rules hold for every method:

* **Bad input is an error on the calling rank, before anything is sent.** A rank that raises inside a collective leaves
  its peers waiting, so shapes, splits, devices and ranks are checked first.
* **Collectives with gradients follow one law.** The gradient of a value that is whole on every rank is whole on every
  rank; the gradient of a shard is that shard of the gradient; the gradient of a pending sum is whole on every rank.
  So an all-reduce's gradient is the identity, a gather's is a slice, a reduce-scatter's is a gather.
* **Streams and events always exist.** Where a device has none, stand-ins keep program order and cost nothing.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, ClassVar

from hyper_parallel.platform.contract.activation import ActivationMemory
from hyper_parallel.platform.contract.attention import AttentionKernels
from hyper_parallel.platform.contract.blocks import Blocks
from hyper_parallel.platform.contract.collectives import Collectives
from hyper_parallel.platform.contract.dry_runs import DryRuns
from hyper_parallel.platform.contract.dtensor_type import DTensorType
from hyper_parallel.platform.contract.gradients import Gradients
from hyper_parallel.platform.contract.groups import EXISTING_COMM_GROUPS as EXISTING_COMM_GROUPS
from hyper_parallel.platform.contract.groups import Groups
from hyper_parallel.platform.contract.local_calls import LocalCalls
from hyper_parallel.platform.contract.lowering import LoweredPrograms
from hyper_parallel.platform.contract.modules import Modules
from hyper_parallel.platform.contract.parameter_units import ParameterUnits
from hyper_parallel.platform.contract.row_groups import RowGroups
from hyper_parallel.platform.contract.state import State
from hyper_parallel.platform.contract.streams import Streams
from hyper_parallel.platform.contract.tensors import Tensors

HYPER_PARALLEL_PLATFORM = "HYPER_PARALLEL_PLATFORM"
HYPER_PARALLEL_PLATFORM_MINDSPORE = "mindspore"
HYPER_PARALLEL_PLATFORM_TORCH = "torch"


class PlatformType(Enum):
    """The frameworks HyperParallel runs on."""

    MINDSPORE = auto()
    PYTORCH = auto()


class Platform(
    Groups,
    Collectives,
    Gradients,
    Tensors,
    Modules,
    ParameterUnits,
    ActivationMemory,
    Streams,
    State,
    DTensorType,
    LocalCalls,
    Blocks,
    RowGroups,
    AttentionKernels,
    DryRuns,
    LoweredPrograms,
):
    """What a framework must provide, and its own types and factories."""

    platform_type: ClassVar[PlatformType]
    Tensor: ClassVar[Any]
    Parameter: ClassVar[Any]
    Module: ClassVar[Any]
    Function: ClassVar[Any]  # base class of autograd functions: static forward(ctx, ...) and backward(ctx, ...)
    DTensorBase: ClassVar[Any]  # tensor type whose operators can be intercepted; DTensor derives from it
    records_during_backward: ClassVar[bool]  # a forward in one thread while another one is in the midst of a backward
    ones: ClassVar[Callable[..., Any]]
    empty: ClassVar[Callable[..., Any]]
    full: ClassVar[Callable[..., Any]]

    # Set by the package, which lies above this folder.
    tensor_transform_provider: ClassVar[Callable[[], Any]]
    operators_provider: ClassVar[Callable[[], Any]]

    @staticmethod
    def get_tensor_transform() -> Any:
        """The layout-to-layout transformer on plain blocks: ``transform(block, source, target, global_shape)``."""
        return Platform.tensor_transform_provider()

    @staticmethod
    def load_operators() -> None:
        """Make operators work on DTensors: the module that makes DTensors asks for it at its end."""
        Platform.operators_provider()

    # Defaults of ``State`` that need other sections; a framework that can do better overrides them.

    def named_state_parameters(self, model: Any) -> dict[str, Any]:
        return self.parameters_dict(model)

    def set_extra_states(self, model: Any, states: Any) -> None:
        if states:
            raise TypeError(f"modules of {self.platform_type.name} keep no state besides tensors, got {list(states)}")

    def raw_array(self, tensor: Any) -> Any:
        tensor = self.detached(tensor)
        array = self.tensor_to_numpy(tensor)
        size = self.get_element_size(tensor)
        if array.dtype.itemsize != size:
            raise TypeError(f"dtype {self.dtype_name(tensor.dtype)} has no raw bits on this platform")
        return array.view("V16" if size == 16 else f"u{size}")


# ---------------------------------------------------------------- choosing the framework

_current: Platform | None = None


def get_platform() -> Platform:
    """The one platform of this process, made on first use.

    ``HYPER_PARALLEL_PLATFORM`` (``torch`` or ``mindspore``) decides; without it MindSpore when it can be imported, else
    PyTorch.

    >>> get_platform().platform_type.name in ("PYTORCH", "MINDSPORE")
    True
    """
    return _current if _current is not None else _find_platform()


def get_torch_platform() -> Platform:
    """Make PyTorch the platform of this process."""
    global _current
    if importlib.util.find_spec("torch") is None:
        raise ImportError("PyTorch is not installed; run: pip install 'hyper-parallel[torch]'")
    from hyper_parallel.platform.torch.platform import TorchPlatform

    if not isinstance(_current, TorchPlatform):
        _current = TorchPlatform()  # type: ignore[abstract]  # `takes_from` has filled it
    return _current


def get_mindspore_platform() -> Platform:
    """Make MindSpore the platform of this process."""
    global _current
    if not _mindspore_is_there():
        raise ImportError("MindSpore cannot be used: it is not installed; run: pip install 'hyper-parallel[mindspore]'")
    from hyper_parallel.platform.mindspore.platform import MindSporePlatform

    if not isinstance(_current, MindSporePlatform):
        _current = MindSporePlatform()
    return _current


def _mindspore_is_there() -> bool:
    return importlib.util.find_spec("mindspore") is not None


def _find_platform() -> Platform:
    asked = os.environ.get(HYPER_PARALLEL_PLATFORM)
    if asked is not None:
        name = asked.strip().lower()
        if name == HYPER_PARALLEL_PLATFORM_TORCH:
            return get_torch_platform()
        if name == HYPER_PARALLEL_PLATFORM_MINDSPORE:
            return get_mindspore_platform()
        raise ValueError(
            f"{HYPER_PARALLEL_PLATFORM}={asked!r} is not a platform; "
            f"set it to {HYPER_PARALLEL_PLATFORM_TORCH!r} or {HYPER_PARALLEL_PLATFORM_MINDSPORE!r}"
        )
    torch_is_there = importlib.util.find_spec("torch") is not None
    if _mindspore_is_there():
        try:
            return get_mindspore_platform()
        except ImportError as error:
            if not torch_is_there:
                raise
            warnings.warn(
                f"MindSpore is installed but cannot be imported, so HyperParallel runs on PyTorch: {error} "
                f"(with {HYPER_PARALLEL_PLATFORM}={HYPER_PARALLEL_PLATFORM_TORCH} it is not tried)",
                RuntimeWarning,
                stacklevel=3,
            )
    if torch_is_there:
        return get_torch_platform()
    raise ImportError(
        "HyperParallel needs a framework; run: pip install 'hyper-parallel[torch]' or 'hyper-parallel[mindspore]'"
    )
