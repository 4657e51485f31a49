"""What of MindSpore is looked at while a call is recorded, and how it is put back.

MindSpore has no mode above the tape that sees operators on plain tensors. So while a call is recorded, its functions,
the methods of tensors and the calls of primitives are replaced where Python finds them: in every module that has them,
in the tensor classes, in the classes of primitives. A function that somebody keeps elsewhere is not seen; what it makes
has no name on the tape, and is refused where it is used.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import mindspore.numpy
from mindspore import Parameter, Tensor, mint, ops

from hyper_parallel.platform.mindspore.dtensor.tensor_type import DTensorBase

__all__ = ["READS", "asks", "draws", "is_library_function", "put_back", "replace_all", "writes"]

Wrap = Callable[[str, Callable[..., Any]], Callable[..., Any]]
Place = tuple[Any, str, Any]  # an object, an attribute of it, what it was; ABSENT: it had none of its own

_ABSENT = object()
_NAMESPACES = (ops, mint, mint.nn.functional, mint.linalg, mint.special, mindspore.numpy)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)

# Questions about a tensor and not about its values, and what makes no tensor of tensors.
# fmt: off
_ABOUT_TENSORS = frozenset({
    "shape", "rank", "size", "is_tensor", "dtype", "is_floating_point", "is_complex", "typeof", "numel", "hastype",
    "dim", "ndimension", "nelement", "stride", "storage_offset", "is_contiguous", "is_signed", "is_init", "is_pinned",
    "is_shared", "data_ptr", "storage", "untyped_storage", "type", "hooks", "wait_pipeline", "data_sync", "vmap",
    "grad", "value_and_grad", "jvp", "vjp", "partial", "get_grad", "isinstance_", "result_type", "can_cast",
    "promote_types", "element_size", "flush_from_cache", "offload_file_path", "set_const_arg", "set_init_flag",
    "set_cast_dtype", "check_elementwise", "constexpr", "set_device_address",
})
READS = (
    "item", "tolist", "asnumpy", "numpy", "get_bytes", "to_dlpack", "__bool__", "__int__", "__float__", "__index__",
    "__array__", "__contains__", "__complex__", "__repr__", "__str__", "itemset",
)
_SPECIAL = (
    "__abs__", "__add__", "__and__", "__eq__", "__floordiv__", "__ge__", "__getitem__", "__gt__", "__iadd__",
    "__ifloordiv__", "__imod__", "__imul__", "__invert__", "__isub__", "__itruediv__", "__le__", "__lt__", "__matmul__",
    "__mod__", "__mul__", "__ne__", "__neg__", "__or__", "__pos__", "__pow__", "__radd__", "__rfloordiv__",
    "__rmatmul__", "__rmod__", "__rmul__", "__round__", "__rpow__", "__rsub__", "__rtruediv__", "__setitem__",
    "__sub__", "__truediv__", "__xor__",
)
# fmt: on
_PROPERTIES = ("T", "mT", "H", "mH", "data")
_DRAWING = (
    "drop",
    "rand",
    "normal",
    "uniform",
    "bernoulli",
    "multinomial",
    "shuffle",
    "gamma",
    "poisson",
    "exponential",
)


def writes(name: str) -> bool:
    """Whether what is called so changes the tensor that it is called on."""
    is_method = name.endswith("_") and not name.endswith("__")
    return is_method or name == "__setitem__" or name.lower().startswith(("assign", "inplace"))


def asks(name: str) -> bool:
    """Whether what is called so answers without looking at values."""
    return name.lower() in _ABOUT_TENSORS


def draws(name: str) -> bool:
    """Whether what is called so may take numbers from MindSpore's generators."""
    return any(word in name.lower() for word in _DRAWING)


def replace_all(calls: Wrap, reads: Wrap) -> list[Place]:
    """Put ``calls(name, function)`` in place of everything that computes, ``reads`` of what gives values to Python."""
    done: list[Place] = []
    made: dict[int, Any] = {}
    for table, name, function in _module_places():
        if id(function) not in made:
            made[id(function)] = calls(function.__name__, function)
        done.append((table, name, function))
        table[name] = made[id(function)]
    for owner, name, function in _methods():
        _set(done, owner, name, (reads if name in READS else calls)(name, function))
    for name in _PROPERTIES:
        for owner in (Tensor, Parameter):
            if owner is Tensor or name in vars(owner):
                _set(done, owner, name, _property(owner, name, calls))
    for kind in _kinds_of_primitives(ops.Primitive):
        if "__call__" in vars(kind):
            _set(done, kind, "__call__", calls("primitive", vars(kind)["__call__"]))
    return done


def put_back(places: list[Place]) -> None:
    """Undo :func:`replace_all`."""
    for owner, name, before in reversed(places):
        if isinstance(owner, dict):
            owner[name] = before
        elif before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def is_library_function(value: Any) -> bool:
    """Whether MindSpore has this function, which then holds nothing of a program's."""
    return id(value) in _functions()


def _set(done: list[Place], owner: type, name: str, value: Any) -> None:
    done.append((owner, name, vars(owner).get(name, _ABSENT)))
    setattr(owner, name, value)


def _property(owner: type, name: str, calls: Wrap) -> property:
    plain, read = _read_of(owner, name)
    return property(calls(name, read), getattr(plain, "__set__", None))


@functools.cache
def _read_of(owner: type, name: str) -> tuple[Any, Callable[..., Any]]:
    """A property, and a function that reads it, the same at each call."""
    plain = inspect.getattr_static(owner, name)

    def read(tensor: Any) -> Any:
        return plain.__get__(tensor, type(tensor))

    read.__name__ = name
    _functions()[id(read)] = read
    return plain, read


def _methods() -> Iterator[tuple[type, str, Callable[..., Any]]]:
    for name in dir(Tensor):
        is_special = name.startswith("_")
        if name in _ABOUT_TENSORS or (is_special and name not in _SPECIAL and name not in READS):
            continue
        method = inspect.getattr_static(Tensor, name)
        if name in _PROPERTIES or not callable(method) or isinstance(method, (staticmethod, classmethod, type)):
            continue
        yield Tensor, name, method
        if name in vars(Parameter):
            yield Parameter, name, vars(Parameter)[name]
    for name in READS:
        if name in vars(DTensorBase):
            yield DTensorBase, name, vars(DTensorBase)[name]


def _kinds_of_primitives(kind: Any) -> set[type]:
    found = {kind}
    for inner in kind.__subclasses__():
        found |= _kinds_of_primitives(inner)
    return found


_known_functions: dict[int, Callable[..., Any]] = {}


def _functions() -> dict[int, Callable[..., Any]]:
    """The functions of MindSpore's public modules, by identity."""
    if not _known_functions:
        for place in _NAMESPACES:
            for name, value in vars(place).items():
                is_public = not name.startswith("_") and name not in _ABOUT_TENSORS
                if is_public and isinstance(value, _FUNCTIONS) and not name[0].isupper():
                    _known_functions[id(value)] = value
    return _known_functions


_places: list[Place] = []
_num_modules = 0


def _module_places() -> list[Place]:
    """Where those functions are, in all modules that are loaded."""
    global _num_modules
    modules = list(sys.modules.values())
    if _num_modules != len(modules):
        functions = _functions()
        _places.clear()
        for module in modules:
            own = getattr(module, "__dict__", None)
            if type(own) is not dict or own.get("__name__") == __name__:
                continue
            for name, value in own.items():
                if isinstance(value, _FUNCTIONS) and id(value) in functions:
                    _places.append((own, name, value))
        _num_modules = len(modules)
    return [place for place in _places if place[0].get(place[1]) is place[2]]
