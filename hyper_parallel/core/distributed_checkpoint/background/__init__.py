"""Saves that a process beside each rank writes while training goes on."""
