"""PyTorch's random functions on plain tensors, while draws have addresses: see ``core/dtensor/random/by_sample.py``.

Note [Replaced where everybody calls them]
``F.dropout`` and its like reach their operators through ``torch._VF``, under whatever name a model has imported them;
so they are replaced there. What users call directly is replaced in ``torch``, ``torch.Tensor`` and
``torch.nn.functional``. A replacement looks whether draws have addresses; where they have none, or a DTensor is among
the arguments, or the caller brings a generator of his own, PyTorch's function runs as ever.

Left to PyTorch's generator, with a warning where a context notices it: ``poisson``, ``binomial``, ``rrelu``, pooling at
random places, and dropout between the layers of ``nn.LSTM`` and its like, which are drawn inside of one operator.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from hyper_parallel.platform.torch.base.dtensor_base import DTensorBase
from hyper_parallel.platform.torch.takes_over.compiling import keep_compiler_out
from hyper_parallel.platform.torch.traced.attention import dropping

_Drawn = Callable[..., torch.Tensor]  # (kind, shape, dtype, device, **parameters)
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class _Replacements:
    """The random functions, made of values that ``drawn`` gives."""

    def __init__(self, drawn: _Drawn) -> None:
        self._drawn = drawn

    def _like(self, kind: str, tensor: torch.Tensor, dtype: torch.dtype | None = None, **parameters: Any) -> Any:
        return self._drawn(kind, tuple(tensor.shape), dtype or tensor.dtype, tensor.device, **parameters)

    def _write(self, tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            tensor.copy_(values)
        return tensor

    # ---------------------------------------------------------------- dropout

    def dropout(self, input: torch.Tensor, p: float, train: bool) -> Any:
        return input * self._like("bernoulli", input, p=1.0 - p) * _scale(p) if train and p else input

    def dropout_(self, input: torch.Tensor, p: float, train: bool) -> Any:
        return input.mul_(self._like("bernoulli", input, p=1.0 - p)).mul_(_scale(p)) if train and p else input

    def native_dropout(self, input: torch.Tensor, p: float, train: bool | None) -> Any:
        if train is False or not p:
            return input.clone(), torch.ones_like(input, dtype=torch.bool)
        keep = self._like("bernoulli", input, torch.bool, p=1.0 - p)
        return input * keep * _scale(p), keep

    def feature_dropout(self, input: torch.Tensor, p: float, train: bool) -> Any:
        return input * self._features(input, p) * _scale(p) if train and p else input

    def feature_dropout_(self, input: torch.Tensor, p: float, train: bool) -> Any:
        return input.mul_(self._features(input, p)).mul_(_scale(p)) if train and p else input

    def alpha_dropout(self, input: torch.Tensor, p: float, train: bool) -> Any:
        return _alpha(input, self._like("bernoulli", input, p=1.0 - p), p) if train and p else input

    def alpha_dropout_(self, input: torch.Tensor, p: float, train: bool) -> Any:
        return input.copy_(self.alpha_dropout(input, p, train))

    def feature_alpha_dropout(self, input: torch.Tensor, p: float, train: bool) -> Any:
        return _alpha(input, self._features(input, p), p) if train and p else input

    def feature_alpha_dropout_(self, input: torch.Tensor, p: float, train: bool) -> Any:
        return input.copy_(self.feature_alpha_dropout(input, p, train))

    def _features(self, input: torch.Tensor, p: float) -> torch.Tensor:
        shape = (*input.shape[:2], *(1,) * (input.ndim - 2))
        return self._drawn("bernoulli", shape, input.dtype, input.device, p=1.0 - p)

    def scaled_dot_product_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """The definition: PyTorch's kernels draw for themselves."""
        if enable_gqa:
            repeats = query.shape[-3] // key.shape[-3]
            key, value = (tensor.repeat_interleave(repeats, -3) for tensor in (key, value))
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if attn_mask is None:
            weights = scores.softmax(-1)
        elif attn_mask.dtype == torch.bool:
            weights = scores.masked_fill(attn_mask.logical_not(), -math.inf).softmax(-1)
            weights = weights.masked_fill(attn_mask.any(-1, keepdim=True).logical_not(), 0.0)
        else:
            weights = (scores + attn_mask).softmax(-1)
        return self.dropout(weights, dropout_p, True) @ value

    # ---------------------------------------------------------------- new tensors

    def rand(self, *size: Any, **options: Any) -> Any:
        return self._new("uniform", size, options)

    def randn(self, *size: Any, **options: Any) -> Any:
        return self._new("normal", size, options)

    def _new(self, kind: str, size: Any, options: dict[str, Any], **parameters: Any) -> Any:
        size = size or (options.get("size"),)
        shape = tuple(size[0]) if isinstance(size[0], (list, tuple)) else tuple(size)
        out = options.get("out")
        dtype = out.dtype if out is not None else options.get("dtype") or torch.get_default_dtype()
        device = options.get("device") or (torch.get_default_device() if out is None else out.device)
        values = self._drawn(kind, tuple(map(int, shape)), dtype, device, **parameters)
        if out is not None:
            return self._write(out.resize_(values.shape), values)
        return values.requires_grad_() if options.get("requires_grad") else values

    def randint(self, *args: Any, **options: Any) -> Any:
        bounds = [bound for bound in args if not isinstance(bound, (list, tuple))]
        shape = next((size for size in args if isinstance(size, (list, tuple))), options.get("size"))
        low, high = _bounds(bounds, options)
        options = {**options, "dtype": options.get("dtype") or torch.int64}
        return self._new("randint", (tuple(shape or ()),), options, low=low, high=high)

    def randperm(self, n: int, **options: Any) -> Any:
        order = self._drawn("uniform", (n,), torch.float64, options.get("device") or torch.get_default_device())
        return order.argsort().to(options.get("dtype") or torch.int64)

    def rand_like(self, input: torch.Tensor, *, dtype: Any = None, requires_grad: bool = False, **_: Any) -> Any:
        values = self._like("uniform", input, dtype)
        return values.requires_grad_() if requires_grad else values

    def randn_like(self, input: torch.Tensor, *, dtype: Any = None, requires_grad: bool = False, **_: Any) -> Any:
        values = self._like("normal", input, dtype)
        return values.requires_grad_() if requires_grad else values

    def randint_like(self, input: torch.Tensor, *bounds: Any, dtype: Any = None, **options: Any) -> Any:
        low, high = _bounds(list(bounds), options)
        whole = self._like("randint", input, torch.int64, low=low, high=high)
        return whole.to(dtype or input.dtype)

    def normal(self, mean: Any, std: Any = 1.0, size: Any = None, *, out: Any = None, **options: Any) -> Any:
        if size is not None:
            values = self._new("normal", (tuple(size),), options, mean=float(mean), std=float(std))
        else:
            like = mean if isinstance(mean, torch.Tensor) else std
            shape = torch.broadcast_shapes(*(one.shape for one in (mean, std) if isinstance(one, torch.Tensor)))
            values = self._drawn("normal", tuple(shape), like.dtype, like.device) * std + mean
        return values if out is None else self._write(out.resize_(values.shape), values)

    def bernoulli(self, input: torch.Tensor, p: float | None = None, *, out: Any = None, **_: Any) -> Any:
        if p is not None:
            values = self._like("bernoulli", input, p=float(p))
        else:
            kind = input.dtype if input.dtype in _FLOATS else torch.get_default_dtype()
            values = (self._like("uniform", input, kind) < input).to(input.dtype)
        return values if out is None else self._write(out.resize_(values.shape), values)

    def multinomial(self, input: torch.Tensor, num_samples: int, replacement: bool = False, *, out: Any = None) -> Any:
        weights = input.detach().double()
        if replacement:
            sums = weights.cumsum(-1)
            shape = (*input.shape[:-1], num_samples)
            places = self._drawn("uniform", shape, torch.float64, input.device) * sums[..., -1:]
            values = torch.searchsorted(sums, places, right=True).clamp_(max=input.shape[-1] - 1)
        else:  # the first of as many clocks that ring at these rates
            values = (weights / _exponential(self._like("uniform", input, torch.float64))).topk(num_samples, -1).indices
        return values if out is None else self._write(out.resize_(values.shape), values)

    # ---------------------------------------------------------------- in place

    def normal_(self, input: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Any:
        return self._write(input, self._like("normal", input, mean=float(mean), std=float(std)))

    def uniform_(self, input: torch.Tensor, low: float = 0.0, high: float = 1.0, **names: Any) -> Any:
        low, high = names.get("from", low), names.get("to", high)
        return self._write(input, self._like("uniform", input, low=float(low), high=float(high)))

    def bernoulli_(self, input: torch.Tensor, p: Any = 0.5, **_: Any) -> Any:
        if isinstance(p, torch.Tensor) and p.ndim:
            return self._write(input, self._like("uniform", input, torch.get_default_dtype()) < p)
        return self._write(input, self._like("bernoulli", input, p=float(p)))

    def random_(self, input: torch.Tensor, *bounds: Any, **names: Any) -> Any:
        if not bounds and not names:
            bounds = (0, 2 ** _RANDOM_BITS.get(input.dtype, 63))
        low, high = _bounds(list(bounds), {"low": names.get("from"), "high": names.get("to")})
        return self._write(input, self._like("randint", input, torch.int64, low=low, high=high))

    def exponential_(self, input: torch.Tensor, lambd: float = 1.0, **_: Any) -> Any:
        return self._write(input, _exponential(self._like("uniform", input, torch.float64)) / lambd)

    def geometric_(self, input: torch.Tensor, p: float, **_: Any) -> Any:
        waits = _exponential(self._like("uniform", input, torch.float64)) / -math.log1p(-p)
        return self._write(input, waits.ceil().clamp_(min=1))

    def cauchy_(self, input: torch.Tensor, median: float = 0.0, sigma: float = 1.0, **_: Any) -> Any:
        uniform = self._like("uniform", input, torch.float64)
        return self._write(input, median + sigma * (math.pi * (uniform - 0.5)).tan())

    def log_normal_(self, input: torch.Tensor, mean: float = 1.0, std: float = 2.0, **_: Any) -> Any:
        return self._write(input, self._like("normal", input, torch.float64, mean=float(mean), std=float(std)).exp())


_RANDOM_BITS = {torch.float32: 24, torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}
_RANDOM_BITS |= {torch.uint8: 8, torch.int8: 7, torch.int16: 15, torch.int32: 31, torch.bool: 1}


def _scale(p: float) -> float:
    return 0.0 if p == 1.0 else 1.0 / (1.0 - p)


def _alpha(input: torch.Tensor, keep: torch.Tensor, p: float) -> torch.Tensor:
    """Dropped elements get the value that keeps mean and variance of SELU's outputs."""
    if p == 1.0:
        return input * 0.0
    dropped = -1.7580993408473766
    scale = 1.0 / math.sqrt((dropped * dropped * p + 1.0) * (1.0 - p))
    return input * (keep * scale) + (keep - 1.0) * (-dropped * scale) - dropped * scale * p


def _exponential(uniform: torch.Tensor) -> torch.Tensor:
    return -torch.log1p(-uniform).clamp_(max=-(2.0**-54))


def _bounds(bounds: list[Any], names: dict[str, Any]) -> tuple[int, int]:
    low, high = names.get("low"), names.get("high")
    if high is None:
        high = bounds.pop()
    if low is None:
        low = bounds.pop() if bounds else 0
    return int(low), int(high)


_OPERATORS = (
    *("dropout", "dropout_", "native_dropout", "feature_dropout", "feature_dropout_", "alpha_dropout"),
    *("alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_"),
)
_FUNCTIONS = (
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "bernoulli"),
    "multinomial",
)
_METHODS = (
    *("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"),
    *("bernoulli", "multinomial"),
)

_addressed: dict[Any, Callable[..., Any]] = {}


def addressed_form(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """``func`` on plain tensors by address; None for one without such a form, and while there are no addresses."""
    found = _addressed.get(getattr(func, "__wrapped__", func))
    return found if found is not None and found._is_active() else None  # type: ignore[attr-defined]


def generator_mark() -> Any:
    """What changes when PyTorch's own generator is drawn from."""
    mark = torch.default_generator.get_state().numpy().tobytes()
    if torch.accelerator.is_available():
        mark += torch.get_device_module().get_rng_state().cpu().numpy().tobytes()
    return mark


def install_addressed_draws(is_active: Callable[[], bool], drawn: _Drawn) -> None:
    """Let ``drawn(kind, shape, dtype, device, **parameters)`` make the values while ``is_active()``; twice is once."""
    if _addressed:
        return
    keep_compiler_out()
    ours = _Replacements(drawn)
    for names, owners in ((_OPERATORS, (torch._VF, torch)), (_FUNCTIONS, (torch,)), (_METHODS, (torch.Tensor,))):
        for name in names:
            for owner in owners:
                _replace(owner, name, getattr(ours, name), is_active)
    _replace_attention(ours.scaled_dot_product_attention, is_active)


def _replace_attention(ours: Callable[..., Any], is_active: Callable[[], bool]) -> None:
    theirs = functional.scaled_dot_product_attention
    _replace(functional, "scaled_dot_product_attention", ours, is_active)
    functional.scaled_dot_product_attention = dropping(theirs, functional.scaled_dot_product_attention)


def _replace(
    owner: Any,
    name: str,
    ours: Callable[..., Any],
    is_active: Callable[[], bool],
) -> None:
    theirs = getattr(owner, name)

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_active() or _is_other(args, kwargs):
            return theirs(*args, **kwargs)
        return ours(*args, **kwargs)

    call._is_active = is_active  # type: ignore[attr-defined]
    setattr(owner, name, call)
    _addressed[theirs] = call


def _is_other(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is none of ours: with a generator, on distributed or complex tensors."""
    if kwargs.get("generator") is not None or getattr(kwargs.get("dtype"), "is_complex", False):
        return True
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and (isinstance(value, DTensorBase) or value.is_complex()):
            return True
    return False
