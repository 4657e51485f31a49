"""Gradients of gradients on a CPU: an error, since MindSpore 2.10 gives wrong ones without a word.

What the nodes of its tape compute in a backward that is recorded is not connected where a reshape is among it, as in
the gradients of sums, matrix products and norms. A part of the second gradient is then missing::

    def fourth_power(x):
        return ((x * x).reshape(1) ** 2).sum()


    x = Tensor(np.array([[2.0]]))
    mindspore.grad(lambda x: mindspore.grad(fourth_power)(x).sum())(x)  # 16, and should be 48

Which operators lose a part depends on their inner workings, so all are refused. On Ascend they are allowed.
"""

from __future__ import annotations

from hyper_parallel.platform.mindspore.mends import ACTIVE

__all__ = ["check_create_graph"]


def check_create_graph(create_graph: bool) -> None:
    """Refuse ``create_graph=True`` on a CPU."""
    if create_graph and ACTIVE:
        raise RuntimeError(
            "create_graph=True: MindSpore 2.10 on a CPU cannot differentiate gradients reliably, parts of the result "
            "would be missing without an error. Use Ascend, or PyTorch (HYPER_PARALLEL_PLATFORM=torch); or compute the "
            "gradient that is to be differentiated by a formula in the forward pass, and leave create_graph out"
        )
