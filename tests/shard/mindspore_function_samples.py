"""Calls of MindSpore's functions that are one operator of the rule table each, by the name of the rule.

What MindSpore's kernels on a CPU cannot run stays here: the validator lists it with the kernel's own words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import mindspore.numpy as mnp
import mindspore.scipy.linalg as scipy_linalg
import numpy as np
from mindspore import Tensor, mint, nn, ops

Add = Callable[..., None]
SINGLE = 1e-4  # for kernels that compute in float32


def random(*shape: int, low: float = -2.0, high: float = 2.0, dtype: Any = np.float32) -> np.ndarray:
    """Random values, the same on every rank."""
    seed = sum((place + 2) * size for place, size in enumerate(shape))
    return (np.random.RandomState(seed).rand(*shape) * (high - low) + low).astype(dtype)


def add_elementwise(add: Add) -> None:
    x, y = random(5, 3), random(3, 5).T.copy()
    unit = random(5, 3, low=0.1, high=0.9)
    whole = (np.arange(15).reshape(5, 3) % 7 + 1).astype(np.int32)
    few = (whole % 3).astype(np.int32)
    infinite = np.where(whole % 3 == 0, np.inf, np.where(whole % 3 == 1, -np.inf, x)).astype(np.float32)
    complex_values = (x + 1j * y).astype(np.complex64)

    for name in ("deg2rad", "rad2deg", "exp2", "frac", "sgn", "signbit", "isreal", "positive", "sinc"):
        add(name, getattr(ops, name), x)
    for name in ("isneginf", "isposinf"):
        add(name, getattr(ops, name), infinite)
    add("log2", ops.log2, unit)
    add("bitwise_not", ops.invert, whole)
    add("bitwise_left_shift", ops.bitwise_left_shift, whole, few)
    add("bitwise_right_shift", ops.bitwise_right_shift, whole, few)
    add("copysign", ops.copysign, x, y)
    add("float_power", ops.float_power, unit, unit[::-1].copy())
    add("fmin", ops.fmin, x, y)
    add("hardtanh", ops.hardtanh, x)
    add("heaviside", ops.heaviside, x, y)
    add("isclose", ops.isclose, x, x + (whole % 2).astype(np.float32))
    add("ldexp", ops.ldexp, x, few)
    add("logaddexp", ops.logaddexp, x, y)
    add("logaddexp2", ops.logaddexp2, x, y)
    add("polygamma", lambda a: ops.polygamma(Tensor(1, ms.int32), a), unit)
    add("threshold", lambda a: ops.threshold(a, 0.1, 20.0), x)
    add("special_zeta", ops.zeta, unit + 2, unit + 1)
    for name, function in (
        *(("special_i0e", ops.bessel_i0e), ("special_i1", ops.bessel_i1), ("special_i1e", ops.bessel_i1e)),
        *(("special_bessel_j0", ops.bessel_j0), ("special_bessel_j1", ops.bessel_j1)),
    ):
        add(name, function, unit)
    add("rsub", lambda a: 2.0 - a, x)
    add("rdiv", lambda a: 2.0 / a, unit)
    add("rpow", lambda a: 2.0**a, unit)
    add("rfloor_divide", lambda a: 2.0 // a, unit)
    add("rremainder", lambda a: 2.0 % a, unit)
    add("clone", lambda a: a.clone(), x)
    add("detach", ops.stop_gradient, x)
    add("fill_", lambda a: (a * 1).fill_(3.0), x)
    add("zero_", lambda a: (a * 1).zero_(), x)
    add("polar", lambda a, b: _parts(ops.polar(a, b)), unit, unit[::-1].copy())
    for name in ("igamma", "igammac"):
        add(name, getattr(ops, name), unit, unit[::-1].copy())
    add("glu", ops.glu, random(5, 4))
    add("glu", lambda a: mint.nn.functional.glu(a, 0), random(4, 3))
    for name in ("bessel_y0", "bessel_y1"):
        add(f"special_{name}", getattr(ops, name), unit)
    for number in (0, 1):
        add(f"special_modified_bessel_k{number}", getattr(ops, f"bessel_k{number}"), unit)
        add(f"special_scaled_modified_bessel_k{number}", getattr(ops, f"bessel_k{number}e"), unit)
    add("mvlgamma", lambda a: ops.mvlgamma(a, 2), unit + 2)
    add("prelu", ops.prelu, x, random(3))
    add("prelu", ops.prelu, x, random(1))
    add("isin", lambda a, b: mnp.isin(a, b), whole, few)
    add("angle", ops.angle, complex_values)
    add("real", ops.real, complex_values)
    add("imag", ops.imag, complex_values)
    add("conj", ops.conj, complex_values)
    add("complex", lambda a, b: ops.Complex()(a, b), x, y)
    add("lerp", lambda a, b: ops.lerp(a, b, 0.3), x, y)
    for name in ("bool", "byte", "double", "half", "int", "long", "short"):
        add(name, lambda a, name=name: getattr(a, name)(), x + 3)
    add("bfloat16", lambda a: a.bfloat16().float(), np.round(x * 4) / 4)


def add_images(add: Add) -> None:
    picture, line, volume = random(3, 4, 5, 6), random(3, 4, 7), random(3, 4, 4, 5, 6)
    add("conv1d", lambda a, w, b: ops.conv1d(a, w, b), line, random(6, 4, 3), random(6))
    add("conv2d", lambda a, w, b: ops.conv2d(a, w, b, 1, "pad", 1), picture, random(6, 4, 3, 3), random(6))
    add("conv2d", lambda a, w: ops.conv2d(a, w, groups=2), picture, random(6, 2, 3, 3))
    add("conv2d", lambda a, w: ops.Conv2D(6, 3)(a, w), picture, random(6, 4, 3, 3))
    add("conv3d", lambda a, w: ops.conv3d(a, w), volume, random(6, 4, 2, 2, 2))
    add("conv_transpose2d", _upscaled, picture, random(4, 6, 3, 3))
    add("conv_transpose2d", lambda a, w: _upscaled(a, w, 2), picture, random(4, 3, 3, 3))
    add("conv_transpose3d", lambda a, w: ops.Conv3DTranspose(4, 6, 2)(a, w), volume, random(4, 6, 2, 2, 2))
    add("avg_pool1d", lambda a: ops.avg_pool1d(a, 2, 2), line)
    add("avg_pool2d", lambda a: ops.avg_pool2d(a, 2, 2), picture)
    add("avg_pool3d", lambda a: ops.avg_pool3d(a, 2, 2), volume)
    add("adaptive_avg_pool1d", lambda a: ops.adaptive_avg_pool1d(a, 2), random(3, 4, 6))
    add("adaptive_avg_pool2d", lambda a: ops.adaptive_avg_pool2d(a, (2, 3)), picture)
    add("adaptive_avg_pool3d", lambda a: ops.adaptive_avg_pool3d(a, (2, 2, 3)), volume)
    add("adaptive_max_pool1d", lambda a: ops.adaptive_max_pool1d(a, 2), random(3, 4, 6))
    add("adaptive_max_pool2d", lambda a: ops.adaptive_max_pool2d(a, (2, 3)), picture)
    add("adaptive_max_pool3d", lambda a: ops.adaptive_max_pool3d(a, (2, 2, 3)), volume)
    settings = {"return_indices": True}
    add("adaptive_max_pool1d_with_indices", lambda a: mint.nn.functional.adaptive_max_pool1d(a, 2, True), line)
    add("adaptive_max_pool2d_with_indices", lambda a: ops.adaptive_max_pool2d(a, (2, 3), **settings), picture)
    add("adaptive_max_pool3d_with_indices", lambda a: ops.adaptive_max_pool3d(a, (2, 2, 3), True), volume)
    add("max_pool2d_with_indices", lambda a: ops.max_pool2d(a, 2, **settings), picture)
    add("max_pool3d_with_indices", lambda a: ops.max_pool3d(a, 2, **settings), volume)
    add("max_pool2d", lambda a: ops.max_pool2d(a, 2), picture)
    add("max_pool3d", lambda a: ops.max_pool3d(a, 2), volume)
    corners = np.array([[0, 2], [9, 11]], np.int64)
    add("max_unpool2d", lambda a, i: ops.max_unpool2d(a, i, 2), random(3, 4, 2, 2), np.tile(corners, (3, 4, 1, 1)))
    add(
        "max_unpool3d", lambda a, i: ops.max_unpool3d(a, i, 2), random(3, 4, 1, 2, 2), np.tile(corners, (3, 4, 1, 1, 1))
    )
    add("upsample_nearest1d", lambda a: ops.interpolate(a, size=14, mode="nearest"), line)
    add("upsample_nearest2d", lambda a: ops.interpolate(a, size=(10, 12), mode="nearest"), picture)
    add("upsample_nearest3d", lambda a: ops.interpolate(a, size=(8, 10, 12), mode="nearest"), volume)
    add("upsample_linear1d", lambda a: ops.interpolate(a, size=14, mode="linear"), line)
    add("upsample_bilinear2d", lambda a: ops.interpolate(a, size=(10, 12), mode="bilinear"), picture)
    add("upsample_bicubic2d", lambda a: ops.interpolate(a, size=(10, 12), mode="bicubic"), picture)
    add("upsample_trilinear3d", lambda a: ops.interpolate(a, size=(8, 10, 12), mode="trilinear"), volume)
    add("_upsample_nearest_exact1d", lambda a: ops.interpolate(a, size=14, mode="nearest-exact"), line)
    add("_upsample_nearest_exact2d", lambda a: ops.interpolate(a, size=(10, 12), mode="nearest-exact"), picture)
    add("_upsample_nearest_exact3d", lambda a: ops.interpolate(a, size=(8, 10, 12), mode="nearest-exact"), volume)
    points, places = random(3, 2, 3, 2, low=-1, high=1), random(3, 2, 2, 3, 3, low=-1, high=1)
    add("grid_sampler_2d", lambda a, g: ops.grid_sample(a, g), picture, points)
    add("grid_sampler_3d", lambda a, g: ops.grid_sample(a, g), volume, places)
    add("affine_grid_generator", lambda t: ops.affine_grid(t, (3, 4, 5, 6)), random(3, 2, 3))
    add("pixel_shuffle", lambda a: ops.pixel_shuffle(a, 2), random(3, 8, 4, 5))
    add("pixel_unshuffle", lambda a: ops.pixel_unshuffle(a, 2), random(3, 2, 4, 6))
    add("channel_shuffle", lambda a: ops.channel_shuffle(a, 2), picture)
    add("im2col", lambda a: ops.unfold(a, 2), picture)
    add("col2im", lambda a: ops.fold(a, Tensor([5, 6], ms.int32), 2), random(3, 16, 20))


def _upscaled(picture: Any, weight: Any, groups: int = 1) -> Any:
    """``nn.Conv2dTranspose``, with the weight as an argument."""
    shape = (picture.shape[0], weight.shape[1] * groups, picture.shape[2] + 2, picture.shape[3] + 2)
    return ops.Conv2DTranspose(weight.shape[0], 3, group=groups)(picture, weight, shape)


def add_losses(add: Add) -> None:
    x, y, unit = random(5, 3), random(3, 5).T.copy(), random(5, 3, low=0.1, high=0.9)
    signs = np.where(random(5) > 0, 1, -1).astype(np.float32)
    classes = np.array([0, 2, 1, 1, 0], np.int32)
    for reduction in ("mean", "none", "sum"):
        how = {"reduction": reduction}
        add("mse_loss", lambda a, b, how=how: ops.mse_loss(a, b, **how), x, y)
        add("cross_entropy_loss", lambda a, i, how=how: ops.cross_entropy(a, i, **how), x, classes)
        add(
            "binary_cross_entropy", lambda a, b, how=how: ops.binary_cross_entropy(a, b, **how), unit, unit[::-1].copy()
        )
    add(
        "cross_entropy_loss",
        lambda a, i, w: ops.cross_entropy(a, i, ops.stop_gradient(w), ignore_index=1),
        x,
        classes,
        random(3, low=0.5),
    )
    add("cross_entropy_loss", lambda a, b: ops.cross_entropy(a, b, label_smoothing=0.1), x, unit)
    add("nll_loss_nd", lambda a, i: ops.nll_loss(a, i), x, classes)
    add("l1_loss", lambda a, b: ops.l1_loss(a, b), x, y)
    add("smooth_l1_loss", lambda a, b: ops.smooth_l1_loss(a, b, 0.5, "mean"), x, y)
    add("huber_loss", lambda a, b: ops.huber_loss(a, b), x, y)
    add("soft_margin_loss", lambda a, b: ops.soft_margin_loss(a, b), x, np.sign(y))
    add(
        "binary_cross_entropy_with_logits",
        lambda a, b: ops.binary_cross_entropy_with_logits(a, b, Tensor(1.0), Tensor(1.0)),
        x,
        unit,
    )
    add("kl_div", lambda a, b: ops.kl_div(a, b, "sum"), x, unit)
    add("hinge_embedding_loss", lambda a, b: ops.hinge_embedding_loss(a, b), x, np.sign(y))
    add("margin_ranking_loss", lambda a, b, t: ops.margin_ranking_loss(a, b, t), random(5), random(6)[:5], signs)
    add("cosine_embedding_loss", lambda a, b, t: ops.cosine_embedding_loss(a, b, t), x, y, signs)
    add("triplet_margin_loss", lambda a, b, c: ops.triplet_margin_loss(a, b, c, 0.7), x, y, unit)
    add("multi_margin_loss", lambda a, i: ops.multi_margin_loss(a, i), x, classes.astype(np.int64))
    targets = np.array([[0, 2, -1], [1, -1, 0], [2, 0, 1], [1, 2, -1], [0, -1, 1]], np.int32)
    add("multilabel_margin_loss", lambda a, i: ops.multilabel_margin_loss(a, i), x, targets)


def add_matrices(add: Add) -> None:
    x, y = random(5, 3), random(3, 5).T.copy()
    square = random(3, 4, 4) + 4 * np.eye(4, dtype=np.float32)
    symmetric = square @ square.transpose(0, 2, 1)
    add("mm", lambda a, b: ops.mm(a, b), x, random(3, 4))
    add("mv", lambda a, b: ops.mv(a, b), x, random(3))
    add("dot", lambda a, b: mint.dot(a, b), random(5), random(6)[:5])
    add("vdot", lambda a, b: mint.vdot(a, b), random(5), random(6)[:5])
    add("dot", lambda a, b: mnp.dot(a, b), random(5), random(6)[:5])
    add("linalg_multi_dot", lambda a, b, c: mnp.multi_dot((a, b, c)), x, random(3, 4), random(4, 2))
    add("outer", lambda a, b: ops.outer(a, b), random(5), random(3))
    add("bilinear", lambda a, b, w: ops.bidense(a, b, w), x, random(5, 4), random(2, 3, 4))
    add("addmm", lambda t, a, b: ops.addmm(t, a, b, beta=0.5, alpha=2.0), random(5, 4), x, random(3, 4))
    add("addmv", lambda t, a, b: ops.addmv(t, a, b), random(5), x, random(3))
    add("addr", lambda t, a, b: ops.addr(t, a, b), x, random(5), random(3))
    add("addbmm", lambda t, a, b: ops.addbmm(t, a, b), random(5, 4), random(2, 5, 3), random(2, 3, 4))
    add("baddbmm", lambda t, a, b: ops.baddbmm(t, a, b), random(2, 5, 4), random(2, 5, 3), random(2, 3, 4))
    add("inner", lambda a, b: ops.inner(a, b), x, random(4, 3))
    add("tensordot", lambda a, b: ops.tensor_dot(a, b, 1), x, random(3, 4))
    add("einsum", lambda a, b: ops.einsum("ij,jk->ik", a, b), x, random(3, 4))
    add("linalg_vecdot", lambda a, b: ops.vecdot(a, b), x, y)
    add("kron", lambda a, b: ops.kron(a, b), random(4, 3), random(2, 2))
    add("cdist", lambda a, b: ops.cdist(a, b), x, random(4, 3))
    add("cross", lambda a, b: ops.cross(a, b, 1), x, y)
    add("linalg_cross", lambda a, b: mnp.cross(a, b), x, y)
    add("inverse", ops.inverse, square)
    add("linalg_inv", lambda a: mint.linalg.inv(a), square)
    add("det", ops.det, square)
    add("logdet", ops.logdet, symmetric)
    add("slogdet", ops.slogdet, square)
    add("cholesky", ops.cholesky, symmetric)
    add("cholesky_inverse", ops.cholesky_inverse, symmetric[0])
    add("cholesky_solve", lambda b, a: ops.cholesky_solve(b, a), random(3, 4, 2), symmetric)
    add("qr", lambda a: ops.qr(a)[1], square)
    add("linalg_qr", lambda a: mint.linalg.qr(a)[1], square)
    add("svd", lambda a: ops.svd(a)[0], square)
    add("linalg_svdvals", lambda a: ops.svd(a, compute_uv=False), square)
    # Functions of one matrix, which then is whole.
    one, right = square[0], random(4, 2)
    add("linalg_cholesky", lambda a: scipy_linalg.cholesky(a, lower=True), symmetric[0])
    add("linalg_det", scipy_linalg.det, one)
    add("linalg_eigh", lambda a: scipy_linalg.eigh(a)[0], symmetric[0])
    add("linalg_eigvalsh", lambda a: scipy_linalg.eigh(a, eigvals_only=True), symmetric[0])
    add("linalg_inv", scipy_linalg.inv, one)
    add("linalg_lu", scipy_linalg.lu, one)
    add("linalg_lu_factor", scipy_linalg.lu_factor, one)
    pivots = np.array([0, 2, 2, 3], np.int32)
    add("linalg_lu_solve", lambda a, p, b: scipy_linalg.lu_solve((a, p), b), one, pivots, right)
    add("linalg_solve_triangular", lambda a, b: scipy_linalg.solve_triangular(a, b, lower=True), one, right)
    add("linalg_matrix_power", lambda a: mnp.matrix_power(a, 3), square)
    add("linalg_eigvals", lambda a: ops.eigvals(a), square)
    add("linalg_eig", lambda a: ops.eig(a)[0], square)
    add("linalg_cond", lambda a: ops.cond(a), square)
    add("linalg_pinv", lambda a: ops.pinv(a), square)
    add("linalg_solve", lambda a, b: ops.matrix_solve(a, b), square, random(3, 4, 2))
    add("linalg_vander", lambda a: ops.vander(a, 3), random(5))
    add("matrix_exp", ops.matrix_exp, square)
    add("matrix_power", lambda a: ops.matrix_power(a, 2), square)
    add("lu_solve", lambda b, a, p: ops.lu_solve(b, a, p), random(4, 2), square[0], np.arange(1, 5, dtype=np.int32))
    add("lu_unpack", lambda a, p: ops.lu_unpack(a, p)[1], square[0], np.arange(1, 5, dtype=np.int32))
    add("ormqr", lambda a, t, b: ops.ormqr(a, t, b), square[0], random(4), random(4, 2))
    add("triangular_solve", lambda b, a: mint.triangular_solve(b, a)[0], random(4, 2), square[0])


def add_reductions(add: Add) -> None:
    x, y = random(5, 3), random(3, 5).T.copy()
    holes = np.where(np.arange(15).reshape(5, 3) % 4 == 0, np.nan, x).astype(np.float32)
    add("nansum", lambda a: ops.nansum(a, 0), holes)
    add("nanmean", lambda a: ops.nanmean(a, 0), holes)
    add("nanmean", lambda a: a.nanmean(), holes)
    add("count_nonzero", lambda a: ops.count_nonzero(a, 0), np.round(x))
    add("aminmax", lambda a: ops.aminmax(a, axis=0), x)
    add("argmin", lambda a: ops.argmin(a, 0), x)
    add("argmin", lambda a: a.argmin(), x)
    add("argmax", lambda a: a.argmax(0), x)
    add("max", lambda a: ops.max(a, 0), x)
    add("min", lambda a: ops.min(a, 1), x)
    add("median", lambda a: ops.median(a, 0), x)
    add("nanmedian", lambda a: ops.nanmedian(a, 0), holes)
    add("quantile", lambda a: ops.quantile(a, 0.5, 0), x)
    add("nanquantile", lambda a: ops.nanquantile(a, 0.5, 0), x)
    add("trace", lambda a: ops.trace(a), random(5, 5))
    add("sum_to_size", lambda a: a.sum_to_size((1, 3)), x)
    add("cosine_similarity", lambda a, b: ops.cosine_similarity(a, b), x, y)
    add("var_mean", lambda a: ops.var_mean(a, 0), x)
    add("std_mean", lambda a: ops.std_mean(a, 0, 1), x)
    add("std", lambda a: ops.std(a, 1, 1, True), x)
    add("var", lambda a: ops.var(a, 0), x)
    add("linalg_norm", lambda a: ops.norm(a), x)
    add("linalg_vector_norm", lambda a: ops.vector_norm(a, 3, 0), x)
    add("linalg_matrix_norm", lambda a: ops.matrix_norm(a), random(3, 4, 4))
    add("norm", lambda a: mint.norm(a, 2, 0), x)
    add("renorm", lambda a: ops.renorm(a, 1, 0, 2.0), x)
    add("dist", lambda a, b: ops.dist(a, b), x, y)
    add("argsort", lambda a: ops.argsort(a, 0), x)
    add("topk", lambda a: ops.topk(a, 2, 0), x)
    add("sort", lambda a: ops.sort(a, 1), x)
    add("cummax", lambda a: ops.cummax(a, 0), x)
    add("cummin", lambda a: ops.cummin(a, 0), x)
    add("cumprod", lambda a: ops.cumprod(a, 0), x)
    add("logcumsumexp", lambda a: ops.logcumsumexp(a, 0), x)
    add("kthvalue", lambda a: mint.kthvalue(a, 2, 0), x)
    add("msort", ops.msort, x)
    add("diff", lambda a: ops.diff(a, 1, 0), x)
    add("bucketize", lambda a: ops.bucketize(a, [-1.0, 0.0, 1.0]), x)
    add("searchsorted", lambda s, v: ops.searchsorted(s, v, out_int32=True), np.sort(random(5, 7)), x)
    add("histc", lambda a: ops.histc(a, 4, -2, 2), x)
    add("log_softmax", lambda a: ops.log_softmax(a, 0), x)
    add("logsumexp", lambda a: ops.logsumexp(a, 0, True), x)


def add_normalisation(add: Add) -> None:
    picture = random(3, 4, 5, 6)
    weight, bias, mean, variance = random(4), random(5)[:4], random(4), random(4, low=0.5)
    add("group_norm", lambda a, w, b: ops.group_norm(a, 2, w, b), picture, weight, bias)
    add("batch_norm", lambda a, m, v, w, b: _in_use(a, m, v, w, b), picture, mean, variance, weight, bias)
    add("layer_norm", lambda a, w, b: ops.layer_norm(a, (4,), w, b), random(5, 4), weight, bias)
    add("instance_norm", lambda a: nn.InstanceNorm2d(4)(a), picture)
    add("rms_norm", lambda a, w: ops.rms_norm(a, w)[0], random(5, 4), weight)


def _in_use(a: Any, mean: Any, variance: Any, weight: Any, bias: Any) -> Any:
    return ops.batch_norm(a, ops.stop_gradient(mean), ops.stop_gradient(variance), weight, bias)


def add_positions(add: Add) -> None:
    x = random(5, 3)
    rows = np.array([[0, 4, 1], [2, 2, 3]], np.int32)
    add("index_fill", lambda a, i: ops.index_fill(a, 0, i, 2.0), x, rows[1, 1:])
    add("gather", lambda a, i: ops.gather_elements(a, 0, i), x, rows)
    add("scatter", lambda a, i, s: ops.scatter(a, 0, i, s), x, rows[:1], random(1, 3))
    add("scatter", lambda a, i, s: mint.scatter(a, 0, i, s), x, rows[:1].astype(np.int64), random(1, 3))
    add("scatter_add", lambda a, i, s: ops.tensor_scatter_elements(a, i, s, 0, "add"), x, rows, random(2, 3))
    add("index_add", lambda a, i, s: ops.index_add(a * 1, i, s, 0), x, rows[0], random(3, 3))
    add("take", lambda a, i: a.take(i), x, rows.astype(np.int64))
    add("take_along_dim", lambda a, i: mnp.take_along_axis(a, i, 0), x, rows)
    add("index_copy", lambda a, i, s: (a * 1).index_copy_(0, i, s), x, rows[0].astype(np.int64), random(3, 3))
    columns = np.array([0, 2, 1], np.int32)
    add("index_put", lambda a, i, j, v: a.index_put((i, j), v), x, rows[0], columns, random(3))
    add("setitem", _written, x, random(3))
    add("select_scatter", lambda a, s: ops.select_scatter(a, s, 0, 2), x, random(3))
    add("slice_scatter", lambda a, s: ops.slice_scatter(a, s, 0, 1, 3), x, random(2, 3))
    add("diagonal_scatter", lambda a, s: ops.diagonal_scatter(a, s), x, random(3))


def _written(values: Any, row: Any) -> Any:
    changed = values * 1
    changed[1] = row
    changed[3:, 0] = 5.0
    return changed


def add_shapes(add: Add) -> None:
    x, cube = random(5, 3), random(2, 5, 3)
    add("t", lambda a: ops.t(a), x)
    for name in ("T", "mT", "mH", "H"):
        add(name, lambda a, name=name: getattr(a, name), x)
    add("adjoint", ops.adjoint, cube)
    add("movedim", lambda a: ops.movedim(a, 0, 2), cube)
    add("repeat", lambda a: a.repeat((1, 2)), x)
    add("repeat_interleave", lambda a: ops.repeat_interleave(a, 2, 0), x)
    add("broadcast_to", lambda a: ops.broadcast_to(a, (2, 5, 3)), x)
    for kind in ("fft", "ifft", "rfft", "ihfft"):
        for dims in ("", "2", "n"):
            add(f"fft_{kind}{dims}", lambda a, name=kind + dims: _parts(getattr(ops, name)(a)), cube)
    spectrum = (cube + 1j * cube[::-1]).astype(np.complex64)
    for kind in ("irfft", "hfft"):
        for dims in ("", "2", "n"):
            add(f"fft_{kind}{dims}", lambda a, name=kind + dims: getattr(ops, name)(a), spectrum)
            add(f"fft_{kind}{dims}", lambda a, name=kind + dims: getattr(ops, name)(a), cube)
    for name in ("fftshift", "ifftshift"):
        add(f"fft_{name}", lambda a, name=name: getattr(ops, name)(a, 1), cube)
    add("meshgrid", lambda a, b: ops.meshgrid(a, b), random(5), random(3))
    add("cartesian_prod", lambda a, b: ops.cartesian_prod(a, b), random(5), random(3))
    add("hstack", lambda a, b: ops.hstack([a, b]), x, random(5, 2))
    add("vstack", lambda a, b: ops.vstack([a, b]), x, random(2, 3))
    add("dstack", lambda a, b: ops.dstack([a, b]), x, x + 1)
    add("column_stack", lambda a, b: ops.column_stack([a, b]), x, random(5))
    add("tensor_split", lambda a: ops.tensor_split(a, 2), x)
    add("hsplit", lambda a: ops.hsplit(a, 3), x)
    add("vsplit", lambda a: ops.vsplit(a, 2), x)
    add("dsplit", lambda a: ops.dsplit(a, 2), cube)
    add("split_with_sizes", lambda a: mint.split(a, (2, 3), 0), x)
    add("unbind", lambda a: ops.unbind(a, 1), x)
    add("roll", lambda a: ops.roll(a, 1, 0), x)
    add("roll", lambda a: mnp.roll(a, 2, 0), x)
    add("roll", lambda a: mnp.roll(a, 1), x)
    add("broadcast_tensors", lambda a, b: mnp.broadcast_arrays(a, b), x, random(3))
    add("getitem", lambda a: ops.slice(a, (1, 0), (2, 3)), x)
    add("fliplr", ops.fliplr, x)
    add("flipud", ops.flipud, x)
    add("rot90", lambda a: ops.rot90(a, 1, (0, 1)), x)
    add("pad", lambda a: ops.pad(a, (1, 2)), x)
    add("diag_embed", lambda a: ops.diag_embed(a), x)
    add("diag", lambda a: ops.diag(a), random(5))
    add("diagflat", lambda a: ops.diagflat(a), x)
    add("ravel", lambda a: ops.ravel(a), x)
    add("view", lambda a: a.view(15), x)
    add("view_as_real", ops.view_as_real, (x + 1j * x[::-1]).astype(np.complex64))
    add("atleast_1d", lambda a: ops.atleast_1d(a), x)
    add("atleast_2d", lambda a: ops.atleast_2d(a), random(5))
    add("atleast_3d", lambda a: ops.atleast_3d(a), x)
    add("select", lambda a: mint.select(a, 0, 1), x)
    add("full_like", lambda a: ops.full_like(a, 2.0) * a, x)
    add("zeros_like", lambda a: ops.zeros_like(a) + a, x)


def _parts(values: Any) -> Any:
    """Real numbers of complex ones: MindSpore has gradients of those."""
    return ops.real(values) + 2 * ops.imag(values)


def add_empty_blocks(add: Add) -> None:
    """Of one row the second rank has nothing."""
    x, y, row = random(1, 3), random(1, 3, low=0.1, high=0.9), random(3)
    add("mse_loss", lambda a, b: ops.mse_loss(a, b), x, y)
    add("binary_cross_entropy", lambda a, b: ops.binary_cross_entropy(a, b, reduction="sum"), y, y)
    add("cross_entropy_loss", lambda a, i: ops.cross_entropy(a, i), x, np.array([2], np.int32))
    add("prod", lambda a: ops.prod(a, 0), x)
    add("any", lambda a: ops.any(a > 0, 0), x)
    add("all", lambda a: ops.all(a < 5, 0), x)
    add("nansum", lambda a: ops.nansum(a, 0), x)
    add("count_nonzero", lambda a: ops.count_nonzero(a, 0), x)
    add("linalg_vector_norm", lambda a: ops.vector_norm(a, 2, 0), x)
    add("var", lambda a: ops.var(a, 1), x)
    add("mm", lambda a, b: ops.mm(a, b), x.T.copy(), x)
    add("mv", lambda a, b: ops.mv(a, b), x.T.copy(), row[:1])
    add("addmm", lambda t, a, b: ops.addmm(t, a, b), random(3, 3), x.T.copy(), x)
    add("conv2d", lambda a, w: ops.conv2d(a, w), random(1, 4, 5, 5), random(2, 4, 3, 3))
    add(
        "batch_norm",
        lambda a, m, v, w, b: _in_use(a, m, v, w, b),
        random(1, 3, 2, 2),
        row,
        row * row + 1,
        row,
        row,
    )
    add("avg_pool2d", lambda a: ops.avg_pool2d(a, 2, 2), random(1, 4, 4, 4))
    add("argmax", lambda a: ops.argmax(a, 0), x)
    add("setitem", lambda a: _written_row(a), x)


def _written_row(values: Any) -> Any:
    changed = ops.square(values)
    changed[0, 1:] = 5.0
    return changed


FAMILIES = (
    add_elementwise,
    add_images,
    add_losses,
    add_matrices,
    add_reductions,
    add_normalisation,
    add_positions,
    add_shapes,
    add_empty_blocks,
)
