"""What a user says about precision, host memory and fused communication: plain records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """In which dtypes a unit computes and communicates; None leaves a dtype as it is.

    ``param_dtype``: of the whole parameters in forward and backward, and of what is sent to gather them; the sharded
    parameters keep theirs. ``reduce_dtype``: in which gradients are summed over ranks and micro-batches.
    ``output_dtype``: to which floating outputs of the unit are cast. ``cast_forward_inputs``: cast floating inputs of
    the unit to ``param_dtype``. ``apply_grad_on_fp32_main_grad``: gradients are added up in float32 in
    ``parameter.main_grad``, whatever the parameter's dtype, and ``grad`` stays None.
    """

    param_dtype: Any = None
    reduce_dtype: Any = None
    output_dtype: Any = None
    cast_forward_inputs: bool = True
    apply_grad_on_fp32_main_grad: bool = False


@dataclass(frozen=True)
class OffloadPolicy:
    """Sharded parameters, their gradients and what an optimizer keeps for them stay on the device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, their gradients and what an optimizer keeps for them lie in host memory.

    ``pin_memory``: in pages that a device copies from and to by itself, where there is one.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class CommFusionPolicy:
    """Accepted for programs written for HyperParallel 1.0: communication of a unit is always fused here."""

    enable_comm_fusion: bool = False
    comm_fusion_zero_copy: bool | None = None
