"""The library proper: layouts, operators and parallelisms. Nothing here imports a framework."""

from hyper_parallel.core.shard import dispatch as _dispatch  # noqa: F401  (operators on DTensors work from here on)
