"""Modules (cells), their parameters and state, and activation memory."""
