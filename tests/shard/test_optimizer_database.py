"""PyTorch's database of optimizers: every configuration on parameters under random layouts, against one device."""

import copy
import random
import traceback
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from tests.shard.op_trials import random_layout
from tests.shard.validator import tensor
from tests.world import run_on_ranks, small_or_sweep

only_on = "torch"  # PyTorch's own database of optimizers

SHAPES = [(6, 4), (5,), (1, 3), ()]


def _configurations() -> list[tuple[Any, Any]]:
    from torch.testing._internal import common_optimizers as database

    found = []
    for info in database.optim_db:
        if not info.only_supports_sparse_grads:
            # The one function that adds foreach, fused and differentiable; it has no public name.
            every = database._get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float64, info)
            found += [(info, one) for one in every]
    return found


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    value = tensor(*shape, seed=seed)
    return torch.complex(value, tensor(*shape, seed=seed + 50)) if dtype.is_complex else value


def _steps(optimizer: torch.optim.Optimizer, parameters: list[Any], targets: list[Any], needs_closure: bool) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = sum(
            ((p - t).abs() ** 2 * (1 + number)).sum()
            for number, (p, t) in enumerate(zip(parameters, targets, strict=True))
        )
        loss.backward()
        return loss

    for _ in range(3):
        if needs_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def _try(info: Any, given: Any, dtype: torch.dtype, mesh: Any, pick: random.Random) -> str | None:
    kwargs = given.kwargs
    tolerance = 1e-2 if info.optim_cls.__name__ == "Muon" else 1e-8  # it multiplies matrices in bfloat16
    shapes = [shape for shape in SHAPES if info.optim_cls.__name__ != "Muon" or len(shape) == 2]
    values = [_values(shape, dtype, 1) for shape in shapes]
    targets = [_values(shape, dtype, 2) for shape in shapes]
    plain = [nn.Parameter(value.clone()) for value in values]
    try:
        _steps(info.optim_cls(plain, **copy.deepcopy(kwargs)), plain, targets, info.step_requires_closure)
    except Exception:  # differentiable=True cannot write into leaves
        return None
    layouts = [random_layout(pick, mesh, value, pending=False) for value in values]
    try:
        ours = [
            nn.Parameter(hp.distribute_tensor(v.clone(), mesh, layout))
            for v, layout in zip(values, layouts, strict=True)
        ]
        goals = [hp.distribute_tensor(t.clone(), mesh, layout) for t, layout in zip(targets, layouts, strict=True)]
        _steps(info.optim_cls(ours, **copy.deepcopy(kwargs)), ours, goals, info.step_requires_closure)
        whole = [parameter.full_tensor() for parameter in ours]
        complaint = ""
        for mine, want in zip(whole, plain, strict=True):
            if not torch.allclose(mine, want, rtol=tolerance, atol=tolerance):
                complaint = f"{mine} instead of {want}"
    except Exception:
        complaint = f"error: {traceback.format_exc(limit=-6)}"
    if not complaint:
        return ""
    where = [layout.placements for layout in layouts]
    return f"{info.optim_cls.__name__} {given.desc} {kwargs} {dtype} under {where}: {complaint}"


@run_on_ranks(2)
@pytest.mark.parametrize("every", small_or_sweep([4, 1], [4]))
def test_three_steps_of_every_configuration(every: int) -> None:
    warnings.simplefilter("ignore")
    mesh = hp.init_device_mesh("cpu", (2,))
    right, wrong = 0, []
    for number, (info, given) in enumerate(list(_configurations())[::every]):
        for dtype in (torch.float64, *((torch.complex128,) if info.supports_complex else ())):
            complaint = _try(info, given, dtype, mesh, random.Random(number))
            right += complaint == ""
            if complaint:
                wrong.append(complaint)
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong)
    assert right > 100 / every
