"""Tests of what is found about a job before it runs."""
