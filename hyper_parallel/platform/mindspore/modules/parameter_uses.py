"""Which plain parameters a tensor was computed from, read from MindSpore's tape.

The tape's nodes do not lead back to tensors, so the leaves found are compared with those of the parameters that may be
meant. The node of an autograd function is an object of the function's class.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.dtensor.tensor_type import DTensorBase

_OWN_EDGES = "hyper_parallel."


def plain_parameters_behind(tensor: Any, known: Iterable[Any]) -> list[Any]:
    """The plain parameters among ``known`` from which a way leads to ``tensor`` that no edge of ours lies on."""
    leaves: set[int] = set()
    seen: set[int] = set()
    gathered: dict[int, Any] = {}
    ahead = [(private_api.grad_node(tensor), 0)]
    while ahead:
        node, number = ahead.pop()
        if node is None:
            continue
        # The edge by which parameters of a sharded unit enter: each of its results stands for one of them.
        parameters = getattr(node, "stands_for", None)
        if parameters is not None and parameters[number] is not None:
            gathered[id(parameters[number])] = parameters[number]
        if private_api.node_number(node) in seen:
            continue
        seen.add(private_api.node_number(node))
        before = private_api.results_before(node)
        if not before:
            leaves.add(private_api.node_number(node))
        elif not type(node).__module__.startswith(_OWN_EDGES):
            ahead.extend(before)
    return [*gathered.values()] + [
        parameter
        for parameter in known
        if not isinstance(parameter, DTensorBase)
        and (node := private_api.grad_node(parameter)) is not None
        and private_api.node_number(node) in leaves
    ]
