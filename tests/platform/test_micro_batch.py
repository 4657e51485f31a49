"""Tests of the `micro_batch` decorator."""

import pytest
import torch

from hyper_parallel.platform import get_platform
from tests.frameworks import assert_close, backward, equal, grad_of, leaf, ours, theirs, zero_grad

micro_batch, cat = get_platform().micro_batch, get_platform().cat


@pytest.mark.parametrize(
    ("batch", "num", "sizes"), [(8, 4, [2] * 4), (5, 4, [2, 1, 1, 1]), (7, 3, [3, 2, 2]), (1, 1, [1])]
)
def test_every_tensor_is_split_along_its_first_dim(batch, num, sizes):
    x, y = ours((torch.randn(batch, 3), torch.arange(batch)))
    seen = micro_batch(num)(lambda *args, **kwargs: (args, kwargs))(x, 5, target=y, mode="train")
    assert [args[0].shape[0] for args, _ in seen] == sizes
    assert equal(cat([args[0] for args, _ in seen]), x)
    assert equal(cat([kwargs["target"] for _, kwargs in seen]), y)
    assert all(args[1] == 5 and kwargs["mode"] == "train" for args, kwargs in seen)


def test_dims_are_chosen_for_each_argument():
    x, mask, scale = ours((torch.randn(3, 4), torch.ones(7, 7), torch.tensor(2.0)))

    @micro_batch(2, args_batch_dim=[1, None, None], kwargs_batch_dim={"bias": -1, "table": None})
    def run(x, mask, scale, bias, table, weight):
        """Multiply."""
        assert mask.shape == (7, 7)
        assert table.shape == (1,)
        assert weight.shape == (2, 5)
        return x * scale + bias

    assert run.__name__ == "run"
    assert run.__doc__ == "Multiply."
    bias = ours(torch.randn(1, 4))
    results = run(x, mask, scale, bias=bias, table=ours(torch.ones(1)), weight=ours(torch.ones(4, 5)))
    assert equal(cat(results, 1), x * 2 + bias)


def test_one_dim_for_all_arguments():
    x, y = ours((torch.randn(2, 6), torch.randn(3, 6)))
    results = micro_batch(3, args_batch_dim=1)(lambda x, y: (x, y))(x, y)
    assert equal(cat([x for x, _ in results], 1), x)
    assert equal(cat([y for _, y in results], 1), y)


def test_nested_inputs_are_split_inside():
    batch = ours({"ids": torch.arange(6), "pair": (torch.arange(12).view(6, 2), "name"), "scale": torch.tensor(1.0)})
    results = micro_batch(3)(lambda batch: batch)(batch)
    assert [theirs(part["ids"]).tolist() for part in results] == [[0, 1], [2, 3], [4, 5]]
    assert [tuple(part["pair"][0].shape) for part in results] == [(2, 2)] * 3
    assert all(part["pair"][1] == "name" and part["scale"] is batch["scale"] for part in results)


def test_accumulated_gradients_equal_those_of_the_whole_batch():
    torch.manual_seed(0)
    x, first, second = (leaf(torch.randn(shape, dtype=torch.float64)) for shape in ((7, 3), (3, 4), (4, 1)))

    def loss_of(x):
        output = (x @ first).tanh() @ second
        return (output * output).sum()

    backward(loss_of(x))
    expected = [grad_of(tensor) for tensor in (x, first, second)]
    zero_grad(x, first, second)
    for loss in micro_batch(3)(loss_of)(x):
        backward(loss)
    for tensor, gradient in zip((x, first, second), expected, strict=True):
        assert_close(grad_of(tensor), gradient, rtol=1e-12, atol=1e-12)


def test_methods_do_not_count_self():
    class Model:
        factor = 3

        @micro_batch(2, args_batch_dim=[0, None])
        def run(self, x, whole):
            return x * self.factor + whole.sum()

    x = ours(torch.arange(4.0))
    assert equal(cat(Model().run(x, ours(torch.ones(5)))), x * 3 + 5)


def test_calls_without_tensors_are_repeated():
    assert micro_batch(3)(lambda: "stage")() == ["stage"] * 3


@pytest.mark.parametrize(
    ("decorator", "args", "message"),
    [
        (
            micro_batch(4),
            (torch.zeros(3, 2),),
            r"argument 0 of shape \(3, 2\) has 3 samples along dim 0, too few for 4",
        ),
        (micro_batch(1), (torch.zeros(0, 2),), "has 0 samples along dim 0, too few for 1 micro-batches"),
        (
            micro_batch(2),
            (torch.zeros(4, 2), torch.zeros(6, 6)),
            r"batch sizes differ: argument 1 of shape \(6, 6\) has 6 .*0 of shape \(4, 2\) has 4; name the dims",
        ),
        (micro_batch(2, [2]), (torch.zeros(4, 2),), r"argument 0 of shape \(4, 2\) has no dim 2 to split; give None"),
        (micro_batch(2, [0]), (torch.tensor(1.0),), r"argument 0 of shape \(\) has no dim 0"),
        (micro_batch(2, [0]), (torch.zeros(4), 1), r"args_batch_dim \[0\] has 1 entries, but the call has 2"),
    ],
)
def test_calls_that_cannot_be_split_say_why(decorator, args, message):
    with pytest.raises(ValueError, match=message):
        decorator(lambda *args: args)(*ours(args))


def test_keywords_are_named_in_messages():
    with pytest.raises(ValueError, match=r"argument 'mask' of shape \(2, 5\) has no dim 3"):
        micro_batch(2, kwargs_batch_dim={"mask": 3})(lambda mask: mask)(mask=ours(torch.zeros(2, 5)))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0,), ValueError, "must be at least 1, got 0"),
        ((2.0,), TypeError, r"must be an int, got 2\.0"),
        ((True,), TypeError, "must be an int, got True"),
        ((2, {"x": 0}), TypeError, "args_batch_dim must be a list"),
        ((2, None, [0]), TypeError, "kwargs_batch_dim must be a dict"),
    ],
)
def test_wrong_declarations_fail_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        micro_batch(*arguments)
