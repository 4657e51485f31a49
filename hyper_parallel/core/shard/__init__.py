"""Operators on distributed tensors: the dispatcher, the rules, and ways to bring your own."""

# First of all: it loads the dispatcher when it is complete, whichever module of this package is asked for.
import hyper_parallel.core.dtensor.distributed_tensor  # noqa: F401
