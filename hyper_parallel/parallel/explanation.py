"""What is found out about a split model: in words its mesh, where parameters lie, bytes on a rank, what a step sends;
and by running it that packed documents do not see each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.comm_recorder import CommRecorder
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.pipeline_parallel.runtime.run_table import PipelineError
from hyper_parallel.data.proof import PackingProof, prove_packing
from hyper_parallel.parallel.losses import without_caches
from hyper_parallel.platform import get_platform

if TYPE_CHECKING:
    from hyper_parallel.parallel.parallel import Parallel

__all__ = ["explain", "prove_packing_of"]

_platform = get_platform()

_MEANING = {
    "pp": "stages of the model",
    "dp_replicate": "copies of the model, each with its part of the batch",
    "dp_shard": "parts of the batch, among which parameters are sharded",
    "cp": "parts of the sequence, among which parameters are sharded too",
    "tp": "parts of each layer",
}


def explain(run: Parallel, batch: Mapping[str, Any]) -> str:
    """See :meth:`Parallel.explain`."""
    lines = [f"{run.name} on {run.mesh.size()} ranks, {run.degrees}"]
    lines += [f"  {axis} = {size}: {_MEANING[axis]}" for axis, size in run.degrees.sizes.items() if size > 1]
    if run.degrees.ep != 1:
        lines.append(f"  ep = {run.degrees.ep}: blocks of experts, on neighbours along {_expert_axes(run)}")
    lines += [*run.sequences.described(), "", "parameters", *_parameters(run)]
    if batch:
        lines += ["", "a step sends", *_communication(run, batch)]
    return "\n".join(lines)


def _expert_axes(run: Parallel) -> str:
    return " and ".join("dp_shard" if name == "ep" else name for name in run.expert_axes)


def _parameters(run: Parallel) -> list[str]:
    """One line for all blocks' parameters of a name, with their layout and bytes."""
    rows: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    local_bytes = total_bytes = 0
    for name, parameter in run.named_parameters():
        starred = ".".join("*" if part.isdigit() else part for part in name.split("."))
        layout = _layout_text(parameter)
        size = _platform.get_element_size(_platform.detached(parameter))
        held = math.prod(_platform.detached(parameter).shape) * size
        whole = math.prod(parameter.shape) * size
        row = rows.setdefault((starred, layout, tuple(parameter.shape)), [0, 0])
        row[0] += 1
        row[1] += held
        local_bytes, total_bytes = local_bytes + held, total_bytes + whole
    width = max((len(name) for name, _, _ in rows), default=0)
    lines = [
        f"  {name:<{width}}  {'x'.join(map(str, shape)) or 'scalar':>12} {f'x {count}' if count > 1 else '':<5} "
        f"{layout}, {_size(held)} here"
        for (name, layout, shape), (count, held) in rows.items()
    ]
    return [*lines, f"  {_size(local_bytes)} of {_size(total_bytes)} on this rank; gradients as much again"]


def _layout_text(parameter: Any) -> str:
    if not isinstance(parameter, DTensor):
        return "replicated"
    layout = parameter._layout
    cuts = []
    for dim, axes in enumerate(layout.shard_axes):
        names = [str(layout.mesh.axis_label(axis)) for axis in axes if layout.mesh.shape[axis] > 1]
        if names:
            cuts.append(f"dim {dim} over {' x '.join(names)}")
    return "sharded on " + ", ".join(cuts) if cuts else "replicated"


def _communication(run: Parallel, batch: Mapping[str, Any]) -> list[str]:
    if any(gradient is not None for gradient in run.gradients()):
        raise RuntimeError(
            "explain: a step is run to see what it sends, and there are gradients; call zero_grad() first"
        )
    with CommRecorder() as recorder:
        run.forward_backward(**batch)
    run.zero_grad()
    return ["  " + line for line in str(recorder.table()).splitlines()]


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


# ---------------------------------------------------------------- packed documents


def prove_packing_of(
    run: Parallel,
    length: int,
    vocab_size: int | None = None,
    tolerance: float = 1e-3,
    arguments: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
) -> PackingProof:
    """:meth:`Parallel.prove_packing`; ``arguments`` gives what the model is called with for a batch of numpy arrays."""
    config = getattr(run.model, "config", None)
    config = getattr(config, "text_config", config)
    vocab_size = vocab_size or getattr(config, "vocab_size", None)
    if vocab_size is None:
        raise ValueError(f"prove_packing: {run.name} does not say how many tokens it knows; give vocab_size")

    def run_model(batch: dict[str, Any]) -> np.ndarray:
        given = (arguments or _as_tensors)({name: np.asarray(value) for name, value in batch.items()})
        were_training = [_platform.set_training(part, False) for part in run.parts]
        try:
            with _platform.no_grad(), without_caches(run.configs_of_caches):
                outputs = run(**given)
        finally:
            for part, was_training in zip(run.parts, were_training, strict=True):
                _platform.set_training(part, was_training)
        return _everywhere(run, outputs)

    # A stage that failed has left its pipeline.
    return prove_packing(run_model, vocab_size=vocab_size, length=length, tolerance=tolerance, final=(PipelineError,))


def _as_tensors(batch: dict[str, Any]) -> dict[str, Any]:
    device = _platform.get_device_type()
    return {
        name: _platform.from_numpy(np.ascontiguousarray(array), _platform.str_to_dtype(str(array.dtype)), device)
        if array.ndim
        else array.item()
        for name, array in batch.items()
    }


def _everywhere(run: Parallel, outputs: Any) -> np.ndarray:
    """The logits; in stages they are with the last one, and every rank must come to one verdict."""
    found = None if outputs is None else getattr(outputs, "logits", outputs)
    found = None if found is None else np.asarray(_platform.tensor_to_numpy(found), np.float64)
    if run.pipeline is None:
        assert found is not None
        return found
    group = run.mesh.get_group("pp")
    everyone: list[Any] = [None] * run.mesh.size("pp")
    _platform.all_gather_object(everyone, found, group)
    return next(one for one in everyone if one is not None)
