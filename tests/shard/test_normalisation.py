"""Normalisation under every layout, with running statistics, and with the normalised dims cut."""

import pytest
import torch
import torch.nn.functional as F

import hyper_parallel as hp
from hyper_parallel.core.dtensor.comm_recorder import CommRecorder
from hyper_parallel.core.shard.dispatching.strict_mode import strict
from tests.shard.validator import Sample, assert_valid, tensor
from tests.world import run_on_ranks

only_on = "torch"  # calls PyTorch's operators one by one; MindSpore's own: test_mindspore_rules.py


def batch_norm(x, mean, var, weight=None, bias=None, training=True, momentum=0.3):
    """Gives the running statistics too, which have no gradient."""
    mean, var = mean.detach().clone(), var.detach().clone()
    result = F.batch_norm(x, mean, var, weight, bias, training, momentum)
    return result, mean, var


def instance_norm(x, mean, var, weight=None, bias=None, use_input_stats=True):
    mean, var = mean.detach().clone(), var.detach().clone()
    result = F.instance_norm(x, mean, var, weight, bias, use_input_stats, 0.2)
    return result, mean, var


def batch_norm_with_update(x, mean, var):
    mean, var = mean.detach().clone(), var.detach().clone()
    result, *saved = torch.ops.aten._batch_norm_with_update(x, None, None, mean, var, 0.3, 1e-5)
    return [result, saved[0], mean, var]


def native_batch_norm_in_evaluation(x, mean, var):
    result, *saved = torch.native_batch_norm(x, None, None, mean.detach(), var.detach(), False, 0.1, 1e-5)
    assert [tuple(one.shape) for one in saved] == [(0,), (0,)]  # as on one device
    return result


def native_batch_norm(x, mean, var):
    return torch.native_batch_norm(x, None, None, mean.detach().clone(), var.detach().clone(), True, 0.1, 1e-5)


def affine(channels):
    return tensor(channels, seed=1), tensor(channels, seed=2)


def statistics(channels):
    return tensor(channels, seed=3), tensor(channels, seed=4, low=0.5)


LAYER = [
    Sample("nn.functional.layer_norm", (tensor(5, 3), (3,), *affine(3))),
    Sample("nn.functional.layer_norm", (tensor(5, 4), [4])),
    Sample("nn.functional.layer_norm", (tensor(3, 2, 5), (2, 5), tensor(2, 5, seed=1))),
    Sample("nn.functional.layer_norm", (tensor(5, 3), (3,)), {"bias": tensor(3, seed=1), "eps": 0.1}),
    Sample("nn.functional.layer_norm", (tensor(1, 4), (4,), *affine(4))),
    Sample("layer_norm", (tensor(5, 3), (3,), *affine(3))),
    Sample("native_layer_norm", (tensor(5, 3), (3,), *affine(3), 1e-5)),
    Sample("nn.functional.rms_norm", (tensor(5, 3), (3,), tensor(3, seed=1))),
    Sample("nn.functional.rms_norm", (tensor(3, 2, 5), (2, 5)), {"eps": 1e-3}),
    Sample("nn.functional.rms_norm", (tensor(4, 1), (1,), tensor(1, seed=1))),
    Sample("nn.functional.rms_norm", (torch.complex(tensor(3, 2), tensor(3, 2, seed=1)), (2,))),
]
GROUP = [
    Sample("nn.functional.group_norm", (tensor(3, 4, 2), 2, *affine(4))),
    Sample("nn.functional.group_norm", (tensor(2, 6, 3), 3)),
    Sample("nn.functional.group_norm", (tensor(2, 6, 3), 2, *affine(6))),
    Sample("nn.functional.group_norm", (tensor(3, 5, 2, 3), 1, *affine(5))),
    Sample("nn.functional.group_norm", (tensor(3, 4), 2)),
    Sample("native_group_norm", (tensor(3, 4, 2), *affine(4), 3, 4, 2, 2, 1e-5)),
    Sample("nn.functional.group_norm", (tensor(2, 3, 4), 3)),
    Sample(instance_norm, (tensor(3, 2, 5), *statistics(2), tensor(2, seed=1))),
    Sample(instance_norm, (tensor(3, 2, 4), *statistics(2)), {"use_input_stats": False}),
    Sample("nn.functional.instance_norm", (tensor(3, 2, 5),)),
]
BATCH = [
    Sample(batch_norm, (tensor(5, 3), *statistics(3), tensor(3, seed=1))),
    Sample(batch_norm, (tensor(3, 2, 4), *statistics(2))),
    Sample(batch_norm, (tensor(3, 4, 2, 3), *statistics(4))),
    Sample(batch_norm, (tensor(5, 1), *statistics(1))),
    Sample(batch_norm, (tensor(0, 2, 3), *statistics(2))),
    Sample(batch_norm_with_update, (tensor(3, 2, 4), *statistics(2))),
    Sample(batch_norm, (tensor(5, 3), *statistics(3), tensor(3, seed=1)), {"training": False}),
    Sample("nn.functional.batch_norm", (tensor(5, 3), None, None), {"training": True}),
    Sample(native_batch_norm, (tensor(5, 3), *statistics(3))),
    Sample(native_batch_norm_in_evaluation, (tensor(5, 3), *statistics(3))),
]
FAMILIES = {"layer": LAYER, "group": GROUP, "batch": BATCH}


@pytest.mark.parametrize("family", FAMILIES)
def test_same_as_one_device(worlds, family: str) -> None:
    assert_valid(worlds, FAMILIES[family])


@run_on_ranks(4)
def test_a_batch_norm_module_over_a_cut_batch() -> None:
    """Three steps of a module whose batch of 7 is cut over 4 ranks, one of which has a single row."""
    mesh = hp.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    plain = torch.nn.BatchNorm1d(3, dtype=torch.float64)
    ours = torch.nn.BatchNorm1d(3, dtype=torch.float64)
    hp.distribute_module(ours, mesh)
    for step in range(3):
        batch = tensor(7, 3, seed=step)
        plain(batch).square().sum().backward()
        with strict():
            ours(hp.distribute_tensor(batch, mesh, [hp.Shard(0)])).square().sum().backward()
    for (name, want), (_, mine) in zip(plain.state_dict().items(), ours.state_dict().items(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), want, msg=name)
    torch.testing.assert_close(ours.weight.grad.full_tensor(), plain.weight.grad)
    plain.eval()
    ours.eval()
    batch = tensor(5, 3, seed=9)
    torch.testing.assert_close(ours(hp.distribute_tensor(batch, mesh, [hp.Shard(0)])).full_tensor(), plain(batch))


@run_on_ranks(2)
def test_running_statistics_keep_their_layout() -> None:
    """Channels cut in the input and whole in the statistics, and the other way round."""
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    x, (mean, var) = tensor(5, 3), statistics(3)
    want_mean, want_var = mean.clone(), var.clone()
    F.batch_norm(x, want_mean, want_var, training=True)
    for of_x in ([hp.Shard(0)], [hp.Shard(1)], [hp.Replicate()]):
        for of_running in ([hp.Shard(0)], [hp.Replicate()]):
            running = [hp.distribute_tensor(one.clone(), mesh, of_running) for one in (mean, var)]
            F.batch_norm(hp.distribute_tensor(x, mesh, of_x), *running, training=True)
            for one, want in zip(running, (want_mean, want_var), strict=True):
                assert one.placements == tuple(of_running)
                torch.testing.assert_close(one.full_tensor(), want)


@run_on_ranks(2)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "batch_norm", "group_norm"])
def test_only_statistics_travel(name: str) -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    place = [hp.Shard(0 if name == "batch_norm" else 1)]
    x = hp.distribute_tensor(tensor(4, 60, 2).requires_grad_(), mesh, place)
    operator = {
        "layer_norm": lambda: F.layer_norm(x, (60, 2)),
        "rms_norm": lambda: F.rms_norm(x, (60, 2)),
        "batch_norm": lambda: F.batch_norm(x, None, None, training=True),
        "group_norm": lambda: F.group_norm(x, 3),
    }[name]
    with strict(implicit_redistribution=True), CommRecorder() as recorder:
        result = operator()
        assert result.layout is x.layout
        result.backward(hp.distribute_tensor(tensor(4, 60, 2, seed=1), mesh, place))
    assert recorder.counts == {"all_reduce": 2 if name == "rms_norm" else 3}, recorder.table()
    most = 2 * 60 if name == "batch_norm" else 2 * 4 * 3
    assert max(record.num_bytes for record in recorder.records) <= most * 8


SECOND = {
    "layer_norm": lambda x, w: F.layer_norm(x, (4,), w),
    "rms_norm": lambda x, w: F.rms_norm(x, (4,), w),
    "batch_norm": lambda x, w: F.batch_norm(x, None, None, w, training=True),
    "group_norm": lambda x, w: F.group_norm(x, 2, w),
}


@run_on_ranks(2)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", list(SECOND))
def test_second_derivatives(name: str, dim: int) -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))

    def penalty(x, weight):
        first = torch.autograd.grad((SECOND[name](x, weight) ** 3).sum(), (x, weight), create_graph=True)
        return (first[0] ** 2).sum() + (first[1] ** 2).sum()

    plain = [tensor(5, 4).requires_grad_(), tensor(4, seed=1).requires_grad_()]
    penalty(*plain).backward()
    ours = [
        hp.distribute_tensor(tensor(5, 4).requires_grad_(), mesh, [hp.Shard(dim)]),
        hp.distribute_tensor(tensor(4, seed=1).requires_grad_(), mesh, [hp.Shard(0) if dim else hp.Replicate()]),
    ]
    penalty(*ours).backward()
    for mine, want in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), want.grad)


@run_on_ranks(2)
def test_half_precision_with_cut_features() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    values = (tensor(3, 64) * 300).to(torch.float16)
    x = hp.distribute_tensor(values, mesh, [hp.Shard(1)])
    for function in (F.layer_norm, F.rms_norm):
        ours, want = function(x, (64,)).full_tensor(), function(values, (64,))
        torch.testing.assert_close(ours, want, rtol=2e-3, atol=2e-3)
    tiny = (tensor(3, 64) * 1e-4).to(torch.bfloat16)
    ours = F.rms_norm(hp.distribute_tensor(tiny, mesh, [hp.Shard(1)]), (64,)).full_tensor()
    torch.testing.assert_close(ours, F.rms_norm(tiny, (64,)), rtol=2e-2, atol=2e-2)


@run_on_ranks(2)
def test_what_was_normalised_can_be_written_into() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    norms = {
        "layer": lambda x: F.layer_norm(x, (6,)),
        "rms": lambda x: F.rms_norm(x, (6,)),
        "group": lambda x: F.group_norm(x, 1),
        "batch": lambda x: F.batch_norm(x, None, None, training=True),
    }
    for name, norm in norms.items():
        plain = tensor(4, 6).requires_grad_()
        ours = hp.distribute_tensor(tensor(4, 6).requires_grad_(), mesh, [hp.Shard(0 if name == "batch" else 1)])
        for x in (plain, ours):
            (norm(x).relu_() ** 2).sum().backward()
        torch.testing.assert_close(ours.grad.full_tensor(), plain.grad, msg=lambda text, n=name: f"{n}: {text}")


@run_on_ranks(2)
def test_messages() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    x = hp.distribute_tensor(tensor(5, 3), mesh, [hp.Shard(0)])
    with pytest.raises(RuntimeError, match=r"layer_norm on distributed tensors of global shape \(5, 3\)"):
        F.layer_norm(x, (4,))
    with pytest.raises(RuntimeError, match=r"a plain tensor of shape \(3,\) meets a distributed one"):
        F.layer_norm(x, (3,), torch.ones(3, dtype=torch.float64))
