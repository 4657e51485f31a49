"""All neutral operators: the table of ``table.py``, with every family in it.

MindSpore's own operators whose arguments agree with the rules' already are not repeated: they are passed on as they
came (``takes_over/translation.py``).
"""

from __future__ import annotations

from hyper_parallel.platform.mindspore.mends import nan_mean, real_spectra, same_bits
from hyper_parallel.platform.mindspore.operators import (  # noqa: F401
    creation,
    layers,
    positions,
    products,
    reductions,
    shapes,
    writes,
)
from hyper_parallel.platform.mindspore.operators.table import NEUTRAL, neutral

__all__ = ["NEUTRAL"]

for _name in same_bits.__all__:
    neutral(getattr(same_bits, _name))
for _transform in real_spectra.TRANSFORMS:
    neutral(_transform)
neutral(nan_mean.nanmean)
