"""What the pytest process and the ranks say to each other.

Arguments and results travel as pickled bytes of their own inside these messages, so that one that cannot be unpickled
is a failure with a name and not a broken connection.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setup:
    """First message to a new rank: who it is and where it lives. Without a world its ranks are threads of it."""

    framework: str
    rank: int
    world_size: int
    port: int
    directory: str
    import_path: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """Run the function `qualname` of `module`; `arguments` is the pickled pair (args, kwargs)."""

    module: str
    qualname: str
    arguments: bytes
    seed: int
    import_path: tuple[str, ...]
    num_threads: int = 0  # ranks that are threads of the process; 0: the process is a rank


@dataclass(frozen=True)
class Ready:
    """The rank is a member of the default process group."""


@dataclass(frozen=True)
class Returned:
    """The function came back; `value` is its pickled result."""

    value: bytes


@dataclass(frozen=True)
class Raised:
    """The function raised: the traceback up to its last part, that part (`TypeError: ...`), the exception's name."""

    frames: str
    message: str
    name: str


@dataclass(frozen=True)
class Skipped:
    """The function called `pytest.skip`."""

    reason: str


Answer = Ready | Returned | Raised | Skipped
