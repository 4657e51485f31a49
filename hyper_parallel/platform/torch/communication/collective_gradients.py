"""The autograd functions behind the collectives with gradients, on PyTorch: ``shared/collective_gradients.py``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hyper_parallel.platform.checks.collective_observers import announce, observers, tell_end
from hyper_parallel.platform.shared.collective_gradients import Framework, make_functions
from hyper_parallel.platform.torch.base.tensors import as_bytes
from hyper_parallel.platform.torch.communication import collectives, group_facts, groups
from hyper_parallel.platform.torch.communication.lost_ranks import completed, naming_lost_ranks
from hyper_parallel.platform.torch.communication.pretend_groups import PretendGroup


def handed_out(result: torch.Tensor) -> torch.Tensor:
    """The result of a collective as another tensor object over the same memory, for an autograd function to return.

    The backend's work keeps the tensor it was given. When that very object becomes part of a graph, the process group
    is sometimes never freed (PyTorch 2.13: about one time in ten), its threads outlive the interpreter, and the rank
    aborts at exit. An alias keeps the two apart; not a view, which could not be written to in place.
    """
    return result.detach()


def own_copy(data: torch.Tensor) -> torch.Tensor:
    """A contiguous copy for a collective to write into.

    By an operator that nobody else calls, so that a selective checkpoint can tell it from copies worth keeping: see
    Note [What a policy cannot keep] in ``activation.py``.
    """
    return torch.detach_copy(data)


def _exchange(tensor: torch.Tensor, peer_rank: int, group: dist.ProcessGroup) -> torch.Tensor:
    received = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    groups.wait_until_connected(group)
    _, facts = group_facts.find_facts(group)
    if facts.ledger is not None:
        place = facts.places[peer_rank]
        facts.ledger.send(place, 0, tensor.numel(), tensor.dtype)
        facts.ledger.receive(place, 0, tensor.numel(), tensor.dtype)
    if tensor.numel() == 0:
        return received
    call = announce("p2p_exchange", group, tensor, peer=peer_rank) if observers else None
    # As bytes, which every backend moves. In one batch: two ranks that each send first and receive after would
    # block each other on an accelerator.
    sent = as_bytes(group_facts.contiguous(tensor))
    if isinstance(group, PretendGroup):
        group.send([sent], facts.places[peer_rank])
        group.recv([as_bytes(received)], facts.places[peer_rank]).wait()
        tell_end(call)
        return received
    with naming_lost_ranks():
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, peer_rank, group),
                dist.P2POp(dist.irecv, as_bytes(received), peer_rank, group),
            ]
        )
    for work in works:
        completed(work)
    tell_end(call)
    return received


def _zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return like.new_zeros(shape)


functions = make_functions(
    Framework(
        Function=torch.autograd.Function,
        collectives=collectives,
        exchange=_exchange,
        cat=torch.cat,
        narrow=torch.narrow,
        zeros=_zeros,
        own_copy=own_copy,
        alias=lambda data: data.view_as(data),
        handed_out=handed_out,
        equal=torch.eq,
        as_integers=lambda data: data.to(torch.int32),
        conjugate=torch.conj,
        no_grad=torch.no_grad,
    )
)
