"""Functions and methods of MindSpore that are taken as a whole: one operator of the rule table, not its parts.

Many functions of ``mindspore.ops`` and ``mindspore.mint`` are written in Python. ``__fallback__`` would see the
operators that they are made of, one by one: right, but a loss would be reduced in many steps, and a convolution, whose
settings are hidden in a primitive, would be gathered. So where such a function is given a DTensor, it is dispatched
under its neutral name, and runs on blocks as it runs on plain tensors. Which they are is in
``whole_function_names.py``; those whose arguments need more than another order are written out in
``whole_function_calls.py`` and ``whole_function_matrices.py``.

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

import mindspore.numpy
import mindspore.scipy.linalg
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.dtensor.tensor_type import DTensorBase, has_dtensor, is_known_dtensor
from hyper_parallel.platform.mindspore.mends import ACTIVE
from hyper_parallel.platform.mindspore.mends.empty_blocks import with_row, zeros_of
from hyper_parallel.platform.mindspore.operators.all_operators import NEUTRAL
from hyper_parallel.platform.mindspore.takes_over import watched_losses
from hyper_parallel.platform.mindspore.takes_over.whole_function_calls import Dispatch, written_out
from hyper_parallel.platform.mindspore.takes_over.whole_function_matrices import matrices_written_out
from hyper_parallel.platform.mindspore.takes_over.whole_function_names import (
    AGREEING,
    MENDED,
    NEUTRALS,
    RENAMED,
    REORDERED,
)

_PLACES: dict[str, Any] = {
    "ops": ops,
    "mint": mint,
    "F": mint.nn.functional,
    "linalg": mint.linalg,
    "special": mint.special,
    "numpy": mindspore.numpy,
    "scipy": mindspore.scipy.linalg,
}
# ``mindspore.numpy`` has the same names with other arguments.
_PLACES_THAT_AGREE = ("ops", "mint", "F", "linalg", "special")


class WholeFunction:
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
            args = tuple(map(with_row, args))
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


# Over dims without elements these add up nothing; see Note [Sums over nothing] in ``mends/empty_blocks.py``.
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


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # one of C++, which takes what it takes
        return []


def _found(path: str) -> Any:
    place, _, name = path.partition(".")
    return getattr(_PLACES[place], name, None)


_replaced: dict[int, tuple[Any, Callable[..., Any]]] = {}  # by the identity of the function that is replaced


Meets = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def replace(plain: Callable[..., Any], meets: Meets) -> None:
    """Let ``meets(args, kwargs)`` answer calls of a function that are given DTensors."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (args and is_known_dtensor(type(args[0]))) or has_dtensor(args) or (kwargs and has_dtensor(kwargs.values())):
            return meets(args, kwargs)
        return plain(*args, **kwargs)

    _replaced.setdefault(id(plain), (plain, watched_losses.watched(plain, call)))


def _dispatched(function: WholeFunction, intercept: Callable[..., Any]) -> Meets:
    operator, keywords = function.operator, function.keywords
    tails = {} if function.is_open else {number: tail for number, tail in enumerate(function.tails) if tail is not None}

    def meets(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, more = args, keywords
        tail = None if kwargs else tails.get(len(args))
        if tail is None:
            given, more = function.arguments(args, kwargs)
        elif tail:
            given = args + tail
        try:
            return intercept(None, operator, (), given, more)
        except Exception:
            private_api.start_recording()  # MindSpore stops recording when an operator fails
            raise

    return meets


def mend_functions() -> None:
    """Let neutral operators answer, for plain tensors, functions of MindSpore that fail or are wrong on a CPU."""
    if not ACTIVE:
        return
    for name, path in MENDED.items():
        plain = _found(path)
        mended = _replaced[id(plain)] = (plain, functools.wraps(plain)(_calling(NEUTRAL[name])))
        if hasattr(Tensor, plain.__name__):
            setattr(Tensor, plain.__name__, mended[1])
    _install()


def _calling(neutral: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: neutral(*args, **kwargs)


def take_functions(dispatch: Dispatch, intercept: Callable[..., Any]) -> None:
    """Replace the functions, and give DTensor the methods of the same names that are written in Python.

    ``intercept(kind, func, types, args, kwargs)`` is the dispatcher itself, and ``dispatch`` the way there.
    """
    for name in AGREEING.split():
        for place in _PLACES_THAT_AGREE:
            _take(name, f"{place}.{name}", intercept)
        _take_method(name, intercept)
    for name, paths in RENAMED.items():
        for path in paths.split():
            _take(name, path, intercept)
    for name, paths in NEUTRALS.items():
        for path in paths.split():
            _take(name, path, intercept, on_blocks=NEUTRAL[name])
    for (name, path), order in REORDERED.items():
        _take(name, path, intercept, order.split())
    for name, path in MENDED.items():
        _take(name, path, intercept, on_blocks=NEUTRAL[name])
        _take_method(name, intercept)
    for path, meets in (written_out(dispatch, _once) | matrices_written_out(dispatch, _once)).items():
        plain = _found(path)
        if isinstance(plain, types.FunctionType):
            replace(plain, _with_plain(meets, plain))
    for plain in watched_losses.LOSSES:
        _replaced.setdefault(id(plain), (plain, watched_losses.watched(plain, plain)))
    _install()


_made: dict[tuple[str, Callable[..., Any]], Callable[..., Any]] = {}


def _once(
    name: str,
    plain: Callable[..., Any],
    make: Callable[[], Callable[..., Any]],
    shapes: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Plans are looked up by the operator, so it must be the same object at each call."""
    if (name, plain) not in _made:
        function = _made[name, plain] = make()
        function.__name__, function.shapes = name, shapes
    return _made[name, plain]


def _with_plain(meets: Callable[..., Any], plain: Callable[..., Any]) -> Meets:
    return lambda args, kwargs: meets(plain, *args, **kwargs)


def _take(
    name: str,
    path: str,
    intercept: Callable[..., Any],
    order: Sequence[str] = (),
    on_blocks: Callable[..., Any] | None = None,
) -> None:
    plain = _found(path)
    if isinstance(plain, types.FunctionType) and id(plain) not in _replaced:
        replace(plain, _dispatched(WholeFunction(name, plain, order, on_blocks), intercept))


def _take_method(name: str, intercept: Callable[..., Any]) -> None:
    plain = getattr(Tensor, name, None)
    if isinstance(plain, types.FunctionType) and name not in vars(DTensorBase):
        meets = _dispatched(WholeFunction(name, plain), intercept)
        setattr(DTensorBase, name, functools.wraps(plain)(lambda *args, meets=meets, **kwargs: meets(args, kwargs)))


def _install() -> None:
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "mindspore" or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            found = _replaced.get(id(value)) if isinstance(value, types.FunctionType) else None
            if found is not None and found[0] is value:
                setattr(module, attribute, found[1])
