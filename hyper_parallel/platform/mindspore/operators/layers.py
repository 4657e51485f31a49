"""Neutral operators of layers: normalisations with weights, and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import ops

from hyper_parallel.platform.mindspore.mends.empty_blocks import zeros_of
from hyper_parallel.platform.mindspore.operators.table import neutral


@neutral
def layer_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """The normalised values only; MindSpore's kernel refuses tensors without elements."""
    first = input.ndim - len(normalized_shape)
    if 0 in input.shape:
        return zeros_of(input.shape, input.dtype, input, weight, bias)
    shape = tuple(normalized_shape)
    weight = ops.ones(shape, input.dtype) if weight is None else weight
    bias = ops.zeros(shape, input.dtype) if bias is None else bias
    return ops.LayerNorm(first, first, eps)(input, weight, bias)[0]


@neutral
def batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = False,
) -> Any:
    """The normalised values only; in training the running statistics are moved."""
    return ops.BatchNorm(training, eps, momentum)(input, weight, bias, running_mean, running_var)[0]


# Convolutions get all attributes of the old primitives by position, in the order that their rule reads.


@neutral
def conv2d(
    input: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int, pad_mode: str
) -> Any:
    size = tuple(weight.shape[2:])
    result = ops.Conv2D(weight.shape[0], size, 1, pad_mode, padding, stride, dilation, groups)(input, weight)
    return result if bias is None else ops.bias_add(result, bias)


@neutral
def conv_transpose2d(input: Any, weight: Any, bias: Any, *settings: Any) -> Any:
    """The last setting is the height and width of the result; MindSpore asks for its full shape."""
    stride, padding, _, groups, dilation, pad_mode, space = settings
    shape = (input.shape[0], weight.shape[1] * groups, *space)
    size = tuple(weight.shape[2:])
    convolve = ops.Conv2DTranspose(weight.shape[0], size, pad_mode, padding, None, 1, stride, dilation, groups)
    return convolve(input, weight, shape)


@neutral
def conv_transpose3d(input: Any, weight: Any, bias: Any, *settings: Any) -> Any:
    stride, padding, output_padding, groups, dilation, pad_mode = settings
    channels, size = (weight.shape[0], weight.shape[1] * groups), tuple(weight.shape[2:])
    given = (pad_mode, padding, stride, dilation, groups, output_padding)
    return ops.Conv3DTranspose(*channels, size, 1, *given)(input, weight)
