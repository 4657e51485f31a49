"""Plain tensors among distributed ones: an error, or whole on every rank where the program says so."""

import pytest
import torch

import hyper_parallel as hp
from tests.frameworks import (
    assert_close,
    dist,
    distribute_tensor,
    equal,
    grad_of,
    leaf,
    on_mindspore,
    ours,
    zero_grad,
)
from tests.frameworks.functions import cat, linear, where
from tests.world import run_on_ranks


@run_on_ranks(2, 4)
def test_a_plain_tensor_is_taken_as_whole_and_gets_the_whole_gradient():
    mesh = hp.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    weight, scale, table = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 6), (6,), (3, 5)))
    ones, mask = torch.ones(1, 6, dtype=torch.float64), torch.arange(6) > 2
    plain = [tensor.clone().requires_grad_() for tensor in (weight, scale, table)]

    def run(weight, scale, table, ones, mask):
        x = cat([weight * scale, ones])
        x = where(mask, x, table.sum())
        return (linear(table, x[:5].T) ** 2).sum() + (table @ weight).sin().sum()

    expected = run(*plain, ones, mask)
    expected.backward()
    for placement in (hp.Shard(0), hp.Shard(1), hp.Replicate()):
        mine = [distribute_tensor(leaf(weight), mesh, [placement]), leaf(scale), leaf(table)]
        with pytest.raises(RuntimeError, match=r"mul.*a plain tensor of shape \(6,\) meets .*implicit_replication"):
            run(*mine, ours(ones), ours(mask))
        with hp.implicit_replication():
            with hp.implicit_replication():
                pass
            loss = run(*mine, ours(ones), ours(mask))
        loss.backward()
        assert_close(loss.detach().full_tensor(), expected)
        assert [type(grad_of(tensor)) for tensor in mine[1:]] == [hp.get_platform().Tensor] * 2
        for tensor, want in zip(mine, plain, strict=True):
            found = grad_of(tensor)
            assert_close(found.full_tensor() if isinstance(tensor, hp.DTensor) else found, want.grad)


@run_on_ranks(2)
def test_a_plain_number_that_needs_a_gradient_gets_the_whole_of_it():
    mesh = hp.init_device_mesh("cpu", (2,))
    x = torch.arange(5.0, dtype=torch.float64)
    number = torch.tensor(3.0, dtype=torch.float64)
    for placement in (hp.Shard(0), hp.Replicate()):
        (distribute_tensor(x, mesh, [placement]) * ours(number)).sum()  # planned without a gradient first
        factor = leaf(number)
        cut = distribute_tensor(x, mesh, [placement])
        ((cut * factor) + where(cut > 1, cut, factor)).sum().backward()
        assert grad_of(factor).item() == 12.0
        zero_grad(factor)
        cut.masked_fill(cut > 1, factor).sum().backward()
        assert grad_of(factor).item() == 3.0


@run_on_ranks(2)
def test_writing_a_distributed_tensor_into_a_plain_one_writes_its_memory():
    mesh = hp.init_device_mesh("cpu", (2,))
    whole = distribute_tensor(torch.arange(4.0), mesh, [hp.Shard(0)])
    target, other = ours(torch.zeros(2, 4)), ours(torch.zeros(4))
    with hp.implicit_replication():
        target[0] = whole
        (other if on_mindspore else target[1]).copy_(whole)  # MindSpore loses what is written into a view
        other.copy_(whole)
    assert equal(target[0], torch.arange(4.0)) and equal(other, torch.arange(4.0))
    assert on_mindspore or equal(target[1], other)


def test_it_holds_for_its_own_thread_and_ends_with_an_error():
    from hyper_parallel.core.shard.dispatching.mixing import replicating

    with pytest.raises(KeyError), hp.implicit_replication():
        assert replicating.depth == 1
        raise KeyError
    assert replicating.depth == 0
