"""Gradients of gradients of MindSpore's operators against differences: ``python -m`` this prints what is wrong.

The calls are those of ``tests/shard/mindspore_samples.py``, on plain tensors. Each is right, refused by this library,
an error of MindSpore's, or wrong, which nothing should be.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import numpy as np
from mindspore import Tensor

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.mindspore import private_api
from tests.shard.mindspore_samples import SAMPLES, Sample

_platform = get_platform()
_ROUNDED = ("half", "bfloat16")  # differences see steps where the gradient of a cast is 1


def _first(sample: Sample, arrays: list[np.ndarray], create_graph: bool) -> tuple[list[Any], Any] | None:
    """The inputs and the gradients of a sum of squares of all results; None when there are none."""
    leaves = [Tensor(array) for array in arrays]
    for array, one in zip(arrays, leaves, strict=True):
        if array.dtype.kind == "f":
            one.requires_grad_()
    results = sample.call(*leaves)
    terms = []
    for result in results if isinstance(results, (tuple, list)) else [results]:
        if private_api.requires_grad(result):
            weights = np.cos(np.arange(max(1, result.numel())) + 1.0).reshape(tuple(result.shape))
            terms.append((result * result * Tensor(weights, result.dtype)).sum())
    if not terms:
        return None
    inputs = [one for one in leaves if private_api.requires_grad(one)]
    return inputs, _platform.grad(sum(terms[1:], terms[0]), inputs, create_graph=create_graph, allow_unused=True)


def _product(tensors: Any, arrays: list[np.ndarray]) -> float:
    pairs = zip(tensors, arrays, strict=True)
    return sum(float((one.asnumpy().astype(np.float64) * array).sum()) for one, array in pairs if one is not None)


def judge(sample: Sample, is_double: bool) -> str:
    """What comes of one sample: "right", "no gradient", or what is wrong or refused."""
    private_api.start_recording()  # an operator that has failed stops it
    random = np.random.RandomState(1)
    arrays = [one.astype(np.float64) if is_double and one.dtype.kind == "f" else one for one in sample.arrays]
    places = [place for place, one in enumerate(arrays) if one.dtype.kind == "f"]
    directions, steps = ([random.randn(*arrays[place].shape) for place in places] for _ in range(2))
    if _first(sample, arrays, False) is None:
        return "no gradient"
    inputs, gradients = _first(sample, arrays, True)
    terms = [
        (one * Tensor(direction, one.dtype)).sum()
        for one, direction in zip(gradients, directions, strict=True)
        if one is not None and private_api.requires_grad(one)
    ]
    found = _product(_platform.grad(sum(terms[1:], terms[0]), inputs, allow_unused=True), steps) if terms else 0.0

    def slope(time: float) -> float:
        moved = list(arrays)
        for place, step in zip(places, steps, strict=True):
            moved[place] = (arrays[place] + time * step).astype(arrays[place].dtype)
        return _product(_first(sample, moved, False)[1], directions)

    best, wanted = np.inf, 0.0  # some kernels compute in float32: the step is the one for which differences agree best
    for time in (1e-6, 1e-4, 1e-3, 1e-2, 3e-2):
        one, other = ((slope(scale * time) - slope(-scale * time)) / (2 * scale * time) for scale in (1.0, 1.5))
        if abs(found - one) < 1e-3 * (1e-2 + abs(one)):
            return "right"
        if abs(one - other) / (1e-3 + abs(one)) < best:
            best, wanted = abs(one - other) / (1e-3 + abs(one)), one
    return "right" if abs(found - wanted) < 3 * best * (1e-2 + abs(wanted)) else f"wrong: {found:.6g} for {wanted:.6g}"


def main() -> int:
    counts: Counter[str] = Counter()
    for sample in SAMPLES:
        verdict = ""
        for is_double in (True, False):
            try:
                verdict = judge(sample, is_double)
                break
            except Exception as error:
                verdict = f"refused: {error}" if "create_graph: " in str(error) else f"error of MindSpore's: {error}"
                if verdict.startswith("refused"):
                    break
        if sample.label not in _ROUNDED:
            counts[verdict.partition(":")[0]] += 1
            if verdict not in ("right", "no gradient"):
                print(f"{sample.label}: {verdict.splitlines()[0][:150]}")
    print(dict(counts))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
