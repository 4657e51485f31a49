"""The start, tensors, their memory, devices, and initial values."""
