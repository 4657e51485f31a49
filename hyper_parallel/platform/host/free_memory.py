"""How much memory of the host is free."""

from __future__ import annotations

import os
from pathlib import Path


def free_host_memory() -> int | None:
    """Bytes that a new program can have without others being swapped out; None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
