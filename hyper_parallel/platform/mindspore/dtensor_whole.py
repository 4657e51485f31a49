"""Functions and methods of MindSpore that are taken as a whole: one operator of the rule table, not its parts.

Many functions of ``mindspore.ops`` and ``mindspore.mint`` are written in Python. ``__fallback__`` would see the
operators that they are made of, one by one: right, but a loss would be reduced in many steps, and a convolution, whose
settings are hidden in a primitive, would be gathered. So where such a function is given a DTensor, it is dispatched
under its neutral name, and runs on blocks as it runs on plain tensors. Which they are is in
:mod:`dtensor_whole_names`; those whose arguments need more than another order are written out below.

Note [How functions are replaced]
A function is replaced in every module of MindSpore that has it. Plain calls go on to it unchanged, and MindSpore's
compiler looks through the replacement (``__wrapped__``), so that graph mode sees the function itself. A function that a
program imported before this library still meets ``__fallback__``.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore.dtensor_base import DTensorBase, has_dtensor
from hyper_parallel.platform.mindspore.dtensor_empty import zeros_of
from hyper_parallel.platform.mindspore.dtensor_ops import NEUTRAL, clone
from hyper_parallel.platform.mindspore.dtensor_whole_names import AGREEING, NEUTRALS, RENAMED, REORDERED

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Dispatch = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_PLACES: dict[str, Any] = {
    "ops": ops,
    "mint": mint,
    "F": mint.nn.functional,
    "linalg": mint.linalg,
    "special": mint.special,
}


class Whole:
    """A function of MindSpore as an operator of the rule table, with the rule's order of positional arguments.

    ``on_blocks`` takes them in that order and is the operator, where it is given; else this is, and calls ``plain``.
    """

    def __init__(
        self,
        name: str,
        plain: Callable[..., Any],
        order: Sequence[str] = (),
        on_blocks: Callable[..., Any] | None = None,
    ) -> None:
        self.__name__ = name
        parameters = _parameters(plain)
        self.positional = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        self.order = [*order, *(one for one in self.positional if one not in order)] if order else self.positional
        self.defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
        # Keywords that say nothing are left out: a call without keywords is looked up sooner.
        self.keywords = {
            one.name: one.default
            for one in parameters
            if one.kind is one.KEYWORD_ONLY and one.default is not one.empty and one.default is not None
        }
        self.is_open = not self.positional or any(one.kind is one.VAR_POSITIONAL for one in parameters)
        self.tails = [self._tail(number) for number in range(len(self.positional) + 1)]
        self.call = plain if not order else self._in_own_order(plain)
        self.operator = on_blocks or self

    def _tail(self, number: int) -> tuple[Any, ...] | None:
        """The defaults behind ``number`` given arguments, without the last ones that are None."""
        rest = self.positional[number:]
        if any(name not in self.defaults for name in rest) or self.order is not self.positional:
            return None
        values = [self.defaults[name] for name in rest]
        while values and values[-1] is None:
            values.pop()
        return tuple(values)

    def _in_own_order(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: plain(**dict(zip(self.order, args, strict=False)), **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """On blocks."""
        if self.__name__ in _ADDS_UP and _has_empty(args):
            args = tuple(_with_zeros(value) for value in args)
        elif self.__name__ in _LOSSES and _has_empty(args):
            return zeros_of((), args[0].dtype, *args)
        return self.call(*args, **kwargs)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call in the rule's order, with defaults, as keywords only where they must be."""
        if self.is_open:
            return args, {**self.keywords, **kwargs}
        if not kwargs and len(args) < len(self.tails):
            tail = self.tails[len(args)]
            if tail is not None:
                return args + tail, self.keywords
        if len(args) > len(self.positional):
            raise TypeError(f"{self.__name__} takes {len(self.positional)} positional arguments, got {len(args)}")
        given = {**self.defaults, **dict(zip(self.positional, args, strict=False)), **kwargs}
        ordered = []
        for name in self.order:
            if name not in given:
                raise TypeError(f"{self.__name__} misses the argument {name!r}")
            ordered.append(given.pop(name))
        return tuple(ordered), {name: value for name, value in given.items() if value is not None}


# Over dims without elements these add up nothing; see Note [Sums over nothing] in ``dtensor_empty.py``.
_ADDS_UP = frozenset(
    {
        *("addbmm", "addmm", "addmv", "baddbmm", "bilinear", "dot", "einsum", "inner", "mm", "mv", "tensordot", "vdot"),
        *("linalg_vecdot", "count_nonzero", "nansum"),
    }
)


_LOSSES = frozenset(
    {
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy", "kl_div"),
        *("hinge_embedding_loss", "margin_ranking_loss", "cosine_embedding_loss", "triplet_margin_loss"),
        *("multi_margin_loss", "multilabel_margin_loss"),
    }
)


def _has_empty(args: tuple[Any, ...]) -> bool:
    return any(isinstance(value, Tensor) and 0 in value.shape for value in args)


def _with_zeros(value: Any) -> Any:
    """A tensor without elements as zeros, of size 1 where it has size 0: they add nothing to a sum."""
    if not isinstance(value, Tensor) or 0 not in value.shape:
        return value
    return zeros_of([size or 1 for size in value.shape], value.dtype, value)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # one of C++, which takes what it takes
        return []


def _parameter_names(function: Callable[..., Any]) -> list[str]:
    return [one.name for one in _parameters(function)]


def _found(path: str) -> Any:
    place, _, name = path.partition(".")
    return getattr(_PLACES[place], name, None)


_replaced: dict[int, tuple[Any, Callable[..., Any]]] = {}  # by the identity of the function that is replaced


Meets = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def replace(plain: Callable[..., Any], meets: Meets) -> None:
    """Let ``meets(args, kwargs)`` answer calls of a function that are given DTensors."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if has_dtensor(args) or (kwargs and has_dtensor(kwargs.values())):
            return meets(args, kwargs)
        return plain(*args, **kwargs)

    _replaced.setdefault(id(plain), (plain, call))


def _dispatched(whole: Whole, dispatch: Dispatch) -> Meets:
    operator, keywords = whole.operator, whole.keywords
    tails = {} if whole.is_open else {number: tail for number, tail in enumerate(whole.tails) if tail is not None}

    def meets(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not kwargs:
            tail = tails.get(len(args))
            if tail is not None:
                return dispatch(operator, args + tail, keywords)
        return dispatch(operator, *whole.arguments(args, kwargs))

    return meets


def take_functions(dispatch: Dispatch) -> None:
    """Replace the functions, and give DTensor the methods of the same names that are written in Python."""
    for name in AGREEING.split():
        for place in _PLACES:
            _take(name, f"{place}.{name}", dispatch)
        _take_method(name, dispatch)
    for name, paths in RENAMED.items():
        for path in paths.split():
            _take(name, path, dispatch)
    for name, paths in NEUTRALS.items():
        for path in paths.split():
            _take(name, path, dispatch, on_blocks=NEUTRAL[name])
    for (name, path), order in REORDERED.items():
        _take(name, path, dispatch, order.split())
    for path, meets in written_out(dispatch).items():
        plain = _found(path)
        if isinstance(plain, types.FunctionType):
            replace(plain, _with_plain(meets, plain))
    _install()


def _with_plain(meets: Callable[..., Any], plain: Callable[..., Any]) -> Meets:
    return lambda args, kwargs: meets(plain, *args, **kwargs)


def _take(
    name: str,
    path: str,
    dispatch: Dispatch,
    order: Sequence[str] = (),
    on_blocks: Callable[..., Any] | None = None,
) -> None:
    plain = _found(path)
    if isinstance(plain, types.FunctionType) and id(plain) not in _replaced:
        replace(plain, _dispatched(Whole(name, plain, order, on_blocks), dispatch))


def _take_method(name: str, dispatch: Dispatch) -> None:
    plain = getattr(Tensor, name, None)
    if isinstance(plain, types.FunctionType) and name not in vars(DTensorBase):
        meets = _dispatched(Whole(name, plain), dispatch)
        setattr(DTensorBase, name, functools.wraps(plain)(lambda *args, meets=meets, **kwargs: meets(args, kwargs)))


def _install() -> None:
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "mindspore" or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            found = _replaced.get(id(value)) if isinstance(value, types.FunctionType) else None
            if found is not None and found[0] is value:
                setattr(module, attribute, found[1])


# ---------------------------------------------------------------- functions whose arguments the rules say otherwise

_REDUCTIONS = ("none", "mean", "sum")
_MODES = {
    "nearest": "upsample_nearest{}d",
    "nearest-exact": "_upsample_nearest_exact{}d",
    "linear": "upsample_linear1d",
    "bilinear": "upsample_bilinear2d",
    "bicubic": "upsample_bicubic2d",
    "trilinear": "upsample_trilinear3d",
}


def named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function under a neutral name."""
    function.__name__ = name
    return function


def written_out(dispatch: Dispatch) -> dict[str, Callable[..., Any]]:
    """By the path of a function, what answers it for DTensors, given the plain function first."""
    made: dict[Any, Callable[..., Any]] = {}

    def once(name: str, plain: Callable[..., Any], make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """Plans are looked up by the operator, so it must be the same object at each call."""
        if (name, plain) not in made:
            made[name, plain] = named(name, make())
        return made[name, plain]

    def cross_entropy(
        plain: Any,
        input: Any,
        target: Any,
        weight: Any = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        def on_blocks(input: Any, target: Any, weight: Any, reduction: int, ignore_index: int, smoothing: float) -> Any:
            return plain(input, target, weight, ignore_index, _REDUCTIONS[reduction], smoothing)

        name = "nll_loss_nd" if plain.__name__.startswith("nll") else "cross_entropy_loss"
        if reduction not in _REDUCTIONS:
            raise ValueError(f"{plain.__name__}: reduction must be one of {_REDUCTIONS}, got {reduction!r}")
        function = once(name, plain, lambda: on_blocks)
        number = _REDUCTIONS.index(reduction)
        return dispatch(function, (input, target, weight, number, ignore_index, label_smoothing), {})

    def nll_loss(
        plain: Any, input: Any, target: Any, weight: Any = None, ignore_index: int = -100, reduction: str = "mean"
    ) -> Any:
        """The one without smoothing of labels."""
        shorter = once("nll_loss", plain, lambda: lambda *args: plain(*args[:5]))
        return cross_entropy(shorter, input, target, weight, ignore_index, reduction)

    def batch_norm(
        plain: Any,
        input: Any,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        def on_blocks(
            x: Any, w: Any, b: Any, mean: Any, var: Any, training: Any, momentum: Any, eps: Any, _: Any
        ) -> Any:
            return plain(x, mean, var, w, b, training, momentum, eps)

        function = once("batch_norm", plain, lambda: on_blocks)
        given = (input, weight, bias, running_mean, running_var, training, momentum, eps, False)
        return dispatch(function, given, {})

    def interpolate(
        plain: Any,
        input: Any,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "nearest",
        *rest: Any,
        **more: Any,
    ) -> Any:
        name = _MODES.get(mode, "interpolate").format(input.ndim - 2)

        def on_blocks(input: Any, *args: Any, **kwargs: Any) -> Any:
            return plain(input, *args, **kwargs)

        return dispatch(once(name, plain, lambda: on_blocks), (input, size, scale_factor, mode, *rest), more)

    def grid_sample(plain: Any, input: Any, grid: Any, *rest: Any, **more: Any) -> Any:
        name = f"grid_sampler_{input.ndim - 2}d"
        return dispatch(once(name, plain, lambda: lambda *args, **kw: plain(*args, **kw)), (input, grid, *rest), more)

    def spread(name: str) -> Callable[..., Any]:
        def meets(plain: Any, input: Any, axis: Any = None, ddof: Any = 0, keepdims: bool = False) -> Any:
            def on_blocks(input: Any, dim: Any, *, correction: Any, keepdim: bool) -> Any:
                return plain(input, dim, correction, keepdim)

            function = once(name, plain, lambda: on_blocks)
            return dispatch(function, (input, axis), {"correction": int(ddof), "keepdim": keepdims})

        return meets

    def index_add(plain: Any, x: Any, indices: Any, y: Any, axis: int, *settings: Any, **more: Any) -> Any:
        """It writes into ``x``."""
        function = once("index_add", plain, lambda: lambda x, dim, index, source: plain(clone(x), index, source, dim))
        return dispatch(NEUTRAL["copy_"], (x, dispatch(function, (x, axis, indices, y), {})), {})

    def reduced_here(name: str) -> Callable[..., Any]:
        """MindSpore's own means and sums are doubled for one element, and count a block's share twice in backward."""

        def meets(plain: Any, input: Any, target: Any, *given: Any, reduction: str = "mean", **more: Any) -> Any:
            names = _parameter_names(plain)[2:-1]
            weights = [more.get(one, given[place] if place < len(given) else None) for place, one in enumerate(names)]
            reduction = given[len(names)] if len(given) > len(names) else reduction

            def on_blocks(*args: Any) -> Any:
                losses = plain(*args[:-1], "none")
                return losses if args[-1] == "none" else losses.mean() if args[-1] == "mean" else losses.sum()

            return dispatch(once(name, plain, lambda: on_blocks), (input, target, *weights, reduction), {})

        return meets

    def fold(plain: Any, input: Any, output_size: Any, *settings: Any, **more: Any) -> Any:
        """The size of the picture is a tensor to MindSpore, and numbers to the rule."""
        sizes = tuple(output_size.tolist()) if isinstance(output_size, Tensor) else tuple(output_size)
        function = once(
            "col2im", plain, lambda: lambda x, sizes, *args, **kw: plain(x, Tensor(sizes, ms.int32), *args, **kw)
        )
        return dispatch(function, (input, sizes, *settings), more)

    def affine_grid(plain: Any, theta: Any, size: Any, align_corners: bool = False) -> Any:
        function = once("affine_grid_generator", plain, lambda: lambda theta, size, how: plain(theta, tuple(size), how))
        return dispatch(function, (theta, tuple(size), align_corners), {})

    def vecdot(plain: Any, x: Any, y: Any, *, axis: int = -1) -> Any:
        function = once("linalg_vecdot", plain, lambda: lambda x, y, dim=-1: plain(x, y, axis=dim))
        return dispatch(function, (x, y, axis), {})

    def roll(plain: Any, input: Any, shifts: Any, dims: Any = None) -> Any:
        function = once("roll", plain, lambda: lambda x, shifts, dims: plain(x, shifts, dims or None))
        return dispatch(function, (input, shifts, () if dims is None else dims), {})

    def scatter_elements(
        plain: Any, input: Any, indices: Any, updates: Any, axis: int = 0, reduction: str = "none"
    ) -> Any:
        name = {"none": "scatter", "add": "scatter_add"}.get(reduction, "tensor_scatter_elements")
        function = once(name, plain, lambda: lambda x, dim, index, src, how: plain(x, index, src, dim, how))
        return dispatch(function, (input, axis, indices, updates, reduction), {})

    return {
        "ops.cross_entropy": cross_entropy,
        "F.cross_entropy": cross_entropy,
        "ops.nll_loss": cross_entropy,
        "F.nll_loss": nll_loss,
        "ops.batch_norm": batch_norm,
        "F.batch_norm": batch_norm,
        "ops.interpolate": interpolate,
        "F.interpolate": interpolate,
        "ops.grid_sample": grid_sample,
        "F.grid_sample": grid_sample,
        "ops.var": spread("var"),
        "ops.std": spread("std"),
        "ops.var_mean": spread("var_mean"),
        "ops.std_mean": spread("std_mean"),
        "ops.binary_cross_entropy": reduced_here("binary_cross_entropy"),
        "ops.binary_cross_entropy_with_logits": reduced_here("binary_cross_entropy_with_logits"),
        "ops.fold": fold,
        "ops.index_add": index_add,
        "ops.affine_grid": affine_grid,
        "F.affine_grid": affine_grid,
        "ops.vecdot": vecdot,
        "ops.roll": roll,
        "mint.roll": roll,
        "ops.tensor_scatter_elements": scatter_elements,
    }
