"""Which plain parameters a tensor was computed from, read from PyTorch's graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hyper_parallel.platform.torch.base.dtensor_base import DTensorBase
from hyper_parallel.platform.torch.private_api import NoInterception

_OWN_EDGES = "hyper_parallel."


def plain_parameters_behind(tensor: torch.Tensor, known: Iterable[Any]) -> list[torch.nn.Parameter]:
    """The plain parameters, known or not, from which a way leads to ``tensor`` that no edge of ours lies on."""
    del known
    found: dict[int, torch.nn.Parameter] = {}
    seen: set[Any] = set()
    with NoInterception():  # a recording of calls asks programs why they look at the graph
        ahead: list[tuple[Any, int]] = [(tensor.grad_fn, tensor.output_nr)]
    while ahead:
        node, number = ahead.pop()
        if node is None:
            continue
        # The edge by which parameters of a sharded unit enter: each of its results stands for one of them.
        parameters = getattr(node, "stands_for", None)
        if parameters is not None and parameters[number] is not None:
            found[id(parameters[number])] = parameters[number]
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)  # of the node that adds to a leaf's gradient
        if isinstance(leaf, torch.nn.Parameter) and not isinstance(leaf, DTensorBase):
            found[id(leaf)] = leaf
        elif not _is_own_edge(node):
            ahead.extend(node.next_functions)
    return list(found.values())


def _is_own_edge(node: Any) -> bool:
    # Of an autograd function written in Python the node's class keeps the function; there is no public name for it.
    function = getattr(type(node), "_forward_cls", None)
    return function is not None and function.__module__.startswith(_OWN_EDGES)
