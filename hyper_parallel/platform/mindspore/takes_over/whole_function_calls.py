"""Functions of MindSpore that one operator of the rule table answers, in other words: layers, losses, positions.

Each is given the plain function and its arguments, and dispatches a function on blocks that takes what the rule takes.
Those of matrices are in ``whole_function_matrices.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Tensor

from hyper_parallel.platform.mindspore.mends.missing_kernels import index_added
from hyper_parallel.platform.mindspore.operators.all_operators import NEUTRAL

Dispatch = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
# ``once(name, plain, make, shapes)``: what ``make`` gives, under a neutral name, the same object at each call. With
# ``shapes``, those of its results follow from its arguments by that, and not by a call on tensors without memory: where
# a function of MindSpore reads such a tensor by position, the process ends.
Once = Callable[..., Callable[..., Any]]

_REDUCTIONS = ("none", "mean", "sum")
_MODES = {
    "nearest": "upsample_nearest{}d",
    "nearest-exact": "_upsample_nearest_exact{}d",
    "linear": "upsample_linear1d",
    "bilinear": "upsample_bilinear2d",
    "bicubic": "upsample_bicubic2d",
    "trilinear": "upsample_trilinear3d",
}


def written_out(dispatch: Dispatch, once: Once) -> dict[str, Callable[..., Any]]:
    """By the path of a function, what answers it for DTensors, given the plain function first."""

    def cross_entropy(
        plain: Any,
        input: Any,
        target: Any,
        weight: Any = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        def on_blocks(input: Any, target: Any, weight: Any, reduction: int, ignore_index: int, smoothing: float) -> Any:
            return plain(input, target, weight, ignore_index, _REDUCTIONS[reduction], smoothing)

        name = "nll_loss_nd" if plain.__name__.startswith("nll") else "cross_entropy_loss"
        if reduction not in _REDUCTIONS:
            raise ValueError(f"{plain.__name__}: reduction must be one of {_REDUCTIONS}, got {reduction!r}")
        function = once(name, plain, lambda: on_blocks)
        number = _REDUCTIONS.index(reduction)
        return dispatch(function, (input, target, weight, number, ignore_index, label_smoothing), {})

    def nll_loss(
        plain: Any, input: Any, target: Any, weight: Any = None, ignore_index: int = -100, reduction: str = "mean"
    ) -> Any:
        """The one without smoothing of labels."""
        shorter = once("nll_loss", plain, lambda: lambda *args: plain(*args[:5]))
        return cross_entropy(shorter, input, target, weight, ignore_index, reduction)

    def batch_norm(
        plain: Any,
        input: Any,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        def on_blocks(
            x: Any, w: Any, b: Any, mean: Any, var: Any, training: Any, momentum: Any, eps: Any, _: Any
        ) -> Any:
            return plain(x, mean, var, w, b, training, momentum, eps)

        function = once("batch_norm", plain, lambda: on_blocks)
        given = (input, weight, bias, running_mean, running_var, training, momentum, eps, False)
        return dispatch(function, given, {})

    def interpolate(
        plain: Any,
        input: Any,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "nearest",
        *rest: Any,
        **more: Any,
    ) -> Any:
        name = _MODES.get(mode, "interpolate").format(input.ndim - 2)

        def on_blocks(input: Any, *args: Any, **kwargs: Any) -> Any:
            return plain(input, *args, **kwargs)

        return dispatch(once(name, plain, lambda: on_blocks), (input, size, scale_factor, mode, *rest), more)

    def grid_sample(plain: Any, input: Any, grid: Any, *rest: Any, **more: Any) -> Any:
        name = f"grid_sampler_{input.ndim - 2}d"
        return dispatch(once(name, plain, lambda: lambda *args, **kw: plain(*args, **kw)), (input, grid, *rest), more)

    def spread(name: str) -> Callable[..., Any]:
        def meets(plain: Any, input: Any, axis: Any = None, ddof: Any = 0, keepdims: bool = False) -> Any:
            def on_blocks(input: Any, dim: Any, *, correction: Any, keepdim: bool) -> Any:
                return plain(input, dim, correction, keepdim)

            function = once(name, plain, lambda: on_blocks)
            return dispatch(function, (input, axis), {"correction": int(ddof), "keepdim": keepdims})

        return meets

    def index_add(plain: Any, x: Any, indices: Any, y: Any, axis: int, *settings: Any, **more: Any) -> Any:
        """It writes into ``x``."""
        function = once("index_add", plain, lambda: lambda *given: index_added(plain, *given))
        return dispatch(NEUTRAL["copy_"], (x, dispatch(function, (x, axis, indices, y), {})), {})

    def reduced_here(name: str) -> Callable[..., Any]:
        """MindSpore's own means and sums are doubled for one element, and count a block's share twice in backward."""

        def meets(plain: Any, input: Any, target: Any, *given: Any, reduction: str = "mean", **more: Any) -> Any:
            names = list(inspect.signature(plain).parameters)[2:-1]
            weights = [more.get(one, given[place] if place < len(given) else None) for place, one in enumerate(names)]
            reduction = given[len(names)] if len(given) > len(names) else reduction

            def on_blocks(*args: Any) -> Any:
                losses = plain(*args[:-1], "none")
                return losses if args[-1] == "none" else losses.mean() if args[-1] == "mean" else losses.sum()

            return dispatch(once(name, plain, lambda: on_blocks), (input, target, *weights, reduction), {})

        return meets

    def fold(plain: Any, input: Any, output_size: Any, *settings: Any, **more: Any) -> Any:
        """The size of the picture is a tensor to MindSpore, and numbers to the rule."""
        sizes = tuple(output_size.tolist()) if isinstance(output_size, Tensor) else tuple(output_size)
        function = once(
            "col2im", plain, lambda: lambda x, sizes, *args, **kw: plain(x, Tensor(sizes, ms.int32), *args, **kw)
        )
        return dispatch(function, (input, sizes, *settings), more)

    def affine_grid(plain: Any, theta: Any, size: Any, align_corners: bool = False) -> Any:
        function = once("affine_grid_generator", plain, lambda: lambda theta, size, how: plain(theta, tuple(size), how))
        return dispatch(function, (theta, tuple(size), align_corners), {})

    def vecdot(plain: Any, x: Any, y: Any, *, axis: int = -1) -> Any:
        function = once("linalg_vecdot", plain, lambda: lambda x, y, dim=-1: plain(x, y, axis=dim))
        return dispatch(function, (x, y, axis), {})

    def roll(plain: Any, input: Any, shifts: Any, dims: Any = None) -> Any:
        on_blocks = lambda: lambda x, shifts, dims: plain(x, shifts, None if dims == () else dims)  # noqa: E731
        function = once("roll", plain, on_blocks, lambda x, shifts, dims: [x.shape])
        return dispatch(function, (input, shifts, () if dims is None else dims), {})

    def scatter_elements(
        plain: Any, input: Any, indices: Any, updates: Any, axis: int = 0, reduction: str = "none"
    ) -> Any:
        name = {"none": "scatter", "add": "scatter_add"}.get(reduction, "tensor_scatter_elements")
        function = once(name, plain, lambda: lambda x, dim, index, src, how: plain(x, index, src, dim, how))
        return dispatch(function, (input, axis, indices, updates, reduction), {})

    def pool(name: str, places_are_int32: bool = False) -> Callable[..., Any]:
        """The places of the largest elements are asked for by a setting, and are another rule."""

        def meets(plain: Any, input: Any, *settings: Any, **more: Any) -> Any:
            bound = inspect.signature(plain).bind(input, *settings, **more)
            bound.apply_defaults()
            with_places = bound.arguments.get("return_indices", False)
            given = bound.args
            function = once(f"{name}_with_indices" if with_places else name, plain, lambda: lambda *args: plain(*args))
            result = dispatch(function, given, {})
            if with_places and places_are_int32:  # a block without elements has others
                return result[0], result[1].to(ms.int32)
            return result

        return meets

    def numpy_roll(plain: Any, a: Any, shift: Any, axis: Any = None) -> Any:
        return roll(plain, a, shift, axis)

    def isin(plain: Any, element: Any, test_elements: Any, invert: bool = False) -> Any:
        function = once("isin", plain, lambda: lambda *args: plain(*args), lambda element, *rest: [element.shape])
        return dispatch(function, (element, test_elements, invert), {})

    def broadcast_arrays(plain: Any, *arrays: Any) -> Any:
        function = once("broadcast_tensors", plain, lambda: lambda *blocks: tuple(plain(*blocks)))
        return list(dispatch(function, arrays, {}))

    return {
        "ops.adaptive_max_pool1d": pool("adaptive_max_pool1d"),
        "F.adaptive_max_pool1d": pool("adaptive_max_pool1d"),
        "ops.adaptive_max_pool2d": pool("adaptive_max_pool2d"),
        "F.adaptive_max_pool2d": pool("adaptive_max_pool2d"),
        "ops.adaptive_max_pool3d": pool("adaptive_max_pool3d", places_are_int32=True),
        "ops.max_pool2d": pool("max_pool2d"),
        "F.max_pool2d": pool("max_pool2d"),
        "ops.max_pool3d": pool("max_pool3d"),
        "numpy.broadcast_arrays": broadcast_arrays,
        "numpy.isin": isin,
        "numpy.roll": numpy_roll,
        "ops.cross_entropy": cross_entropy,
        "F.cross_entropy": cross_entropy,
        "ops.nll_loss": cross_entropy,
        "F.nll_loss": nll_loss,
        "ops.batch_norm": batch_norm,
        "F.batch_norm": batch_norm,
        "ops.interpolate": interpolate,
        "F.interpolate": interpolate,
        "ops.grid_sample": grid_sample,
        "F.grid_sample": grid_sample,
        "ops.var": spread("var"),
        "ops.std": spread("std"),
        "ops.var_mean": spread("var_mean"),
        "ops.std_mean": spread("std_mean"),
        "ops.binary_cross_entropy": reduced_here("binary_cross_entropy"),
        "ops.binary_cross_entropy_with_logits": reduced_here("binary_cross_entropy_with_logits"),
        "ops.fold": fold,
        "ops.index_add": index_add,
        "ops.affine_grid": affine_grid,
        "F.affine_grid": affine_grid,
        "ops.vecdot": vecdot,
        "ops.roll": roll,
        "mint.roll": roll,
        "ops.tensor_scatter_elements": scatter_elements,
    }
