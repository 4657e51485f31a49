"""The dtypes that a config asks for, as a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel.core.fully_shard.policies import MixedPrecisionPolicy
from hyper_parallel.platform import get_platform

if TYPE_CHECKING:
    from hyper_parallel.trainer.config.sections.precision import PrecisionConfig

__all__ = ["policy_of"]


def policy_of(config: PrecisionConfig) -> MixedPrecisionPolicy | None:
    """None where all is computed and summed as it is kept."""
    if config.compute == config.reduce == "same":
        return None
    dtype = get_platform().str_to_dtype
    return MixedPrecisionPolicy(
        param_dtype=None if config.compute == "same" else dtype(config.compute),
        reduce_dtype=None if config.reduce == "same" else dtype(config.reduce),
    )
