"""Attention on the blocks of plain tensors that a rank holds; what travels between the ranks, and when."""
