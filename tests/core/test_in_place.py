"""Updates of distributed tensors in place: values, memory, versions, and gradients of what was updated."""

from __future__ import annotations

import itertools

from hyper_parallel import Partial, Replicate, Shard
from hyper_parallel.platform import get_platform
from tests.core.layout_cases import PLACEMENTS, make_mesh, numbers
from tests.core.test_dtensor import Parameter, parameter_of
from tests.frameworks import assert_close, backward, distribute_tensor, equal, theirs
from tests.world import run_on_ranks


@run_on_ranks(4)
def test_updates_in_place():
    mesh = make_mesh(2, 2)
    for name, (placements, shape) in PLACEMENTS.items():
        if name in ("partial", "scalar"):
            continue
        trained = parameter_of(numbers(*shape), mesh, placements)
        backward((trained**2).sum())
        memory, version = trained.to_local().data_ptr(), trained._version
        expected = numbers(*shape)
        with get_platform().no_grad():
            trained -= 0.25 * trained.grad
            expected -= 0.25 * 2 * numbers(*shape)
            trained.add_(trained.grad, alpha=-0.5)
            expected.add_(2 * numbers(*shape), alpha=-0.5)
            trained.mul_(3)
            expected *= 3
        assert equal(trained.full_tensor(), expected), name
        assert trained.is_leaf and trained.requires_grad and isinstance(trained, Parameter), name
        assert trained.to_local().data_ptr() == memory and trained._version > version, name
        with get_platform().no_grad():
            for source in ([Replicate(), Replicate()], placements):
                trained.zero_()
                assert not theirs(trained.full_tensor()).any(), name
                assert trained.copy_(distribute_tensor(expected, mesh, source)) is trained, name
                assert equal(trained.full_tensor(), expected), name


@run_on_ranks(2)
def test_an_update_in_the_graph_has_a_gradient():
    mesh = make_mesh()
    start = distribute_tensor(numbers(5), mesh, [Shard(0)]).requires_grad_()
    value = start * 2
    value.mul_(distribute_tensor(numbers(5), mesh, [Shard(0)]))
    backward(value.full_tensor().sum())
    assert equal(start.grad.full_tensor(), numbers(5) * 2)


@run_on_ranks(2, 4)
def test_what_was_redistributed_can_be_updated():
    mesh = make_mesh()
    whole = numbers(4, 6)
    for source, target in itertools.permutations((Replicate(), Shard(0), Shard(1), Partial()), 2):
        x = distribute_tensor(whole, mesh, [source]).requires_grad_()
        y = (x * 1).redistribute(mesh, [target])
        y *= 3
        y.square().sum().backward()
        assert_close(y.detach().full_tensor(), 3 * whole)
        assert_close(x.detach().full_tensor(), whole)
        assert_close(x.grad.full_tensor(), 18 * whole)
