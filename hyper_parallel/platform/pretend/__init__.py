"""Worlds whose ranks are threads of one process: who runs, where they meet, what is put aside in between."""
