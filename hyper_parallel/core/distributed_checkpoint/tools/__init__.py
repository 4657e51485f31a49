"""Checkpoints of any kind looked at, compared and rewritten, without a model."""
