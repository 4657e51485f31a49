"""Models times meshes times ways to accumulate, recompute and keep: each equal to one device after steps of AdamW."""

import copy
import itertools

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel import checkpoint
from hyper_parallel.platform import get_platform
from tests.fully_shard.parity import (
    Mlp,
    assert_all_sharded,
    assert_same_gradients,
    assert_same_weights,
    batch,
    double,
    loss_of,
    my_part,
    whole,
)
from tests.world import run_on_ranks, small_or_sweep

only_on = "torch"  # modules of PyTorch

_MESHES = {
    "shard": ((4,), ("dp",), None),
    "hybrid": ((2, 2), ("replicate", "shard"), None),
    "one replica": ((1, 4), ("replicate", "shard"), None),
    "one shard": ((4, 1), ("replicate", "shard"), None),
    "two shard axes": ((2, 2), ("dp", "cp"), ("dp", "cp")),
    "tensor parallel": ((2, 2), ("dp", "tp"), None),
}
_MODELS = ("mlp", "llama", "tied llama", "convolutions")
_WAYS = ("once", "reduce", "keep", "all reduce last")


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.GroupNorm(3, 6), nn.GELU()) for _ in range(2)
        )
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((-2, -1)))


def _make(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A model and a batch of 8 for it."""
    if name == "mlp":
        return double(Mlp), batch(8, 3)
    if name == "convolutions":
        return double(Convolutions), batch(8, 1, 5, 5)
    config = hp.models.LlamaConfig(
        vocab_size=37, dim=16, num_blocks=2, num_heads=4, num_kv_heads=2, hidden_dim=22, tie_head=name == "tied llama"
    )
    return double(hp.models.Llama, config), torch.arange(8 * 6).reshape(8, 6) * 11 % 37


def _sharded(
    model: nn.Module, name: str, mesh_name: str, recompute: bool, **options
) -> tuple[nn.Module, hp.DeviceMesh]:
    shape, names, shard_axes = _MESHES[mesh_name]
    mesh = hp.init_device_mesh("cpu", shape, mesh_dim_names=names)
    if mesh_name == "tensor parallel":
        if "llama" in name:
            hp.parallelize_module(model, mesh["tp"], hp.models.llama_plan(sequence_parallel=False))
        mesh = mesh["dp"]
    for number, block in enumerate(model.blocks):
        hp.fully_shard(block, mesh=mesh, shard_axes=shard_axes, **options)
        if recompute:
            model.blocks[number] = get_platform().ckpt_wrapper(block)
    return hp.fully_shard(model, mesh=mesh, shard_axes=shard_axes, **options), mesh


_CASES = [
    case
    for case in itertools.product(_MODELS, _MESHES, _WAYS, (True, False, 2), (False, True))
    if case[3] != 2 or _MESHES[case[1]][0][-1] == 4  # parts among two of two ranks are no parts
]
_SMALL = [
    ("llama", "shard", "once", True, False),
    ("tied llama", "hybrid", "all reduce last", True, True),
    ("tied llama", "tensor parallel", "keep", True, True),
    ("llama", "tensor parallel", "reduce", False, False),
    ("convolutions", "two shard axes", "keep", True, False),
    ("mlp", "one shard", "all reduce last", False, True),
    ("llama", "shard", "reduce", 2, True),
]


@run_on_ranks(4)
@pytest.mark.parametrize("case", small_or_sweep(_CASES, _SMALL))
def test_matrix(case) -> None:
    model_name, mesh_name, way, reshard, recompute = case
    model, x = _make(model_name)
    ours, mesh = _sharded(copy.deepcopy(model), model_name, mesh_name, recompute, reshard_after_forward=reshard)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, ours)]
    parts = 1 if way == "once" else 2
    for _ in range(5 if case in _SMALL else 2):
        for number, rows in enumerate(x.chunk(parts)):
            is_last = number == parts - 1
            if way == "keep":
                ours.set_requires_gradient_sync(is_last)
            elif way == "all reduce last":
                ours.set_requires_all_reduce(is_last)
            (loss_of(model(rows)) / parts).backward()
            (loss_of(ours(my_part(rows, mesh))) / parts).backward()
        assert_same_gradients(model, ours)
        want = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.testing.assert_close(whole(hp.clip_grad_norm_(ours.parameters(), 0.5)), want)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(model, ours)
    assert_all_sharded(ours)


@run_on_ranks(4)
@pytest.mark.processes("ranks save and load one checkpoint")
def test_checkpoint_across_layouts(tmp_path) -> None:
    """Saved under one layout, loaded under another, with the optimizer: training goes on as on one device."""
    model, x = _make("tied llama")
    ours, mesh = _sharded(copy.deepcopy(model), "tied llama", "shard", False)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, ours)]

    def step(ours, mesh, optimizers):
        loss_of(model(x)).backward()
        loss_of(ours(my_part(x, mesh))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    step(ours, mesh, optimizers)
    names, states = checkpoint.get_state_dict(ours, optimizers[1])
    checkpoint.save({"model": names, "optimizer": states}, checkpoint_id=tmp_path / "saved")
    for other in ("hybrid", "tensor parallel"):
        again, mesh = _sharded(_make("tied llama")[0], "tied llama", other, False)
        optimizer = torch.optim.AdamW(again.parameters(), lr=0.01)
        names, states = checkpoint.get_state_dict(again, optimizer)
        state = {"model": names, "optimizer": states}
        checkpoint.load(state, checkpoint_id=tmp_path / "saved")
        checkpoint.set_state_dict(
            again, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        assert_same_weights(model, again)
        step(again, mesh, [optimizers[0], optimizer])
        assert_same_weights(model, again)
        names, states = checkpoint.get_state_dict(again, optimizer)
        checkpoint.save({"model": names, "optimizer": states}, checkpoint_id=tmp_path / "saved")
