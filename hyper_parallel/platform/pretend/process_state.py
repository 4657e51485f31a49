"""State of Python itself that each rank of a world of threads has for itself; see Note [Members]."""

from __future__ import annotations

import random
import sys
import warnings
from typing import Any

import numpy as np

from hyper_parallel.platform.shared.membership import belongs_to_rank

# `warnings.catch_warnings` puts its own function in the place of this private one, so it must change hands as well.
_SHOW = "_showwarnmsg_impl"


def _save_warnings() -> tuple[Any, ...]:
    return warnings.filters[:], warnings.showwarning, getattr(warnings, _SHOW)


def _load_warnings(saved: tuple[Any, ...]) -> None:
    filters, warnings.showwarning, show = saved
    setattr(warnings, _SHOW, show)
    if warnings.filters != filters:
        warnings.resetwarnings()  # which also makes places that have warned look at the filters again
        warnings.filters[:] = filters  # type: ignore[index]


def _load_streams(saved: tuple[Any, Any]) -> None:
    sys.stdout, sys.stderr = saved


belongs_to_rank(_save_warnings, _load_warnings)
belongs_to_rank(random.getstate, random.setstate)
belongs_to_rank(np.random.get_state, np.random.set_state)
belongs_to_rank(lambda: (sys.stdout, sys.stderr), _load_streams)
