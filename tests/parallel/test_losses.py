"""How a run finds its loss: labels, a function, what the model returns; and what it says when it cannot."""

import copy

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.testing import threads


class Classifier(nn.Module):
    """A model that knows nothing of losses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class ReturnsLoss(Classifier):
    def forward(self, x, labels=None):
        logits = super().forward(x)
        return logits if labels is None else nn.functional.cross_entropy(logits, labels)


def _batch(rows=7):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(5, (rows,), generator=generator)}


def _model(kind=Classifier):
    torch.manual_seed(0)
    return kind().double()


def squares(outputs, batch):
    """Counts what only the outputs tell."""
    chosen = outputs[outputs.abs() < 0.6]
    return chosen.square().sum(), chosen.numel()


def entropies(outputs, batch):
    return nn.functional.cross_entropy(outputs, batch["labels"], reduction="sum"), len(outputs)


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, hp.DTensor) else tensor


def _gradients(model):
    return {name: one.grad for name, one in model.named_parameters()}


@pytest.mark.parametrize("degrees", ["dp_shard=1", "dp_shard=2", "dp_replicate=2", "dp_shard=4"])
@pytest.mark.parametrize("function", [squares, entropies])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_function_gives_sum_and_count(function, degrees, microbatches):
    alone, given = _model(), _batch()
    total, count = function(alone(given["x"]), given)
    want = total / count
    (3 * want).backward()  # gradients of two calls add up
    wanted = _gradients(alone)

    def work():
        run = hp.parallelize(_model(), degrees, loss=function, microbatches=microbatches)
        mine = run.mine(range(7))
        part = {name: value[mine.start : mine.stop] for name, value in given.items()}
        losses = [run.forward_backward(**part) for _ in range(3)]
        return losses[-1], {name: _whole(hp.grad_of(one)) for name, one in run.named_parameters()}

    for loss, gradients in threads(int(degrees[-1])).run(work):
        torch.testing.assert_close(loss, want.detach(), rtol=1e-12, atol=0)
        for name, gradient in gradients.items():
            assert (gradient is None) == (wanted[name] is None), name
            if gradient is not None:
                torch.testing.assert_close(gradient, wanted[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_model_returns_the_mean_over_its_labels(microbatches):
    given = _batch()
    given["labels"][:4] = -100  # all of rank 0
    want = _model(ReturnsLoss)(**given)

    def work():
        run = hp.parallelize(_model(ReturnsLoss), microbatches=microbatches)
        mine = run.mine(range(7))
        loss = run.forward_backward(given["x"][mine.start : mine.stop], labels=given["labels"][mine.start : mine.stop])
        return loss, all(torch.isfinite(one.to_local()).all() for one in run.gradients() if one is not None)

    for got, is_finite in threads(2).run(work):
        torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=0)
        assert is_finite


@pytest.mark.parametrize("degrees", ["dp_shard=1", "dp_shard=2, tp=2", "cp=2, tp=2"])
def test_next_token_loss(degrees):
    config = hp.models.LlamaConfig(vocab_size=37, dim=16, num_blocks=2, num_heads=4, num_kv_heads=2, hidden_dim=24)
    torch.manual_seed(0)
    model = hp.models.Llama(config).double()
    ids = torch.randint(37, (3, 9))
    labels = ids.clone()
    labels[1, 3:] = -100
    logits = model(ids)
    want = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    want.backward()

    def work():
        run = hp.parallelize(copy.deepcopy(alone), degrees, loss=hp.next_token_loss, microbatches=2)
        mine = run.mine(range(3))
        loss = run.forward_backward(ids[mine.start : mine.stop], labels=labels[mine.start : mine.stop])
        return loss, list(map(_whole, run.gradients()))

    alone = copy.deepcopy(model)
    alone.zero_grad()
    world = 1 if degrees == "dp_shard=1" else 4
    for loss, gradients in threads(world).run(work):
        torch.testing.assert_close(loss, want.detach(), rtol=1e-12, atol=0)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-12)


def _says(text, work, error=ValueError):
    with pytest.raises(error, match=text):
        threads(1).run(work)


def test_what_it_says_when_there_is_no_loss():
    given = _batch()
    _says("x and no labels; give labels=", lambda: hp.parallelize(_model()).forward_backward(x=given["x"]))
    _says(
        r"ReturnsLogits was given labels and returned a tensor of shape \(7, 5\), not its loss.*next_token_loss",
        lambda: hp.parallelize(_model(ReturnsLogits)).forward_backward(**given),
    )
    _says(
        "the loss function .*wrong must give .sum of losses, their number., got Tensor",
        lambda: hp.parallelize(_model(), loss=wrong).forward_backward(**given),
        TypeError,
    )
    _says("loss is a function", lambda: hp.parallelize(_model(), loss="mean"), TypeError)
    _says("the batch has no tensors; it has x", lambda: hp.parallelize(_model()).forward_backward(x=None))
    takes = lambda: hp.parallelize(_model(ReturnsLoss)).forward_backward(given["x"], x=given["x"])  # noqa: E731
    _says("x is given by position and by name", takes, TypeError)
    _says(
        r"takes 2 inputs \(x, labels\), got 3",
        lambda: hp.parallelize(_model(ReturnsLoss)).forward_backward(1, 2, 3),
        TypeError,
    )


def wrong(outputs, batch):
    return outputs.sum()


class ReturnsLogits(Classifier):
    def forward(self, x, labels=None):
        return super().forward(x)
