"""Tests of the framework platforms."""
