"""The rules on MindSpore, by brute force: each sample under every layout against the plain call, with gradients."""

from __future__ import annotations

import itertools
import random
import re
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor

import hyper_parallel as hp
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard import dispatch
from hyper_parallel.core.shard.rule_table import rule_names
from hyper_parallel.platform import get_platform
from tests.shard.mindspore_samples import SAMPLES, Sample

DOCS = Path(__file__).parents[2] / "docs" / "mindspore_tensors.md"


def layouts_of(mesh: Any, values: np.ndarray) -> list[Layout]:
    """Every layout on the mesh; pending sums for numbers with a point."""
    cuts = [hp.Shard(dim) for dim in range(values.ndim)]
    options = [hp.Replicate(), *cuts, *([hp.Partial()] if values.dtype.kind == "f" else [])]
    return [
        Layout.from_placements(mesh, placements, values.ndim)
        for placements in itertools.product(options, repeat=mesh.ndim)
    ]


def as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def run_backward(results: list[Any]) -> None:
    """From a weighted sum of all results, so that every element counts differently."""
    platform, total = get_platform(), None
    for result in results:
        if not platform.requires_grad(result):
            continue
        weights = np.cos(np.arange(max(1, result.numel()))).reshape(tuple(result.shape) or ())
        term = (result * Tensor(weights, result.dtype)).sum()
        total = term if total is None else total + term
    if total is not None:
        hp.backward(total)


def leaf(values: np.ndarray) -> Tensor:
    made = Tensor(values)
    if values.dtype.kind == "f":
        made.requires_grad_()
    return made


def complaint(sample: Sample, layouts: tuple[Layout, ...], mesh: Any, wanted: list[Any], gradients: list[Any]) -> str:
    leaves = [
        hp.distribute_tensor(leaf(values), mesh, layout) for values, layout in zip(sample.arrays, layouts, strict=True)
    ]
    outputs = as_list(sample.call(*leaves))
    whole = [output.full_tensor() for output in outputs]
    for mine, plain in zip(whole, wanted, strict=True):
        if mine.dtype != plain.dtype or tuple(mine.shape) != tuple(plain.shape):
            return f"{mine.dtype} of shape {mine.shape} instead of {plain.dtype} of shape {plain.shape}"
        if not np.allclose(mine.asnumpy(), plain.asnumpy(), sample.tolerance, sample.tolerance, equal_nan=True):
            return f"values\n{mine}\ninstead of\n{plain}"
    run_backward(whole)
    for number, (one, want) in enumerate(zip(leaves, gradients, strict=True)):
        if want is None:
            continue
        mine = hp.grad_of(one)
        if mine is None:
            return f"no gradient for input {number}"
        if mine.layout is not one.layout.gradient():
            return f"gradient {number} lies under {mine.layout}"
        if not np.allclose(mine.full_tensor().asnumpy(), want, sample.tolerance, sample.tolerance, equal_nan=True):
            return f"gradient {number}\n{mine.full_tensor()}\ninstead of\n{want}"
    return ""


def validate(samples: list[str], mesh_shape: tuple[int, ...], most: int) -> tuple[list[str], list[str]]:
    """Runs on every rank: what was wrong, and the rules that were used."""
    mesh = hp.init_device_mesh("cpu", mesh_shape, mesh_dim_names=("x", "y")[: len(mesh_shape)])
    used: set[str] = set()
    plan = dispatch.plan_call

    def remember(func: Any, args: Any, kwargs: Any) -> Any:
        planned = plan(func, args, kwargs)
        if planned is not None:
            used.add(planned.name)
        return planned

    dispatch.plan_call = remember
    wrong = []
    try:
        for sample in [one for one in SAMPLES if one.label in samples]:
            plain = [leaf(values) for values in sample.arrays]
            try:
                wanted = as_list(sample.call(*plain))
                run_backward(wanted)
            except Exception:
                wrong.append(f"{sample.label}, plain: {traceback.format_exc(limit=-3)}")
                continue
            gradients = [None if hp.grad_of(one) is None else hp.grad_of(one).asnumpy().copy() for one in plain]
            every = list(itertools.product(*[layouts_of(mesh, values) for values in sample.arrays]))
            chosen = every if len(every) <= most else random.Random(sample.label).sample(every, most)
            for layouts in chosen:
                try:
                    found = complaint(sample, layouts, mesh, wanted, gradients)
                except Exception:  # the other ranks may be elsewhere now, so nothing more can be asked of them
                    return [
                        f"{sample.label} under {', '.join(map(str, layouts))}: {traceback.format_exc(limit=-6)}"
                    ], []
                if found:
                    wrong.append(f"{sample.label} under {', '.join(map(str, layouts))}: {found}")
                    break
    finally:
        dispatch.plan_call = plan
    return wrong, sorted(used)


@pytest.fixture(scope="module")
def validated(worlds):
    """The complaints, and the rules used, on a mesh of 2 ranks under every layout."""
    return worlds(2, timeout=600).run(validate, [sample.label for sample in SAMPLES], (2,), 6)[0]


def test_every_sample_equals_one_device_under_every_layout(validated):
    wrong, _ = validated
    assert not wrong, f"{len(wrong)} of {len(SAMPLES)}:\n" + "\n".join(wrong)


def test_the_page_says_how_many_rules_were_validated(validated):
    _, used = validated
    names = set(rule_names())
    counted = {name if name in names else name.rstrip("_") for name in used} & names
    said = re.search(r"(\d+) of (\d+) rules", DOCS.read_text())
    assert said, "docs/mindspore_tensors.md says '<validated> of <all> rules'"
    assert int(said[1]) <= len(counted), f"the page says {said[1]}, validated were {len(counted)}: {sorted(counted)}"
    assert int(said[2]) <= len(names)


SEVERAL_AXES = ("add, stretched", "linear", "layer_norm", "softmax", "embedding", "cross_entropy", "ranges", "one row")


def test_on_two_axes(worlds):
    wrong, _ = worlds(4, timeout=600).run(validate, list(SEVERAL_AXES), (2, 2), 16)[0]
    assert not wrong, "\n".join(wrong)
