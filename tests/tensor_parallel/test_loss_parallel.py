"""Cross entropy over a cut vocabulary: the loss and all gradients of one device, and the logits stay where they are."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyper_parallel as hp
from tests.tensor_parallel.toy import whole
from tests.world import run_on_ranks

WIDTH, LENGTH = 4, 6


def _targets(vocabulary: int) -> torch.Tensor:
    target = torch.arange(2 * LENGTH).reshape(2, LENGTH) * 5 % vocabulary
    target[1, 2] = target[0, 4] = -100
    return target


@run_on_ranks(2, 4)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_options(reduction: str) -> None:
    mesh = hp.init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    plan = hp.ColwiseParallel(output_layouts=hp.Shard(-1), use_local_output=False)
    for vocabulary, smoothing, weighted, dense in itertools.product(
        (8, 5, 2), (0.0, 0.1), (False, True), (False, True)
    ):
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, vocabulary).double()
        ours = hp.parallelize_module(copy.deepcopy(model), mesh, plan)
        x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
        target = torch.rand(2 * LENGTH, vocabulary, dtype=torch.float64).softmax(-1) if dense else _targets(vocabulary)
        weight = torch.rand(vocabulary, dtype=torch.float64) + 0.5 if weighted else None
        results = []
        for one in (model, ours):
            features = x.clone().requires_grad_()
            options = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight}
            goal = target if dense else target.flatten()
            with hp.loss_parallel(), hp.CommRecorder() as recorder:
                loss = F.cross_entropy(one(features).flatten(0, 1), goal, **options)
            loss = (whole(loss) * torch.arange(1, loss.numel() + 1).reshape(loss.shape)).sum()
            loss.backward()
            results.append([loss, features.grad, whole(one.weight.grad), whole(one.bias.grad)])
            assert all(record.shape[-1:] != (vocabulary,) for record in recorder.records), recorder.table()
            assert all(record.num_bytes <= 8 * 2 * LENGTH * 2 for record in recorder.records), recorder.table()
        case = f"{vocabulary} words, smoothing {smoothing}, weighted {weighted}, dense {dense}"
        for mine, want in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(mine, want, msg=lambda text, c=case: f"{c}: {text}")


@run_on_ranks(2)
def test_backward_sends_only_the_gradient_of_the_features() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = hp.ColwiseParallel(output_layouts=hp.Shard(-1), use_local_output=False)
    ours = hp.parallelize_module(nn.Linear(WIDTH, 9), mesh, plan)
    features = torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    with hp.loss_parallel():
        loss = F.cross_entropy(ours(features).flatten(0, 1), _targets(9).flatten())
    with hp.CommRecorder() as recorder:
        loss.backward()
    assert [(record.op, record.shape) for record in recorder.records] == [("all_reduce", (2, LENGTH, WIDTH))]


@run_on_ranks(2)
def test_outside_of_it_plain_targets_are_refused() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    logits = hp.distribute_tensor(torch.randn(3, 4), mesh, [hp.Shard(1)])
    with pytest.raises(RuntimeError, match=r"a plain tensor of shape .3,. meets a distributed one"):
        F.cross_entropy(logits, torch.tensor([0, 1, 2]))
    with hp.loss_parallel(), pytest.raises(IndexError, match="the target 7 is not one of the 4 classes"):
        F.cross_entropy(logits, torch.tensor([0, 1, 7]))
