"""Functions of MindSpore that are answered for plain tensors too, since its own fail or are wrong on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

import hyper_parallel as hp
from tests.world import run_on_ranks


@run_on_ranks(2)
def test_transforms_of_real_spectra_are_right_at_every_call():
    real = np.random.RandomState(0).rand(2, 5, 4).astype(np.float32)
    spectrum = (real + 1j * real[::-1]).astype(np.complex64)
    for _ in range(3):  # MindSpore's own are right at the first and the third
        for norm in (None, "forward", "ortho"):
            found = ops.hfft(Tensor(spectrum), 7, 1, norm)
            np.testing.assert_allclose(found.asnumpy(), np.fft.hfft(spectrum, 7, 1, norm), 1e-4, 1e-4)
            found = ops.ihfft(Tensor(real), norm=norm)
            np.testing.assert_allclose(found.asnumpy(), np.fft.ihfft(real, norm=norm), 1e-4, 1e-4)
        expected = np.fft.irfftn(spectrum.conj(), norm="forward")
        np.testing.assert_allclose(ops.hfftn(Tensor(spectrum)).asnumpy(), expected, 1e-4, 1e-4)
        expected = np.fft.rfft2(real, (3, 4), (0, 1), "forward").conj()
        np.testing.assert_allclose(ops.ihfft2(Tensor(real), (3, 4), (0, 1)).asnumpy(), expected, 1e-4, 1e-4)


@run_on_ranks(2)
def test_nanmean_has_a_gradient():
    array = np.array([[1.0, np.nan, 4.0], [3.0, 5.0, np.nan]], np.float32)
    tensor = Tensor(array)
    tensor.requires_grad_()
    means = ops.nanmean(tensor, 1)
    np.testing.assert_allclose(means.asnumpy(), [2.5, 4.0])
    hp.backward((means * Tensor(np.array([1.0, 10.0], np.float32))).sum())
    np.testing.assert_allclose(hp.grad_of(tensor).asnumpy(), [[0.5, 0.0, 0.5], [5.0, 5.0, 0.0]])
    np.testing.assert_allclose(Tensor(array).nanmean().asnumpy(), 3.25)
    np.testing.assert_allclose(ops.nanmean(Tensor(array), 0, True).asnumpy(), [[2.0, 5.0, 4.0]])
    with pytest.raises(TypeError, match=r"nanmean.*floating point"):
        ops.nanmean(Tensor(np.array([1, 2])))


def test_recording_that_an_operator_has_stopped_begins_again():
    hp.get_platform()
    with pytest.raises(TypeError, match="ReLU6"):
        ops.relu6(Tensor(np.ones(2)))
    for is_lost in (True, False):
        leaf = Tensor(np.ones(2))
        leaf.requires_grad_()
        if is_lost:
            with pytest.raises(RuntimeError, match=r"stops recording when an operator fails.*compute the tensor anew"):
                hp.backward((leaf * leaf).sum())
        else:
            hp.backward((leaf * leaf).sum())
            np.testing.assert_array_equal(hp.grad_of(leaf).asnumpy(), [2.0, 2.0])


_SAME_BITS = {
    "log": ops.log,
    "log2": ops.log2,
    "cube": lambda x: x**3.0,
    "root": lambda x: x**0.5,
    "pow": lambda x: ops.pow(x, 0.3),
    "tower": lambda x: x**x,
    "zeroth": lambda x: x**0,
    "powers of a number": lambda x: 2.5**x,
    "softplus": ops.softplus,
    "steep softplus": lambda x: ops.softplus(x, 30.0, 15.0),
    "mish": ops.mish,
    "log_sigmoid": ops.logsigmoid,
    "logsumexp": lambda x: ops.logsumexp(x.reshape(-1, 1), 1),
}


@run_on_ranks(2)
def test_logarithms_and_powers_round_alike_at_every_call():
    """MindSpore's own try other numbers of threads in the first calls after an error, which changes the last bit."""
    mesh = hp.init_device_mesh("cpu", (2,))
    array = np.random.RandomState(0).rand(9).astype(np.float32) * 0.8 + 0.1
    with pytest.raises(RuntimeError, match="kernel"):
        mint.nn.functional.layer_norm(Tensor(array), (9,))
    for name, function in _SAME_BITS.items():
        plain = Tensor(array)
        plain.requires_grad_()
        expected = function(plain)
        hp.backward(expected.sum())
        found = set()
        for _ in range(12):
            leaf = Tensor(array)
            leaf.requires_grad_()
            x = hp.distribute_tensor(leaf, mesh, [hp.Replicate()])
            result = function(x)
            result.sum().backward()
            values, gradient = (one.to_local().asnumpy() for one in (result, x.grad))
            found.add((values.tobytes(), gradient.tobytes()))
        assert len(found) == 1, name
        np.testing.assert_allclose(values, expected.asnumpy(), 2e-5, err_msg=name)
        np.testing.assert_allclose(gradient, hp.grad_of(plain).asnumpy(), 2e-5, err_msg=name)


@run_on_ranks(2)
def test_kernels_that_refuse_blocks_without_elements():
    """One rank has no column; its gradients of zeros still take part in the sums of the others."""
    mesh = hp.init_device_mesh("cpu", (2,))
    column, row = np.arange(3.0).reshape(3, 1) - 1.5, np.array([[0.25]])
    for function in (ops.maximum, ops.minimum):
        plain = [Tensor(column), Tensor(row)]
        cut = [hp.distribute_tensor(Tensor(column), mesh, [hp.Shard(1)])]
        cut.append(hp.distribute_tensor(Tensor(row), mesh, [hp.Replicate()]))
        for x, y in (plain, cut):
            x.requires_grad_()
            y.requires_grad_()
            result = function(x, ops.where(x > 0, y, x.sum()))  # the bools have no gradient, nor does a cut of them
            hp.backward((result * result).sum())
        for mine, wanted in zip(cut, plain, strict=True):
            np.testing.assert_allclose(hp.grad_of(mine).full_tensor().asnumpy(), hp.grad_of(wanted).asnumpy())


@run_on_ranks(2)
def test_whole_numbers_and_bools_give_what_one_device_gives():
    mesh = hp.init_device_mesh("cpu", (2,))
    array = np.arange(20).reshape(5, 4)
    for placement in (hp.Replicate(), hp.Shard(0), hp.Shard(1)):
        x = hp.distribute_tensor(Tensor(array), mesh, [placement])
        assert x.var().full_tensor().asnumpy() == Tensor(array).var().asnumpy()
        assert x.std().full_tensor().asnumpy() == Tensor(array).std().asnumpy()
        np.testing.assert_array_equal((x > 3).argmax(axis=0).full_tensor().asnumpy(), (array > 3).argmax(axis=0))


@run_on_ranks(2)
def test_what_is_written_into_a_block_without_elements_has_a_gradient():
    """The kernel of its gradient fails on the rank that has no row."""
    mesh, values = hp.init_device_mesh("cpu", (2,)), np.arange(16.0).reshape(1, 4, 4)
    x = hp.distribute_tensor(Tensor(values), mesh, [hp.Shard(0)])
    x.requires_grad_()
    written = x * 1.0
    written[:, :, :3] = written[:, :, :3] * 3.0
    hp.backward((written * written).sum())
    np.testing.assert_allclose(hp.grad_of(x).full_tensor().asnumpy(), 2 * values * np.array([9, 9, 9, 1]))


@run_on_ranks(2)
def test_products_of_blocks_that_are_one_row_have_gradients_of_their_shape():
    mesh = hp.init_device_mesh("cpu", (2,))
    for left, right, placement in (((2, 1, 3), (3, 4), hp.Shard(0)), ((1, 4, 2), (1, 2, 4), hp.Shard(2))):
        arrays = [np.random.RandomState(0).rand(*shape) for shape in (left, right)]
        a = hp.distribute_tensor(Tensor(arrays[0]), mesh, [placement])
        b = hp.distribute_tensor(Tensor(arrays[1]), mesh, [hp.Replicate()])
        a.requires_grad_()
        b.requires_grad_()
        for _ in range(2):
            hp.zero_grad([a, b])
            hp.backward((a @ b).sum())
            assert tuple(a.grad.to_local().shape) == tuple(a.to_local().shape)
            found = [hp.grad_of(one).full_tensor().asnumpy() for one in (a, b)]
            np.testing.assert_allclose(found[0], np.broadcast_to(arrays[1].sum(-1), left))
            wanted = arrays[0].sum(tuple(range(len(left) - 1)))[:, None]
            np.testing.assert_allclose(found[1], np.broadcast_to(wanted, right))


@run_on_ranks(2)
def test_a_softmax_over_one_element_does_not_spoil_those_that_follow():
    mesh = hp.init_device_mesh("cpu", (2,))
    with pytest.raises(TypeError, match="ReLU6"):  # which makes MindSpore forget what it has seen
        ops.relu6(hp.distribute_tensor(Tensor(np.ones(2)), mesh, [hp.Replicate()]))
    for size in (1, 5):
        values, factor = (np.random.RandomState(seed).rand(3, size) for seed in (0, 1))
        x = hp.distribute_tensor(Tensor(values), mesh, [hp.Shard(0)])
        x.requires_grad_()
        result = ops.softmax(x, 1)
        hp.backward((result * hp.distribute_tensor(Tensor(factor), mesh, [hp.Replicate()])).sum())
        wanted = np.exp(values) / np.exp(values).sum(1, keepdims=True)
        np.testing.assert_allclose(result.full_tensor().asnumpy(), wanted)
        gradient = wanted * (factor - (wanted * factor).sum(1, keepdims=True))
        np.testing.assert_allclose(hp.grad_of(x).full_tensor().asnumpy(), gradient, atol=1e-12)


@run_on_ranks(2)
def test_adam_with_weight_decay_updates_plain_and_cut_parameters():
    mesh, values = hp.init_device_mesh("cpu", (2,)), np.arange(3.0, dtype=np.float32)
    cut = hp.distribute_tensor(Tensor(values), mesh, [hp.Shard(0)])
    for tensor, gradient in ((Tensor(values), Tensor(values)), (cut, cut * 1)):
        parameter = Parameter(tensor, name="p")
        nn.AdamWeightDecay([parameter], 0.1)((gradient,))
        updated = parameter.full_tensor() if isinstance(parameter, hp.DTensor) else parameter
        np.testing.assert_allclose(updated.asnumpy(), values - 0.1 * np.sqrt(10) * (values > 0), 1e-4)
