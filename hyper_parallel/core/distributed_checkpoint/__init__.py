"""Checkpoints of distributed state: planned by arithmetic, loadable under any layout, never half there."""
