"""Which operators are refused while tokens lie in another order than that of the sequence, and which are not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

import hyper_parallel as hp
from hyper_parallel.core.shard.dispatching.order_guard import OrderGuard, guarded_order
from hyper_parallel.testing import threads

only_on = "torch"

TOKENS = 8


class _Given:
    """Hidden values and token ids whose sequence is sharded, and a table that is whole."""

    def __init__(self) -> None:
        mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        self.x = hp.distribute_tensor(torch.randn(2, TOKENS, 3), mesh, [hp.Shard(1)])
        self.wide = hp.distribute_tensor(torch.randn(2, TOKENS, TOKENS), mesh, [hp.Shard(1)])
        self.ids = hp.distribute_tensor(torch.arange(2 * TOKENS).reshape(2, TOKENS) % 5, mesh, [hp.Shard(1)])
        self.table = hp.distribute_tensor(torch.randn(20, 3), mesh, [hp.Replicate()])


Calls = dict[str, Callable[[_Given], object]]

REFUSED: Calls = {
    "a running sum": lambda given: given.x.cumsum(1),
    "neighbours": lambda given: given.x.roll(1, 1),
    "all but the first": lambda given: given.x[:, 1:],
    "the last token": lambda given: given.x[:, -1],
    "halves": lambda given: given.x.chunk(2, 1),
    "quarters": lambda given: given.x.split(2, 1),
    "chunks as a dim": lambda given: given.x.reshape(2, 4, 2, 3),
    "chunks by unflatten": lambda given: given.x.unflatten(1, (2, 4)),
    "chunks of flattened tokens": lambda given: given.x.flatten(0, 1).reshape(8, 2, 3),
    "a prefix": lambda given: torch.cat([given.x, given.x], 1),
    "where the largest is": lambda given: given.x.argmax(1).double(),
    "a window": lambda given: given.x.unfold(1, 2, 1),
    "positions counted from ids": lambda given: F.embedding(given.ids.ne(0).cumsum(1), given.table),
    "a share of what came before": lambda given: given.x / given.ids.cumsum(1).unsqueeze(-1),
    "marks of where ids change": lambda given: given.x.masked_fill((given.ids.diff(dim=1) > 1).any().view(1, 1, 1), 0),
    "ids of neighbours": lambda given: F.embedding(given.ids.roll(1, 1), given.table),
    "positions counted by the model": lambda given: given.x * torch.arange(TOKENS).view(1, TOKENS, 1),
    "positions looked up": lambda given: given.x + F.embedding(torch.arange(TOKENS), given.table),
    "a table cut to the tokens": lambda given: given.x + given.table[:TOKENS],
    "a matrix of tokens by tokens": lambda given: torch.ones(TOKENS, TOKENS).tril() @ given.x,
}

ALLOWED: Calls = {
    "each token by itself": lambda given: (given.x * 2).softmax(-1) @ given.table.T,
    "over all tokens": lambda given: given.x.sum(1),
    "flattened and back": lambda given: given.x.flatten(0, 1).reshape(2, TOKENS, 3) + given.x,
    "heads": lambda given: given.x.view(2, TOKENS, 3, 1).transpose(1, 2),
    "features": lambda given: torch.cat([given.x[..., :2], given.x[..., 2:]], -1) + given.x.split(1, -1)[0],
    "as many features as tokens": lambda given: torch.cat([-given.wide, given.wide], -1),
    "looked up": lambda given: given.x + F.embedding(given.ids, given.table),
    "something for each feature": lambda given: given.x * torch.arange(3),
    "an empty cache": lambda given: torch.cat([given.x.new_zeros(0), given.x], 1),
    "where documents begin, for the mask": lambda given: (given.ids.diff(dim=1) != 1).cumsum(1),
}


def _what_happens() -> dict[str, str]:
    given = _Given()
    said: dict[str, str] = {}

    def call(what: str, function: Callable[[_Given], object]) -> None:
        try:
            function(given)
        except ValueError as error:
            said[what] = str(error)
        else:
            said[what] = ""

    with hp.implicit_replication():
        given.x.cumsum(1)  # planned where it is right
        for order in ("zigzag", "striped"):
            with guarded_order(OrderGuard(order, TOKENS)):
                for what, function in {**REFUSED, **ALLOWED}.items():
                    call(what, function)
        given.x.cumsum(1)
        with guarded_order(OrderGuard("zigzag", 5)):  # a table that is cut to as many tokens as another batch has
            call("another length", lambda given: given.table[:TOKENS])
    return said


def test_what_goes_by_the_order_of_tokens_is_refused() -> None:
    said = threads(2).run(_what_happens)[0]
    wrong = {
        what: said[what] for what in REFUSED if "by the order of tokens, and the 8 tokens lie in" not in said[what]
    }
    assert not wrong
    wrong = {what: said[what] for what in (*ALLOWED, "another length") if said[what]}
    assert not wrong
    assert "embedding of integers that cumsum made along the sequence goes by" in said["positions counted from ids"]
    assert "a plain tensor of (1, 8, 1), which the model makes by itself" in said["positions counted by the model"]
    assert all("write order='contiguous'" in said[what] for what in REFUSED)
