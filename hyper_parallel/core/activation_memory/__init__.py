"""What of a forward is kept for backward: recomputation of modules."""
