"""All neutral operators: the table of :mod:`dtensor_neutral`, with every family in it.

MindSpore's own operators whose arguments agree with the rules' already are not repeated: they are passed on as they
came (:mod:`dtensor_names`).
"""

from __future__ import annotations

from hyper_parallel.platform.mindspore import (  # noqa: F401
    dtensor_ops_creation,
    dtensor_ops_layers,
    dtensor_ops_positions,
    dtensor_ops_products,
    dtensor_ops_reductions,
    dtensor_ops_shapes,
    dtensor_ops_writes,
)
from hyper_parallel.platform.mindspore.dtensor_neutral import NEUTRAL, neutral
from hyper_parallel.platform.mindspore.mends import nan_mean, real_spectra, same_bits

__all__ = ["NEUTRAL"]

for _name in same_bits.__all__:
    neutral(getattr(same_bits, _name))
for _transform in real_spectra.TRANSFORMS:
    neutral(_transform)
neutral(nan_mean.nanmean)
