"""Whether the layout of a run gives the numbers of one process: tried at shrunk widths, in float64, for a few steps."""

from hyper_parallel.trainer.check.check import check_run
from hyper_parallel.trainer.check.verdict import Verdict

__all__ = ["Verdict", "check_run"]
