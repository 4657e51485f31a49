"""A forward and a backward at once: what one sends to experts is under way while the other computes; the bits of one
after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.pipeline_parallel.check import check
from hyper_parallel.core.pipeline_parallel.folding import overlap_neighbours
from hyper_parallel.core.pipeline_parallel.prepare import prepare
from hyper_parallel.core.pipeline_parallel.runtime.overlap import Overlap
from hyper_parallel.core.pipeline_parallel.tables import make_table
from hyper_parallel.platform import get_platform
from hyper_parallel.testing import threads
from tests.models.test_mixture import SIZES
from tests.tensor_parallel.hugging_face import whole
from tests.world import run_on_ranks, small_or_sweep

only_on = "torch"  # MindSpore records nothing while a backward is half done: there pairs run in order

_LAYERS = 2


def _layers(mesh: hp.DeviceMesh, log: list[tuple[str, str]]) -> tuple[list[Any], Callable[[Any], Any]]:
    made = torch.Generator().manual_seed(0)
    blocks = [
        hp.distribute_tensor(torch.randn(4, 8, 8, generator=made, dtype=torch.float64), mesh, [hp.Shard(0)])
        for _ in range(2 * _LAYERS)
    ]
    weights = [torch.nn.Parameter(one) for one in blocks]

    def note(what: str) -> None:
        log.append(("backward" if "backward" in threading.current_thread().name else "forward", what))

    def activation(x: Any) -> Any:
        note("experts")
        x = x.sin()
        x.register_hook(lambda _: note("experts' gradient"))
        return x

    def run(tokens: Any) -> Any:
        chosen = torch.stack(
            [torch.arange(len(tokens)) % 4, (torch.arange(len(tokens)) + mesh.get_local_rank()) % 4], 1
        )
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            mixed = hp.experts(tokens, chosen, tokens[:, :2].sigmoid(), up, down, activation=activation)
            tokens = tokens + torch.nn.functional.dropout(mixed, 0.3)  # behind the place where the other has its turn
        return tokens.square().sum()

    def observed(op: str, *_: Any) -> None:
        if op == "all_to_all_single":
            note("send")

    get_platform().observe_collectives(observed)
    return weights, run


def _tokens(rank: int) -> list[Any]:
    made = torch.Generator().manual_seed(1 + rank)
    return [torch.randn(5 + rank, 8, generator=made, dtype=torch.float64).requires_grad_() for _ in range(2)]


def _step(at_once: bool, recompute: bool) -> tuple[list[Any], list[tuple[str, str]]]:
    mesh, log = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), list[tuple[str, str]]()
    weights, run = _layers(mesh, log)
    first, second = _tokens(mesh.get_local_rank())
    torch.manual_seed(mesh.get_local_rank())
    overlap = Overlap()
    found: list[Any] = []

    def forward(tokens: Any) -> None:
        with overlap.around():
            found.append(get_platform().checkpoint(run, tokens, use_reentrant=False) if recompute else run(tokens))

    def backward(number: int) -> None:
        with overlap.around():
            get_platform().backward(found[number])

    forward(first)
    log.clear()
    if at_once:
        overlap.both(lambda: forward(second), lambda: backward(0))
    else:
        forward(second)
        backward(0)
    seen = list(log)
    backward(1)
    return [*(one.detach() for one in found), first.grad, second.grad, *(one.grad.to_local() for one in weights)], seen


@pytest.mark.parametrize("recompute", [False, True])
@run_on_ranks(2)
def test_one_computes_while_what_the_other_sends_is_under_way(recompute: bool) -> None:
    want, _ = _step(at_once=False, recompute=recompute)
    got, log = _step(at_once=True, recompute=recompute)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    if not recompute:
        turns = [
            ("forward", "send"),
            ("backward", "send"),
            ("forward", "experts"),
            ("forward", "send"),
            ("backward", "experts' gradient"),
            ("backward", "send"),
        ]
        assert log == _LAYERS * turns
    assert {who for who, what in log if what == "experts"} == {"forward", "backward"} if recompute else {"forward"}


@run_on_ranks(2)
def test_the_one_that_fails_ends_the_other() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    _, run = _layers(mesh, [])
    tokens, _ = _tokens(mesh.get_local_rank())
    overlap = Overlap()

    def fails() -> None:
        with overlap.around():
            run(tokens)
        raise KeyError("from the user's module")

    def runs() -> None:
        with overlap.around():
            for _ in range(3):
                run(tokens)

    for forward, backward in ((fails, runs), (runs, fails)):
        with pytest.raises(KeyError, match="from the user's module"):
            overlap.both(forward, backward)
        beside = f"{threading.current_thread().name}, backward"
        assert beside not in [one.name for one in threading.enumerate()]
    done: list[str] = []
    overlap.both(lambda: done.append("forward"), lambda: done.append("backward"))  # what failed is forgotten
    assert done == ["forward", "backward"]


def _train(degrees: str, options: dict[str, Any], steps: int = 1) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = {**SIZES, "num_blocks": 4, "shared_dim": 12}
    model = hp.models.Mixture(hp.models.MixtureConfig(**sizes)).double()
    run = hp.parallelize(model, degrees, **options)
    optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2, eps=1e-6)
    ids = torch.randint(0, 16, (9, 7), generator=torch.Generator().manual_seed(1))
    rows = run.mine(range(len(ids)))
    seen: dict[str, Any] = {}
    for step in range(steps):
        loss = run.forward_backward(ids[rows.start : rows.stop], labels=ids[rows.start : rows.stop])
        seen |= {f"loss {step}": loss.detach(), f"norm {step}": whole(run.clip_grad_norm_(1.0))}
        optimizer.step()
        run.zero_grad()
    if run.pipeline is not None:
        assert [one for one in run.pipeline._runs.values() if one._overlap is not None]
    return seen | {name: whole(one) for name, one in run.named_parameters()}


_DEGREES = ["pp=2, dp_shard=2, ep=2", "pp=2, tp=2, ep=2", "pp=2, cp=2, ep=2"]


@pytest.mark.parametrize("recompute", small_or_sweep([None, "full"], [None]))
@pytest.mark.parametrize("degrees", small_or_sweep(_DEGREES, _DEGREES[:1]))
def test_dual_pipe_trains_as_one_device(degrees: str, recompute: str | None, sweep: bool) -> None:
    options = {"schedule": "dual_pipe_v", "microbatches": 4, "recompute": recompute}
    steps = 2 if sweep else 1
    (want,) = threads(1).run(_train, "dp_shard=1", {"microbatches": 4}, steps)
    for got in threads(4, timeout=300).run(_train, degrees, options, steps):
        for name, value in got.items():
            torch.testing.assert_close(value, want[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.sweep
@pytest.mark.processes("turns of threads, and collectives that are under way, on a backend that sends by itself")
@run_on_ranks(4, timeout=600)
def test_dual_pipe_on_processes() -> None:
    got = [
        _train(_DEGREES[0], {"schedule": "dual_pipe_v", "microbatches": 4, "recompute": "full"}, 2) for _ in range(3)
    ]
    assert all(torch.equal(got[0][name], other[name]) for other in got[1:] for name in got[0])


@pytest.mark.parametrize("name", ["interleaved", "zb1p"])
def test_tables_with_a_backward_and_the_next_forward_at_once(name: str) -> None:
    for ranks, microbatches, per_rank in ((2, 4, 2), (2, 4, 3), (3, 6, 2), (4, 8, 2), (4, 12, 3)):
        table = overlap_neighbours(make_table(name, ranks, microbatches, per_rank))
        check(prepare(table))
        pairs = [action for _, _, action in table if action.parts]
        assert len(pairs) >= ranks, table
        plain = make_table(name, ranks, microbatches, per_rank)
        for mine, its in zip(table.actions, plain.actions, strict=True):
            assert sorted(map(str, (step for action in mine for step in action.steps))) == sorted(map(str, its))
