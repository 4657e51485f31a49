"""Backward and gradients in the same words on every framework, with the traps of MindSpore on a CPU closed."""

from __future__ import annotations

import numpy as np
import pytest

import hyper_parallel
from hyper_parallel.platform import get_platform
from tests.frameworks.models import linear

RANDOM = np.random.default_rng(0)


def leaf(values):
    platform = get_platform()
    array = np.asarray(values, dtype=np.float32)
    return platform.set_tensor_requires_grad(platform.from_numpy(array, platform.str_to_dtype("float32"), None))


def constant(values):
    platform = get_platform()
    return platform.from_numpy(np.asarray(values, dtype=np.float32), platform.str_to_dtype("float32"), None)


def gradient_of(tensor):
    gradient = hyper_parallel.grad_of(tensor)
    return None if gradient is None else np.array(get_platform().tensor_to_numpy(gradient))


def test_gradients_add_up_over_several_backwards():
    """That of a matrix used transposed, as every linear layer does: its elements must not change places."""
    weight, x, factor = leaf(RANDOM.normal(size=(3, 4))), RANDOM.normal(size=(5, 4)), RANDOM.normal(size=(5, 3))
    expected = factor.T @ x
    assert gradient_of(weight) is None
    for number in range(1, 4):
        hyper_parallel.backward(((constant(x) @ weight.T) * constant(factor)).sum())
        assert np.allclose(gradient_of(weight), number * expected, atol=1e-5)
    hyper_parallel.zero_grad([weight])
    assert gradient_of(weight) is None


def test_leaves_that_get_the_same_gradient_do_not_share_it():
    first, second = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    hyper_parallel.backward((first + second).sum())
    hyper_parallel.backward((first + first * 2).sum())
    assert gradient_of(first).tolist() == [4, 4]
    assert gradient_of(second).tolist() == [1, 1]
    get_platform().clip_grad_norm_([first], 1.0)
    assert gradient_of(second).tolist() == [1, 1]


def test_a_gradient_can_be_given_and_the_graph_kept():
    x = leaf([1.0, 2.0, 3.0])
    y = x * x
    hyper_parallel.backward(y, constant([1.0, 0.0, 2.0]), retain_graph=True)
    assert gradient_of(x).tolist() == [2, 0, 12]
    hyper_parallel.backward(y, constant([0.0, 1.0, 0.0]))
    assert gradient_of(x).tolist() == [2, 4, 12]
    with pytest.raises(RuntimeError):
        hyper_parallel.backward(x * x)  # not a scalar, and no gradient given
    with pytest.raises(RuntimeError):
        hyper_parallel.backward((constant([1.0]) * 2).sum())  # nothing requires a gradient


def test_value_and_grad():
    weight, bias, unused = leaf(RANDOM.normal(size=(2, 3))), leaf([0.5, 0.5]), leaf([1.0])
    x = RANDOM.normal(size=(4, 3)).astype(np.float32)

    def loss_of(inputs, scale):
        output = inputs @ weight.T + bias
        return (output * scale).sum(), output

    step = hyper_parallel.value_and_grad(loss_of, [weight, bias, unused])
    for _ in range(2):
        (loss, output), gradients = step(constant(x), scale=2.0)
        arrays = [np.array(get_platform().tensor_to_numpy(gradient)) for gradient in gradients]
        assert np.allclose(arrays[0], np.tile(2 * x.sum(0), (2, 1)), atol=1e-5)
        assert arrays[1].tolist() == [8, 8]
        assert arrays[2].tolist() == [0]
        assert tuple(output.shape) == (4, 2)
        assert loss.shape == ()
    assert gradient_of(weight) is None
    with get_platform().no_grad():
        assert step(constant(x), scale=1.0)[1][1].shape == (2,)


def test_nothing_is_recorded_under_no_grad():
    x = leaf([1.0])
    with get_platform().no_grad():
        y = x * 2
    with pytest.raises(RuntimeError):
        hyper_parallel.backward(y.sum())


def test_own_functions_carry_gradients():
    class Scale(get_platform().Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.factor = factor
            ctx.save_for_backward(x)
            return x * factor

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient * ctx.factor + x * 0, None

    first, second = leaf([1.0, 2.0]), leaf([1.0, 2.0])
    hyper_parallel.backward((Scale.apply(first, 3.0) + Scale.apply(second, 1.0)).sum())
    assert gradient_of(first).tolist() == [3, 3]
    assert gradient_of(second).tolist() == [1, 1]


def test_gradients_by_their_name_in_hyper_parallel_1():
    x = leaf([1.0, 2.0, 3.0])
    for sens, factor in ((None, 1), (2.0, 2), (constant(3.0), 3)):
        step = hyper_parallel.parallelize_value_and_grad(lambda: ((x * x).sum(), "more"), [x], sens)
        (value, more), (gradient,) = step()
        assert get_platform().tensor_to_numpy(value) == 14.0 and more == "more"
        assert get_platform().tensor_to_numpy(gradient).tolist() == [2 * factor, 4 * factor, 6 * factor]


def test_the_front_door_has_the_platforms_groups_and_weights_without_memory():
    platform = get_platform()
    assert hyper_parallel.get_process_group_ranks == platform.get_process_group_ranks
    with hyper_parallel.init_empty_weights():
        layer = linear(3, 4)
    assert platform.has_no_memory(layer.weight) and tuple(layer.weight.shape) == (4, 3)
