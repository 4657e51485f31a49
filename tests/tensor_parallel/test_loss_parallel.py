"""Cross entropy over a cut vocabulary: the loss and all gradients of one device, and the logits stay where they are."""

import itertools

import pytest
import torch

import hyper_parallel as hp
from tests.frameworks import assert_close, backward, dist, distribute_tensor, grad_of, leaf, on_mindspore, ours
from tests.frameworks.functions import cross_entropy
from tests.frameworks.models import fill, linear
from tests.tensor_parallel.small_modules import whole
from tests.world import run_on_ranks

WIDTH, LENGTH = 4, 6


def _targets(vocabulary: int) -> torch.Tensor:
    target = torch.arange(2 * LENGTH) * 5 % vocabulary
    target[LENGTH + 2] = target[4] = -100
    return target.int() if on_mindspore else target


@run_on_ranks(4)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_options(reduction: str, sweep: bool) -> None:
    mesh = hp.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = hp.ColwiseParallel(output_layouts=hp.Shard(-1), use_local_output=False)
    torch.manual_seed(0)
    vocabularies = (8, 5, 2) if sweep else (5,) if on_mindspore else (5, 2)  # over 4 ranks: even, uneven, empty
    for vocabulary, smoothing, weighted, dense in itertools.product(
        vocabularies, (0.0, 0.1), (False, True), (False, True)
    ):
        model = fill(linear(WIDTH, vocabulary))
        cut = hp.parallelize_module(fill(linear(WIDTH, vocabulary)), mesh, plan)
        x = torch.randn(2, LENGTH, WIDTH)
        target = torch.rand(2 * LENGTH, vocabulary).softmax(-1) if dense else _targets(vocabulary)
        weight = torch.rand(vocabulary) + 0.5 if weighted else None
        options = {"reduction": reduction, "label_smoothing": smoothing, "weight": ours(weight)}
        results = []
        for one in (model, cut):
            features = leaf(x)
            with hp.loss_parallel(), hp.CommRecorder() as recorder:
                loss = cross_entropy(one(features).reshape(-1, vocabulary), ours(target), **options)
            loss = (whole(loss) * ours(torch.arange(1.0, loss.numel() + 1).reshape(tuple(loss.shape)))).sum()
            backward(loss)
            results.append([loss, grad_of(features), whole(grad_of(one.weight)), whole(grad_of(one.bias))])
            assert all(record.shape[-1:] != (vocabulary,) for record in recorder.records), recorder.table()
            assert all(record.num_bytes <= 8 * 2 * LENGTH * 2 for record in recorder.records), recorder.table()
        case = f"{vocabulary} words, smoothing {smoothing}, weighted {weighted}, dense {dense}"
        for mine, want in zip(results[1], results[0], strict=True):
            assert_close(mine, want, rtol=1e-4, atol=1e-5, msg=lambda text, c=case: f"{c}: {text}")


@run_on_ranks(2)
def test_backward_sends_only_the_gradient_of_the_features() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = hp.ColwiseParallel(output_layouts=hp.Shard(-1), use_local_output=False)
    cut = hp.parallelize_module(fill(linear(WIDTH, 9)), mesh, plan)
    features = leaf(torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0)))
    with hp.loss_parallel():
        loss = cross_entropy(cut(features).reshape(-1, 9), ours(_targets(9)))
    with hp.CommRecorder() as recorder:
        loss.backward()
    assert [(record.op, record.shape) for record in recorder.records] == [("all_reduce", (2, LENGTH, WIDTH))]


@run_on_ranks(2)
def test_outside_of_it_plain_targets_are_refused() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    logits = distribute_tensor(torch.randn(3, 4), mesh, [hp.Shard(1)])
    wrong = _targets(12)[:3]
    wrong[2] = 7
    with pytest.raises(RuntimeError, match=r"a plain tensor of shape .3,. meets a distributed one"):
        cross_entropy(logits, ours(wrong % 4))
    with hp.loss_parallel(), pytest.raises(IndexError, match="the target 7 is not one of the 4 classes"):
        cross_entropy(logits, ours(wrong % 8 * torch.tensor([0, 0, 1]).to(wrong.dtype)))
