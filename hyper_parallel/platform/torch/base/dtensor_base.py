"""The tensor type that DTensor derives from: a ``torch.Tensor`` whose own data is this rank's block.

Note [A DTensor is its local tensor]
The C++ tensor behind a DTensor is the local block, autograd included, so backward is plain local autograd and making a
DTensor of a result costs a class assignment and two attributes: the layout, and the global shape, which is what
``.shape`` shows. Operators are intercepted at ``__torch_function__``. With interception off (``NoInterception``) C
functions run on the blocks directly; Python code must be given plain aliases (:func:`local_alias`), for it would read
``.shape``.

Attributes that optimizers and modules read in loops are Python properties here: a trip through ``__torch_function__``
costs microseconds, a property a fraction of one.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel.platform.shared.lawful_gradients import LawfulGradients
from hyper_parallel.platform.torch.private_api import NoInterception

# Functions about the autograd graph and not about values: they are not dispatched. Filled by ``dtensor_gradients``.
graph_functions: dict[Callable[..., Any], Callable[..., Any]] = {}


def graph_function(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Our form of a function about the autograd graph, such as ``torch.autograd.grad``; None for other functions."""
    return graph_functions.get(func)


def set_dispatcher(intercept: Callable[..., Any]) -> None:
    """Let ``intercept(kind, func, types, args, kwargs)`` answer every operator that meets a DTensor."""
    DTensorBase._on_operator = DTensorBase.__torch_function__ = classmethod(intercept)  # type: ignore[assignment]


def _attribute(name: str, settable: bool = False) -> property:
    """The plain tensor's attribute ``name``, read without a trip through ``__torch_function__``."""
    plain = getattr(torch.Tensor, name)

    def get(self: torch.Tensor) -> Any:
        with NoInterception():
            return plain.__get__(self)

    def put(self: torch.Tensor, value: Any) -> None:
        with NoInterception():
            plain.__set__(self, value)

    return property(get, put if settable else None)


# Of a DTensor's attributes: those that a copy has of its own, or must not have (edges of the graph it is in).
_NOT_COPIED = frozenset({"_layout", "_global_shape", "_edges", "_gathered_from", "_source", "_counts_alone"})


class DTensorBase(LawfulGradients, torch.Tensor):
    """A tensor with a layout; see Note [A DTensor is its local tensor]."""

    _layout: Any
    _global_shape: torch.Size
    _on_operator: Any  # set by :func:`set_dispatcher`; a kind of DTensor that looks at operators first has its own

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_on_operator" in vars(cls):
            cls.__torch_function__ = vars(cls)["_on_operator"]

    dtype = _attribute("dtype")
    device = _attribute("device")
    is_leaf = _attribute("is_leaf")
    requires_grad = _attribute("requires_grad", settable=True)
    grad_fn = _attribute("grad_fn")
    ndim = _attribute("ndim")
    is_cuda = _attribute("is_cuda")
    is_cpu = _attribute("is_cpu")
    is_meta = _attribute("is_meta")
    is_sparse = _attribute("is_sparse")
    _version = _attribute("_version")

    def dim(self) -> int:
        return len(self._global_shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        return self.dtype.is_complex

    @property
    def layout(self) -> Any:  # type: ignore[override]
        """Where the data lies. Code of PyTorch and transformers, which asks if a tensor is dense, is told: dense."""
        asking = sys._getframe(1).f_globals.get("__name__", "")
        return torch.strided if asking.startswith(("torch.", "transformers.")) else self._layout

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The global shape."""
        return self._global_shape

    @property
    def grad(self) -> Any:  # type: ignore[override]
        """The gradient, laid out by the law; None before backward."""
        with NoInterception():
            gradient = torch.Tensor.grad.__get__(self)  # type: ignore[attr-defined]
        if gradient is not None and type(gradient) is torch.Tensor:
            as_dtensor(type(self), gradient, self._layout.gradient(), self._global_shape)
        return gradient

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None:
            value = self.lawful_gradient(value)
        with NoInterception():
            torch.Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> Any:  # type: ignore[override]
        """The same memory without gradient history."""
        with NoInterception():
            plain = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        same = as_dtensor(type(self), plain, self._layout, self._global_shape)
        same._counts_alone = True  # writes into this tensor are not counted there
        return same

    @data.setter
    def data(self, value: Any) -> None:
        if not isinstance(value, DTensorBase):
            raise TypeError(
                f"the data of a distributed tensor of shape {tuple(self._global_shape)} can only be set to a "
                f"distributed tensor, got {type(value).__name__}; use distribute_tensor or from_local"
            )
        with NoInterception():
            if self.requires_grad and torch.Tensor.size(self) != torch.Tensor.size(value):
                # A graph that is still there keeps the node that expects gradients of the old block; another dtype in
                # between makes PyTorch begin a new one.
                other = torch.float32 if self.dtype is torch.float64 else torch.float64
                torch.Tensor.data.__set__(self, torch.empty(0, dtype=other, device=self.device))  # type: ignore[attr-defined]
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._layout = value._layout
        self._global_shape = value._global_shape
        for remembered in ("_edges", "_gathered_from"):  # made of the old values, which no counter tells
            self.__dict__.pop(remembered, None)

    def set_(self, source: Any = None, *rest: Any, **given: Any) -> Any:  # type: ignore[override]
        """The memory of another distributed tensor, and its layout; PyTorch does not intercept this one."""
        if rest or given or not isinstance(source, DTensorBase):
            raise RuntimeError(
                f"set_ would change the memory of a distributed tensor of global shape {tuple(self._global_shape)} "
                f"under {self._layout} behind its layout; set it to a distributed tensor"
            )
        self.data = source
        return self

    def backward(
        self, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
    ) -> None:
        """As for a plain tensor: a whole or pending loss is seeded with 1, other tensors need a ``gradient``."""
        torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "only distributed tensors created by the user (graph leaves) can be deep-copied; detach() it first"
            )
        with NoInterception():
            plain = torch.Tensor.detach(self).clone()
        copied = as_dtensor(type(self), plain, self._layout, self._global_shape)
        copied.requires_grad = self.requires_grad
        memo[id(self)] = copied
        own = {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}
        copied.__dict__.update(copy.deepcopy(own, memo))
        if self.grad is not None:
            copied.grad = self.grad.__deepcopy__(memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with NoInterception():
            plain = torch.Tensor.detach(self)
            if plain.untyped_storage().nbytes() > plain.numel() * plain.element_size():
                plain = plain.clone()  # a part of a larger memory, all of which would be written
        is_param = isinstance(self, torch.nn.Parameter)
        layout = self._layout.to_dict()
        return _rebuild, (plain, layout, tuple(self._global_shape), self.requires_grad, is_param)


_rebuild: Callable[..., Any]


def set_rebuilder(rebuild: Callable[..., Any]) -> None:
    """Let ``rebuild(local, layout_dict, shape, requires_grad, is_param)`` make DTensors of pickled parts.

    It must be a function of a module: pickles name it, and loading one imports its module.
    """
    global _rebuild
    _rebuild = rebuild
    torch.serialization.add_safe_globals([rebuild])


def as_dtensor(kind: type, plain: torch.Tensor, layout: Any, shape: Any) -> Any:
    """Make ``plain`` itself a DTensor; the caller must own it."""
    plain.__class__ = kind  # type: ignore[assignment]
    plain._layout = layout  # type: ignore[attr-defined]
    plain._global_shape = shape if type(shape) is torch.Size else torch.Size(shape)  # type: ignore[attr-defined]
    return plain


# Note [Aliases]
# ``x[...]`` and not ``x.view_as(x)``: the gradient of a view is a view of the gradient, which autograd takes for its
# own and keeps as ``p.grad``, so that a second backward would add to the tensor that the caller passed to the first.


def local_alias(tensor: torch.Tensor) -> torch.Tensor:
    """The block as a plain tensor: the same memory and the same gradient history."""
    with NoInterception():
        if torch.is_grad_enabled() and torch.Tensor.requires_grad.__get__(tensor):  # type: ignore[attr-defined]
            return torch.Tensor.__getitem__(tensor, ...)
        return torch.Tensor.detach(tensor)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor with the same memory and gradient history, to be turned into a DTensor."""
    return tensor[...] if tensor.requires_grad and torch.is_grad_enabled() else tensor.detach()


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """The block as a plain tensor without gradient history."""
    with NoInterception():
        return torch.Tensor.detach(tensor)


def without_interception(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a C function, or an autograd function's ``apply``, directly on the blocks of DTensors."""
    with NoInterception():
        return func(*args, **kwargs)
