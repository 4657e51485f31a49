"""The brute-force validator: an operator under every layout of its inputs against one device, values and gradients.

A :class:`Sample` is one call on small tensors. :func:`validate` runs on every rank of a world: it takes the call's
tensors through all layouts of the mesh, and compares this rank's block of the result and of the gradients of all inputs
with the plain call. Where there are many combinations, one is run for each choice that the planner can make, which
covers them all: see Note [All layouts without running them all]. It returns what went wrong on this rank, as text.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import hyper_parallel as hp
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.platform import get_platform
from tests.shard.choices import every_choice, looking_only_when_planned, planned_calls

# HYPER_PARALLEL_VALIDATE=6000 runs all combinations of samples that have up to 6000, whatever stands for them.
RUN_ALL_UP_TO = int(os.environ.get("HYPER_PARALLEL_VALIDATE", 0))


@dataclass(frozen=True)
class Sample:
    """One call: ``func(*args, **kwargs)``. Tensors may be nested in lists; floating ones get gradients."""

    func: Callable[..., Any] | str  # a function, or a dotted name under torch such as "nn.functional.gelu"
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    gradients: bool = True
    label: str = ""

    def function(self) -> Callable[..., Any]:
        if not isinstance(self.func, str):
            return self.func
        found: Any = torch
        for part in self.func.split("."):
            found = getattr(found, part)
        return found

    def __str__(self) -> str:
        name = self.func if isinstance(self.func, str) else getattr(self.func, "__name__", repr(self.func))
        shapes = [tuple(value.shape) for value in tensors_in((self.args, self.kwargs))]
        return self.label or f"{name}{shapes}"


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of nested containers, in their order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return [tensor for item in tree for tensor in tensors_in(item)]
    return []


def _replace(tree: Any, new: list[Any]) -> Any:
    if isinstance(tree, torch.Tensor):
        return new.pop(0)
    if isinstance(tree, dict):
        return {key: _replace(value, new) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        items = [_replace(item, new) for item in tree]
        return type(tree)(items) if type(tree) in (list, tuple) else tree
    return tree


def layouts_of(mesh: Any, tensor: torch.Tensor, partial: bool) -> list[Layout]:
    """Every layout of a tensor on a mesh, ordered cuts and pending sums included."""
    dims = [hp.Shard(dim) for dim in range(tensor.ndim)]
    options = [hp.Replicate(), *dims, *([hp.Partial()] if partial else [])]
    found = []
    for placements in itertools.product(options, repeat=mesh.ndim):
        layout = Layout.from_placements(mesh, placements, tensor.ndim)
        found.append(layout)
        if any(len(axes) > 1 for axes in layout.shard_axes):
            found.append(Layout.of(mesh, [tuple(reversed(axes)) for axes in layout.shard_axes], layout.partials))
    return found


def _can_be_partial(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()


def validate(
    samples: Sequence[Sample], mesh_shape: tuple[int, ...], most: int = 12, tolerance: float = 1e-9
) -> list[str]:
    """Runs on every rank; what was wrong, one line per sample and layouts.

    Up to ``most`` combinations of layouts are all run; of more, those that lead to every choice, and one by chance.
    """
    warnings.simplefilter("ignore")
    mesh = hp.init_device_mesh("cpu", mesh_shape, mesh_dim_names=("x", "y", "z")[: len(mesh_shape)])
    wrong: list[str] = []
    with looking_only_when_planned():
        for sample in samples:
            tensors = tensors_in((sample.args, sample.kwargs))
            choices = [layouts_of(mesh, tensor, _can_be_partial(tensor)) for tensor in tensors]
            expected = _run_plain(sample, tensors)
            for layouts in _combinations(sample, tensors, choices, mesh, most):
                complaint = _compare(sample, tensors, layouts, mesh, expected, tolerance)
                if complaint and len(wrong) < 20:  # the other ranks go on, so this one must too
                    wrong.append(f"{sample} under {', '.join(map(str, layouts))}: {complaint}")
    return wrong


def _combinations(
    sample: Sample, tensors: list[torch.Tensor], choices: list[list[Layout]], mesh: Any, most: int
) -> list[tuple[Layout, ...]]:
    """The combinations of layouts to run: all, or those that stand for all."""
    if math.prod(map(len, choices)) > max(most, RUN_ALL_UP_TO):
        calls = _calls_of(sample, tensors, mesh)
        covering = every_choice(calls[0], choices) if len(calls) == 1 else None
        if covering is not None:
            return [*covering, tuple(map(random.Random(str(sample)).choice, choices))]
    return list(itertools.product(*choices))


def _calls_of(sample: Sample, tensors: list[torch.Tensor], mesh: Any) -> list[tuple[Any, ...]]:
    """The calls of operators that a sample comes down to; copies that it makes of its tensors lie as they do."""
    whole = [hp.distribute_tensor(tensor.detach().clone(), mesh, None) for tensor in tensors]
    args, kwargs = _replace((sample.args, sample.kwargs), whole)
    with planned_calls(gathered=True) as calls, torch.no_grad():
        sample.function()(*args, **kwargs)
    others = [call for call in calls if get_platform().get_op_name(call[0]) != "clone"]
    return others or calls


def _leaf(tensor: torch.Tensor, gradients: bool) -> torch.Tensor:
    leaf = tensor.detach().clone()
    return leaf.requires_grad_() if gradients and (leaf.is_floating_point() or leaf.is_complex()) else leaf


def _call(sample: Sample, leaves: list[Any], clone: bool) -> Any:
    # In-place operators need inputs that are not leaves.
    given = [leaf.clone() if clone else leaf for leaf in leaves]
    args, kwargs = _replace((sample.args, sample.kwargs), given)
    return sample.function()(*args, **kwargs)


def _is_in_place(sample: Sample) -> bool:
    name = sample.func if isinstance(sample.func, str) else getattr(sample.func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name.startswith(("__i", "__set"))


def _run_plain(sample: Sample, tensors: list[torch.Tensor]) -> tuple[Any, list[Any], list[Any]]:
    leaves = [_leaf(tensor, sample.gradients) for tensor in tensors]
    result = _call(sample, leaves, _is_in_place(sample))
    outputs = tensors_in(result) if not isinstance(result, torch.Tensor) else [result]
    cotangents = [
        torch.rand(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).to(out.dtype)
        for out in outputs
    ]
    _backward(outputs, cotangents)
    return result, cotangents, [leaf.grad for leaf in leaves]


def _backward(outputs: list[Any], cotangents: list[Any]) -> None:
    pairs = [pair for pair in zip(outputs, cotangents, strict=True) if pair[0].requires_grad]
    if pairs:
        torch.autograd.backward([out for out, _ in pairs], [cotangent for _, cotangent in pairs])


def spread(value: torch.Tensor, layout: Layout) -> Any:
    """The value under a layout. Where a sum is pending the first rank has twice the value and the second takes it off
    once, which is exact in any order: with zeros for parts a product of pending sums would look right.
    """
    spread = hp.distribute_tensor(value, layout.mesh, layout.gradient())
    if not layout.has_partial:
        return spread
    axes = zip(layout.mesh.get_coordinate(), layout.mesh.shape, layout.partials, strict=True)
    pending = [place for place, size, op in axes if op and size > 1]
    factor = 1 if not pending else 0 if any(pending[1:]) else {0: 2, 1: -1}.get(pending[0], 0)
    local = spread.detach().to_local()
    infinite = local if factor in (1, 2) else torch.zeros_like(local)  # whole on the first rank
    local = torch.where(local.isfinite(), local * factor, infinite)
    made = hp.DTensor.from_local(local, layout.mesh, layout, shape=tuple(value.shape))
    return made.requires_grad_(value.requires_grad)


def _compare(
    sample: Sample, tensors: list[torch.Tensor], layouts: Sequence[Layout], mesh: Any, expected: Any, tolerance: float
) -> str:
    result, cotangents, gradients = expected
    leaves = [spread(_leaf(tensor, sample.gradients), layout) for tensor, layout in zip(tensors, layouts, strict=True)]
    refused = _is_in_place(sample) and layouts[0].has_partial
    try:
        ours = _call(sample, leaves, _is_in_place(sample))
        if not isinstance(result, (torch.Tensor, list, tuple)):
            return "" if ours == result else f"gave {ours!r} instead of {result!r}"
        outputs = tensors_in(ours)
        for out, want in zip(outputs, tensors_in(result), strict=True):
            if not isinstance(out, hp.DTensor):
                return "a result is a plain tensor"
            shape = tuple(want.shape)
            if tuple(out.shape) != shape or tuple(out.local_shape) != out.layout.local_shape(shape):
                return f"shape {tuple(out.shape)} (block {tuple(out.local_shape)}) instead of {shape}"
            reduced = out.detach().reduce_partial()
            if not _close(reduced.to_local(), _block(want, reduced.layout), tolerance):
                return f"wrong values under {out.layout}:\n{reduced.to_local()}\ninstead of\n{want}"
        _backward(
            outputs,
            [
                hp.distribute_tensor(cotangent, mesh, out.layout.gradient())
                for out, cotangent in zip(outputs, cotangents, strict=True)
            ],
        )
        for number, (leaf, want) in enumerate(zip(leaves, gradients, strict=True)):
            if want is None:
                want = torch.zeros(leaf.shape, dtype=leaf.dtype) if leaf.grad is not None else None
            if want is None:
                continue
            if leaf.grad is None:
                if want.abs().sum() == 0:
                    continue
                return f"no gradient for input {number}"
            if leaf.grad.layout is not leaf.layout.gradient():
                return f"gradient {number} lies under {leaf.grad.layout}"
            if not _close(leaf.grad.to_local(), _block(want, leaf.grad.layout), tolerance):
                return f"wrong gradient of input {number}:\n{leaf.grad.to_local()}\ninstead of\n{want}"
    except RuntimeError as error:
        if refused and "partial value" in str(error):
            return ""
        return f"raised {traceback.format_exc(limit=-6)}"
    except Exception:
        return f"raised {traceback.format_exc(limit=-6)}"
    return ""


def _block(whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(*layout.local_region(tuple(whole.shape)), strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole


def _close(mine: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    if mine.dtype != want.dtype or mine.shape != want.shape:
        return False
    if not (mine.is_floating_point() or mine.is_complex()):
        return torch.equal(mine, want)
    return torch.allclose(mine, want, rtol=tolerance, atol=tolerance, equal_nan=True)


def tensor(
    *shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, low: float = -2.0, high: float = 2.0
) -> torch.Tensor:
    """Random values that are well away from kinks."""
    generator = torch.Generator().manual_seed(1000 * seed + sum((i + 1) * s for i, s in enumerate(shape)))
    values = torch.rand(shape, dtype=torch.float64, generator=generator) * (high - low) + low
    return values.to(dtype)


def assert_valid(worlds: Any, samples: Sequence[Sample]) -> None:
    """Validate samples on a mesh of 2 ranks and one of 2 x 2 ranks; without a sweep one in two and one in eight."""
    for size, shape, every in ((2, (2,), 2), (4, (2, 2), 8)):
        every = 1 if worlds.sweep else every
        answers = worlds(size, timeout=900).run(validate, list(samples)[::every], shape)
        for rank, wrong in enumerate(answers):
            assert not wrong, f"{len(wrong)} wrong on rank {rank} of {shape}:\n" + "\n".join(wrong)
