"""Pickles of torch's checkpoints, read by an interpreter that runs nothing and makes plain data."""
