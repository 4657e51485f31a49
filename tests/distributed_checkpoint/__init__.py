"""Tests of distributed checkpoints."""
