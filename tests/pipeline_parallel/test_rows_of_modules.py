"""Models without a list of blocks: the members of their largest row of modules are the blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.testing import threads

only_on = "torch"  # modules of PyTorch


class _ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.rows = nn.ModuleDict({name: nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for name in ("a", "b", "c")})
        self.last = nn.Linear(6, 2)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = self.first(input)
        for block in self.rows.values():
            x = block(x)
        return self.last(x)


class _Named(nn.Sequential):
    """A class of one's own, whose blocks are its members."""


class _Listed(nn.Module):
    """Blocks in a list of one's own class, lists of embeddings and of heads, and positions for one length only."""

    class Blocks(nn.ModuleList):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.embeds = nn.ModuleList([nn.Embedding(5, 6), nn.Embedding(7, 6)])
        self.heads = nn.ModuleList(nn.Linear(6, 1) for _ in range(2))
        self.blocks = self.Blocks(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embeds[0](input_ids) + self.embeds[1](torch.arange(7))
        for block in self.blocks:
            x = block(x)
        return torch.cat([head(x) for head in self.heads], -1)


def _loss(outputs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return (outputs * outputs).sum(), outputs.numel()


def test_stages_of_a_sequential_and_of_a_dict() -> None:
    torch.manual_seed(0)
    row = _Named(nn.Embedding(5, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 2))
    ids = torch.arange(21).reshape(3, 7) % 5
    for whole, name, batch in (
        (row, "input", ids),
        (_ByName(), "input", torch.randn(5, 4)),
        (_Listed(), "input_ids", ids),
    ):
        whole = whole.double()
        batch = batch.double() if batch.is_floating_point() else batch
        total, count = _loss(whole(batch), None)
        (total / count).backward()
        want = {name: one.grad for name, one in whole.named_parameters()}
        whole.zero_grad()

        def work(whole: Any = whole, name: str = name, batch: Any = batch) -> tuple[float, dict[str, Any]]:
            run = hp.parallelize(copy.deepcopy(whole), "pp=2", schedule="zb_h1", microbatches=2, loss=_loss)
            loss = run.forward_backward(**{name: batch})
            return loss.item(), {name: one.grad for name, one in run.named_parameters()}

        found = threads(2).run(work)
        assert [set(gradients) & set(found[0][1]) for _, gradients in found] == [set(found[0][1]), set()]
        assert {name for _, gradients in found for name in gradients} == set(want)
        for loss, gradients in found:
            assert abs(loss - (total / count).item()) < 1e-12
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, want[name], rtol=0, atol=1e-12, msg=name)


def test_a_module_in_blocks_of_two_stages_is_refused() -> None:
    def work() -> None:
        model = _ByName()
        model.rows["c"][0] = model.rows["a"][0]
        hp.parallelize(model, "pp=2", microbatches=2, loss=_loss)

    with pytest.raises(ValueError, match=r"'rows.c.0' and 'rows.a.0' are one module, in blocks of different stages"):
        threads(2).run(work)
