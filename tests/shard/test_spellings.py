"""Rare ways to call operators: Python's operators with strangers, and functions under the ones written in Python."""

import operator

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel import Partial, Replicate, Shard
from tests.shard.validator import tensor
from tests.world import run_on_ranks

only_on = "torch"  # Python's operators with strangers, as PyTorch resolves them


class _Stranger:
    def __radd__(self, other):
        return "added"

    def __eq__(self, other):
        return "compared"


@run_on_ranks(2)
def test_python_operators_ask_the_other_operand() -> None:
    x = hp.ones((5, 3), hp.init_device_mesh("cpu", (2,)), [Shard(0)])
    assert (x == None) is False and (x != None) is True and (x == (0, 1)) is False  # noqa: E711
    assert [x, None].index(None) == 1
    assert x.is_same_size(x.redistribute(placements=[Shard(1)])) and not torch.is_same_size(x, x.t())
    assert x + _Stranger() == "added" and (x == _Stranger()) == "compared"
    for apply in (operator.add, operator.mul, operator.matmul, operator.lt):
        with pytest.raises(TypeError, match="DTensor' and 'NoneType'"):
            apply(x, None)


@run_on_ranks(2)
def test_functions_under_the_ones_written_in_python() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    table, index = torch.arange(15).reshape(5, 3), torch.tensor([[4], [0], [3], [3], [1]])
    log, target = tensor(5, 3, low=0.1).log(), tensor(5, 3, seed=1, low=0.1)
    for cut in ([Shard(0)], [Shard(1)], [Replicate()], [Partial()]):
        rows, places, logs, targets = (hp.distribute_tensor(t, mesh, cut) for t in (table, index, log, target))
        if not isinstance(cut[0], Partial):  # a table and positions of integers: only their order tells them apart
            torch.testing.assert_close(torch.embedding(rows, places).full_tensor(), torch.embedding(table, index))
            square = torch.embedding(rows[:, :1], places).full_tensor()
            torch.testing.assert_close(square, torch.embedding(table[:, :1], index))
        torch.testing.assert_close(torch.kl_div(logs, targets).full_tensor(), torch.kl_div(log, target))
        torch.testing.assert_close(torch.fft.fftn(logs, 4).full_tensor(), torch.fft.fftn(log, 4))


@run_on_ranks(2)
def test_cells_start_from_zeros_of_their_own() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        cell = kind(4, 3, dtype=torch.float64)
        for parameter in cell.parameters():
            hp.get_platform().broadcast(parameter.data, 0, None)
        expected = cell(tensor(5, 4))
        hp.distribute_module(cell, mesh)
        got = cell(hp.distribute_tensor(tensor(5, 4), mesh, [Shard(0)]))
        for mine, want in zip(*((one if isinstance(one, tuple) else (one,)) for one in (got, expected)), strict=True):
            torch.testing.assert_close(mine.full_tensor(), want.detach())
