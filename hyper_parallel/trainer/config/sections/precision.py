"""``[precision]``: the dtypes of computing and communicating."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from hyper_parallel.trainer.config.section import STRICT, Section

__all__ = ["PrecisionConfig"]

_Dtype = Literal["same", "float32", "bfloat16", "float16"]


@dataclass(config=STRICT, kw_only=True, frozen=True)
class PrecisionConfig(Section):
    """The dtypes of computing and communicating; `train.dtype` is that of what is kept."""

    compute: _Dtype = "same"
    """Of parameters and activations in forward and backward; "same": train.dtype."""
    reduce: _Dtype = "same"
    """In which gradients are summed over ranks and micro-batches; "same": that of the gradients."""
    compile: Literal["none", "local", "inductor"] = "none"
    """Blocks as recorded local programs, as they are or compiled; "none": by dispatch."""
