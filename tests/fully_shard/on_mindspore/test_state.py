"""On MindSpore: states, loading, deferred initialisation, checkpoints across layouts, optimizers, precision, memory."""

import gc
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental import optim

import hyper_parallel as hp
from hyper_parallel import checkpoint as ckpt
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.mindspore.base import returnable_memory
from tests.fully_shard.on_mindspore.parity import (
    Mlp,
    assert_all_sharded,
    assert_same_gradients,
    assert_same_weights,
    batch,
    filled,
    loss_of,
    mesh_of,
    my_part,
    named,
    pair,
    shard_blocks,
    trains_as_one_device,
    values,
)
from tests.world import run_on_ranks


def _step(expected: nn.Cell, ours: nn.Cell, mesh: hp.DeviceMesh) -> None:
    x = batch(8, 3, seed=4)
    for cell, part in ((expected, Tensor(x)), (ours, my_part(x, mesh))):
        hp.zero_grad(cell.trainable_params())
        hp.backward(loss_of(cell(part)))
    assert_same_gradients(expected, ours)
    assert_all_sharded(ours)


@run_on_ranks(2)
def test_state_at_any_moment_and_loading() -> None:
    """The sharded parameters in forward too; set_data, load_state_dict, load_param_into_net take whole values."""
    mesh = mesh_of()
    expected, ours = pair(mesh)
    seen = []
    handle = ours.blocks[1].register_forward_hook(lambda cell, args, out: seen.append(dict(ours.state_dict())))
    loss = loss_of(ours(my_part(batch(8, 3), mesh)))
    seen.append(dict(ours.state_dict()))
    hp.backward(loss)
    seen.append(dict(ours.state_dict()))
    handle.remove()
    for state in seen:
        assert list(state) == list(named(expected))
        assert all(isinstance(value, hp.DTensor) for value in state.values())
    for name, value in seen[0].items():
        np.testing.assert_array_equal(values(value), values(named(expected)[name]))

    for number, load in enumerate((_load_state_dict, _load_parameters, _set_data, _set_state)):
        other = filled(Mlp(), seed=7 + number)
        load(ours, other)
        assert_same_weights(other, ours)
        _step(other, ours, mesh)
    with pytest.raises(ValueError, match=r"shape \(5, 3\) cannot have the values of one of shape \(2, 3\)"):
        ours.first.weight.assign_value(Tensor(np.zeros((2, 3))))
    elsewhere = hp.distribute_tensor(Tensor(np.zeros((5, 3))), mesh, [hp.Replicate()])
    with pytest.raises(
        ValueError, match=r"under Layout.* cannot have the values of one under .* redistribute it first"
    ):
        ours.first.weight.assign_value(elsewhere)


def _load_state_dict(ours: nn.Cell, other: nn.Cell) -> None:
    ours.load_state_dict(other.state_dict())


def _load_parameters(ours: nn.Cell, other: nn.Cell) -> None:
    wanted = {one.name: Parameter(Tensor(values(one)), name=one.name) for one in other.get_parameters()}
    assert mindspore.load_param_into_net(ours, wanted) == ([], [])


def _set_data(ours: nn.Cell, other: nn.Cell) -> None:
    for one, value in zip(ours.get_parameters(), other.get_parameters(), strict=True):
        one.set_data(hp.distribute_tensor(Tensor(values(value)), one.device_mesh, one.placements))


def _set_state(ours: nn.Cell, other: nn.Cell) -> None:
    hp.set_model_state_dict(ours, hp.get_model_state_dict(other))


@run_on_ranks(4)
def test_states_and_checkpoints_across_layouts(tmp_path) -> None:
    flat, turned = mesh_of(4), mesh_of(2, 2, names=("dp", "cp"))
    expected, ours = pair(flat)
    ckpt.save({"model": hp.get_model_state_dict(ours)}, checkpoint_id=tmp_path / "flat")
    full = hp.get_model_state_dict(ours, options={"full_state_dict": True})
    assert not any(isinstance(value, hp.DTensor) for value in full.values())
    others = [filled(Mlp(), seed=9) for _ in range(4)]
    for one in others[1:]:
        shard_blocks(mesh_of(2, 2))(one)
    last_dims = {"shard_placement_fn": lambda p: hp.Shard(p.ndim - 1)}
    shard_blocks(turned, shard_axes=("cp", "dp"), **last_dims)(others[0])
    loaded = {"model": hp.get_model_state_dict(others[0])}
    ckpt.load(loaded, checkpoint_id=tmp_path / "flat")
    hp.set_model_state_dict(others[1], full)
    hp.set_model_state_dict(others[2], hp.get_model_state_dict(ours))
    on_rank_0 = full if get_platform().get_rank() == 0 else {}
    hp.set_model_state_dict(others[3], on_rank_0, options={"broadcast_from_rank0": True})
    for one in others:
        assert_same_weights(expected, one)
    _step(expected, others[0], turned)
    plain = filled(Mlp(), seed=9)
    loaded = {"model": hp.get_model_state_dict(plain)}
    ckpt.load(loaded, checkpoint_id=tmp_path / "flat")
    hp.set_model_state_dict(plain, loaded["model"])
    assert_same_weights(expected, plain)


@run_on_ranks(2)
def test_deferred_initialisation() -> None:
    """Built without memory, sharded, then given values: the same bits as on one device."""
    mesh = mesh_of()

    def built() -> nn.Cell:
        with hp.deferred_init():
            return hp.models.Llama(hp.models.LlamaConfig(vocab_size=11, dim=16, num_blocks=2, num_heads=4))

    hp.manual_seed(3)
    expected = hp.materialize(built())
    ours = hp.fully_shard(built(), mesh=mesh, units="auto")
    assert ours.head.weight.is_meta and isinstance(ours.blocks[0], hp.HSDPModule)
    hp.manual_seed(3)
    hp.materialize(ours)
    for (name, one), mine in zip(named(expected).items(), named(ours).values(), strict=True):
        assert np.array_equal(values(mine), values(one)), name
    ids = np.arange(12, dtype=np.int32).reshape(2, 6) % 11
    for cell, part in ((expected, Tensor(ids)), (ours, my_part(ids, mesh))):
        hp.backward(cell(part, part.reshape(part.shape)).sum())
    assert_same_gradients(expected, ours)


@run_on_ranks(2, timeout=120)
@pytest.mark.parametrize("kind", ["experimental", "nn"])
def test_optimizers_of_mindspore(kind, tmp_path) -> None:
    """AdamW steps five times, with its state saved and loaded under another layout in between."""
    mesh = mesh_of()
    x = batch(8, 3)

    def optimizer_of(cell: nn.Cell) -> Any:
        weights = cell.trainable_params()
        return optim.AdamW(weights, lr=0.01) if kind == "experimental" else nn.AdamWeightDecay(weights, 0.01)

    def train(cell: nn.Cell, optimizer: Any, part: Tensor, num_steps: int) -> None:
        for _ in range(num_steps):
            _, gradients = hp.value_and_grad(lambda: loss_of(cell(part)), cell.trainable_params())()
            with get_platform().no_grad():
                optimizer(tuple(gradients))

    expected, ours = (filled(Mlp(num_blocks=1)) for _ in range(2))
    train(expected, optimizer_of(expected), Tensor(x), 5)
    shard_blocks(mesh)(ours)
    optimizer = optimizer_of(ours)
    train(ours, optimizer, my_part(x, mesh), 3 if kind == "experimental" else 5)
    if kind == "experimental":
        state = dict(zip(("model", "optimizer"), ckpt.get_state_dict(ours, optimizer), strict=True))
        ckpt.save(state, checkpoint_id=tmp_path / "three")
        ours = filled(Mlp(num_blocks=1), seed=5)
        shard_blocks(mesh, shard_placement_fn=lambda p: hp.Shard(p.ndim - 1))(ours)
        optimizer = optimizer_of(ours)
        state = dict(zip(("model", "optimizer"), ckpt.get_state_dict(ours, optimizer), strict=True))
        ckpt.load(state, checkpoint_id=tmp_path / "three")
        ckpt.set_state_dict(ours, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        train(ours, optimizer, my_part(x, mesh), 2)
    assert_same_weights(expected, ours)
    assert_all_sharded(ours)


@run_on_ranks(2)
def test_precision_and_host_memory() -> None:
    """float16 on the wire and in forward, sums in float32; gradients in float32; host memory, which is all there is."""
    mesh = mesh_of()
    x = batch(8, 3)
    expected, ours = pair(mesh, offload_policy=hp.CPUOffloadPolicy())
    hp.backward(loss_of(expected(Tensor(x))))
    hp.backward(loss_of(ours(my_part(x, mesh))))
    assert_same_gradients(expected, ours)

    ours = filled(Mlp())
    for block in ours.blocks:
        hp.fully_shard(block, mesh=mesh, mp_policy=hp.MixedPrecisionPolicy(mindspore.float16, mindspore.float32))
    whole = hp.MixedPrecisionPolicy(mindspore.float16, mindspore.float32, mindspore.float64)
    hp.fully_shard(ours, mesh=mesh, mp_policy=whole)
    out = ours(my_part(x, mesh))
    assert out.dtype == mindspore.float64
    hp.backward(loss_of(out))
    for name, one in named(ours).items():
        want, got = values(hp.grad_of(named(expected)[name])), values(hp.grad_of(one))
        assert one.dtype == mindspore.float64 and got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=0.05, atol=0.02, err_msg=name)
    assert_all_sharded(ours)

    main = hp.MixedPrecisionPolicy(apply_grad_on_fp32_main_grad=True)
    _, ours = pair(mesh, mp_policy=main)
    for _ in range(2):
        hp.backward(loss_of(ours(my_part(x, mesh))))
    for name, one in named(ours).items():
        assert hp.grad_of(one) is None and one.main_grad.dtype == mindspore.float32
        want = 2 * values(hp.grad_of(named(expected)[name]))
        np.testing.assert_allclose(values(one.main_grad), want, rtol=1e-5, atol=1e-6, err_msg=name)


@run_on_ranks(2)
def test_views_of_one_storage() -> None:
    """What accelerators use gives the same numbers on a CPU, if not the same memory."""
    platform, mesh = type(get_platform()), mesh_of()
    one_storage = lambda num_elements, dtype, device: returnable_memory.OneStorage(num_elements, dtype)  # noqa: E731
    for options in ({}, {"shard_placement_fn": lambda p: hp.Shard(p.ndim - 1)}):
        before = platform.returnable_memory
        platform.returnable_memory = staticmethod(one_storage)
        try:
            trains_as_one_device(Mlp, shard_blocks(mesh, **options), batch(8, 3), mesh, num_steps=2)
        finally:
            platform.returnable_memory = staticmethod(before)


class Wide(nn.Cell):
    """Layers of 8 MiB each."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.CellList(
            [nn.Dense(1024, 1024, has_bias=False, dtype=mindspore.float64) for _ in range(num_layers)]
        )

    def construct(self, x: Any) -> Any:
        for block in self.blocks:
            x = ops.tanh(block(x))
        return x


def _resident() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


@pytest.mark.sweep("mindspore")
@run_on_ranks(2)
def test_memory_is_that_of_a_few_units() -> None:
    """Whole, 12 layers are 96 MiB; a step holds shards (48), their gradients (48) and a few layers."""
    mesh = mesh_of()
    cell = Wide(12)
    shard_blocks(mesh)(cell)
    x = Tensor(batch(2, 1024))
    before = _resident()
    out = cell(x)
    after_forward = _resident()
    hp.backward(out.sum())
    after_backward = _resident()
    assert after_forward - before < 40, (before, after_forward)
    assert after_backward - before < 48 + 64, (before, after_backward)
    hp.zero_grad(cell.trainable_params())
    for _ in range(3):
        hp.backward(cell(x).sum())
        hp.zero_grad(cell.trainable_params())
        cell(x)  # recorded, and no backward comes: nothing piles up
    assert _resident() - after_backward < 24
