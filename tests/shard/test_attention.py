"""Attention under every layout: the operator, and the modules that are made of it."""

import copy
import random

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.core.dtensor.comm_recorder import CommRecorder
from hyper_parallel.core.shard.dispatching.strict_mode import strict
from tests.shard.validator import Sample, assert_valid, layouts_of, tensor
from tests.world import run_on_ranks, small_or_sweep

only_on = "torch"  # scaled_dot_product_attention and the modules made of it are PyTorch's

SDPA = "nn.functional.scaled_dot_product_attention"


def _qkv(batch: int, heads: int, queries: int, keys: int, features: int = 4, key_heads: int | None = None):
    key_heads = heads if key_heads is None else key_heads
    return (
        tensor(batch, heads, queries, features),
        tensor(batch, key_heads, keys, features, seed=1),
        tensor(batch, key_heads, keys, features, seed=2),
    )


ATTENTION = [
    Sample(SDPA, _qkv(2, 3, 5, 4)),
    Sample(SDPA, _qkv(3, 2, 4, 4), {"is_causal": True}),
    Sample(SDPA, _qkv(1, 2, 5, 3), {"is_causal": True, "scale": 0.3}),
    Sample(SDPA, _qkv(1, 2, 3, 5), {"is_causal": True}),
    Sample(SDPA, _qkv(2, 3, 5, 4), {"attn_mask": tensor(5, 4, seed=3)}),
    Sample(SDPA, _qkv(2, 2, 3, 4), {"attn_mask": tensor(2, 1, 3, 4, seed=3, low=-1.0) > -0.5}),
    Sample(SDPA, (*_qkv(2, 2, 3, 4), tensor(1, 2, 1, 4, seed=3), 0.0, False)),
    Sample(SDPA, (tensor(3, 4), tensor(5, 4, seed=1), tensor(5, 2, seed=2))),
    Sample(SDPA, (tensor(3, 5, 4), tensor(3, 2, 4, seed=1), tensor(3, 2, 4, seed=2))),
    Sample(SDPA, _qkv(2, 4, 3, 3, key_heads=2), {"enable_gqa": True}),
    Sample(SDPA, _qkv(1, 6, 3, 3, key_heads=3), {"enable_gqa": True, "is_causal": True}),
    Sample(SDPA, _qkv(1, 4, 3, 2, key_heads=1), {"enable_gqa": True}),
]


@pytest.mark.parametrize("half", small_or_sweep([0, 1], [1]))
def test_same_as_one_device(worlds, half: int) -> None:
    samples = ATTENTION[half::2]
    assert_valid(worlds, samples if worlds.sweep else samples[1::3])


@run_on_ranks(4)
def test_heads_and_batch_are_cut_without_communication() -> None:
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    query, key, value = (
        hp.distribute_tensor(t, mesh, [hp.Shard(0), hp.Shard(1)]) for t in _qkv(2, 8, 3, 3, key_heads=4)
    )
    with strict(implicit_redistribution=True), CommRecorder() as recorder:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert out.placements == (hp.Shard(0), hp.Shard(1))
    assert not recorder.records


@run_on_ranks(2)
def test_dropout_is_the_same_under_every_layout() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    tensors = _qkv(2, 4, 5, 3, key_heads=2)
    found = []
    for placement in (hp.Replicate(), hp.Shard(0), hp.Shard(1), hp.Shard(2)):
        hp.manual_seed(3)
        leaves = [hp.distribute_tensor(t.clone().requires_grad_(), mesh, [placement]) for t in tensors]
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, dropout_p=0.4, is_causal=True, enable_gqa=True)
        out.full_tensor().square().sum().backward()
        found.append([out.full_tensor().detach(), *(leaf.grad.full_tensor() for leaf in leaves)])
    for other in found[1:]:
        for mine, first in zip(other, found[0], strict=True):
            torch.testing.assert_close(mine, first)
    plain = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    assert not torch.allclose(found[0][0], plain), "something was dropped"


# ---------------------------------------------------------------------------------------------------------------------
# Modules, unmodified, with random layouts on inputs and parameters
# ---------------------------------------------------------------------------------------------------------------------


def _multihead(batch_first: bool = True, need_weights: bool = True):
    module = nn.MultiheadAttention(4, 2, batch_first=batch_first, dtype=torch.float64)
    x = tensor(2, 3, 4)
    return module, lambda m, x: m(x, x, x, need_weights=need_weights)[0], (x,)


def _encoder_layer(norm_first: bool = False):
    module = nn.TransformerEncoderLayer(
        4, 2, 6, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64
    )
    return module, lambda m, x: m(x), (tensor(2, 3, 4),)


def _decoder_layer():
    module = nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True, dtype=torch.float64)
    return module, lambda m, x, memory: m(x, memory), (tensor(2, 3, 4), tensor(2, 5, 4, seed=1))


MODULES = {
    "multihead": _multihead,
    "multihead_sequence_first": lambda: _multihead(batch_first=False, need_weights=False),
    "encoder": _encoder_layer,
    "encoder_norm_first": lambda: _encoder_layer(True),
    "decoder": _decoder_layer,
}


def _whole(tensor_: torch.Tensor) -> torch.Tensor:
    return tensor_.full_tensor() if isinstance(tensor_, hp.DTensor) else tensor_


def _train_one_step(module: nn.Module, call, inputs) -> list[torch.Tensor]:
    """One AdamW step; the output, all gradients and the new parameters, whole."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    out = call(module, *inputs)
    loss = (out * out).sum()
    loss.backward()
    gradients = [*(value.grad for value in inputs), *(p.grad for p in module.parameters())]
    optimizer.step()
    return [_whole(value).detach() for value in (out, *gradients, *module.parameters())]


def check_module(name: str, make, seed: int) -> None:
    """Runs on every rank: random layouts on inputs and parameters against one device."""
    torch.manual_seed(0)
    module, call, inputs = make()
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    pick = random.Random(f"{name}{seed}")

    def cut(value: torch.Tensor, partial: bool) -> hp.DTensor:
        return hp.distribute_tensor(value, mesh, pick.choice(layouts_of(mesh, value, partial)))

    distributed = copy.deepcopy(module)
    for submodule in distributed.modules():
        for key, parameter in list(submodule._parameters.items()):
            if parameter is not None:
                submodule.register_parameter(key, nn.Parameter(cut(parameter.detach(), False)))
        for key, buffer in list(submodule._buffers.items()):
            if buffer is not None:
                submodule._buffers[key] = cut(buffer, False)
    ours = [cut(value.clone().requires_grad_(), True) for value in inputs]
    expected = _train_one_step(module, call, [value.clone().requires_grad_() for value in inputs])
    found = _train_one_step(distributed, call, ours)
    for mine, want in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-8, atol=1e-8)


@run_on_ranks(4)
@pytest.mark.parametrize("name", list(MODULES))
def test_modules(name: str) -> None:
    for seed in range(3):
        check_module(name, MODULES[name], seed)


@run_on_ranks(2)
def test_modules_without_gradients() -> None:
    module, call, inputs = _encoder_layer()
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    module.eval()
    with torch.no_grad():
        expected = call(module, *inputs)
        hp.distribute_module(module, mesh)
        found = call(module, hp.distribute_tensor(inputs[0], mesh, [hp.Shard(0)]))
    torch.testing.assert_close(found.full_tensor(), expected)
