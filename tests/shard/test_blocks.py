"""Unmodified model blocks with random layouts on inputs and parameters: values, gradients and an AdamW step."""

import random
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyper_parallel as hp
from tests.world import run_on_ranks

only_on = "torch"  # model blocks written for PyTorch; cells: test_training_on_mindspore.py


class LlamaBlock(nn.Module):
    """Grouped-query attention with rotary positions, and a gated MLP; plain single-device code."""

    def __init__(self, dim: int = 16, num_heads: int = 4, num_kv_heads: int = 2, hidden: int = 24) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, dim // num_heads
        self.wq = nn.Linear(dim, num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        angles = torch.outer(torch.arange(6.0), 1.0 / 100 ** (torch.arange(0, self.head_dim, 2) / self.head_dim))
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        h = self.attention_norm(x)
        q = self._rotate(self.wq(h).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2))
        k = self._rotate(self.wk(h).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2))
        v = self.wv(h).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(attended.transpose(1, 2).reshape(batch, length, dim))
        h = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class ResNetBlock(nn.Module):
    """Two convolutions with batch norms and a residual."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(h)) + x)


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)


class Recurrent(nn.Module):
    """An LSTM and a GRU, whose parameters they also keep in lists of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(12, 5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, (hidden, _) = self.lstm(x)
        out, last = self.gru(out)
        return out.sum(1) + last[0] + hidden[-1, :, :5]


class Decoder(nn.Module):
    """PyTorch's decoder layer and its attention with a mask, weights returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=True)
        self.attention = nn.MultiheadAttention(8, 4, kdim=8, vdim=8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(1, x.shape[1] + 1).cumsum(0)
        memory = x.flip(1) * 0.5
        h = self.layer(x, memory)
        out, weights = self.attention(h, memory, memory, need_weights=True)
        return out + weights.mean((1, 2), keepdim=True) + float(steps[0])


class Experts(nn.Module):
    """Tokens sent to the two best of four experts, each by a loop, and joined by weighted sums."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 6, 8))
        self.down = nn.Parameter(torch.randn(4, 8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        scores, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        result = torch.zeros_like(tokens)
        for expert in range(4):
            share = (scores * (chosen == expert)).sum(-1, keepdim=True)
            result = result + F.silu(tokens @ self.up[expert]) @ self.down[expert] * share
        return result.view_as(x)


class Patches(nn.Module):
    """Images cut into patches by reshapes, mixed along both dims, put together again."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(12, 12)
        self.norm = nn.GroupNorm(3, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = x.shape
        h = x.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
        h = self.mix(h.flatten(1, 2).flatten(2))
        h = self.norm(h.transpose(1, 2)).unflatten(2, (height // 2, width // 2))
        return h.view(batch, channels, 2, 2, height // 2, width // 2).permute(0, 1, 4, 2, 5, 3).reshape(x.shape) + x


BLOCKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "llama": (LlamaBlock, (4, 6, 16)),
    "resnet": (ResNetBlock, (5, 4, 6, 6)),
    "encoder": (_encoder, (3, 6, 16)),
    "recurrent": (Recurrent, (3, 5, 4)),
    "decoder": (Decoder, (3, 5, 8)),
    "experts": (Experts, (2, 5, 6)),
    "patches": (Patches, (3, 3, 4, 6)),
}


OFTEN = ("llama", "resnet", "encoder")


def _build(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    make, shape = BLOCKS[name]
    return make().double(), torch.randn(shape, dtype=torch.float64)


def _random_layout(pick: random.Random, mesh: hp.DeviceMesh, tensor: torch.Tensor) -> hp.Layout:
    options = [hp.Replicate(), *(hp.Shard(dim) for dim in range(tensor.ndim))]
    return hp.Layout.from_placements(mesh, [pick.choice(options) for _ in range(mesh.ndim)], tensor.ndim)


def _distribute(module: nn.Module, mesh: hp.DeviceMesh, pick: random.Random) -> None:
    for submodule in module.modules():
        for name, parameter in list(submodule.named_parameters(recurse=False)):
            cut = hp.distribute_tensor(parameter, mesh, _random_layout(pick, mesh, parameter))
            submodule.register_parameter(name, nn.Parameter(cut))
        for name, buffer in list(submodule.named_buffers(recurse=False)):
            setattr(submodule, name, hp.distribute_tensor(buffer, mesh, _random_layout(pick, mesh, buffer)))


@run_on_ranks(2, 4)
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_equal_one_device(name: str) -> None:
    warnings.simplefilter("ignore")
    plain, x = _build(name)
    plain_x = x.clone().requires_grad_()
    expected = plain(plain_x)
    expected.square().sum().backward()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    optimizer.step()
    size = hp.get_platform().get_world_size()
    mesh = hp.init_device_mesh("cpu", (2,) if size == 2 else (2, 2))
    for seed in range(4 if name in OFTEN else 2):
        pick = random.Random(seed)
        cut, _ = _build(name)
        _distribute(cut, mesh, pick)
        cut_x = hp.distribute_tensor(x.clone().requires_grad_(), mesh, _random_layout(pick, mesh, x))
        out = cut(cut_x)
        torch.testing.assert_close(out.full_tensor(), expected.detach(), rtol=1e-9, atol=1e-9)
        out.square().sum().backward()
        torch.testing.assert_close(cut_x.grad.full_tensor(), plain_x.grad, rtol=1e-9, atol=1e-9)
        torch.optim.AdamW(cut.parameters(), lr=0.01).step()
        for (key, mine), want in zip(cut.named_parameters(), plain.parameters(), strict=True):
            grad = mine.grad.full_tensor()
            torch.testing.assert_close(grad, want.grad, rtol=1e-8, atol=1e-8, msg=lambda m, k=key: f"{k}.grad: {m}")
            torch.testing.assert_close(mine.detach().full_tensor(), want.detach(), rtol=1e-8, atol=1e-8)
        for mine, want in zip(cut.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), want)
