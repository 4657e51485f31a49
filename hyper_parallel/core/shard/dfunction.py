"""DFunction, where HyperParallel 1.0 has it: the names on one page."""

from hyper_parallel.core.shard.custom.dfunction import DFunction

__all__ = ["DFunction"]
