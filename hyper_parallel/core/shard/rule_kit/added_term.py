"""A term that is added to a product (a bias): once, also where the product is a pending sum over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.shard.rule_kit.signature import LocalCall
from hyper_parallel.platform import get_platform


def added_once(term: int) -> dict[str, Any]:
    """The ``local`` and ``needs_local`` of a signature whose input number ``term`` is added to a product.

    Where the result is a pending sum and the term is whole, the first rank of the axis adds it; the others add zeros
    that keep it in their graph, so that all ranks take part in the sum of its gradient.
    """

    def silence(call: LocalCall) -> Any:
        args, kwargs = replace_tensor(call, term, get_platform().zeros_kept_in_graph)
        return call.func(*args, **kwargs)

    return {"local": silence, "needs_local": lambda call: not is_counted_here(call, term)}


def is_counted_here(call: LocalCall, term: int) -> bool:
    """Whether this rank adds input number ``term``; every rank does where nothing is pending, or the term is too."""
    pending = zip(call.outputs[0].partials, call.inputs[term].partials, strict=True)
    return call.mesh.leads(axis for axis, (op, own) in enumerate(pending) if op == "sum" and own is None)


def replace_tensor(call: LocalCall, number: int, change: Callable[[Any], Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with ``change`` applied to the tensor that comes as number ``number``."""
    platform = get_platform()
    args, kwargs = list(call.args), dict(call.kwargs)
    places: list[tuple[Any, Any]] = [(args, index) for index in range(len(args))]
    places += [(kwargs, name) for name in kwargs]
    tensors = [(holder, key) for holder, key in places if platform.is_tensor(holder[key])]
    holder, key = tensors[number]
    holder[key] = change(holder[key])
    return args, kwargs
