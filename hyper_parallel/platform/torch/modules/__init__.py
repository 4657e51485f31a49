"""Modules, their parameters and state, and activation memory."""
