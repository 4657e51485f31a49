"""What all parallel styles have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh


class ParallelStyle(ABC):
    """How one module is made parallel. :func:`parallelize_module` sets ``src_data_rank`` and calls :meth:`apply`.

    ``src_data_rank`` is the position in the mesh of the rank whose parameters count: it sends the others their parts.
    None lets every rank cut the parameters that it has.
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Cut ``module`` over ``device_mesh``, in place, and return it."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def described(style: ParallelStyle, **arguments: Any) -> str:
    """``Style(name=value, ...)``, for ``repr``."""
    return f"{type(style).__name__}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
