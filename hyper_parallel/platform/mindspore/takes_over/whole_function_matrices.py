"""Functions of ``mindspore.scipy.linalg`` and ``mindspore.numpy`` on matrices, in the words of the rule table.

They take numpy's arguments, such as leave to overwrite or not to check; what the rules read is put in front.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.platform.mindspore.takes_over.whole_function_calls import Dispatch, Once


def matrices_written_out(dispatch: Dispatch, once: Once) -> dict[str, Callable[..., Any]]:
    """By the path of a function, what answers it for DTensors, given the plain function first."""

    def of_matrix(name: str, shapes: Callable[..., Any]) -> Callable[..., Any]:
        """A function of one matrix, whose settings the rule need not know."""

        def meets(plain: Any, a: Any, *settings: Any, **more: Any) -> Any:
            function = once(name, plain, lambda: lambda a, *args, **kw: plain(a, *args, **kw), shapes)
            return dispatch(function, (a, *settings), more)

        return meets

    def eigh(plain: Any, a: Any, b: Any = None, lower: bool = True, eigvals_only: bool = False, *rest: Any) -> Any:
        name = "linalg_eigvalsh" if eigvals_only else "linalg_eigh"

        def shapes(a: Any, b: Any, lower: bool, eigvals_only: bool, *rest: Any) -> Any:
            return [a.shape[:1]] if eigvals_only else [a.shape[:1], a.shape]

        function = once(name, plain, lambda: lambda a, *args: plain(a, *args), shapes)
        return dispatch(function, (a, b, lower, eigvals_only, *rest), {})

    def svd(plain: Any, input: Any, full_matrices: bool = False, compute_uv: bool = True) -> Any:
        function = once("svd" if compute_uv else "linalg_svdvals", plain, lambda: lambda *args: plain(*args))
        return dispatch(function, (input, full_matrices, compute_uv), {})

    def solve_triangular(plain: Any, a: Any, b: Any, *settings: Any, **more: Any) -> Any:
        function = once("linalg_solve_triangular", plain, lambda: lambda a, b, *args, **kw: plain(a, b, *args, **kw))
        return dispatch(function, (a, b, *settings), more)

    def lu_solve(plain: Any, lu_and_piv: Any, b: Any, *settings: Any, **more: Any) -> Any:
        def on_blocks(lu: Any, pivots: Any, b: Any, *settings: Any, **more: Any) -> Any:
            return plain((lu, pivots), b, *settings, **more)

        function = once("linalg_lu_solve", plain, lambda: on_blocks, lambda lu, pivots, b, *rest, **more: [b.shape])
        return dispatch(function, (*lu_and_piv, b, *settings), more)

    def dot(plain: Any, a: Any, b: Any) -> Any:
        """Of vectors; of others, product and reshapes are dispatched one by one."""
        if a.ndim != 1 or b.ndim != 1:
            return plain(a, b)
        return dispatch(once("dot", plain, lambda: lambda a, b: plain(a, b)), (a, b), {})

    def cross(
        plain: Any, a: Any, b: Any, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None
    ) -> Any:
        """Of vectors that lie alike; of others, the parts are dispatched one by one."""
        dims = {axisa, axisb, axisc} if axis is None else {axis}
        if len(dims) > 1 or a.shape != b.shape:
            return plain(a, b, axisa, axisb, axisc, axis)
        function = once("linalg_cross", plain, lambda: lambda a, b, dim: plain(a, b, axis=dim))
        return dispatch(function, (a, b, *dims), {})

    return {
        "ops.svd": svd,
        "numpy.cross": cross,
        "numpy.dot": dot,
        "numpy.matrix_power": of_matrix("linalg_matrix_power", _same),
        "scipy.cholesky": of_matrix("linalg_cholesky", _same),
        "scipy.det": of_matrix("linalg_det", lambda a, *rest, **more: [()]),
        "scipy.eigh": eigh,
        "scipy.inv": of_matrix("linalg_inv", _same),
        "scipy.lu": of_matrix("linalg_lu", _of_factors),
        "scipy.lu_factor": of_matrix("linalg_lu_factor", lambda a, *rest, **more: [a.shape, (min(a.shape),)]),
        "scipy.lu_solve": lu_solve,
        "scipy.solve_triangular": solve_triangular,
    }


def _same(a: Any, *settings: Any, **more: Any) -> Any:
    return [a.shape]


def _of_factors(a: Any, permute_l: bool = False, *settings: Any, **more: Any) -> Any:
    rows, columns = a.shape
    inner = min(rows, columns)
    return [*([] if permute_l else [(rows, rows)]), (rows, inner), (inner, columns)]
