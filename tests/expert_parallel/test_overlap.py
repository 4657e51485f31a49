"""The shared expert is computed while results of the others travel back, in both passes, and nothing else changes."""

import numpy as np
import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.expert_parallel.dispatch_options import dispatching
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.checks.collective_observers import observers, wait_observers
from hyper_parallel.testing import threads
from tests.frameworks import on_mindspore, ours, theirs
from tests.world import run_on_ranks, small_or_sweep

of_pytorch = pytest.mark.skipif(on_mindspore, reason="ranks of one process are PyTorch's")


class Logged(torch.autograd.Function):
    """Tells when a value is computed, and when its gradient."""

    @staticmethod
    def forward(ctx, x, log, name):
        ctx.log, ctx.name = log, name
        log.append(name)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.log.append(f"{ctx.name}, backward")
        return gradient, None, None


def _mixture(shape, style, shared_dim=12):
    torch.manual_seed(0)
    moe = hp.models.MoE(8, 6, num_experts=5, top_k=2, shared_dim=shared_dim, sequence_loss=0.1).double()
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if style is not None:
        mesh = hp.init_device_mesh("cpu", shape, mesh_dim_names=("ep", "tp")[: len(shape)])
        hp.parallelize_module(moe.experts, mesh, style)
    return moe


def _tokens(seed=None):
    generator = torch.Generator().manual_seed(get_platform().get_rank() if seed is None else seed)
    return torch.randn(2, 4, 8, dtype=torch.float64, generator=generator).requires_grad_()


@of_pytorch
@pytest.mark.parametrize("dispatcher", small_or_sweep(("all_to_all", "deredundency"), ["all_to_all"]))
def test_the_shared_expert_runs_between_launch_and_wait(dispatcher):
    def work():
        moe, tokens, log = _mixture((2,), hp.ExpertParallel(dispatcher)), _tokens(), []
        moe.shared.register_forward_hook(lambda module, args, output: Logged.apply(output, log, "shared expert"))
        told = [
            (observers, lambda call: log.append(f"launch {call.op}" if call.async_op else call.op)),
            (wait_observers, lambda call: log.append(f"wait {call.op}")),
        ]
        for where, observer in told:
            where.append(observer)
        try:
            output, auxiliary = moe(tokens)
            forward, log[:] = list(log), []
            (output.square().sum() + auxiliary).backward()
        finally:
            for where, observer in told:
                where.remove(observer)
        return forward, log

    combine = ["launch all_to_all_single", "shared expert", "wait all_to_all_single"]
    dispatch = ["all_to_all_single"] * (1 if dispatcher == "all_to_all" else 3)
    back = ["all_to_all_single"] * (1 if dispatcher == "all_to_all" else 2)  # choices have no gradient
    for forward, backward in threads(2).run(work):
        assert forward == ["all_gather_into_tensor", *dispatch, *combine]
        assert backward == [combine[0], "shared expert, backward", combine[2], *back]


@pytest.mark.sweep("mindspore")
@run_on_ranks(2)
def test_the_same_bits_with_and_without():
    platform = get_platform()
    mesh, seen = hp.init_device_mesh(platform.get_device_type(), (2,), mesh_dim_names=("ep",)), []
    random = np.random.default_rng(platform.get_rank())
    given, factors = (ours(torch.tensor(random.normal(size=(2, 4, 8)), dtype=torch.float32)) for _ in range(2))
    for overlaps in (True, False):
        random = np.random.default_rng(5)
        moe = hp.models.MoE(8, 6, num_experts=5, top_k=2, shared_dim=12, sequence_loss=0.1)
        for parameter in platform.parameters_dict(moe).values():
            value = torch.tensor(random.normal(size=tuple(parameter.shape)) * 0.3, dtype=torch.float32)
            platform.load_into_param(parameter, ours(value))
        hp.parallelize_module(moe.experts, mesh, hp.ExpertParallel(async_combine=overlaps))
        tokens = platform.set_tensor_requires_grad(platform.copied(given))
        output, auxiliary = moe(tokens)
        platform.backward((output * factors).sum() + auxiliary)
        leaves = {**platform.parameters_dict(moe), "tokens": tokens}
        gradients = {name: platform.get_grad(one) for name, one in leaves.items()}
        found = {name: one.to_local() if isinstance(one, hp.DTensor) else one for name, one in gradients.items()}
        seen.append({name: theirs(one) for name, one in {**found, "output": output}.items()})
    for name, value in seen[0].items():
        assert value.any() and torch.equal(value, seen[1][name]), name


@of_pytorch
@pytest.mark.sweep
def test_a_shared_expert_beside_experts_that_are_sharded_twice():
    def work():
        tokens = _tokens(get_platform().get_rank() // 2)  # the same along tp
        moe = _mixture((2, 2), hp.ExpertTensorParallel())
        output, auxiliary = moe(tokens)
        (output.square().sum() + auxiliary).backward()
        alone = _mixture((), None)
        expected = alone(tokens.detach())[0]
        return torch.allclose(output, expected, rtol=1e-12)

    assert threads(4).run(work) == [True] * 4


@of_pytorch
def test_what_is_beside_is_computed_once_on_every_way():
    def work():
        mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        tokens, chosen, weights = torch.randn(4, 8), torch.tensor([[0], [3], [1], [2]]), torch.ones(4, 1)
        plain = torch.randn(4, 8, 8)
        sharded, whole = (hp.distribute_tensor(plain, mesh, [place]) for place in (hp.Shard(0), hp.Replicate()))
        given = [hp.distribute_tensor(one, mesh, [hp.Replicate()]) for one in (tokens, chosen, weights)]
        calls = []
        for own, weight in (((tokens, chosen, weights), plain), ((tokens, chosen, weights), sharded)) + (
            (given, sharded),
            (given, whole),
        ):
            for overlaps in (True, False):
                with dispatching(overlaps=overlaps):
                    _, found = hp.experts(*own, weight, weight, activation=abs, beside=lambda: calls.append(1) or "it")
                assert found == "it"
        return len(calls)

    assert threads(2).run(work) == [8, 8]
