"""Tools for tests of distributed programs: all ranks of a world as threads of one process."""

from hyper_parallel.platform.pretend.turns import Deadlock
from hyper_parallel.testing.threads import Threads, threads

__all__ = ["Deadlock", "Threads", "threads"]
