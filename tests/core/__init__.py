"""Tests of hyper_parallel.core: meshes, layouts, distributed tensors and everything above them."""
