"""Plain tensors among distributed ones: an error, or whole on every rank where the program says so."""

import pytest
import torch
import torch.nn.functional as F

import hyper_parallel as hp
from tests.world import run_on_ranks


@run_on_ranks(2, 4)
def test_a_plain_tensor_is_taken_as_whole_and_gets_the_whole_gradient():
    mesh = hp.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    torch.manual_seed(0)
    weight, scale, table = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 6), (6,), (3, 5)))
    plain = [tensor.clone().requires_grad_() for tensor in (weight, scale, table)]

    def run(weight, scale, table):
        x = torch.cat([weight * scale, torch.ones(1, 6, dtype=torch.float64)])
        x = torch.where(torch.arange(6) > 2, x, table.sum())
        return F.linear(table, x[:5].T).square().sum() + (table @ weight).sin().sum()

    run(*plain).backward()
    for placement in (hp.Shard(0), hp.Shard(1), hp.Replicate()):
        cut = hp.distribute_tensor(weight.clone().requires_grad_(), mesh, [placement])
        mine = [cut, *(tensor.clone().requires_grad_() for tensor in (scale, table))]
        with pytest.raises(RuntimeError, match=r"mul.*a plain tensor of shape \(6,\) meets a distributed one"):
            run(*mine)
        with hp.implicit_replication():
            with hp.implicit_replication():
                pass
            loss = run(*mine)
        loss.backward()
        torch.testing.assert_close(loss.detach().full_tensor(), run(*plain).detach())
        assert [type(tensor.grad) for tensor in mine[1:]] == [torch.Tensor, torch.Tensor]
        for tensor, want in zip(mine, plain, strict=True):
            got = tensor.grad.full_tensor() if isinstance(tensor, hp.DTensor) else tensor.grad
            torch.testing.assert_close(got, want.grad)


@run_on_ranks(2)
def test_a_plain_number_that_needs_a_gradient_gets_the_whole_of_it():
    mesh = hp.init_device_mesh("cpu", (2,))
    x = torch.arange(5.0, dtype=torch.float64)
    for placement in (hp.Shard(0), hp.Replicate()):
        factor = torch.tensor(3.0, dtype=torch.float64)
        (hp.distribute_tensor(x, mesh, [placement]) * factor).sum()  # planned without a gradient first
        factor.requires_grad_()
        cut = hp.distribute_tensor(x, mesh, [placement])
        (torch.mul(cut, factor) + torch.where(cut > 1, cut, factor)).sum().backward()
        assert factor.grad.item() == 12.0
        factor.grad = None
        cut.masked_fill(cut > 1, factor).sum().backward()
        assert factor.grad.item() == 3.0


@run_on_ranks(2)
def test_writing_a_distributed_tensor_into_a_plain_one_writes_its_memory():
    mesh = hp.init_device_mesh("cpu", (2,))
    whole = hp.distribute_tensor(torch.arange(4.0), mesh, [hp.Shard(0)])
    target = torch.zeros(2, 4)
    with hp.implicit_replication():
        target[1] = whole
        target[0].copy_(whole)
    assert torch.equal(target, torch.arange(4.0).expand(2, 4))


def test_it_holds_for_its_own_thread_and_ends_with_an_error():
    from hyper_parallel.core.shard.mixing import replicating

    with pytest.raises(KeyError), hp.implicit_replication():
        assert replicating.depth == 1
        raise KeyError
    assert replicating.depth == 0
