"""Gradients of gradients on a CPU: what MindSpore would lose of them is handed on, or refused.

Note [What is lost when a backward is recorded]
    With ``create_graph`` MindSpore 2.10 records what the nodes of its tape compute, so that it can be differentiated
    again. On a CPU the result of a reshape in there is not connected to what is made of it next: a part of the second
    gradient is missing, silently. Between two nodes a copy made by Python is connected, so every node hands on copies.
    Within one node nothing helps. Sums that drop dims put them back by a reshape, products of two matrices transpose
    them, and some others lose a part for reasons of their own; differentiated twice they are an error, which says what
    to write instead. What comes before them may be constant: the sum at the end of a loss is right. Which nodes these
    are was found with differences: ``python -m tests.platform.mindspore_second_gradients``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor

from hyper_parallel.platform.mindspore import private_api

__all__ = ["hand_on_copies"]

# Nodes whose gradient does not depend on what they were given.
_LINEAR = frozenset(
    {
        *("Add", "AddExt", "AddScalar", "Sub", "SubExt", "SubScalar", "Neg", "Muls", "Divs", "Cast", "Contiguous"),
        *("Reshape", "Squeeze", "SumExt", "MeanExt", "ReduceSum", "ReduceMean", "Transpose", "TransposeView"),
    }
)
_DROP_DIMS = frozenset(
    {"SumExt", "MeanExt", "ProdExt", "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"}
)
_PRODUCTS = frozenset({"MatMulExt", "BatchMatMulExt", "Dense"})
_NORMS = frozenset(
    {"Softmax", "LogSoftmax", "LayerNorm", "BatchNorm", "ReduceStd", "CrossEntropyLoss", "NLLLoss", "LpNorm"}
)
_MATRICES = frozenset(
    {"MatrixDeterminant", "LogMatrixDeterminant", "CholeskyInverse", "CholeskySolve", "Svd", "Eigh", "Cdist", "Zeta"}
)
_NEVER = frozenset({*_NORMS, *_MATRICES, "Tile", "Sort"})
_INSTEAD = (
    (_DROP_DIMS, "reduce with keepdims=True and reshape the result"),
    (_PRODUCTS, "multiply plain matrices by ops.MatMul() or ops.BatchMatMul()"),
    (_NORMS, "write softmax, norms and cross-entropy by exp, log and mean"),
    ({"Tile"}, "repeat with ops.broadcast_to and reshape"),
    ({"Sort"}, "sort with ops.topk"),
)


def hand_on_copies(roots: Sequence[Tensor], seeds: Sequence[Any], copies: Callable[[Any], Any]) -> list[Any]:
    """Let all nodes behind the roots hand on ``copies`` of gradients; gives the hooks. An error names what is lost."""
    nodes = _nodes_behind(roots, any(seed is not None and private_api.requires_grad(seed) for seed in seeds))
    lost = sorted({private_api.node_name(node) for node, is_constant in nodes if _is_lost(node, is_constant)})
    if lost:
        instead = [advice for names, advice in _INSTEAD if not names.isdisjoint(lost)]
        raise RuntimeError(
            f"create_graph: MindSpore 2.10 loses a part of the second gradient of {', '.join(lost)} on a CPU; "
            f"{'; '.join([*instead, 'or use Ascend or PyTorch'])}"
        )
    return [
        node.register_prehook(copies) if node.is_leaf() else node.register_hook(lambda given, _: copies(given))
        for node, _ in nodes
    ]


def _is_lost(node: Any, gradient_is_constant: bool) -> bool:
    name = private_api.node_name(node)
    if name in _NEVER:
        return True
    if name in _PRODUCTS:
        operands = [before for before, _ in node.next_functions]
        has_bias = name == "Dense" and len(operands) > 2 and operands[2] is not None
        return all(operand is not None for operand in operands[:2]) and not has_bias
    return name in _DROP_DIMS and not (gradient_is_constant and name in _LINEAR) and _drops_dims(node)


def _drops_dims(node: Any) -> bool:
    after, before = (private_api.result_shape(one) for one in (node, node.next_functions[0][0]))
    return before is None or after is None or len(after) != len(before)


def _nodes_behind(roots: Sequence[Tensor], seeds_vary: bool) -> list[tuple[Any, bool]]:
    """(node, whether the gradient that comes to it is a constant) for all nodes behind the roots."""
    found: dict[int, tuple[Any, bool]] = {}
    waiting = [(node, not seeds_vary) for node in map(private_api.grad_node, roots) if node is not None]
    while waiting:
        node, is_constant = waiting.pop()
        number = private_api.node_number(node)
        if number in found and found[number][1] <= is_constant:
            continue
        found[number] = (node, is_constant)
        if not node.is_leaf():
            goes_on = is_constant and private_api.node_name(node) in _LINEAR
            waiting.extend((before, goes_on) for before in private_api.nodes_before(node))
    return list(found.values())
