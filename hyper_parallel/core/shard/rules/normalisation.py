"""Layer, RMS, group, batch and instance normalisation. Where the normalised dims are cut, only statistics travel.

Batch normalisation in training takes the statistics of the global batch, however it is cut, and so do the running ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.shard.rule_kit.empty_blocks import lacks_rows, with_spare_rows
from hyper_parallel.core.shard.rule_kit.rule_table import rule
from hyper_parallel.core.shard.rule_kit.signature import Labels, LocalCall, OpCall, Signature, letters, without
from hyper_parallel.core.shard.rules.sharded_letters import (
    all_reduced,
    arguments,
    block_region,
    call_with,
    group_of,
    in_working_precision,
    is_sharded,
    refuse_integers,
    sum_over,
    varied,
)
from hyper_parallel.platform import get_platform

_platform = get_platform()

_LAYER_ARGUMENTS = ("input", "normalized_shape", "weight", "bias", "eps")
_RMS_ARGUMENTS = ("input", "normalized_shape", "weight", "eps")
_GROUP_ARGUMENTS = ("input", "num_groups", "weight", "bias", "eps")
_BATCH_ARGUMENTS = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn")


class _Pool:
    """Which elements are normalised together: how their sums are taken over all ranks, and how many they are."""

    def __init__(self, sum_here: Callable[[Any], Any], spread: Callable[[Any], Any], group: Any, count: int) -> None:
        self.sum_here = sum_here  # from the shape of the block to that of the sums
        self.spread = spread  # from the shape of the sums to one that broadcasts with the block
        self.group = group
        self.count = count

    def constant_parts(self) -> list[Any]:
        """All that it depends on, for recorded programs."""
        return [self.sum_here, self.spread, self.group, self.count]

    def mean(self, values: Any) -> Any:
        """Without a gradient, in the shape of the sums."""
        return all_reduced(self.sum_here(values), "sum", self.group) / self.count

    def shared_means(self, *several: Any) -> list[Any]:
        """Means of several tensors by one all-reduce, for use with the rank's own values."""
        stacked = _platform.cat([self.sum_here(values).unsqueeze(0) for values in several])
        total = varied(sum_over(stacked, self.group), self.group) / self.count
        return [self.spread(one) for one in total.unbind(0)]


def _pool_over(dims: tuple[int, ...], group: Any, count: int) -> _Pool:
    return _Pool(lambda values: values.sum(dim=dims, keepdim=True), lambda sums: sums, group, count)


class _Normalise(_platform.Function):  # type: ignore[name-defined]
    """forward: the elements, less their mean if ``centred``, times a factor, by one all-reduce per moment; backward:
    one all-reduce. Besides the result it gives the factor, for second derivatives, and the moments without a gradient.
    """

    @staticmethod
    def forward(ctx: Any, block: Any, pool: _Pool, eps: float, centred: bool) -> Any:
        mean = pool.mean(block) if centred else None
        deviations = block if mean is None else block - pool.spread(mean)
        variance = pool.mean(deviations * deviations)
        factor = (variance + eps).rsqrt()
        result = deviations * pool.spread(factor)
        ctx.save_for_backward(result, factor)
        ctx.how = (pool, centred)
        ctx.set_materialize_grads(False)
        moments = (variance.clone() if mean is None else mean, variance)
        ctx.mark_non_differentiable(*moments)
        return result, factor, *moments

    @staticmethod
    def backward(ctx: Any, gradient: Any, of_factor: Any, *_: Any) -> Any:
        result, factor = ctx.saved_tensors
        pool, centred = ctx.how
        factor = pool.spread(varied(factor, pool.group))
        answer = None
        if gradient is not None:
            if centred:
                mean, along = pool.shared_means(gradient, gradient * result)
                answer = factor * (gradient - mean - result * along)
            else:
                (along,) = pool.shared_means(gradient * result)
                answer = factor * (gradient - result * along)
        if of_factor is not None:
            slope = pool.spread(varied(of_factor, pool.group)) * factor * factor * result / -pool.count
            answer = slope if answer is None else answer + slope
        return answer, None, None, None


def _affine(result: Any, weight: Any, bias: Any, shape: Sequence[int], dtype: Any) -> Any:
    """The normalised values times weight plus bias, both viewed as ``shape``, in ``dtype``.

    Always a new tensor, which may be written into: the normalised values themselves are needed for the gradient.
    """
    if weight is None and bias is None and result.dtype == dtype:
        return result.clone()
    if weight is not None:
        result = result * weight.reshape(shape)
    if bias is not None:
        result = result + bias.reshape(shape)
    return result.to(dtype)


# ---------------------------------------------------------------- over the last dims


@rule("layer_norm")
def layer_norm(call: OpCall) -> Signature:
    return _over_last_dims(call, _layer_norm)


@rule("rms_norm", by_dtype=True)
def rms_norm(call: OpCall) -> Signature:
    return _over_last_dims(call, _rms_norm)


def _over_last_dims(call: OpCall, local: Callable[[LocalCall], Any]) -> Signature:
    ndim = call.tensors[0].ndim
    labels: Labels = letters(ndim)
    normalised = (
        labels[ndim - len(call.args[1]) :] if len(call.args) > 1 else labels[-len(call.kwargs["normalized_shape"]) :]
    )
    if _platform.dtype_name(call.tensors[0].dtype).startswith("complex"):  # our gradient is that of real numbers
        labels = without(labels, range(ndim - len(normalised), ndim))
        normalised = (None,) * len(normalised)
    inputs = (labels, *(normalised,) * (len(call.tensors) - 1))
    return Signature(inputs, (labels,), local=local, needs_local=lambda planned: is_sharded(planned, normalised))


@rule("native_layer_norm")
def native_layer_norm(call: OpCall) -> Signature:
    """The statistics are results too, of the rank of the input: the normalised dims stay whole."""
    ndim = call.tensors[0].ndim
    given = arguments(call, *_LAYER_ARGUMENTS)
    kept = ndim - len(given["normalized_shape"])
    labels = (*letters(kept), *(None,) * (ndim - kept))
    inputs = (labels, *(((None,) * (ndim - kept)),) * (len(call.tensors) - 1))
    return Signature(inputs, (labels,) * len(call.outputs))


def _layer_norm(call: LocalCall) -> Any:
    given = arguments(call, *_LAYER_ARGUMENTS, weight=None, bias=None, eps=1e-5)
    refuse_integers(call, given["input"])
    return _normalise_last_dims(call, given, given["eps"], True)


def _rms_norm(call: LocalCall) -> Any:
    given = arguments(call, *_RMS_ARGUMENTS, weight=None, eps=None, bias=None)
    eps = given["eps"]
    if eps is None:
        eps = _platform.machine_epsilon(in_working_precision(given["input"]).dtype)
    return _normalise_last_dims(call, given, eps, False)


def _normalise_last_dims(call: LocalCall, given: dict[str, Any], eps: float, centred: bool) -> Any:
    block, shape = given["input"], call.input_shapes[0]
    first = len(shape) - len(given["normalized_shape"])
    dims = tuple(range(first, len(shape)))
    group = group_of(call, letters(len(shape))[first:])
    pool = _pool_over(dims, group, math.prod(shape[first:]))
    result = _Normalise.apply(in_working_precision(block), pool, eps, centred)[0]
    return _affine(result, given["weight"], given["bias"], tuple(block.shape[first:]), block.dtype)


# ---------------------------------------------------------------- over groups of channels


@rule("group_norm")
def group_norm(call: OpCall) -> Signature:
    labels = letters(call.tensors[0].ndim)
    inputs = (labels, *((labels[1],),) * (len(call.tensors) - 1))
    return Signature(inputs, (labels,), local=_group_norm, needs_local=lambda planned: is_sharded(planned, labels[1:]))


def _group_norm(call: LocalCall) -> Any:
    given = arguments(call, *_GROUP_ARGUMENTS, weight=None, bias=None, eps=1e-5)
    block, shape, num_groups = given["input"], call.input_shapes[0], given["num_groups"]
    refuse_integers(call, block)
    labels = letters(len(shape))
    offsets, sizes = block_region(call, labels, shape)
    per_group = shape[1] // num_groups
    channels = _platform.arange(offsets[1], offsets[1] + sizes[1], device=block.device)
    groups = channels // per_group
    spatial = tuple(range(2, len(shape)))
    ones = (1,) * len(spatial)

    def sum_here(values: Any) -> Any:
        per_channel = values.sum(dim=spatial) if spatial else values
        return per_channel.new_zeros((values.shape[0], num_groups)).index_add(1, groups, per_channel)

    def spread(sums: Any) -> Any:
        return sums.index_select(1, groups).reshape((*sums.shape[:1], sizes[1], *ones))

    pool = _Pool(sum_here, spread, group_of(call, labels[1:]), per_group * math.prod(shape[2:]))
    result = _Normalise.apply(in_working_precision(block), pool, given["eps"], True)[0]
    return _affine(result, given["weight"], given["bias"], (sizes[1], *ones), block.dtype)


@rule("native_group_norm")
def native_group_norm(call: OpCall) -> Signature:
    """The statistics are results too, a row for each sample; samples may be cut."""
    ndim = call.tensors[0].ndim
    labels = ("a", *(None,) * (ndim - 1))
    inputs = (labels, *((None,),) * (len(call.tensors) - 1))
    return Signature(inputs, (labels, *(("a", None),) * (len(call.outputs) - 1)), local=_native_group_norm)


def _native_group_norm(call: LocalCall) -> Any:
    names = ("input", "weight", "bias", "N")
    return call_with(call, names, N=arguments(call, *names)["input"].shape[0])


# ---------------------------------------------------------------- over the batch, or each instance by itself


@rule("batch_norm", "instance_norm")
def batch_norm(call: OpCall) -> Signature | None:
    if len(call.args) != len(_BATCH_ARGUMENTS) or call.tensors[0].ndim < 2:
        return None  # the function written in Python, with another order of arguments: it calls this one
    given = arguments(call, *_BATCH_ARGUMENTS)
    labels = letters(call.tensors[0].ndim)
    inputs = (labels, *((labels[1],),) * (len(call.tensors) - 1))
    if not given["training"]:
        return Signature(inputs, (labels,), local=with_spare_rows, needs_local=lacks_rows)
    running = [given["running_mean"], given["running_var"]]
    updates = tuple(place for place, spec in enumerate(call.tensors) if any(spec is one for one in running))
    pooled = labels[:1] + labels[2:] if call.name == "batch_norm" or updates else labels[2:]
    together = _batch_norm if call.name == "batch_norm" else _instance_norm

    def is_ours(planned: LocalCall) -> bool:
        # A row of zeros divided by nothing has no finite gradient.
        return is_sharded(planned, pooled) or not given["eps"]

    def local(planned: LocalCall) -> Any:
        return together(planned) if is_ours(planned) else with_spare_rows(planned)

    def needs_local(planned: LocalCall) -> bool:
        return is_ours(planned) or lacks_rows(planned)

    return Signature(inputs, (labels,), local=local, needs_local=needs_local, updates=updates)


@rule("native_batch_norm", "_native_batch_norm_legit")
def native_batch_norm(call: OpCall) -> Signature | None:
    """The statistics are results too: only channels may be cut, and into no empty parts, which the function refuses."""
    names: tuple[str, ...] = _BATCH_ARGUMENTS
    if call.name == "_native_batch_norm_legit" and len(call.args) == 6:  # the form without running statistics
        names = ("input", "weight", "bias", "training", "momentum", "eps")
    given = arguments(call, *names, running_mean=None, running_var=None)
    ndim = call.tensors[0].ndim
    if "training" not in given or ndim < 2:
        return None
    labels: Labels = (None, "c", *(None,) * (ndim - 2))
    running = [given["running_mean"], given["running_var"]] if given["training"] else []
    updates = tuple(place for place, spec in enumerate(call.tensors) if any(spec is one for one in running))
    inputs = (labels, *(("c",),) * (len(call.tensors) - 1))
    outputs = tuple(
        labels if index == 0 else ("c",) if given["training"] else (None,) for index in range(len(call.outputs))
    )
    return Signature(inputs, outputs, handled=frozenset({"c"}), even=frozenset({"c"}), updates=updates)


def _batch_norm(call: LocalCall) -> Any:
    given = arguments(call, *_BATCH_ARGUMENTS)
    block, shape = given["input"], call.input_shapes[0]
    refuse_integers(call, block)
    labels = letters(len(shape))
    dims = (0, *range(2, len(shape)))
    count = math.prod(shape[dim] for dim in dims)
    pool = _pool_over(dims, group_of(call, [labels[dim] for dim in dims]), count)
    result, _, mean, variance = _Normalise.apply(in_working_precision(block), pool, given["eps"], True)
    _update_running(given, mean.reshape(-1), variance.reshape(-1), count)
    return _affine(result, given["weight"], given["bias"], (block.shape[1], *(1,) * (len(shape) - 2)), block.dtype)


def _instance_norm(call: LocalCall) -> Any:
    given = arguments(call, *_BATCH_ARGUMENTS)
    block, shape = given["input"], call.input_shapes[0]
    refuse_integers(call, block)
    labels = letters(len(shape))
    dims = tuple(range(2, len(shape)))
    count = math.prod(shape[2:])
    pool = _pool_over(dims, group_of(call, labels[2:]), count)
    result, _, mean, variance = _Normalise.apply(in_working_precision(block), pool, given["eps"], True)
    if given["running_mean"] is not None:
        batch = group_of(call, labels[:1])
        means = [
            all_reduced(one.reshape(one.shape[:2]).sum(dim=0), "sum", batch) / shape[0] for one in (mean, variance)
        ]
        _update_running(given, means[0], means[1], count)
    return _affine(result, given["weight"], given["bias"], (block.shape[1], *(1,) * len(dims)), block.dtype)


def _update_running(given: dict[str, Any], mean: Any, variance: Any, count: int) -> None:
    """Move the running statistics towards those of this batch, the variance as an unbiased estimate."""
    if count == 0:
        return
    unbiased = variance * (_platform.number_like(count / (count - 1), variance) if count > 1 else math.nan)
    with _platform.no_grad():
        for running, new in ((given["running_mean"], mean), (given["running_var"], unbiased)):
            if running is not None:
                moved = running * (1 - given["momentum"]) + new.to(running.dtype) * given["momentum"]
                _platform.fill_block(running, moved)
