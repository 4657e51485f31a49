"""Device meshes: the names that programs use, on one page."""

from hyper_parallel.core.dtensor.meshes.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
