"""PyTorch's own operator database under random layouts: which operators are right, and which of them gather.

``check_ops`` runs on every rank: each operator's samples with each tensor under a random layout, value and gradient
compared with the plain call. ``python -m tests.shard.op_coverage`` runs the whole database and writes ``docs/ops.md``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch

import hyper_parallel as hp
from hyper_parallel.core.shard.strict_mode import gathered_ops
from tests.shard.validator import tensors_in
from tests.world.failures import RanksFailed
from tests.world.world import Worlds

# These give other values at every call, or memory that nobody has written to: only shapes and replicas are compared.
UNDETERMINED = {
    *(
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "empty_permuted",
        "bernoulli",
        "normal",
    ),
    *("multinomial", "rand_like", "randn_like", "randint_like", "cauchy", "exponential", "geometric", "log_normal"),
    *("uniform", "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d", "randn", "randint"),
    *("nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout", "nn.functional.rrelu", "svd_lowrank"),
    *("nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d", "pca_lowrank", "normal_"),
    *("nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward"),
}
NUM_SAMPLES = 4
MAX_NUMEL = 20_000


@dataclass
class Outcome:
    """What came of one operator."""

    name: str
    status: str  # "right", "wrong", "error", "no sample"
    gathered: bool
    message: str = ""


def op_infos() -> list[Any]:
    """The database, in its order."""
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def full_name(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


def check_ops(
    indices: list[int], seed: int = 0, mesh_shape: tuple[int, ...] = (2,), num_samples: int = NUM_SAMPLES
) -> list[Outcome]:
    """Runs on every rank."""
    warnings.simplefilter("ignore")
    os.environ["PYTORCH_TEST_WITH_SLOW"] = "0"
    mesh = hp.init_device_mesh("cpu", mesh_shape)
    infos = op_infos()
    with _quick_seeds():
        return [_check(infos[index], mesh, seed, num_samples) for index in indices]


@contextmanager
def _quick_seeds() -> Iterator[None]:
    """The database seeds for every sample, and PyTorch notes each seed, with a stack, for devices that may come."""
    with ExitStack() as stack:
        for device in (torch.cuda, torch.xpu):
            stack.enter_context(mock.patch.object(device, "manual_seed_all"))
        yield


def _check(info: Any, mesh: Any, seed: int, num_samples: int) -> Outcome:
    name = full_name(info)
    dtype = next(
        (d for d in (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool) if d in info.dtypes), None
    )
    if dtype is None:
        dtype = next(iter(info.dtypes), None)
    if dtype is None:
        return Outcome(name, "no sample", False, "it has no dtype on the CPU")
    gradients = info.supports_autograd and dtype in (torch.float64, torch.complex128)
    before = sum(gathered_ops.values())
    try:
        torch.manual_seed(17)
        random.seed(17)
        numpy.random.seed(17)
        samples = list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=gradients), 40))
    except Exception:
        return Outcome(name, "no sample", False, traceback.format_exc(limit=-3))
    tried = 0
    pick = random.Random(f"{seed}{name}")
    pick.shuffle(samples)
    for sample in samples:
        if tried >= num_samples:
            break
        tensors = tensors_in((sample.input, sample.args, sample.kwargs))
        if not tensors or any(t.numel() > MAX_NUMEL or t.layout is not torch.strided for t in tensors):
            continue
        try:
            expected, gradient = _run(info, sample, [_fresh(t) for t in tensors], gradients)
        except Exception:
            continue
        tried += 1
        layouts = [_random_layout(pick, mesh, t) for t in tensors]
        try:
            complaint = _compare(info, sample, tensors, layouts, mesh, expected, gradient, gradients, name)
        except Exception:
            where = ", ".join(
                f"{tuple(t.shape)} {t.dtype} {layout.placements}" for t, layout in zip(tensors, layouts, strict=True)
            )
            complaint = f"error: under {where}: {traceback.format_exc(limit=-5)}"
        if complaint:
            status = "error" if complaint.startswith("error") else "wrong"
            return Outcome(name, status, sum(gathered_ops.values()) > before, complaint)
    if not tried:
        return Outcome(name, "no sample", False, "no sample with dense tensors of moderate size ran plainly")
    return Outcome(name, "right", sum(gathered_ops.values()) > before)


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _random_layout(pick: random.Random, mesh: Any, tensor: torch.Tensor) -> Any:
    options: list[Any] = [hp.Replicate(), *(hp.Shard(dim) for dim in range(tensor.ndim))]
    if tensor.is_floating_point():
        options.append(hp.Partial())
    weights = [1.0] + [2.0] * tensor.ndim + [0.5] * (len(options) - 1 - tensor.ndim)
    return hp.Layout.from_placements(mesh, pick.choices(options, weights, k=mesh.ndim), tensor.ndim)


def _replaced(tree: Any, new: list[Any]) -> Any:
    if isinstance(tree, torch.Tensor):
        return new.pop(0)
    if isinstance(tree, dict):
        return {key: _replaced(value, new) for key, value in tree.items()}
    if isinstance(tree, torch.Size):
        return tree
    if isinstance(tree, (list, tuple)):
        items = [_replaced(item, new) for item in tree]
        return type(tree)(items) if type(tree) in (list, tuple) else type(tree)(*items)
    return tree


def _run(info: Any, sample: Any, tensors: list[Any], gradients: bool) -> tuple[Any, list[Any]]:
    given = list(tensors)
    first, args, kwargs = _replaced((sample.input, sample.args, sample.kwargs), list(given))
    torch.manual_seed(3)
    hp.manual_seed(3)
    result = info.op(first, *args, **kwargs)
    outputs = tensors_in(sample.output_process_fn_grad(result))
    if gradients:
        whole = [out.full_tensor() if isinstance(out, hp.DTensor) else out for out in outputs]
        terms = []
        for number, out in enumerate(whole):
            if out.requires_grad and (out.is_floating_point() or out.is_complex()):
                weight = torch.rand(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
                term = (out * weight.to(out.dtype)).sum()
                terms.append(term.real + term.imag if term.is_complex() else term)
        if terms:
            sum(terms).backward()
    return result, [tensor.grad if tensor.is_leaf else None for tensor in tensors]


def _compare(
    info: Any,
    sample: Any,
    tensors: Any,
    layouts: Any,
    mesh: Any,
    expected: Any,
    gradient: Any,
    gradients: bool,
    name: str,
) -> str:
    ours_in = [hp.distribute_tensor(_fresh(t), mesh, layout) for t, layout in zip(tensors, layouts, strict=True)]
    result, grads = _run(info, sample, ours_in, gradients)
    where = ", ".join(f"{tuple(t.shape)} {layout.placements}" for t, layout in zip(tensors, layouts, strict=True))
    undetermined = info.name in UNDETERMINED
    # All gathers come first: a rank that finds a difference must not leave the others waiting.
    ours = [leaf.full_tensor() if isinstance(leaf, hp.DTensor) else leaf for leaf in _leaves(result)]
    grads = [None if grad is None else grad.full_tensor() for grad in grads]
    theirs = _leaves(expected)
    if len(ours) != len(theirs):
        return f"under {where}: {len(ours)} results instead of {len(theirs)}"
    for mine, want in zip(ours, theirs, strict=True):
        if not isinstance(want, torch.Tensor):
            if mine != want and not (mine != mine and want != want):
                return f"under {where}: {mine!r} instead of {want!r}"
            continue
        if mine.shape != want.shape or mine.dtype != want.dtype:
            return f"under {where}: {tuple(mine.shape)} {mine.dtype} instead of {tuple(want.shape)} {want.dtype}"
        if not undetermined and not _close(mine, want):
            return f"under {where}: {mine.detach()} instead of {want.detach()}"
    for number, (mine, want) in enumerate(zip(grads, gradient, strict=True)):
        if undetermined or (want is None and mine is None):
            continue
        mine = torch.zeros_like(tensors[number]) if mine is None else mine
        want = torch.zeros_like(tensors[number]) if want is None else want
        if not _close(mine, want):
            return f"under {where}: gradient {number} is {mine} instead of {want}"
    return ""


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        return [leaf for item in tree for leaf in _leaves(item)]
    return [tree]


def _close(mine: torch.Tensor, want: torch.Tensor) -> bool:
    if mine.layout is not torch.strided:
        mine, want = mine.to_dense(), want.to_dense()
    if not (mine.is_floating_point() or mine.is_complex()):
        return torch.equal(mine, want)
    if mine.element_size() == 1:
        mine, want = mine.float(), want.float()
    tight = 1e-7 if mine.dtype in (torch.float64, torch.complex128) else 1e-3
    return torch.allclose(mine, want, rtol=tight, atol=tight, equal_nan=True)


def run_database(
    worlds: Any,
    seed: int = 0,
    mesh_shape: tuple[int, ...] = (2,),
    only: str = "",
    num_samples: int = NUM_SAMPLES,
    chunk: int = 20,
) -> Iterator[Outcome]:
    """Every operator, in worlds that are replaced when one hangs or dies."""
    names = [full_name(info) for info in op_infos()]
    indices = [index for index, name in enumerate(names) if only in name]
    size = math.prod(mesh_shape)
    for start in range(0, len(indices), chunk):
        part = indices[start : start + chunk]
        try:
            yield from _merged(worlds(size, timeout=400).run(check_ops, part, seed, mesh_shape, num_samples))
        except RanksFailed:
            for index in part:
                try:
                    yield from _merged(worlds(size, timeout=120).run(check_ops, [index], seed, mesh_shape, num_samples))
                except RanksFailed as failure:
                    yield Outcome(names[index], "died or hung", False, str(failure))


def _merged(answers: list[list[Outcome]]) -> list[Outcome]:
    """The ranks' answers as one: the worst counts."""
    rank = {"right": 0, "no sample": 1, "error": 2, "wrong": 3}
    return [max(per_op, key=lambda outcome: rank[outcome.status]) for per_op in zip(*answers, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="operators whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mesh", default="2", help="2, 4 or 2x2")
    parser.add_argument("--write", type=Path, default=None, help="write the table to this file")
    options = parser.parse_args()
    shape = tuple(int(size) for size in options.mesh.split("x"))
    outcomes: list[Outcome] = []
    with closing(Worlds()) as worlds:
        for outcome in run_database(worlds, options.seed, shape, options.only):
            outcomes.append(outcome)
            if len(outcomes) % 20 == 0:
                print(f"{len(outcomes)} operators", flush=True)
    for outcome in outcomes:
        if outcome.status not in ("right", "no sample"):
            print(f"--- {outcome.name}: {outcome.status}: {outcome.message}")
    right = [o for o in outcomes if o.status == "right"]
    print(
        f"{len(outcomes)} operators: {len(right)} right ({sum(not o.gathered for o in right)} without a gather), "
        + ", ".join(
            f"{sum(o.status == s for o in outcomes)} {s}" for s in ("wrong", "error", "died or hung", "no sample")
        )
    )
    if options.write:
        options.write.write_text(table(outcomes, options.mesh))


def table(outcomes: list[Outcome], mesh: str) -> str:
    """The coverage page."""
    outcomes = [o for o in outcomes if o.status != "no sample"]
    right = [o for o in outcomes if o.status == "right"]
    lines = [
        "# Operators",
        "",
        "Made by `python -m tests.shard.op_coverage --write docs/ops.md`: PyTorch's operator database, every tensor",
        f"argument under a random layout on a mesh of {mesh} ranks, values and gradients compared with one device.",
        "",
        f"{len(right)} of {len(outcomes)} operators are right, "
        f"{sum(not o.gathered for o in right)} of them without a gather.",
        "",
        "| operator | result | how |",
        "|---|---|---|",
    ]
    how = {True: "gathers", False: "by rule"}
    lines += [f"| `{o.name}` | {o.status} | {how[o.gathered] if o.status == 'right' else ''} |" for o in outcomes]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    from tests.shard.op_coverage import main as run  # under its own name, which the ranks can import

    run()
