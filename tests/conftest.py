"""Loads the test world: its options, the `worlds` fixture and the cases of `run_on_ranks`."""

pytest_plugins = ("tests.world.plugin", "pytester")
