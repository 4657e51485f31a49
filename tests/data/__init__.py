"""Tests of hyper_parallel/data."""
