"""The doors by which an operator that meets a DTensor arrives, and the way from there to the dispatcher.

Note [The four doors]
    1. Functions of MindSpore that are one operator of the rule table (``mint.matmul(x, w)``, ``ops.cross_entropy``) are
       replaced in its modules: ``whole_functions.py``, with the names in ``whole_function_names.py``.
    2. Python's operators and methods of elements (``x @ w``, ``x.exp()``) are methods of DTensor:
       ``python_operators.py``.
    3. All other operators of MindSpore (``Add``, a method written in C++, an old primitive) come to ``__fallback__``
       here, and are put into the words of the rule table: ``translation.py``, with the names in ``names.py``.
    4. What MindSpore lets nobody see, below, are methods of DTensor and wrappers in this file: indexing, iteration,
       questions with a plain answer, lists of tensors, random values in place.

    A new operator needs a name for door 1 or 3, whichever it comes by, and a function in ``operators/`` where
    MindSpore's own does not take what the rule takes. Autograd functions have a door of their own
    (``autograd_functions.py``), and compiled code has none: it is refused (``compiled_code.py``).

Note [What __fallback__ does not see]
    MindSpore asks for ``__fallback__`` when an argument of an operator is of a subclass. It does not look into lists of
    old primitives (``ops.stack``), indexing goes its own way, some questions are answered by the C++ tensor, and a
    method of a plain tensor looks at the plain tensor only. For these there are methods of DTensor, wrappers of the few
    functions, and a ``__fallback__`` of plain tensors, which MindSpore asks only where a DTensor is the other operand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Parameter, Tensor, ops

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base.tensors import full_like, own_copy
from hyper_parallel.platform.mindspore.dtensor.tensor_type import (
    DTensorBase,
    as_dtensor,
    has_dtensor,
    local_alias,
    plain_kind,
)
from hyper_parallel.platform.mindspore.mends.empty_blocks import zeros_of
from hyper_parallel.platform.mindspore.operators.all_operators import NEUTRAL
from hyper_parallel.platform.mindspore.operators.creation import clone
from hyper_parallel.platform.mindspore.operators.positions import takes_nothing
from hyper_parallel.platform.mindspore.operators.writes import copy_
from hyper_parallel.platform.mindspore.takes_over import compiled_code, python_operators, translation, whole_functions
from hyper_parallel.platform.mindspore.takes_over.translated_operators import RANDOM
from hyper_parallel.platform.mindspore.takes_over.translation import Composed, neutral_call, passed_on

_intercept: Callable[..., Any]


def set_dispatcher(intercept: Callable[..., Any]) -> None:
    """Let ``intercept(kind, func, types, args, kwargs)`` answer every operator that meets a DTensor."""
    global _intercept
    _intercept = intercept
    translation.dispatch = _dispatch
    python_operators.give_operators(_enter)
    whole_functions.take_functions(_enter, intercept)
    compiled_code.refuse_distributed_tensors()


def _dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _intercept(None, func, (), args, kwargs)


def _enter(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dispatcher, for calls from the program."""
    try:
        return _intercept(None, func, (), args, kwargs)
    except Exception:
        private_api.start_recording()  # MindSpore stops recording when an operator fails
        raise


def _meet(self: Any, func: Any, args: Any = (), kwargs: Any = None) -> Any:
    """MindSpore calls this for an operator ``func`` of which a DTensor is an argument."""
    try:
        func, args, kwargs = neutral_call(func, args, kwargs)
        if type(func) is Composed:
            return func.body(*args, **kwargs)
        return _intercept(None, func, (), args, kwargs)
    except Exception:
        private_api.start_recording()  # MindSpore stops recording when an operator fails
        raise


def _meet_plain(self: Any, func: Any, args: Any = (), kwargs: Any = None) -> Any:
    """The same where the method of a plain tensor, or an operator on a plain parameter, was called."""
    given = args[2] if args and isinstance(args[0], ops.Primitive) else args
    if has_dtensor(given) or (kwargs and has_dtensor(kwargs.values())):
        return _meet(self, func, args, kwargs)
    with private_api.NoFallbackGuard():
        return func(*args, **(kwargs or {}))


def _getitem(self: Any, index: Any) -> Any:
    return _enter(NEUTRAL["getitem"], (self, index), {})


def _setitem(self: Any, index: Any, value: Any) -> None:
    _enter(_SETITEM, (self, index, value), {})
    self.written()


def _set_block(input: Any, index: Any, value: Any) -> None:
    """``input[index] = value``, by ``copy_``: MindSpore's own assignment forgets how often a tensor was written to."""
    block = local_alias(input)
    changed = clone(block)
    if takes_nothing(block.shape, index):  # the value stays in the graph, as on the ranks that write it
        changed = changed + zeros_of((), block.dtype, value)
    else:
        changed[index] = value
    copy_(block, changed)


_SETITEM = passed_on("setitem", _set_block)
_SETITEM.shapes = lambda *args: []  # it returns nothing; asked on tensors without memory, MindSpore ends the process


def _iterate(self: Any) -> Any:
    if not self.shape:
        raise TypeError("iteration over a 0-d tensor")
    return iter(_intercept(None, NEUTRAL["unbind"], (), (self, 0), {}))


def _of_full_tensor(name: str) -> Callable[..., Any]:
    """Questions with a plain answer: every rank asks the full tensor."""
    plain = getattr(Tensor, name)

    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self.full_tensor(), *args, **kwargs)

    ask.__name__ = name
    return ask


def _contiguous(self: Any) -> Any:
    return self


def _type_as(self: Any, other: Any) -> Any:
    return self.to(other.dtype)


def _clone(self: Any, init: Any = "same") -> Any:
    """The values in other memory; of a parameter, as MindSpore's optimizers ask for it, another parameter.

    ``init`` of a parameter's clone is "same", "zeros", "ones" or a number.
    """
    if not isinstance(self, Parameter):
        return _intercept(None, NEUTRAL["clone"], (), (self,), {})
    block = local_alias(self)
    if init == "same":
        made = own_copy(block)
    elif init in ("zeros", "ones") or isinstance(init, (int, float)):
        made = full_like(block, {"zeros": 0, "ones": 1}.get(init, init))
    else:
        raise TypeError(
            f"clone of the distributed parameter {self.name}: init must be 'same', 'zeros', 'ones' or a number, got "
            f"{init!r}"
        )
    tensor = as_dtensor(plain_kind(type(self)), made, self._layout, self._global_shape)
    return Parameter(tensor, name=self.name, requires_grad=self.requires_grad)


def _drawn(name: str) -> Callable[..., Any]:
    """Random values in place: MindSpore's methods draw before they call an operator, and have none for a CPU."""

    def fill(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "from_" in kwargs:
            kwargs["from"] = kwargs.pop("from_")
        return _intercept(None, RANDOM[name], (), (self, *args), kwargs)

    fill.__name__ = name
    return fill


for _name in ("normal_", "uniform_", "bernoulli_"):
    setattr(DTensorBase, _name, _drawn(_name))
for _name, _method in {
    "__fallback__": _meet,
    "__getitem__": _getitem,
    "__setitem__": _setitem,
    "__iter__": _iterate,
    "contiguous": _contiguous,
    "type_as": _type_as,
    "clone": _clone,
}.items():
    setattr(DTensorBase, _name, _method)
for _name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__contains__", "__array__"):
    if hasattr(Tensor, _name):
        setattr(DTensorBase, _name, _of_full_tensor(_name))

Tensor.__fallback__ = _meet_plain


def _guard_plain_indexing() -> None:
    """``plain[i]`` and ``plain[i] = v`` take a DTensor for its block, without asking anybody."""
    read, write = Tensor.__getitem__, Tensor.__setitem__

    def getitem(self: Any, index: Any) -> Any:
        return _enter(NEUTRAL["getitem"], (self, index), {}) if has_dtensor((index,)) else read(self, index)

    def setitem(self: Any, index: Any, value: Any) -> None:
        if has_dtensor((index, value)):
            _enter(_SETITEM, (self, index, value), {})
        else:
            write(self, index, value)

    Tensor.__getitem__, Tensor.__setitem__ = getitem, setitem


_guard_plain_indexing()


def _wrap_lists() -> None:
    """Old primitives that take a list of tensors, into which MindSpore does not look."""
    plain = ops.Primitive.__call__

    def call(self: Any, *args: Any) -> Any:
        for value in args:
            if type(value) in (list, tuple) and has_dtensor(value):
                known = _OF_LISTS.get(self.name)
                if known is not None:
                    return known(self, list(value))
                return _enter(passed_on(self.name, lambda *blocks: plain(self, *blocks)), args, {})
        return plain(self, *args)

    ops.Primitive.__call__ = call


def _stack(primitive: Any, tensors: list[Any]) -> Any:
    return _enter(NEUTRAL["stack"], (tensors, primitive.axis), {})


def _add_all(primitive: Any, tensors: list[Any]) -> Any:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


_OF_LISTS = {"Stack": _stack, "AddN": _add_all}
_wrap_lists()
