"""Models of a program's own, of unusual structure, under `hp.parallelize`: the numbers of one device."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import hyper_parallel as hp
from hyper_parallel.testing import threads
from tests.tensor_parallel.hugging_face import assert_same, whole

only_on = "torch"  # modules of PyTorch
ROWS = 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class WritesRows(Block):
    """Computes some of the rows and writes them into a tensor that it makes for itself."""

    def forward(self, x):
        chosen, sums = x.sum(-1) > 0, torch.zeros(6, dtype=x.dtype)
        y = torch.zeros_like(x)
        y[chosen] = super().forward(x[chosen])
        sums.index_add_(0, torch.arange(6), self.norm.bias)
        return x + y * sums


class WithWeight(Block):
    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(4, 4) / 2)

    def forward(self, x):
        return super().forward(torch.einsum("ts,bsd->btd", self.mix, x))


class Square(Block):
    """The layers of a pair may have one weight."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.fc1, self.fc2 = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 9), nn.Linear(9, 6)
        self.down.weight = self.up.weight

    def forward(self, x):
        return super().forward(x) + self.fc2(self.fc1(x).relu())


class Model(nn.Module):
    def __init__(self, block, rows=nn.ModuleList):
        super().__init__()
        self.blocks = rows([block(), block()]) if rows is nn.ModuleList else rows(block(), block())
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _build(*args):
    torch.manual_seed(0)
    model = Model(*args).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return model, torch.randn(ROWS, 4, 6, dtype=torch.float64)


def _squares(outputs, batch):
    return outputs.square().sum() + outputs.sin().sum(), len(outputs)


def _on_a_rank(args, degrees, options):
    model, x = _build(*args)
    run = hp.parallelize(model, degrees, loss=_squares, **options)
    mine = run.mine(range(ROWS))
    loss = run.forward_backward(x[mine.start : mine.stop])
    return {"loss": loss} | {name: whole(one.grad) for name, one in run.named_parameters()}


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((WritesRows,), {}),
        ((WithWeight,), {"keep_whole": ["blocks.*.mix"]}),
        ((Block, nn.Sequential), {"recompute": "full"}),
        ((Square,), {}),
    ],
)
@pytest.mark.parametrize(("degrees", "ranks"), [("tp=2", 2), ("dp_shard=2, tp=2", 4)])
def test_numbers_of_one_device(args, options, degrees, ranks):
    model, x = _build(*args)
    total, count = _squares(model(x), {})
    (total / count).backward()
    want = {"loss": (total / count).detach()} | {name: one.grad for name, one in model.named_parameters()}
    for got in threads(ranks).run(_on_a_rank, args, degrees, options):
        assert_same(got, want, rtol=1e-9, atol=1e-9)


def test_blocks_in_a_sequential_are_sharded_over_tp():
    def work():
        model = hp.parallelize(_build(Block, nn.Sequential)[0], "tp=2", loss=_squares).model
        return model.blocks[1].up.weight.placements, model.blocks[1].down.weight.placements

    assert threads(2).run(work)[0] == ((hp.Replicate(), hp.Shard(0)), (hp.Replicate(), hp.Shard(1)))


class Normed(Block):
    def __init__(self):
        super().__init__()
        self.gate = parametrizations.weight_norm(nn.Linear(6, 6))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (WithWeight, r"'blocks.0', a WithWeight with weights of its own \(mix\).*keep_whole=\['blocks.\*.mix'\]"),
        (Normed, r"'blocks.0.gate.parametrizations.weight', .*keep_whole=\['blocks.\*.gate.parametrizations.weight'\]"),
    ],
)
def test_weights_beside_layers_are_named(block, message):
    def work():
        with pytest.raises(ValueError, match=message):
            hp.parallelize(_build(block)[0], "tp=2")

    threads(2).run(work)


def test_lazy_modules_are_to_be_called_first():
    with pytest.raises(ValueError, match=r"'1', a LazyLinear, get their sizes from the first input: call the model"):
        hp.parallelize(nn.Sequential(nn.ReLU(), nn.LazyLinear(2)))


class Scaled(Block):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))


def test_parameters_without_dims_are_written(tmp_path):
    def work():
        run = hp.parallelize(_build(Scaled)[0], "dp_shard=2", loss=_squares)
        run.save_hugging_face(tmp_path)
        return whole(run.model.blocks[1].scale)

    for want in threads(2).run(work):
        assert torch.equal(load_file(tmp_path / "model.safetensors")["blocks.1.scale"], want)


class Renormalizes(Block):
    def forward(self, x):
        with torch.no_grad():
            self.up.weight.div_(self.up.weight.norm(dim=1, keepdim=True))
        return super().forward(x)


@pytest.mark.parametrize(("degrees", "ranks"), [("dp_shard=2", 2), ("dp_shard=2, tp=2", 4)])
def test_writes_into_sharded_parameters_are_refused(degrees, ranks):
    with pytest.raises(RuntimeError, match=r"forward wrote into 'blocks.0.up.weight', .* the write would be lost"):
        threads(ranks).run(_on_a_rank, (Renormalizes,), degrees, {})


def test_writes_into_parameters_that_stay_are_those_of_one_device():
    test_numbers_of_one_device((Renormalizes,), {}, "tp=2", 2)


class Held(Block):
    def forward(self, x):
        self.array = self.up.weight.detach().numpy()
        return super().forward(x)


def test_whole_parameters_that_numpy_holds():
    with pytest.raises(RuntimeError, match="cannot be given back: numpy holds it"):
        threads(2).run(_on_a_rank, (Held,), "dp_shard=2", {})
