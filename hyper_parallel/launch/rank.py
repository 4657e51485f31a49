"""What a rank runs before the user's code: ``python -m hyper_parallel.launch.rank script.py arguments``.

Errors that end it are written down for the launcher. ``-m module`` runs a module; ``--call module:function`` and
``--call file.py:function`` call a function with arguments in JSON.
"""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

from hyper_parallel.launch.errors import report_errors

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Run what the arguments say."""
    report_errors()
    first, *rest = arguments
    if first == "--call":
        where, values = rest
        _function(where)(*json.loads(values))
    elif first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


def _function(where: str) -> Any:
    place, _, name = where.rpartition(":")
    found: Any
    if place.endswith(".py"):  # A script's own function: its `if __name__ == "__main__"` must not run again.
        found = runpy.run_path(place, run_name="__rank__")[name]
    else:
        found = importlib.import_module(place)
        for part in name.split("."):
            found = getattr(found, part)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
