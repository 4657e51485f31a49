"""The tensor type that DTensor derives from: a MindSpore tensor that carries this rank's block and its layout.

Note [A DTensor and its block are one tensor]
``Tensor._make_subclass`` gives a second Python object over the same C++ tensor, gradient history included. A DTensor is
such an object: MindSpore's engine sees the block, and ``_local`` is the block as a plain tensor, so that operators run
on plain tensors and nothing is switched off. ``.shape`` is global, which Python code of MindSpore may therefore read.
Operators are intercepted at ``__fallback__``; indexing and a few functions never get there and are answered by methods
(``takes_over/doors.py``).

Note [Versions]
MindSpore counts writes of some operators only, and begins again at zero after others. What edges of the graph remember
must not outlive a write, so a DTensor counts the writes that come through it (``written``) as well.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from mindspore import Parameter, Tensor, ops

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base.tensors import narrow, overwrite, own_copy
from hyper_parallel.platform.shared.lawful_gradients import LawfulGradients

_make = private_api.make_subclass


class DTensorBase(LawfulGradients, Tensor):
    """A tensor with a layout; see Note [A DTensor and its block are one tensor]."""

    _layout: Any
    _global_shape: tuple[int, ...]
    _local: Any
    _num_writes: int = 0

    @property
    def layout(self) -> Any:
        """Where the data lies."""
        return self._layout

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self._global_shape

    @property
    def ndim(self) -> int:
        return len(self._global_shape)

    def dim(self) -> int:
        return len(self._global_shape)

    @property
    def requires_grad(self) -> bool:
        return private_api.requires_grad(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if isinstance(self, Parameter):
            Parameter.requires_grad.fset(self, value)
        elif value:
            self.requires_grad_()
        else:
            private_api.set_requires_grad(self, False)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Ask for the gradient; the tensor."""
        block = self._completed()._local
        if requires_grad:
            block.requires_grad_()
        else:
            private_api.set_requires_grad(block, False)
        return self

    @property
    def is_leaf(self) -> bool:
        return private_api.is_leaf(self)

    @property
    def grad_fn(self) -> Any:
        return None if private_api.is_leaf(self) else private_api.grad_node(self)

    @property
    def is_meta(self) -> bool:
        return self._local.is_meta

    @property
    def _version(self) -> Any:
        return (self._num_writes, private_api.version_of(self._local))

    @property
    def local_param_info(self) -> Any:
        """What MindSpore knows of a parameter besides its values; its tape looks for it at the block."""
        return getattr(self._local, "param_info", None)

    @local_param_info.setter
    def local_param_info(self, info: Any) -> None:
        self._local.param_info = info

    def is_complex(self) -> bool:
        return "complex" in str(self.dtype).lower()

    def __str__(self) -> str:
        return repr(self)

    # ---------------------------------------------------------------- gradients

    @property
    def grad(self) -> Any:
        """The gradient, laid out by the law; None before backward."""
        gradient = private_api.get_grad(self._local)
        if gradient is None:
            return None
        return as_dtensor(plain_kind(type(self)), gradient, self._layout.gradient(), self._global_shape)

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None:
            value = self.lawful_gradient(value)._completed()._local
        private_api.set_grad(self._local, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """As for a plain tensor; ``hook`` gets the gradient as a DTensor laid out by the law."""
        layout, shape, kind = self._layout.gradient(), self._global_shape, plain_kind(type(self))
        lawful = self.lawful_hook(hook, lambda gradient: as_dtensor(kind, detached(gradient), layout, shape))

        def on_local(gradient: Any) -> Any:
            changed = lawful(gradient)
            return None if changed is None else local_alias(changed)

        return Tensor.register_hook(self._local, on_local)

    # ---------------------------------------------------------------- memory

    @property
    def data(self) -> Any:
        """The same memory without gradient history."""
        return as_dtensor(plain_kind(type(self)), detached(self), self._layout, self._global_shape)

    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, DTensorBase):
            raise TypeError(
                f"the data of a distributed tensor of shape {tuple(self._global_shape)} can only be set to a "
                f"distributed tensor, got {type(value).__name__}; use distribute_tensor or from_local"
            )
        self._local.data = value._completed()._local
        self._layout = value._layout
        self._global_shape = value._global_shape
        self.written()

    def written(self) -> None:
        """Say that the values have changed; see Note [Versions]."""
        self._num_writes += 1

    def assign_value(self, value: Any) -> Any:
        """Take the values of a distributed tensor of this layout, or this rank's part of a whole one; the tensor.

        ``Parameter.set_data``, ``Cell.load_state_dict`` and ``mindspore.load_param_into_net`` end here. MindSpore's own
        would give other memory to this object and leave the block, which is what operators read, as it is.
        """
        if tuple(value.shape) != tuple(self._global_shape):
            raise ValueError(
                f"a distributed tensor of shape {tuple(self._global_shape)} cannot have the values of one of shape "
                f"{tuple(value.shape)}; give the whole values, or a distributed tensor"
            )
        if isinstance(value, DTensorBase):
            if value._layout is not self._layout:
                raise ValueError(
                    f"a distributed tensor under {self._layout} cannot have the values of one under {value._layout}; "
                    "redistribute it first"
                )
            block = detached(value)
        else:
            block = value.data
            for dim, (begin, length) in enumerate(zip(*self._layout.local_region(self._global_shape), strict=True)):
                block = narrow(block, dim, begin, length)
        overwrite(self._local, block if block.dtype == self._local.dtype else ops.cast(block, self._local.dtype))
        self.written()
        return self

    def asnumpy(self) -> Any:
        """The whole values; every rank of the mesh must ask."""
        return self.full_tensor().asnumpy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "only distributed tensors created by the user (graph leaves) can be deep-copied; detach() it first"
            )
        copied = as_dtensor(plain_kind(type(self)), copied_block(self), self._layout, self._global_shape)
        if isinstance(self, Parameter):
            made = Parameter(copied, name=self.name, requires_grad=self.requires_grad)
        else:
            made = copied
            if self.requires_grad:
                made.requires_grad_()
        memo[id(self)] = made
        own = {name: value for name, value in self.__dict__.items() if name in _COPIED_BESIDES}
        made.__dict__.update(copy.deepcopy(own, memo))
        if self.grad is not None:
            made.grad = self.grad.__deepcopy__(memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        is_param = isinstance(self, Parameter)
        layout = self._layout.to_dict()
        return _rebuild, (detached(self), layout, tuple(self._global_shape), self.requires_grad, is_param)


# Attributes of the library that a deep copy has too.
_COPIED_BESIDES: frozenset[str] = frozenset()

_rebuild: Callable[..., Any]


def set_rebuilder(rebuild: Callable[..., Any]) -> None:
    """Let ``rebuild(local, layout_dict, shape, requires_grad, is_param)`` make DTensors of pickled parts."""
    global _rebuild
    _rebuild = rebuild


_is_distributed: dict[type, bool] = {}
is_known_dtensor = _is_distributed.get  # of a type: whether its tensors are DTensors; None where nobody has asked yet


def is_distributed(value: Any) -> bool:
    """Whether ``value`` is a DTensor; asked of each type once, since ``isinstance`` of MindSpore's tensors is slow."""
    found = _is_distributed.get(type(value))
    return _learn(value) if found is None else found


def _learn(value: Any) -> bool:
    found = isinstance(value, DTensorBase)
    if not isinstance(value, (list, tuple)):
        _is_distributed[type(value)] = found
    return found


def has_dtensor(values: Any) -> bool:
    """Whether a DTensor is among the values, or in lists among them."""
    for value in values:
        found = _is_distributed.get(type(value))
        if found is None:
            found = has_dtensor(value) if type(value) is list or type(value) is tuple else _learn(value)
        if found:
            return True
    return False


def plain_kind(kind: type) -> type:
    """The class of tensors that are like one of ``kind`` without being a parameter, or in flight."""
    return next(base for base in kind.__mro__ if DTensorBase in base.__bases__)


def as_dtensor(kind: type, plain: Any, layout: Any, shape: Any) -> Any:
    """A DTensor over the memory and gradient history of ``plain``."""
    if isinstance(plain, DTensorBase):
        plain = plain._completed()._local
    made = _make(kind, plain)
    made._local = plain
    made._layout = layout
    made._global_shape = tuple(shape)
    return made


def local_alias(tensor: Any) -> Any:
    """The block as a plain tensor: the same memory and the same gradient history."""
    return tensor._completed()._local if isinstance(tensor, DTensorBase) else tensor


def alias(tensor: Any) -> Any:
    """The tensor itself: a DTensor made of it is another Python object over the same C++ tensor."""
    return tensor


def detached(tensor: Any) -> Any:
    """The block as a plain tensor without gradient history."""
    return local_alias(tensor).data


def copied_block(tensor: Any) -> Any:
    """The block in memory of its own, without gradient history."""
    return own_copy(local_alias(tensor))


def numel(shape: Any) -> int:
    return math.prod(shape)
