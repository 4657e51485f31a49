"""Joining a world: who this process is, according to whoever started it, and where its world meets."""

from hyper_parallel.launch.environments import Place, find_place
from hyper_parallel.launch.join import join

__all__ = ["Place", "find_place", "join"]
