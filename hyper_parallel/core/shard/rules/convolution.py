"""Convolutions, pooling and resampling: batch and channels may be cut, the space stays whole."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.shard.rule_kit.added_term import is_counted_here, replace_tensor
from hyper_parallel.core.shard.rule_kit.agreed_errors import with_agreed_errors
from hyper_parallel.core.shard.rule_kit.empty_blocks import lacks_rows, with_spare_rows
from hyper_parallel.core.shard.rule_kit.rule_table import Rule, rule
from hyper_parallel.core.shard.rule_kit.signature import Labels, LocalCall, OpCall, Signature, letters
from hyper_parallel.core.shard.rules.sharded_letters import call_with
from hyper_parallel.platform import get_platform

_FORWARD = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_LINEAR = (frozenset({0}), frozenset({1}), frozenset({0, 2}), frozenset({1, 2}))


def _refuse_sizes(given: dict[str, Any]) -> None:
    """What the framework finds out in its kernels only, which a rank with an empty block does not reach."""
    for name, low, message in (
        ("padding", 0, "negative padding is not supported"),
        ("dilation", 1, "dilation should be greater than zero"),
    ):
        sizes = given[name] if isinstance(given[name], (list, tuple)) else [given[name]]
        if any(isinstance(size, int) and size < low for size in sizes):
            raise RuntimeError(message)


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolution(call: OpCall) -> Signature | None:
    """Cut input channels leave a pending sum, to which the bias is added once. With groups whole groups are cut."""
    transposed = call.name.startswith("conv_transpose")
    names = _TRANSPOSED if transposed else _FORWARD
    given = call.bind(*names, groups=1, padding=0, dilation=1)
    _refuse_sizes(given)
    groups = given["groups"]
    space = (None,) * (call.tensors[1].ndim - 2)
    batch: Labels = ("n",) if call.tensors[0].ndim == len(space) + 2 else ()
    channels: tuple[Labels, ...]
    if groups == 1:
        into, out = "c", "o"
        channels = (("c", "o"),) if transposed else (("o", "c"),)
    else:
        into = out = "g"
        channels = (("g", None),)
    inputs: tuple[Labels, ...] = ((*batch, into, *space), (*channels[0], *space))
    if len(call.tensors) > 2:
        inputs = (*inputs, (out,))
    return Signature(
        inputs,
        ((*batch, out, *space),),
        reduces={"c": "sum"} if groups == 1 else {},
        divisors={"g": groups} if groups > 1 else {},
        linear=_LINEAR,
        local=lambda local: _convolve(local, names, groups),
        needs_local=_needs_care,
    )


def _needs_care(call: LocalCall) -> bool:
    return bool(call.axes.get("g")) or lacks_rows(call) or (len(call.inputs) > 2 and not is_counted_here(call, 2))


def _convolve(call: LocalCall, names: tuple[str, ...], groups: int) -> Any:
    if len(call.inputs) > 2 and not is_counted_here(call, 2):
        args, kwargs = replace_tensor(call, 2, get_platform().zeros_kept_in_graph)
        call = dataclasses.replace(call, args=tuple(args), kwargs=kwargs)
    num_parts = math.prod(call.mesh.shape[axis] for axis in call.axes.get("g", ()))
    return with_spare_rows(call, lambda block: call_with(block, names, groups=groups // num_parts))


# ---------------------------------------------------------------------------------------------------------------------
# Operators on each channel by itself
# ---------------------------------------------------------------------------------------------------------------------

_LINEAR_POOLS = ("avg_pool{}d", "adaptive_avg_pool{}d")
_MAX_POOLS = ("max_pool{}d", "adaptive_max_pool{}d", "max_pool{}d_with_indices", "adaptive_max_pool{}d_with_indices")
_UPSAMPLE = (
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("upsample_trilinear3d", "upsample_bicubic2d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d"),
    *("_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa"),
)


def _per_channel(num_spatial: int, is_linear: bool) -> Callable[[OpCall], Signature]:
    def signature(call: OpCall) -> Signature:
        leading = letters(call.tensors[0].ndim - num_spatial)
        labels = (*leading, *(None,) * num_spatial)
        # Whole numbers are rounded. An index of the largest element counts within its channel.
        is_rounded = "int" in get_platform().dtype_name(call.tensors[0].dtype)
        return Signature(
            (labels,) * len(call.tensors),
            (labels,) * len(call.outputs),
            linear=(frozenset({0}),) if is_linear and not is_rounded else (),
            local=with_spare_rows,
            needs_local=lacks_rows,
        )

    return signature


for _rank in (1, 2, 3):
    for _name in _LINEAR_POOLS:
        rule(_name.format(_rank), by_dtype=True)(_per_channel(_rank, True))
    for _name in _MAX_POOLS:
        rule(_name.format(_rank))(_per_channel(_rank, False))


def _checked(positions_rule: Rule) -> Rule:
    """``max_unpool`` refuses positions outside of the result."""

    def answer(call: OpCall) -> Signature | None:
        found = positions_rule(call)
        return None if found is None else with_agreed_errors(found)

    return answer


for _rank in (2, 3):
    rule(f"max_unpool{_rank}d")(_checked(_per_channel(_rank, False)))
for _name in _UPSAMPLE:
    rule(_name, by_dtype=True)(_per_channel(int(next(character for character in _name if character.isdigit())), True))


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(call: OpCall) -> Signature:
    """Every sampling point reads the whole picture of its sample, in every channel."""
    places = letters(call.tensors[1].ndim - 2)
    inputs = (("N", "C", *(None,) * len(places)), ("N", *places, None))
    return Signature(
        inputs,
        (("N", "C", *places),),
        linear=(frozenset({0}),),
        local=with_spare_rows,
        needs_local=lacks_rows,
    )


@rule("affine_grid_generator")
def affine_grid_generator(call: OpCall) -> Signature:
    names = ("theta", "size", "align_corners")

    def local(block: LocalCall) -> Any:
        given = dict(zip(names, block.args, strict=False)) | dict(block.kwargs)
        return call_with(block, names, size=[given["theta"].shape[0], *given["size"][1:]])

    output = ("n", *(None,) * (len(call.outputs[0]) - 1))
    return Signature((("n", None, None),), (output,), linear=(frozenset({0}),), local=local)


# ---------------------------------------------------------------------------------------------------------------------
# Operators that move elements between channels and space
# ---------------------------------------------------------------------------------------------------------------------


@rule("pixel_shuffle", "pixel_unshuffle")
def pixel_shuffle(call: OpCall) -> Signature:
    """(..., c * r * r, h, w) to (..., c, h * r, w * r) or back: whole output channels, rows and columns may be cut."""
    shape, output = call.tensors[0].shape, call.outputs[0]
    labels = letters(len(shape))
    divisors = {str(labels[dim]): math.gcd(shape[dim], output[dim]) for dim in (-3, -2, -1)}
    return Signature(
        (labels,),
        (labels,),
        divisors=divisors,
        linear=(frozenset({0}),),
        local=with_spare_rows,
        needs_local=lacks_rows,
    )


@rule("channel_shuffle", "native_channel_shuffle")
def channel_shuffle(call: OpCall) -> Signature:
    names = letters(call.tensors[0].ndim)
    labels = (names[0], None, *names[2:])
    return Signature((labels,), (labels,), linear=(frozenset({0}),), local=with_spare_rows, needs_local=lacks_rows)


@rule("im2col", "col2im")
def columns(call: OpCall) -> Signature:
    """(n, c, h, w) to (n, c * window, positions) or back; without a batch the n is missing."""
    shape, output = call.tensors[0].shape, call.outputs[0]
    pictures = shape if call.name == "im2col" else output
    has_batch = len(pictures) == 4
    batch: Labels = ("n",) if has_batch else ()
    labels = ((*batch, "c", None, None), (*batch, "c", None))
    inputs, outputs = labels if call.name == "im2col" else reversed(labels)
    return Signature(
        (inputs,),
        (outputs,),
        divisors={"c": pictures[1 if has_batch else 0]},
        linear=(frozenset({0}),),
        local=with_spare_rows,
        needs_local=lacks_rows,
    )
