"""Meshes whose ranks do not ascend: replicas of what rules reduce have the same bits on every rank."""

import pytest
import torch
import torch.nn.functional as F

import hyper_parallel as hp
from tests.world import run_on_ranks

X = torch.randn(7, 9, generator=torch.Generator().manual_seed(1))
WEIGHT = torch.randn(9, generator=torch.Generator().manual_seed(2))
TARGET = torch.tensor([0, 8, 3, 3, 1, 7, 5])

OPERATORS = {
    "sum": lambda x, w, t: x.sum(),
    "mean": lambda x, w, t: x.mean(1),
    "product": lambda x, w, t: x.t() @ x,
    "prod": lambda x, w, t: x.prod(1),
    "var": lambda x, w, t: x.var(1),
    "std": lambda x, w, t: x.std(),
    "norm": lambda x, w, t: torch.linalg.vector_norm(x, dim=0),
    "logsumexp": lambda x, w, t: x.logsumexp(1),
    "softmax": lambda x, w, t: x.softmax(1),
    "log_softmax": lambda x, w, t: x.log_softmax(0),
    "layer_norm": lambda x, w, t: F.layer_norm(x, (9,), w, w),
    "rms_norm": lambda x, w, t: F.rms_norm(x, (9,), w),
    "batch_norm": lambda x, w, t: F.batch_norm(x, None, None, w, w, training=True),
    "cross_entropy": lambda x, w, t: F.cross_entropy(x, t),
    "smoothed": lambda x, w, t: F.cross_entropy(x, t, weight=w.abs().detach(), label_smoothing=0.1),
    "embedding": lambda x, w, t: F.embedding(t.clamp(max=6), x),
    "cumsum": lambda x, w, t: x.cumsum(0),
    "row": lambda x, w, t: x[3] * w,
}


def _bits(mesh, tensor: hp.DTensor) -> set[bytes]:
    whole = tensor.redistribute(mesh, [hp.Replicate()] * mesh.ndim).to_local().detach().contiguous()
    found = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, whole.numpy().tobytes())
    return set(found)


@run_on_ranks(4, timeout=120)
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_replicas_are_equal_to_the_bit(shape: tuple[int, ...]) -> None:
    mesh = hp.init_device_mesh("cpu", shape, rank_list=(3, 1, 0, 2))
    for name, operator in OPERATORS.items():
        plain = [X.clone().requires_grad_(), WEIGHT.clone().requires_grad_()]
        expected = operator(*plain, TARGET)
        expected.sin().sum().backward()
        for dim in (0, 1):
            placements = [hp.Shard(dim), hp.Shard(1 - dim)][: mesh.ndim]
            x = hp.distribute_tensor(X.clone().requires_grad_(), mesh, placements)
            weight = hp.distribute_tensor(WEIGHT.clone().requires_grad_(), mesh, [hp.Replicate()] * mesh.ndim)
            target = hp.distribute_tensor(TARGET, mesh, [hp.Replicate()] * mesh.ndim)
            out = operator(x, weight, target)
            out.sin().sum().backward()
            torch.testing.assert_close(out.full_tensor(), expected, msg=lambda text, n=name: f"{n}: {text}")
            tensors = [out, x.grad, *([] if weight.grad is None else [weight.grad])]
            assert [len(_bits(mesh, tensor)) for tensor in tensors] == [1] * len(tensors), f"{name} cut along {dim}"
            torch.testing.assert_close(x.grad.full_tensor(), plain[0].grad, msg=lambda text, n=name: f"{n}: {text}")
