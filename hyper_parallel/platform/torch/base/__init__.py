"""Tensors, devices, and the tensor type that DTensor derives from."""
