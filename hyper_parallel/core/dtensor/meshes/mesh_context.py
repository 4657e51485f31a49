"""The current mesh: what ``with mesh:`` sets and :func:`get_current_mesh` reads, per thread, nesting."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hyper_parallel.platform.shared.membership import followed_by_threads

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.meshes.device_mesh import DeviceMesh


class _MeshStack(threading.local):
    def __init__(self) -> None:
        self.meshes: list[DeviceMesh] = []


_STACK = followed_by_threads(_MeshStack())


def get_current_mesh() -> DeviceMesh | None:
    """The mesh of the innermost ``with mesh:`` of this thread, or None outside of any.

    >>> from hyper_parallel.core.dtensor.meshes.device_mesh import init_device_mesh
    >>> with init_device_mesh("cpu", (2,), mesh_dim_names=("tp",), init_backend=False):
    ...     print(get_current_mesh())
    DeviceMesh('cpu', (tp=2), ranks=[0, 1])
    >>> print(get_current_mesh())
    None
    """
    return _STACK.meshes[-1] if _STACK.meshes else None


def enter_mesh(mesh: DeviceMesh) -> None:
    """Make ``mesh`` the current one of this thread until :func:`leave_mesh`."""
    _STACK.meshes.append(mesh)


def leave_mesh() -> None:
    """Give this thread back the mesh that was current before the last :func:`enter_mesh`."""
    _STACK.meshes.pop()
