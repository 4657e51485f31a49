"""PyTorch's database of modules: parameters, buffers and inputs under random layouts, against one device."""

import copy
import random
import traceback
import warnings
from typing import Any

import torch
from torch import nn

import hyper_parallel as hp
from tests.shard.op_trials import _backward, _close, _fresh, _leaves, _replaced, random_layout
from tests.shard.validator import spread, tensors_in

only_on = "torch"  # PyTorch's own database of modules

# These give other values at every call while training.
DRAWS = {
    *("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout", "RReLU"),
    *("FractionalMaxPool2d", "FractionalMaxPool3d"),
}
WITH_DROPOUT = {"Transformer", "TransformerEncoder", "TransformerEncoderLayer", "TransformerDecoderLayer"}


def module_infos() -> list[Any]:
    from torch.testing._internal.common_modules import module_db

    return list(module_db)


def _distribute(module: nn.Module, mesh: Any, pick: random.Random) -> None:
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            layout = random_layout(pick, mesh, parameter, pending=False)
            whole = hp.distribute_tensor(parameter.detach().clone(), mesh, layout)
            setattr(part, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        for name, buffer in list(part.named_buffers(recurse=False)):
            layout = random_layout(pick, mesh, buffer, pending=False)
            setattr(part, name, hp.distribute_tensor(buffer.detach().clone(), mesh, layout))


def _run(module: nn.Module, sample: Any, tensors: list[Any]) -> tuple[list[Any], list[Any]]:
    args, kwargs = _replaced((sample.forward_input.args, sample.forward_input.kwargs), list(tensors))
    torch.manual_seed(3)
    hp.manual_seed(3)
    result = module(*args, **kwargs)
    _backward(tensors_in(result))
    state = [value for _, value in module.named_buffers()]
    grads = [parameter.grad for parameter in module.parameters()] + [tensor.grad for tensor in tensors]
    return [*_leaves(result), *state], grads


def _whole(values: list[Any]) -> list[Any]:
    return [value.full_tensor() if isinstance(value, hp.DTensor) else value for value in values]


def _difference(ours: list[Any], theirs: list[Any], what: str) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} {what}s instead of {len(theirs)}"
    for number, (mine, want) in enumerate(zip(ours, theirs, strict=True)):
        if want is None and mine is None:
            continue
        if want is None or mine is None:
            if (mine if want is None else want).any():
                return f"{what} {number} is {mine} instead of {want}"
        elif mine.shape != want.shape or mine.dtype != want.dtype or not _close(mine, want):
            return f"{what} {number} is {mine} instead of {want}"
    return ""


def _try(info: Any, sample: Any, training: bool, mesh: Any, pick: random.Random) -> str | None:
    """What went wrong; None when the module cannot be tried, "" when it is right."""
    made, given = sample.constructor_input, sample.forward_input
    if any(isinstance(value, nn.utils.rnn.PackedSequence) for value in given.args):
        return None
    torch.manual_seed(5)
    plain = info.module_cls(*made.args, **made.kwargs).to(torch.float64)
    plain.train(training)
    if info.name.removeprefix("nn.") in WITH_DROPOUT and training:
        for part in plain.modules():
            if hasattr(part, "p"):
                part.p = 0.0
            if isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.0
    tensors = tensors_in((given.args, given.kwargs))
    if any(isinstance(parameter, nn.UninitializedParameter) for parameter in plain.parameters()) or not tensors:
        return None
    ours = copy.deepcopy(plain)
    try:
        expected, expected_grads = _run(plain, sample, [_fresh(t) for t in tensors])
    except Exception:
        return None
    layouts = [random_layout(pick, mesh, t) for t in tensors]
    try:
        _distribute(ours, mesh, pick)
        inputs = [spread(_fresh(t), layout) for t, layout in zip(tensors, layouts, strict=True)]
        results, grads = _run(ours, sample, inputs)
        results, grads = _whole(results), _whole(grads)
        draws = info.name.removeprefix("nn.") in DRAWS and training
        complaint = "" if draws else _difference(results, expected, "result")
        complaint = complaint or ("" if draws else _difference(grads, expected_grads, "gradient"))
    except Exception:
        complaint = f"error: {traceback.format_exc(limit=-6)}"
    if not complaint:
        return ""
    shapes = [f"{tuple(t.shape)} {layout.placements}" for t, layout in zip(tensors, layouts, strict=True)]
    cut = {name: p.placements for name, p in ours.named_parameters() if isinstance(p, hp.DTensor)}
    return f"{info.name}({made.args}, {made.kwargs}, training={training}) of {shapes} with {cut}: {complaint}"


def check_modules(
    indices: list[int], seed: int, mesh_shape: tuple[int, ...], num_samples: int
) -> tuple[int, list[str]]:
    """Runs on every rank: how many samples were right, and what was wrong."""
    warnings.simplefilter("ignore")
    mesh = hp.init_device_mesh("cpu", mesh_shape)
    infos, right, wrong = module_infos(), 0, []
    for index in indices:
        info = infos[index]
        for training in (True, False):
            torch.manual_seed(17)
            random.seed(17)
            samples = list(info.module_inputs_func(info, "cpu", torch.float64, True, training))
            pick = random.Random(f"{seed}{info.name}{training}")
            pick.shuffle(samples)
            for sample in samples[:num_samples]:
                complaint = _try(info, sample, training, mesh, pick)
                right += complaint == ""
                if complaint:
                    wrong.append(complaint)
    return right, wrong


def run_modules(
    worlds: Any, seed: int, mesh_shape: tuple[int, ...], num_samples: int, only: str = "", every: int = 1
) -> int:
    indices = [number for number, info in enumerate(module_infos()) if only in info.name][::every]
    size = 1
    for length in mesh_shape:
        size *= length
    answers = worlds(size, timeout=500).run(check_modules, indices, seed, mesh_shape, num_samples)
    wrong = [complaint for _, complaints in answers for complaint in complaints]
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong)
    return answers[0][0]


def test_modules_are_right(worlds) -> None:
    every = 1 if worlds.sweep else 4
    assert run_modules(worlds, seed=1, mesh_shape=(2,), num_samples=2, every=every) > 200 / every
