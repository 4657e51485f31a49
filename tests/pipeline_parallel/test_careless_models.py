"""Models that write to what their embedding gives, look at its device, or use it beside the stream."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.testing import threads

only_on = "torch"  # MindSpore's cells have no weight on another device, and are not written to in place


class _Careless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids.to(self.embed.weight.device))
        x *= 3.0
        for block in self.blocks:
            x = block(x)
        return x


def _loss(outputs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return (outputs * outputs).sum(), outputs.numel()


def test_stages_of_a_model_that_writes_to_its_embeddings_output() -> None:
    torch.manual_seed(0)
    whole = _Careless().double()
    ids = torch.randint(0, 11, (5, 3))
    total, count = _loss(whole(ids), None)
    (total / count).backward()
    want = {name: one.grad for name, one in whole.named_parameters()}
    whole.zero_grad()

    def work() -> tuple[float, dict[str, Any]]:
        run = hp.parallelize(copy.deepcopy(whole), "pp=2", schedule="zbv", microbatches=3, loss=_loss)
        loss = run.forward_backward(input_ids=ids)
        return loss.item(), {name: one.grad for name, one in run.named_parameters()}

    found = threads(2).run(work)
    assert {name for _, gradients in found for name in gradients} == set(want)
    for loss, gradients in found:
        assert abs(loss - (total / count).item()) < 1e-12
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, want[name], rtol=0, atol=1e-12, msg=name)


class _GivesToBlocks(_Careless):
    """Every block is given the embedding too, as Zamba 2's and Gemma 3n's are."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, extra=(first * 2,))
        return x


class _Adds(nn.Linear):
    def forward(self, x: torch.Tensor, extra: Any = None) -> torch.Tensor:
        return super().forward(x + (0 if extra is None else extra[0])).tanh()


class _AddsBehind(_Careless):
    """What runs behind the blocks uses the embedding."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return x + first


class _Table(nn.Embedding):
    def forward(self, size: torch.Size) -> torch.Tensor:
        return super().forward(torch.arange(size[-1]))


class _GivesSizes(_Careless):
    """A table of positions that is asked by their number, as RoFormer's."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = _Table(11, 6)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.positions(input_ids.shape)
        for block in self.blocks:
            x = block(x)
        return x


class _HasATower(_Careless):
    """Adds pictures to its embedding where it is given some, as LLaVA does."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(2, 6)

    def forward(self, input_ids: torch.Tensor, pixels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(input_ids) + (0 if pixels is None else self.tower(pixels))
        for block in self.blocks:
            x = block(x)
        return x


def test_a_tower_that_the_run_before_the_split_did_not_see_is_refused_where_it_is_called() -> None:
    def work(**more: torch.Tensor) -> float:
        torch.manual_seed(0)
        model = _HasATower()
        want = _loss(model(torch.zeros(4, 3, dtype=torch.long)), None)
        run = hp.parallelize(model, "pp=2", microbatches=2, loss=_loss)
        loss = run.forward_backward(input_ids=torch.zeros(4, 3, dtype=torch.long), **more)
        return float(loss - want[0].detach() / want[1])

    assert max(map(abs, threads(2).run(work))) < 1e-6
    with pytest.raises(RuntimeError, match=r"0F0 .*'tower' was called on stage 0, and it is on the last one: it was"):
        threads(2).run(lambda: work(pixels=torch.ones(4, 3, 2)))


def test_a_model_that_uses_its_embedding_beside_the_stream_is_refused() -> None:
    """On stages without it there is nothing in its place: the numbers would be wrong without a word."""

    def work(kind: type[_Careless], frozen: bool = False) -> None:
        model = kind()
        model.blocks = nn.ModuleList(_Adds(6, 6) for _ in range(4))
        model.embed.requires_grad_(not frozen)
        run = hp.parallelize(model, "pp=2", microbatches=2, loss=_loss)
        run.forward_backward(input_ids=torch.zeros(4, 3, dtype=torch.long))

    for frozen in (False, True):
        with pytest.raises(
            ValueError, match=r"'blocks.0' is given, beside the stream, a tensor .* \(extra=\) .*; only the st"
        ):
            threads(2).run(work, _GivesToBlocks, frozen)
    with pytest.raises(
        ValueError, match=r"'positions' \(_Table\) runs before the blocks and is called with a Size, no"
    ):
        threads(2).run(work, _GivesSizes)
    with pytest.raises(RuntimeError, match=r"1B0 .* what 'embed' gives before the blocks is used beside the stream"):
        threads(2).run(work, _AddsBehind)


class _Scales(_Careless):
    """Numbers of all blocks, and of what runs before them, without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.sums_blocks = False

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        total = x.detach().mean()
        with torch.no_grad():
            self.mean.add_(x.mean((0, 1)) if not self.sums_blocks else 1.0)
        for block in self.blocks:
            x = block(x)
            total = total + x.detach().mean()
        return x * (total if self.sums_blocks else self.mean)


def test_values_that_other_stages_have_are_never_taken_for_zeros() -> None:
    def work(sums_blocks: bool) -> Any:
        model = _Scales()
        model.sums_blocks = sums_blocks
        run = hp.parallelize(model, "pp=2", microbatches=2, loss=_loss)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = run.forward_backward(input_ids=torch.zeros(4, 3, dtype=torch.long))
        return loss.item(), [str(one.message) for one in caught]

    for sums_blocks in (True, False):
        (loss, _), (_, told) = threads(2).run(work, sums_blocks)
        assert loss != loss and "the first loss is NaN" in told[0] and "(embed)" in told[0]


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.drop(self.norm(x.flatten(0, 1)).view_as(x))


def test_a_look_at_blocks_leaves_their_averages_and_random_numbers() -> None:
    def work() -> None:
        model = _Careless()
        model.blocks = nn.ModuleList(_Counting() for _ in range(2))
        before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
        run = hp.parallelize(model, "pp=2", microbatches=1, loss=_loss)
        assert run.model.training and torch.equal(torch.get_rng_state(), drawn)
        for name, value in run.model.state_dict().items():
            assert value.is_meta or torch.equal(value, before[name]), name

    threads(2).run(work)
