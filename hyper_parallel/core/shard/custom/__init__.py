"""Operators and autograd functions of your own on distributed tensors."""
