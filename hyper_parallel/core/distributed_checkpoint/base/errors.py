"""What goes wrong with checkpoints."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A save or load failed, on every rank that takes part; the message says on which rank and why."""


class CorruptCheckpointError(CheckpointError):
    """A file of a checkpoint is damaged, cut short, missing, or from a newer version."""


class LostRankError(CheckpointError):
    """Another rank is gone, and with it the word on how the save or load ended."""
