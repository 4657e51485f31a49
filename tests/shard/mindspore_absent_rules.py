"""Why no function of MindSpore comes to some rules; those that are not named here are not in MindSpore at all."""

from __future__ import annotations

# By the reason: the rules, each with what MindSpore's programs come to instead.
REASONS: dict[str, dict[str, str]] = {
    "PyTorch's second name for another rule, under which MindSpore's function comes": {
        "_addmm_activation": "addmm",
        "_cdist_forward": "cdist",
        "_index_put_impl": "index_put",
        "_native_batch_norm_legit": "batch_norm",
        "_safe_softmax": "softmax",
        "_unsafe_view": "view",
        "chain_matmul": "linalg_multi_dot",
        "clamp_max": "clamp",
        "clamp_min": "clamp",
        "conj_physical": "conj",
        "constant_pad_nd": "pad",
        "grid_sampler": "grid_sampler_2d",
        "linalg_diagonal": "diagonal",
        "linalg_matrix_exp": "matrix_exp",
        "linalg_slogdet": "slogdet",
        "linalg_svd": "svd",
        "native_batch_norm": "batch_norm",
        "native_channel_shuffle": "channel_shuffle",
        "native_group_norm": "group_norm",
        "native_layer_norm": "layer_norm",
        "pinverse": "linalg_pinv",
        "scatter_reduce": "scatter_add",
        "slice": "getitem",
        "special_modified_bessel_i0": "i0",
        "special_modified_bessel_i1": "special_i1",
    },
    "PyTorch's form that returns an error code instead of raising": {
        "_lu_with_info": "linalg_lu_factor",
        "linalg_cholesky_ex": "linalg_cholesky",
        "linalg_inv_ex": "linalg_inv",
        "linalg_lu_factor_ex": "linalg_lu_factor",
        "linalg_solve_ex": "linalg_solve",
    },
    "PyTorch's form that copies, or does not check, what is else a view": {
        "alias": "",
        "alias_copy": "",
        "diagonal_copy": "diagonal",
        "expand_copy": "expand",
        "lift_fresh": "",
        "narrow_copy": "narrow",
        "permute_copy": "permute",
        "resolve_conj": "",
        "resolve_neg": "",
        "select_copy": "select",
        "split_copy": "split",
        "split_with_sizes_copy": "split_with_sizes",
        "squeeze_copy": "squeeze",
        "t_copy": "t",
        "transpose_copy": "transpose",
        "unbind_copy": "unbind",
        "unfold_copy": "",
        "unsafe_chunk": "chunk",
        "unsafe_split": "split",
        "unsafe_split_with_sizes": "split_with_sizes",
        "unsqueeze_copy": "unsqueeze",
        "view_copy": "view",
    },
    "a conversion or a move to a device by its own method, where MindSpore has `to`": dict.fromkeys(
        ("cdouble", "cfloat", "chalf", "char", "contiguous", "cpu", "cuda", "npu", "pin_memory", "xpu"), ""
    ),
    "a layer that MindSpore has as a cell, whose operators come one by one": {
        "conv_transpose1d": "conv_transpose2d",
        "max_pool1d": "max_pool2d",
        "max_pool1d_with_indices": "max_pool2d_with_indices",
        "poisson_nll_loss": "exp",
        "unflatten": "reshape",
    },
    "on Ascend only, and there with other arguments (`ops.flash_attention_score`)": {
        "scaled_dot_product_attention": ""
    },
}
NOT_THERE = "not in MindSpore"


def by_reason(absent: list[str]) -> dict[str, list[str]]:
    """The rules under the reasons that they have no function for."""
    grouped = {reason: [name for name in absent if name in names] for reason, names in REASONS.items()}
    known = {name for names in REASONS.values() for name in names}
    return {**grouped, NOT_THERE: [name for name in absent if name not in known]}
