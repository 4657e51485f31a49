"""Trying one operator of PyTorch's database: its samples with each tensor under a random layout, against one device.

An operator has several *forms*: the function, the method, Python's operator, the function with all arguments by
keyword, the one that writes into its first argument, the one that writes into ``out=``; and the function with blocks
that are not contiguous, with gradients for some of the tensors only, and with gradients of gradients. Values,
gradients, shapes, dtypes and what was written into are compared; in the form ``errors`` the samples are wrong calls,
which must raise on every rank.
"""

from __future__ import annotations

import itertools
import os
import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy
import torch

import hyper_parallel as hp
from hyper_parallel.core.shard.dispatching.strict_mode import gathered_ops
from tests.shard.validator import spread, tensors_in

# These give other values at every call, or memory that nobody has written to: only shapes and replicas are compared.
UNDETERMINED = {
    *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "bernoulli"),
    *("multinomial", "rand_like", "randn_like", "randint_like", "cauchy", "exponential", "geometric", "log_normal"),
    *("uniform", "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d", "randn", "randint"),
    *("nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout", "nn.functional.rrelu", "svd_lowrank"),
    *("nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d", "pca_lowrank", "normal_"),
    *("nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward", "normal"),
}
DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)  # the most telling one first
MAX_NUMEL = 20_000
ALIKE = ("function", "keywords", "strided", "some_gradients", "second_gradients")  # the function itself
FORMS = (*ALIKE, "method", "operator", "in_place", "out", "errors")


@dataclass
class Outcome:
    """What came of one operator."""

    name: str
    status: str  # "right", "wrong", "error", "no sample"
    gathered: bool
    message: str = ""


@dataclass(frozen=True)
class Trial:
    """How the operators are tried."""

    seed: int = 0
    mesh_shape: tuple[int, ...] = (2,)
    num_samples: int = 4
    form: str = "function"
    dtype: str = ""  # "bfloat16", ...; without it each operator's most telling one


def op_infos() -> list[Any]:
    """The database, in its order, and the operators on lists."""
    from torch.testing._internal import common_methods_invocations as database

    kinds = ("unary", "binary", "pointwise", "reduce", "other")
    return [*database.op_db, *(info for kind in kinds for info in getattr(database, f"foreach_{kind}_op_db"))]


def full_name(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


def check_ops(indices: list[int], trial: Trial) -> list[Outcome]:
    """Runs on every rank."""
    warnings.simplefilter("ignore")
    os.environ["PYTORCH_TEST_WITH_SLOW"] = "0"
    mesh = hp.init_device_mesh("cpu", trial.mesh_shape)
    infos = op_infos()
    with quick_seeds():
        return [_check(infos[index], mesh, trial) for index in indices]


@contextmanager
def quick_seeds() -> Iterator[None]:
    """The database seeds for every sample, and PyTorch notes each seed, with a stack, for devices that may come."""
    with ExitStack() as stack:
        for device in (torch.cuda, torch.xpu):
            stack.enter_context(mock.patch.object(device, "manual_seed_all"))
        yield


def _check(info: Any, mesh: Any, trial: Trial) -> Outcome:
    name = full_name(info)
    before = sum(gathered_ops.values())
    pick = random.Random(f"{trial.seed}{name}")
    tried = 0
    for one, layouts, where in trials_of(info, mesh, trial, pick):
        tried += 1
        try:
            complaint = one.compare(layouts, pick)
        except Exception:
            complaint = f"error: {traceback.format_exc(limit=-5)}"
        if complaint:
            status = "error" if complaint.startswith("error") else "wrong"
            return Outcome(name, status, sum(gathered_ops.values()) > before, f"{complaint}\n  under {where}")
    if not tried:
        return Outcome(name, "no sample", False, "nothing of such a form and dtype, with dense tensors, ran plainly")
    return Outcome(name, "right", sum(gathered_ops.values()) > before)


def trials_of(info: Any, mesh: Any, trial: Trial, pick: random.Random) -> Iterator[tuple[OneSample, list[Any], str]]:
    """The samples of an operator that run plainly, with a layout for each tensor and a description of both."""
    dtype = _dtype(info, trial)
    call = _form(info, trial.form)
    if dtype is None or call is None:
        return
    gradients = info.supports_autograd and dtype in (torch.float64, torch.complex128) and trial.form != "out"
    try:
        samples = _samples(info, dtype, gradients, trial)
    except Exception:  # the database has none for this dtype
        return
    pick.shuffle(samples)
    tried = 0
    for sample in samples:
        if tried >= trial.num_samples:
            break
        tensors = tensors_in((sample.input, sample.args, sample.kwargs))
        if not tensors or any(t.numel() > MAX_NUMEL or t.layout is not torch.strided for t in tensors):
            continue
        if trial.form == "some_gradients":
            tensors = [tensor.detach() if pick.random() < 0.5 else tensor for tensor in tensors]
        one = OneSample(full_name(info), call, sample, tensors, gradients, mesh, trial.form, info.name in UNDETERMINED)
        try:
            one.run_plain()
        except Exception:
            if trial.form != "errors":
                continue
        else:
            if trial.form == "errors":
                continue
        tried += 1
        layouts = [random_layout(pick, mesh, t) for t in tensors]
        where = ", ".join(
            f"{tuple(t.shape)} {t.dtype} {layout.placements}" for t, layout in zip(tensors, layouts, strict=True)
        )
        yield one, layouts, where + f" and {sample.args} {sample.kwargs}"[:300]


def _dtype(info: Any, trial: Trial) -> torch.dtype | None:
    if trial.dtype:
        wanted = getattr(torch, trial.dtype)
        return wanted if wanted in info.dtypes else None
    return next((d for d in DTYPES if d in info.dtypes), next(iter(info.dtypes), None))


def _form(info: Any, form: str) -> Callable[..., Any] | None:
    if form in ALIKE:
        return info.op
    return {
        "errors": info.op if info.error_inputs_func is not None else None,
        "method": info.method_variant,
        "operator": info.operator_variant,
        "in_place": info.inplace_variant,
        "out": info.op if info.supports_out else None,
    }[form]


def _samples(info: Any, dtype: torch.dtype, gradients: bool, trial: Trial) -> list[Any]:
    torch.manual_seed(17)
    random.seed(17)
    numpy.random.seed(17)
    if trial.form == "errors":
        return [error.sample_input for error in info.error_inputs("cpu")]
    most = 40 if trial.num_samples <= 4 else 400
    return list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=gradients), most))


def _argument_names(name: str, count: int) -> list[tuple[str, ...]]:
    """What the first arguments of an operator may be called, by its overloads."""
    packet = getattr(torch.ops.aten, name.removeprefix("nn.functional.").replace(".", "_"), None)
    found = []
    for overload in packet.overloads() if packet is not None else ():
        names = [argument.name for argument in getattr(packet, overload)._schema.arguments]
        if len(names) >= count and names[:1] in (["self"], ["input"]):
            found.append(("input", *names[1:count]))
    return list(dict.fromkeys(found))


def random_layout(pick: random.Random, mesh: Any, tensor: torch.Tensor, pending: bool = True) -> Any:
    """A layout of a tensor: cut dims in any order, sums that are pending where ``pending``."""
    options: list[Any] = [hp.Replicate(), *(hp.Shard(dim) for dim in range(tensor.ndim))]
    weights = [1.0] + [2.0] * tensor.ndim
    if pending and tensor.dtype is not torch.bool and not (tensor.is_floating_point() and tensor.element_size() == 1):
        options.append(hp.Partial())
        weights.append(0.5)
    layout = hp.Layout.from_placements(mesh, pick.choices(options, weights, k=mesh.ndim), tensor.ndim)
    if pick.random() < 0.5:
        layout = hp.Layout.of(mesh, [tuple(reversed(axes)) for axes in layout.shard_axes], layout.partials)
    return layout


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


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


class OneSample:
    """One call of an operator, made plainly and with distributed tensors."""

    def __init__(
        self,
        name: str,
        call: Callable[..., Any],
        sample: Any,
        tensors: list[torch.Tensor],
        gradients: bool,
        mesh: Any,
        form: str,
        is_undetermined: bool,
    ) -> None:
        self.name, self.call, self.sample, self.tensors = name, call, sample, tensors
        self.gradients, self.mesh, self.form, self.is_undetermined = gradients, mesh, form, is_undetermined
        self.names: tuple[str, ...] = ()
        self.outs: list[torch.Tensor] = []
        self.expected: list[Any] = []
        self.wanted_gradients: list[Any] = []

    def run_plain(self) -> None:
        if self.form == "keywords":
            self._find_names()
        fresh = [_fresh(tensor) for tensor in self.tensors]
        if self.form == "strided":
            fresh = [_strided(tensor) for tensor in fresh]
        if self.form == "out":
            fresh = [tensor.detach() for tensor in fresh]
            result = self._called(fresh)
            self.outs = [torch.zeros_like(one) for one in tensors_in(result)]
            self.outs_are_one = isinstance(result, torch.Tensor)
            fresh = [_fresh(tensor).detach() for tensor in self.tensors]
        self.expected, self.wanted_gradients = self._run(fresh, [out.clone() for out in self.outs])

    def _find_names(self) -> None:
        for names in _argument_names(self.name.split(".")[0], 1 + len(self.sample.args)):
            self.names = names
            try:
                self._called([_fresh(tensor) for tensor in self.tensors])
                return
            except Exception:
                continue
        raise TypeError("it takes no keywords")

    def compare(self, layouts: list[Any], pick: random.Random) -> str:
        ours = [spread(_fresh(t), layout) for t, layout in zip(self.tensors, layouts, strict=True)]
        if self.form == "strided":
            ours = [_with_strided_block(tensor) for tensor in ours]
        outs = []
        if self.form == "out":
            ours = [tensor.detach() for tensor in ours]
            outs = [
                hp.distribute_tensor(out.clone(), self.mesh, random_layout(pick, self.mesh, out, pending=False))
                for out in self.outs
            ]
        if self.form == "errors":
            try:
                self._run(ours, outs)
            except Exception:
                return ""
            return "no error where one device raises"
        try:
            results, grads = self._run(ours, outs)
        except RuntimeError as error:
            num_written = len(tensors_in(self.sample.input))
            is_pending = any(layout.has_partial for layout in layouts[:num_written])
            if is_pending and "partial value" in str(error) and "cannot write" in str(error):
                return ""
            raise
        # All gathers come first: a rank that finds a difference must not leave the others waiting.
        results = [leaf.full_tensor() if isinstance(leaf, hp.DTensor) else leaf for leaf in results]
        if self.form == "in_place" and len(results) == 2 and not _close(*results):
            return f"{results[1].detach()} was written, but {results[0].detach()} returned"
        grads = [None if grad is None else grad.full_tensor() for grad in grads]
        return self._difference(results) or self._gradient_difference(grads)

    def _called(self, given: list[Any], outs: Any = None) -> Any:
        first, args, kwargs = _replaced((self.sample.input, self.sample.args, self.sample.kwargs), list(given))
        torch.manual_seed(3)
        hp.manual_seed(3)
        if outs:
            kwargs["out"] = outs[0] if self.outs_are_one else tuple(outs)
        if self.names:
            named = dict(zip(self.names, (first, *args), strict=True)) | kwargs
            return self.call(**dict(reversed(named.items())))
        return self.call(first, *args, **kwargs)

    def _run(self, tensors: list[Any], outs: list[Any]) -> tuple[list[Any], list[Any]]:
        given = list(tensors)
        num_written = len(tensors_in(self.sample.input)) if self.form == "in_place" else 0
        given[:num_written] = [tensor.clone() for tensor in given[:num_written]]
        result = self._called(given, outs)
        if num_written:
            result = [result, given[:num_written]]
        elif outs:
            result = [result, outs]
        leaves = _leaves(result)
        if self.gradients and self.form != "errors":
            outputs = tensors_in(self.sample.output_process_fn_grad(result))
            wanted = [tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf]
            if self.form == "second_gradients" and wanted and (loss := _loss(outputs)) is not None:
                first = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
                outputs = [gradient for gradient in first if gradient is not None]
            _backward(outputs)
        return leaves, [tensor.grad if tensor.is_leaf else None for tensor in tensors]

    def _difference(self, ours: list[Any]) -> str:
        if len(ours) != len(self.expected):
            return f"{len(ours)} results instead of {len(self.expected)}"
        for mine, want in zip(ours, self.expected, strict=True):
            if not isinstance(want, torch.Tensor):
                if mine != want and not (mine != mine and want != want):
                    return f"{mine!r} instead of {want!r}"
                continue
            if mine.shape != want.shape or mine.dtype != want.dtype:
                return f"{tuple(mine.shape)} {mine.dtype} instead of {tuple(want.shape)} {want.dtype}"
            if not self.is_undetermined and not _close(mine, want):
                return f"{mine.detach()} instead of {want.detach()}"
        return ""

    def _gradient_difference(self, ours: list[Any]) -> str:
        for number, (mine, want) in enumerate(zip(ours, self.wanted_gradients, strict=True)):
            if self.is_undetermined or (want is None and mine is None):
                continue
            mine = torch.zeros_like(self.tensors[number]) if mine is None else mine
            want = torch.zeros_like(self.tensors[number]) if want is None else want
            if not _close(mine, want):
                return f"gradient {number} is {mine} instead of {want}"
        return ""


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in every second element of the memory, in the other order of dims."""
    memory = torch.empty((*reversed(tensor.shape), 2), dtype=tensor.dtype)[..., 0]
    laid = memory.permute(*reversed(range(tensor.ndim)))
    return laid.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def _with_strided_block(tensor: Any) -> Any:
    block = _strided(tensor.detach().to_local())
    made = hp.DTensor.from_local(block, tensor.device_mesh, tensor.layout, shape=tuple(tensor.shape))
    return made.requires_grad_(tensor.requires_grad)


def _backward(outputs: list[Any]) -> None:
    loss = _loss(outputs)
    if loss is not None:
        loss.backward()


def _loss(outputs: list[Any]) -> Any:
    """A number that all elements matter to; None if none has a gradient."""
    whole = [out.full_tensor() if isinstance(out, hp.DTensor) else out for out in outputs]
    terms = []
    for number, out in enumerate(whole):
        if out.requires_grad and (out.is_floating_point() or out.is_complex()):
            weight = torch.rand(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
            term = (out * weight.to(out.dtype)).sum()
            terms.append(term.real + term.imag if term.is_complex() else term)
    return sum(terms) if terms else None


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        return [leaf for item in tree for leaf in _leaves(item)]
    return [tree]


_TOLERANCES = {torch.float64: 1e-7, torch.complex128: 1e-7, torch.bfloat16: 4e-2, torch.float16: 1e-2}


def _close(mine: torch.Tensor, want: torch.Tensor) -> bool:
    if mine.layout is not torch.strided:
        mine, want = mine.to_dense(), want.to_dense()
    if not (mine.is_floating_point() or mine.is_complex()):
        return torch.equal(mine, want)
    tolerance = _TOLERANCES.get(mine.dtype, 1e-3)
    if mine.element_size() == 1:
        mine, want = mine.float(), want.float()
    absolute = tolerance
    if mine.element_size() == 2 and want.isfinite().any():  # terms that are summed in another order cancel otherwise
        absolute = tolerance * max(1.0, want[want.isfinite()].abs().max().item())
    return torch.allclose(mine, want, rtol=tolerance, atol=absolute, equal_nan=True)
