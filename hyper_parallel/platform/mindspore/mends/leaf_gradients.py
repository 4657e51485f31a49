"""Every leaf takes a copy of its gradient.

MindSpore 2.10 gives a leaf the very tensor that another node made. When a second backward is added to a gradient with
the strides of a transposed matrix, as that of every linear weight, the elements are added in the wrong order, silently;
and when two leaves get the same gradient, MindSpore wants to clone it, for which a CPU has no kernel::

    weight = Tensor(np.zeros((2, 3), np.float32))  # with requires_grad_()
    x, factor = Tensor(np.array([[1.0, 2.0, 3.0]], np.float32)), Tensor(np.array([[1.0, 10.0]], np.float32))
    for _ in range(2):
        run_backward((((x @ weight.T) * factor).sum(),), (Tensor(1.0),), False, False, ())
    weight._grad  # [[2, 20, 4], [40, 6, 60]], and should be [[2, 4, 6], [20, 40, 60]]

So every leaf that a backward reaches gets ``gradient * 1``, by a hook on its node that lasts for this backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.mends import ACTIVE

__all__ = ["copy_hooks"]


def copy_hooks(roots: Sequence[Tensor]) -> list[Any]:
    """Hooks for the leaves that the roots were computed from, to be removed after the backward."""
    return [node.register_prehook(_take_copies) for node in _leaves(roots)] if ACTIVE else []


def _take_copies(gradients: Any) -> Any:
    return tuple(None if gradient is None else gradient * 1 for gradient in gradients)


def _leaves(roots: Sequence[Tensor]) -> list[Any]:
    """The nodes of the leaves that the roots were computed from."""
    waiting = [node for node in map(private_api.grad_node, roots) if node is not None]
    found: dict[int, Any] = {}
    while waiting:
        node = waiting.pop()
        number = private_api.node_number(node)
        if number not in found:
            found[number] = node
            waiting.extend(private_api.nodes_before(node))
    return [node for node in found.values() if node.is_leaf()]
