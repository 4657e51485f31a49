"""Lowering: a parallel module's calls, recorded once, run as a plain local program."""
