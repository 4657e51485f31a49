"""Runs without memory, on PyTorch: every operator on shapes, every byte and floating-point operation counted."""
