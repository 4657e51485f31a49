"""Functions of matrices: batch dims may be cut, the matrices stay whole."""

from __future__ import annotations

from hyper_parallel.core.shard.rule_kit.agreed_errors import with_agreed_errors
from hyper_parallel.core.shard.rule_kit.rule_table import rule
from hyper_parallel.core.shard.rule_kit.signature import OpCall, Signature, TensorSpec, letters
from hyper_parallel.core.shard.rules.matmul import align

# For each operator the number of dims of one item (a matrix, a vector) in each tensor, in the order of the arguments.
_ITEM_DIMS = {
    **dict.fromkeys(
        (
            *("inverse", "linalg_inv", "linalg_inv_ex", "det", "linalg_det", "logdet", "slogdet", "linalg_slogdet"),
            *("cholesky", "linalg_cholesky", "linalg_cholesky_ex", "cholesky_inverse", "qr", "linalg_qr"),
            *("svd", "linalg_svd", "linalg_svdvals", "linalg_eigh", "linalg_eigvalsh", "linalg_eig", "linalg_eigvals"),
            *("matrix_exp", "linalg_matrix_exp", "matrix_power", "linalg_matrix_power", "linalg_pinv", "pinverse"),
            *("linalg_matrix_rank", "linalg_lu", "linalg_lu_factor", "linalg_lu_factor_ex", "_lu_with_info"),
            *("linalg_ldl_factor", "linalg_ldl_factor_ex", "linalg_cond"),
        ),
        (2,),
    ),
    "linalg_vander": (1,),
    "linalg_solve_triangular": (2, 2),
    "triangular_solve": (2, 2),
    "cholesky_solve": (2, 2),
    "lu_solve": (2, 2, 1),
    "lu_unpack": (2, 1),
    "linalg_lu_solve": (2, 1, 2),
    "linalg_ldl_solve": (2, 1, 2),
    "ormqr": (2, 1, 2),
}
# An empty batch, which a rank may have where the cut is uneven, is refused by the framework or has no gradient, or one
# that belongs to another graph than those of the other ranks.
_NOT_FOR_EMPTY = frozenset({"linalg_cond", "linalg_vander", "ormqr"})
# These raise where a matrix is singular, not positive definite, or has no finite values, or pivots are no rows of one.
_MAY_FAIL = frozenset(
    {
        *("inverse", "linalg_inv", "cholesky", "linalg_cholesky", "svd", "linalg_svd", "linalg_svdvals", "linalg_eigh"),
        *("linalg_eigvalsh", "linalg_eig", "linalg_eigvals", "linalg_pinv", "pinverse", "linalg_matrix_rank"),
        *("linalg_cond", "linalg_lu_factor", "linalg_ldl_factor", "linalg_solve", "linalg_matrix_power"),
        *("matrix_power", "cholesky_inverse", "lu_solve", "lu_unpack", "linalg_lu_solve", "linalg_ldl_solve"),
    }
)


@rule(*_ITEM_DIMS)
def per_item(call: OpCall) -> Signature | None:
    return _by_batch(call, _ITEM_DIMS[call.name])


@rule("linalg_solve", "linalg_solve_ex")
def solve(call: OpCall) -> Signature | None:
    """The right side is a batch of vectors when it has the shape of the left one without its last dim."""
    bound = call.bind("A", "B")
    left, right = bound["A"], bound["B"]
    if not isinstance(left, TensorSpec) or not isinstance(right, TensorSpec):
        return None
    is_vector = right.ndim == 1 or (right.ndim == left.ndim - 1 and right.shape == left.shape[:-1])
    return _by_batch(call, (2, 1 if is_vector else 2))


def _by_batch(call: OpCall, item_dims: tuple[int, ...]) -> Signature | None:
    if len(call.tensors) != len(item_dims) or any(
        spec.ndim < dims for spec, dims in zip(call.tensors, item_dims, strict=True)
    ):
        return None
    batch_rank = max(spec.ndim - dims for spec, dims in zip(call.tensors, item_dims, strict=True))
    batch = letters(batch_rank)
    sizes = call.outputs[0][:batch_rank]
    if any(shape[:batch_rank] != sizes for shape in call.outputs):
        return None
    inputs = tuple(
        (*align(spec.shape[: spec.ndim - dims], batch, sizes), *(None,) * dims)
        for spec, dims in zip(call.tensors, item_dims, strict=True)
    )
    outputs = tuple((*batch, *(None,) * (len(shape) - batch_rank)) for shape in call.outputs)
    even = frozenset(map(str, batch)) if call.name in _NOT_FOR_EMPTY else frozenset()
    found = Signature(inputs, outputs, even=even)
    return with_agreed_errors(found) if call.name in _MAY_FAIL else found
