"""Backward in two parts gives the gradients of a whole one; products of linear layers' weights are in the second."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from hyper_parallel.core.activation_memory.recompute import recompute
from hyper_parallel.core.pipeline_parallel.runtime.weight_gradients import WeightGradients, noting, split_backward

only_on = "torch"  # the same through hp.parallelize on both frameworks: test_run.py


class _Twice(nn.Linear):
    """A forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        torch.manual_seed(0)
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)
        self.conv, self.twice = Conv1D(6, 6), _Twice(6, 6)
        self.frozen, self.hooked = nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.weight.requires_grad_(False)
        self.parametrized = parametrizations.weight_norm(nn.Linear(6, 6))
        self.head, self.tied = nn.Linear(6, 6), nn.Linear(6, 6)
        self.tied.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(torch.relu(self.up(self.norm(x)).mul_(1.5)))  # in place behind the product
        x = self.twice(self.conv(x)) + self.frozen(x)
        return self.tied(self.head(self.parametrized(self.hooked(x))))


_PUT_OFF = {"up.weight", "down.weight", "conv.weight", "head.weight"}


def _backward(loss: Any, pending: WeightGradients | None) -> None:
    with noting(pending):
        loss.backward()


@pytest.mark.parametrize("recomputed", [False, True])
def test_two_parts_give_the_bits_of_the_whole(recomputed: bool) -> None:
    torch.manual_seed(1)
    batches = [torch.randn(size, dtype=torch.float64) for size in ((3, 6), (2, 5, 6), (0, 6), (6,))]
    whole, split = _Model().double(), _Model().double()
    seen: list[int] = []
    for model in (whole, split):
        model.hooked.weight.register_hook(lambda gradient: seen.append(gradient.numel()))
    if recomputed:
        recompute(whole)
        recompute(split)
    assert split_backward(split) == split_backward(split) == 7
    for number, batch in enumerate(batches):
        x, y = batch.clone().requires_grad_(), batch.clone().requires_grad_()
        whole(x).sum().backward()
        before = {name: None if one.grad is None else one.grad.clone() for name, one in split.named_parameters()}
        pending = WeightGradients()
        with noting(pending):
            loss = split(y).sum()
        _backward(loss, pending)
        assert torch.equal(x.grad, y.grad)
        assert len(pending) == 5  # the tied weight twice
        for name, one in split.named_parameters():
            left = one.grad is None if before[name] is None else torch.equal(one.grad, before[name])
            assert left is (name in _PUT_OFF or name == "frozen.weight" or (not batch.numel() and number > 0)), name
        pending.compute()
        assert len(pending) == 0
        for (name, one), other in zip(split.named_parameters(), whole.parameters(), strict=True):
            assert (one.grad is None) is (other.grad is None), name
            assert one.grad is None or torch.allclose(one.grad, other.grad, rtol=1e-15, atol=1e-15), name
    assert len(seen) == 2 * len(batches)


def test_nothing_changes_outside_of_a_split_backward() -> None:
    model = _Model()
    split_backward(model)
    model(torch.randn(2, 6)).sum().backward()
    assert all(one.grad is not None for name, one in model.named_parameters() if name != "frozen.weight")


def test_products_of_autocast_have_the_dtype_of_the_product() -> None:
    whole, split = _Model(), _Model()
    split_backward(split)
    x = torch.randn(3, 6)
    for model in (whole, split):
        pending = WeightGradients()
        with noting(pending), torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().sum()
        _backward(loss, pending)
        pending.compute()
    for (name, one), other in zip(split.named_parameters(), whole.parameters(), strict=True):
        if other.grad is not None:
            assert one.grad is not None and one.grad.dtype == torch.float32
            is_shared = name == "head.weight"  # autocast adds its gradients up in the narrow dtype
            assert torch.allclose(one.grad, other.grad, *((1e-2, 1e-2) if is_shared else (0, 0))), name


def test_a_weight_that_is_computed_at_each_call_has_its_gradient_in_the_first_part() -> None:
    """Nobody asks a computed tensor for what is added to its gradient later: the parameter would have none."""
    layer, x, pending = nn.Linear(3, 4), torch.randn(2, 3), WeightGradients()
    split_backward(layer)
    vars(layer)["weight"] = layer.weight * 1  # as modules that run on whole plain tensors have it
    with noting(pending):
        layer(x).sum().backward()
    del vars(layer)["weight"]
    assert not len(pending)
    torch.testing.assert_close(layer.weight.grad, torch.ones(4, 2) @ x)
