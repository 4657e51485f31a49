"""Which functions of MindSpore are one operator of the rule table each, and in which order the rules take arguments.

A path begins with the place of a function: ``ops`` and ``mint`` are MindSpore's, ``F`` is ``mint.nn.functional``,
``linalg`` and ``special`` are ``mint``'s, ``numpy`` is ``mindspore.numpy`` and ``scipy`` ``mindspore.scipy.linalg``.
"""

from __future__ import annotations

# Each name is that of the rule, and of the functions of MindSpore in all the places above that have it.
AGREEING = """
    abs acos acosh addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
    bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp copysign cos cosh deg2rad digamma elu eq erf erfc erfinv
    exp exp2 expm1 float_power floor floor_divide fmax fmin fmod frac gcd ge gelu gt hardshrink hardsigmoid hardswish
    hardtanh heaviside hypot i0 isclose isfinite isinf isnan isneginf isposinf isreal lcm ldexp le leaky_relu lerp
    lgamma log1p logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt
    masked_fill maximum minimum mul nan_to_num ne neg nextafter polygamma positive rad2deg real reciprocal
    relu relu6 remainder round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softshrink sqrt square
    sub tan tanh threshold trunc where xlogy add div imag conj glu igamma igammac mvlgamma polar prelu

    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d max_unpool2d
    max_unpool3d channel_shuffle pixel_shuffle pixel_unshuffle

    cosine_embedding_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss
    mse_loss multi_margin_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss

    cholesky cholesky_inverse cholesky_solve det inverse logdet lu_solve lu_unpack matrix_exp matrix_power ormqr qr
    slogdet triangular_solve

    addbmm addmm addmv addr baddbmm cdist cross dot einsum inner kron mm mv outer vdot

    group_norm layer_norm

    bucketize cummax cummin cumprod diff histc kthvalue logcumsumexp msort searchsorted

    aminmax cosine_similarity count_nonzero dist logsumexp median nanmedian nanquantile nansum quantile renorm
    sum_to_size trace

    index_fill index_put scatter scatter_add take

    adjoint atleast_1d atleast_2d atleast_3d cartesian_prod column_stack diag diag_embed diagflat diagonal_scatter
    dsplit dstack fliplr flipud hsplit hstack meshgrid movedim pad ravel repeat_interleave rot90
    select_scatter slice_scatter t tensor_split view_as_real vsplit vstack

    full_like
"""

# Functions under other names.
RENAMED = {
    "acos": "ops.arccos mint.arccos",
    "acosh": "ops.arccosh mint.arccosh",
    "asin": "ops.arcsin mint.arcsin",
    "asinh": "ops.arcsinh mint.arcsinh",
    "atan": "ops.arctan mint.arctan",
    "atan2": "ops.arctan2 mint.arctan2",
    "atanh": "ops.arctanh mint.arctanh",
    "bilinear": "ops.bidense",
    "bitwise_not": "ops.invert",
    "col2im": "F.fold",
    **{
        f"fft_{kind}{dims}": f"ops.{kind}{dims}" for kind in ("fft", "ifft", "rfft", "irfft") for dims in ("", "2", "n")
    },
    "fft_fftshift": "ops.fftshift",
    "fft_ifftshift": "ops.ifftshift",
    "gather": "ops.gather_elements",
    "i0": "ops.bessel_i0",
    "im2col": "ops.unfold F.unfold",
    "linalg_cond": "ops.cond",
    "linalg_eig": "ops.eig",
    "linalg_eigvals": "ops.eigvals",
    "linalg_inv": "linalg.inv",
    "linalg_matrix_norm": "ops.matrix_norm linalg.matrix_norm",
    "linalg_multi_dot": "numpy.multi_dot",
    "linalg_norm": "ops.norm linalg.norm",
    "linalg_pinv": "ops.pinv",
    "linalg_qr": "linalg.qr",
    "linalg_solve": "ops.matrix_solve",
    "linalg_vander": "ops.vander",
    "linalg_vector_norm": "ops.vector_norm linalg.vector_norm",
    "movedim": "ops.moveaxis",
    "norm": "mint.norm",
    "outer": "ops.ger",
    "select": "mint.select",
    "softshrink": "ops.soft_shrink",
    "special_bessel_j0": "ops.bessel_j0",
    "special_bessel_j1": "ops.bessel_j1",
    "special_bessel_y0": "ops.bessel_y0",
    "special_bessel_y1": "ops.bessel_y1",
    "special_i0e": "ops.bessel_i0e",
    "special_i1": "ops.bessel_i1",
    "special_i1e": "ops.bessel_i1e",
    "special_modified_bessel_k0": "ops.bessel_k0",
    "special_modified_bessel_k1": "ops.bessel_k1",
    "special_scaled_modified_bessel_k0": "ops.bessel_k0e",
    "special_scaled_modified_bessel_k1": "ops.bessel_k1e",
    "special_zeta": "ops.zeta",
    "take_along_dim": "numpy.take_along_axis",
    "tensordot": "ops.tensor_dot",
    "vstack": "ops.row_stack",
    "where": "ops.select",
}

# Functions for which there is a neutral operator that also knows blocks without elements, or whose bits are the same
# on every rank.
NEUTRALS = {
    "all": "ops.all mint.all",
    "any": "ops.any mint.any",
    "argsort": "ops.argsort",
    "bmm": "ops.bmm mint.bmm",
    "broadcast_to": "ops.broadcast_to mint.broadcast_to",
    "cumsum": "ops.cumsum",
    "flip": "ops.flip mint.flip",
    "linear": "ops.dense F.linear",
    "log": "ops.log mint.log",
    "log10": "ops.log10 mint.log10",
    "log2": "ops.log2 mint.log2",
    "log_sigmoid": "ops.logsigmoid F.logsigmoid",
    "log_softmax": "ops.log_softmax",
    "matmul": "ops.matmul mint.matmul",
    "mean": "ops.mean mint.mean",
    "mish": "ops.mish F.mish",
    "permute": "ops.permute mint.permute ops.transpose",
    "pow": "ops.pow mint.pow",
    "prod": "ops.prod mint.prod",
    "reshape": "ops.reshape mint.reshape",
    "softmax": "ops.softmax mint.softmax",
    "softplus": "ops.softplus F.softplus",
    "sort": "ops.sort",
    "sum": "ops.sum mint.sum",
    "tile": "ops.tile mint.tile",
    "topk": "ops.topk",
    "transpose": "ops.swapaxes mint.swapaxes mint.transpose",
    "unbind": "ops.unbind",
    "unsqueeze": "ops.unsqueeze mint.unsqueeze ops.expand_dims",
}

# Functions that the neutral operator answers for plain tensors too. MindSpore's own fail under gradient recording
# (``nanmean``), or give another result at every second call (``hfft`` and ``ihfft`` on a CPU).
MENDED = {
    "nanmean": "ops.nanmean",
    **{f"fft_{kind}{dims}": f"ops.{kind}{dims}" for kind in ("hfft", "ihfft") for dims in ("", "2", "n")},
}

# The function's own parameters in the order of the rule; others follow as they come.
REORDERED = {
    ("conv1d", "ops.conv1d"): "input weight bias stride padding dilation groups",
    ("conv2d", "ops.conv2d"): "input weight bias stride padding dilation groups",
    ("conv3d", "ops.conv3d"): "input weight bias stride padding dilation groups",
    ("smooth_l1_loss", "ops.smooth_l1_loss"): "input target reduction beta",
    ("smooth_l1_loss", "F.smooth_l1_loss"): "input target reduction beta",
    ("binary_cross_entropy", "F.binary_cross_entropy"): "input target weight reduction",
    ("binary_cross_entropy_with_logits", "F.binary_cross_entropy_with_logits"): (
        "input target weight pos_weight reduction"
    ),
}
