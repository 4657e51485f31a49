"""Meshes whose ranks do not ascend: replicas of what rules reduce have the same bits on every rank."""

import pytest
import torch

import hyper_parallel as hp
from tests.frameworks import assert_close, dist, distribute_tensor, leaf, on_mindspore, theirs
from tests.frameworks.functions import (
    cross_entropy,
    cumsum,
    embedding,
    layer_norm,
    log_softmax,
    logsumexp,
    softmax,
    variance,
    vector_norm,
)
from tests.world import run_on_ranks

X = torch.randn(7, 9, generator=torch.Generator().manual_seed(1))
WEIGHT = torch.randn(9, generator=torch.Generator().manual_seed(2))
TARGET = torch.tensor([0, 8, 3, 3, 1, 7, 5])

OPERATORS = {
    "sum": lambda x, w, t: x.sum(),
    "mean": lambda x, w, t: x.mean(1),
    "product": lambda x, w, t: x.T @ x,
    "prod": lambda x, w, t: x.prod(1),
    "variance": lambda x, w, t: variance(x, 1),
    "norm": lambda x, w, t: vector_norm(x, 0),
    "logsumexp": lambda x, w, t: logsumexp(x, 1),
    "softmax": lambda x, w, t: softmax(x, 1),
    "log_softmax": lambda x, w, t: log_softmax(x, 0),
    "layer_norm": lambda x, w, t: layer_norm(x, w, w),
    "cross_entropy": lambda x, w, t: cross_entropy(x, t),
    "embedding": lambda x, w, t: embedding(t // 2, x),
    "cumsum": lambda x, w, t: cumsum(x, 0),
    "row": lambda x, w, t: x[3] * w,
}
if not on_mindspore:  # MindSpore's have other forms, or no kernel on a CPU
    F = torch.nn.functional
    OPERATORS |= {
        "var": lambda x, w, t: x.var(1),
        "std": lambda x, w, t: x.std(),
        "rms_norm": lambda x, w, t: F.rms_norm(x, (9,), w),
        "batch_norm": lambda x, w, t: F.batch_norm(x, None, None, w, w, training=True),
        "smoothed": lambda x, w, t: F.cross_entropy(x, t, weight=w.abs().detach(), label_smoothing=0.1),
    }


def _bits(mesh, tensor: hp.DTensor) -> set[bytes]:
    whole = theirs(tensor.redistribute(mesh, [hp.Replicate()] * mesh.ndim).to_local()).contiguous()
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, whole.numpy().tobytes())
    return set(found)


@run_on_ranks(4, timeout=120)
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_replicas_are_equal_to_the_bit(shape: tuple[int, ...]) -> None:
    mesh = hp.init_device_mesh("cpu", shape, rank_list=(3, 1, 0, 2))
    everywhere = [hp.Replicate()] * mesh.ndim
    target = distribute_tensor(TARGET.int() if on_mindspore else TARGET, mesh, everywhere)
    for name, operator in OPERATORS.items():
        plain = [X.clone().requires_grad_(), WEIGHT.clone().requires_grad_()]
        expected = operator(*plain, TARGET)
        expected.sin().sum().backward()
        for dim in (0, 1):
            placements = [hp.Shard(dim), hp.Shard(1 - dim)][: mesh.ndim]
            x = distribute_tensor(leaf(X), mesh, placements)
            weight = distribute_tensor(leaf(WEIGHT), mesh, everywhere)
            out = operator(x, weight, target)
            out.sin().sum().backward()
            assert_close(out.full_tensor(), expected, msg=lambda text, n=name: f"{n}: {text}")
            tensors = [out, x.grad, *([] if weight.grad is None else [weight.grad])]
            assert [len(_bits(mesh, tensor)) for tensor in tensors] == [1] * len(tensors), f"{name} cut along {dim}"
            assert_close(x.grad.full_tensor(), plain[0].grad, msg=lambda text, n=name: f"{n}: {text}")
            if weight.grad is not None:
                assert_close(weight.grad.full_tensor(), plain[1].grad, msg=lambda text, n=name: f"{n}: {text}")
