"""Loading what torch.distributed.checkpoint saved straight into tensors under our layouts."""

from __future__ import annotations

import os
from typing import Any

from hyper_parallel.core.distributed_checkpoint.agreement.agreement import AloneAgreement, GroupAgreement
from hyper_parallel.core.distributed_checkpoint.foreign.torch_dcp import TorchCheckpoint
from hyper_parallel.core.distributed_checkpoint.planning.flatten import flatten
from hyper_parallel.core.distributed_checkpoint.planning.standard_planner import local_box, spec_of
from hyper_parallel.platform import get_platform


def load_torch(
    state_dict: dict[str, Any], folder: str | os.PathLike[str], *, allow_pickle: bool = False, no_dist: bool = False
) -> None:
    """Fill ``state_dict`` in place from a checkpoint of torch's; every rank reads its own blocks.

    Names are those of torch: nested dicts joined by dots. Objects that are more than plain data need
    ``allow_pickle=True``, which runs whatever code is in them.
    """
    platform = get_platform()
    agreement = AloneAgreement() if no_dist or platform.get_world_size() == 1 else GroupAgreement()

    def work() -> None:
        source = TorchCheckpoint(folder)
        try:
            fill(source)
        finally:
            source.close()

    def fill(source: TorchCheckpoint) -> None:
        known, objects = source.known(), source.objects()
        leaves = flatten(state_dict)
        missing = [f"'{name}'" for name in leaves if name not in known and name not in objects]
        if missing:
            raise ValueError(f"the checkpoint '{source.path}' lacks {', '.join(missing[:20])}")
        for name, leaf in leaves.items():
            if name in objects:
                leaf.container[leaf.place] = source.object_value(name, allow_pickle)
                continue
            if not leaf.is_tensor:
                raise ValueError(f"'{name}' is a tensor in '{source.path}', but the state to load into has none there")
            spec: Any = spec_of(name, leaf, "load")
            if (spec.shape, spec.dtype) != known[name]:
                shape, dtype = known[name]
                raise ValueError(
                    f"'{name}' has shape {shape} and dtype {dtype} in '{source.path}', but shape {spec.shape} and "
                    f"dtype {spec.dtype} here"
                )
            offsets, sizes = local_box(spec, platform.get_rank())
            if 0 not in sizes:
                platform.set_raw(leaf.value, source.view(name, offsets, sizes))

    agreement.round("loading", work)
