"""Tests of long sequences."""
