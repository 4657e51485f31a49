"""What a user may do to a run in stages: it trains as in one piece, or says what to do instead."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.testing import threads

only_on = "torch"  # ranks are threads

_IDS = torch.arange(21).reshape(7, 3) % 11


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _model() -> _Model:
    torch.manual_seed(0)
    return _Model().double()


def _loss(outputs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return outputs.square().sum(), outputs.numel()


def _start(model: nn.Module, **options: Any) -> hp.Parallel:
    return hp.parallelize(model, "pp=2", microbatches=3, loss=_loss, **options)


def test_parameters_that_are_frozen_and_trained_again() -> None:
    def work() -> None:
        whole = _model()
        run = _start(copy.deepcopy(whole), schedule="zbv", stages=[1, 1, 2, 1])
        of_whole = dict(whole.named_parameters())
        for frozen in ((), ("embed", "blocks.0", "blocks.1", "blocks.2"), ("embed",), ("blocks.4", "head"), ()):
            for name, parameter in (*of_whole.items(), *run.named_parameters()):
                parameter.requires_grad_(not name.startswith(tuple(frozen))).grad = None
            total, count = _loss(whole(_IDS), None)
            (total / count).backward()
            assert abs(run.forward_backward(_IDS) - total.detach() / count) < 1e-12
            for name, parameter in run.named_parameters():
                torch.testing.assert_close(parameter.grad, of_whole[name].grad, rtol=0, atol=1e-12, msg=name)

    threads(2).run(work)


def test_a_frozen_model_has_its_loss_in_its_own_dtype() -> None:
    def work() -> float:
        return _start(_model().requires_grad_(False)).loss_of(_IDS).item()

    total, count = _loss(_model()(_IDS), None)
    assert threads(2).run(work) == pytest.approx([total.item() / count] * 2, rel=1e-14)


def test_mistakes() -> None:
    def trained_later() -> None:
        model = _model()
        model.blocks[4].requires_grad_(False)
        run = _start(model)
        if hp.get_platform().get_rank() == 1:
            dict(run.named_parameters())["blocks.4.0.bias"].requires_grad_()
        run.forward_backward(_IDS)

    def other_stages() -> None:
        _start(_model(), stages=[2, 3] if hp.get_platform().get_rank() else [3, 2]).forward_backward(_IDS)

    def cut_twice() -> None:
        model = _model()
        _start(model)
        _start(model)

    def without_gradients() -> None:
        with torch.no_grad():
            _start(_model()).forward_backward(_IDS)

    for work, said in (
        (trained_later, "'blocks.4.0.bias' was frozen when the pipeline was made, .* behind parallelize, not before"),
        (other_stages, r"different tables \(rank 0: .*, stages=\[3, 2\]; rank 1: .*, stages=\[2, 3\]\): .* same sche"),
        (cut_twice, "this _Model has been cut already; build it again"),
        (without_gradients, "forward_backward was called under no_grad: call it outside, or loss_of in its place"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=said):
            threads(2).run(work)


class _Averages(_Model):
    """Averages in modules without parameters, before and behind the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.BatchNorm1d(4, affine=False) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embed(input_ids))
        for block in self.blocks:
            x = block(x)
        return self.last(self.head(x))


def test_a_checkpoint_has_the_buffers_of_the_stage_that_computes_them(tmp_path: Any) -> None:
    torch.manual_seed(0)
    whole = _Averages().double()
    given = copy.deepcopy(whole)
    ids = torch.arange(28).reshape(7, 4) % 11
    whole(ids)

    def save() -> None:
        run = hp.parallelize(copy.deepcopy(given), "pp=2", microbatches=1, loss=_loss)
        run.forward_backward(ids)
        run.save(tmp_path)

    def load(degrees: str) -> dict[str, torch.Tensor]:
        run = hp.parallelize(copy.deepcopy(given), degrees, microbatches=1, loss=_loss)
        run.load(tmp_path)
        return dict(run.model.named_buffers())

    threads(2).run(save)
    for found in threads(1).run(load, "dp_shard=1") + threads(2).run(load, "pp=2"):
        torch.testing.assert_close(found, dict(whole.named_buffers()), rtol=1e-12, atol=0)
