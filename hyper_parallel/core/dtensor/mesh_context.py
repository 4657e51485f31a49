"""The current mesh: the name that programs use, on one page."""

from hyper_parallel.core.dtensor.meshes.mesh_context import get_current_mesh

__all__ = ["get_current_mesh"]
