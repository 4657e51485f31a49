"""From MindSpore's operators to neutral ones: what arrives at ``__fallback__``, in the words of the rule table.

One operator of the table has up to five names in MindSpore (``names.py``). Three kinds:

* ``SAME``: the arguments agree with the rules'. The operator is passed on as it came, so local tensors run the very
  kernel that the plain call would.
* ``TRANSLATED``: the arguments are put into the rules' words for a neutral operator of ``operators/``.
* ``COMPOSED``: written in terms of other operators, which are dispatched one by one.

Those that need more than a table are written out in ``translated_operators.py``. What has no entry is gathered, as
everything without a rule is.

Note [Old primitives]
    Primitives of the older kind arrive as (primitive, its name, its arguments), and carry part of their settings
    (strides, axes) as attributes. Passed on, they are one operator per name for the look-up of plans, whose key does
    not have the attributes; so only those without influence on layouts may be passed on, and all others are translated,
    by ``ATTRIBUTES``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mindspore import ops

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.operators.all_operators import NEUTRAL
from hyper_parallel.platform.mindspore.takes_over.names import IN_ORDER, REDUCTIONS, SAME

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class PassedOn(str):
    """An operator of MindSpore whose arguments agree with the rules', under its neutral name.

    A name that can be called: the operator itself is another object at each call and keeps what that call computed for
    backward, so it can be called once and no look-up may know it. Equal names are one operator for the look-ups.
    """

    call: Callable[..., Any]
    shapes: Callable[..., Any] | None = None  # how the shapes of its results follow from its arguments

    @property
    def __name__(self) -> str:
        return str(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def passed_on(name: str, call: Callable[..., Any]) -> PassedOn:
    """``call`` under a neutral name."""
    passed = PassedOn(name)
    passed.call = call
    return passed


def dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The library's dispatcher, once it is there."""
    raise AssertionError("distributed tensors exist before their dispatcher is set")


TRANSLATED: dict[str, Callable[..., Call]] = {}
COMPOSED: dict[str, Callable[..., Any]] = {}
ATTRIBUTES: dict[str, Callable[..., Call]] = {}  # called with the primitive, what runs it, and its arguments


def neutral_call(func: Any, args: Any, kwargs: Any) -> Call:
    """What arrived at ``__fallback__`` as a call of a neutral operator."""
    kwargs = kwargs or {}
    if args and isinstance(args[0], ops.Primitive):
        return _primitive_call(func, args)
    name = func.name
    same = SAME.get(name)
    if same is not None:
        return passed_on(same, func), tuple(args), kwargs
    translate = TRANSLATED.get(name)
    if translate is not None:
        return translate(*args, **kwargs)
    composed = COMPOSED.get(name)
    if composed is not None:
        return Composed(composed), tuple(args), kwargs
    return passed_on(name, func), tuple(args), kwargs


class Composed:
    """A function that is to be run as it is, on DTensors."""

    __slots__ = ("body",)

    def __init__(self, body: Callable[..., Any]) -> None:
        self.body = body


def _primitive_call(func: Any, args: Any) -> Call:
    primitive, name, given = args[0], args[1], tuple(args[2])
    if name in TRANSLATED:
        return TRANSLATED[name](*given)
    if name in COMPOSED:
        return Composed(COMPOSED[name]), given, {}

    def call(*blocks: Any) -> Any:
        return func(primitive, name, blocks)

    call.primitive = primitive  # type: ignore[attr-defined]  # which can be called again, other than ``func``
    with_attributes = ATTRIBUTES.get(name)
    if with_attributes is not None:
        return with_attributes(primitive, call, *given)
    return passed_on(SAME.get(name, name), call), given, {}


_SPELLINGS = {"axis": "dim", "keepdims": "keepdim", "keep_dims": "keepdim", "x": "input", "self": "input"}


def renamed(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords as the rules spell them, with a dtype for its number."""
    spelled = {_SPELLINGS.get(name, name): value for name, value in kwargs.items()}
    if isinstance(spelled.get("dtype"), int):
        spelled["dtype"] = private_api.dtype_of_id(spelled["dtype"])
    return spelled


def _enters(table: dict[str, Any], *ms_names: str) -> Callable[[Any], Any]:
    """A decorator that puts a function into the table under these names of MindSpore's."""

    def register(function: Any) -> Any:
        table.update(dict.fromkeys(ms_names, function))
        return function

    return register


translates, composes = functools.partial(_enters, TRANSLATED), functools.partial(_enters, COMPOSED)
reads_attributes = functools.partial(_enters, ATTRIBUTES)


def _in_order(function: Callable[..., Any]) -> Callable[..., Call]:
    def translate(*args: Any, **kwargs: Any) -> Call:
        return function, args, renamed(kwargs)

    return translate


def _reduction(function: Callable[..., Any]) -> Callable[..., Call]:
    def translate(input: Any, dim: Any = None, keepdim: Any = False, dtype: Any = None, **kwargs: Any) -> Call:
        given = renamed({"dim": dim, "keepdim": keepdim, "dtype": dtype} | renamed(kwargs))
        given = {name: value for name, value in given.items() if value is not None and value is not False}
        return function, (input,), given

    return translate


for _table, _translation in ((IN_ORDER, _in_order), (REDUCTIONS, _reduction)):
    for _name, _ms_names in _table.items():
        translates(*_ms_names.split())(_translation(NEUTRAL[_name]))
