"""Views: other sizes for the same elements, under every layout, and that they stay views."""

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.shard.dispatching.strict_mode import strict
from hyper_parallel.core.shard.rules.views import view_labels
from tests.shard.validator import Sample, assert_valid, tensor
from tests.world import run_on_ranks

only_on = "torch"  # that views share memory; MindSpore's lose writes on a CPU; values: test_mindspore_rules.py

VIEW = [
    Sample("Tensor.view", (tensor(4, 6), 24)),
    Sample("Tensor.view", (tensor(4, 6), -1, 3)),
    Sample("Tensor.view", (tensor(4, 6), (2, 2, 6))),
    Sample("Tensor.view", (tensor(24), 4, -1)),
    Sample("Tensor.view", (tensor(3, 4), 2, 6)),
    Sample("Tensor.view", (tensor(1, 4, 1), 4)),
    Sample("Tensor.view", (tensor(5, 3), 5, 1, 3, 1)),
    Sample("Tensor.view", (tensor(0, 4), 0, 2, 2)),
    Sample("Tensor.view", (tensor(3, 0, 2), 0, 5)),
    Sample("Tensor.view", (tensor(), 1, 1)),
    Sample("Tensor.view", (tensor(4, 6), torch.int32), gradients=False),
    Sample("Tensor.view", (tensor(4, 6), torch.int64), gradients=False),
    Sample("Tensor.view", (tensor(4, 3, 2), -1, 2)),
    Sample("Tensor.view", (tensor(2, 4, 2, 3), 8, 6)),
    Sample("Tensor.view_as", (tensor(4, 6), tensor(8, 3, dtype=torch.int64))),
    Sample("Tensor.reshape", (tensor(4, 3), 3, 4)),
    Sample("reshape", (tensor(2, 2, 3), (4, -1))),
    Sample("reshape", (tensor(5, 2),), {"shape": (10,)}),
    Sample("Tensor.reshape_as", (tensor(4, 6), tensor(2, 12, dtype=torch.int64))),
]
FLATTEN = [
    Sample("flatten", (tensor(2, 3, 4),)),
    Sample("flatten", (tensor(2, 4, 3), 1)),
    Sample("flatten", (tensor(4, 2, 3),), {"start_dim": 0, "end_dim": 1}),
    Sample("flatten", (tensor(),)),
    Sample("Tensor.unflatten", (tensor(3, 8), 1, (4, 2))),
    Sample("unflatten", (tensor(6, 3), 0, (2, -1))),
    Sample("ravel", (tensor(4, 3),)),
    Sample("squeeze", (tensor(1, 4, 1, 3),)),
    Sample("squeeze", (tensor(1, 4, 1), 0)),
    Sample("squeeze", (tensor(1, 4, 1), (0, 1, 2))),
    Sample("Tensor.squeeze", (tensor(3, 2), -1)),
    Sample("unsqueeze", (tensor(5, 3), 1)),
    Sample("Tensor.unsqueeze", (tensor(5, 3), -1)),
    Sample("unsqueeze", (tensor(), 0)),
    Sample("atleast_1d", (tensor(),)),
    Sample("atleast_2d", (tensor(5),)),
    Sample("atleast_3d", (tensor(5, 3),)),
    Sample("atleast_2d", ([tensor(5), tensor(2, 3)],)),
    Sample("view_as_real", (torch.complex(tensor(4, 3), tensor(4, 3, seed=1)),), gradients=False),
    Sample("view_as_complex", (tensor(4, 3, 2),), gradients=False),
]


@pytest.mark.parametrize("samples", [VIEW, FLATTEN], ids=["view", "flatten"])
def test_same_as_one_device(worlds, samples: list[Sample]) -> None:
    assert_valid(worlds, samples)


@pytest.mark.parametrize(
    ("before", "after", "labels"),
    [
        ((4, 6), (24,), ("a", None)),
        ((4, 6), (2, 2, 6), ("a", "b")),
        ((6, 35), (2, 3, 5, 7), ("a", "b")),
        ((2, 3, 5, 7), (6, 35), ("a", None, "b", None)),
        ((1, 6), (6,), (None, "a")),
        ((3, 4), (2, 6), ("a", None)),
        ((0, 3), (3, 0), (None, None)),
        ((), (1, 1), ()),
    ],
)
def test_which_dims_stay_cut(before: tuple, after: tuple, labels: tuple) -> None:
    assert view_labels(before, after)[0] == labels


@run_on_ranks(2)
def test_views_are_local_and_share_memory() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    x = hp.distribute_tensor(tensor(4, 6), mesh, [hp.Shard(0)])
    made = [
        lambda: x.view(24),
        lambda: x.view(2, 2, 6),
        lambda: x.reshape(2, 12),
        lambda: x.flatten(),
        lambda: x.unsqueeze(0),
        lambda: x.unsqueeze(1).squeeze(),
        lambda: x.T,
        lambda: x.transpose(0, 1),
        lambda: x.permute(1, 0),
        lambda: x.expand(3, 4, 6),
        lambda: x[:, 2:4],
        lambda: x[:, 1],
        lambda: x[None, :, ::2],
        lambda: x.narrow(1, 1, 3),
        lambda: x.unbind(1)[0],
        lambda: x.split(2, dim=1)[1],
        lambda: x.movedim(0, 1),
    ]
    with strict(implicit_redistribution=True), hp.CommRecorder() as recorder:
        views = [make() for make in made]
    assert recorder.records == []
    memory = x.untyped_storage().data_ptr()
    assert all(view.untyped_storage().data_ptr() == memory for view in views)
    views[0].zero_()
    assert x.full_tensor().abs().sum() == 0
    # Three of six rows do not end where a block ends: only that dim is gathered.
    y = hp.distribute_tensor(tensor(6, 4), mesh, [hp.Shard(0)])
    assert y.view(3, 8).layout.is_replicated
    assert y.view(24).placements == (hp.Shard(0),)


@run_on_ranks(2)
def test_views_in_place_change_layout_and_shape() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    whole = tensor(4, 1, 3)
    x = hp.distribute_tensor(whole, mesh, [hp.Shard(2)])
    same = x.transpose_(0, 2)
    assert same is x and tuple(x.shape) == (3, 1, 4) and x.placements == (hp.Shard(0),)
    assert torch.equal(x.full_tensor(), whole.transpose(0, 2))
    x.squeeze_()
    assert tuple(x.shape) == (3, 4) and torch.equal(x.full_tensor(), whole.squeeze().T)
    x.t_()
    assert x.placements == (hp.Shard(1),) and torch.equal(x.full_tensor(), whole.squeeze())
    x.unsqueeze_(-1)
    assert tuple(x.shape) == (4, 3, 1) and torch.equal(x.full_tensor(), whole.squeeze().unsqueeze(-1))
    x.squeeze_(-1)
    assert tuple(x.shape) == (4, 3)
    x.swapaxes_(0, 1)
    assert torch.equal((x * 2).full_tensor(), whole.squeeze().T * 2)
    leaf = hp.distribute_tensor(tensor(4, 3).requires_grad_(), mesh, [hp.Shard(0)])
    (leaf * 1).t_().sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad.full_tensor(), torch.ones(4, 3, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"dim 0 of a tensor of global shape \(1, 3\) .* is sharded.*or use squeeze"):
        hp.distribute_tensor(tensor(1, 3), mesh, [hp.Shard(0)]).squeeze_()
    with pytest.raises(IndexError, match="dim 5 is out of range for 3 dims"):
        hp.distribute_tensor(tensor(1, 3), mesh, [hp.Shard(1)]).unsqueeze_(5)
    with pytest.raises(RuntimeError, match=r"resize_ would change the memory .* behind its layout"):
        x.resize_(12)
    with pytest.raises(RuntimeError, match=r"view on distributed tensors of global shape \(3, 4\).*invalid for input"):
        x.view(5, 5)


@run_on_ranks(2)
def test_what_is_written_without_counting() -> None:
    """``inplace=True`` of functions, ``out=`` through an alias, and operators that give back what they were given."""
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    for name in ("elu", "celu", "relu", "hardsigmoid", "silu", "leaky_relu", "dropout"):
        pending = hp.DTensor.from_local(tensor(4, 3), mesh, [hp.Partial()])
        alias = pending.detach()
        with pytest.raises(RuntimeError, match=f"{name}.? cannot write into a tensor .*call reduce_partial"):
            getattr(torch.nn.functional, name)(pending, inplace=True)
        del alias
        leaf = hp.distribute_tensor(tensor(4, 3).requires_grad_(), mesh, [hp.Shard(0)])
        summed = leaf.t() @ leaf  # a pending sum that nobody else has
        assert summed.layout.has_partial
        found = getattr(torch.nn.functional, name)(summed, inplace=True)
        assert found is summed
        if name in ("relu", "hardsigmoid", "silu"):  # `inplace` by its position
            other = leaf.t() @ leaf
            assert getattr(torch.nn.functional, name)(other, True) is other
            torch.testing.assert_close(other.full_tensor(), found.full_tensor())
        if name != "dropout":
            plain = tensor(4, 3).requires_grad_()
            expected = getattr(torch.nn.functional, name)(plain.t() @ plain)
            (expected * expected.detach()).sum().backward()
            (found * found.detach()).sum().backward()
            torch.testing.assert_close(found.full_tensor(), expected)
            torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad, msg=lambda text, n=name: f"{n}: {text}")
        for layout in ([hp.Shard(0)], [hp.Replicate()]):
            x = hp.distribute_tensor(tensor(4, 3), mesh, layout)
            assert getattr(torch.nn.functional, name)(x, inplace=True) is x
            if name != "dropout":
                torch.testing.assert_close(x.full_tensor(), getattr(torch.nn.functional, name)(tensor(4, 3)))
    a, b = (hp.distribute_tensor(tensor(*shape), mesh, [hp.Shard(0)]) for shape in ((4, 3), (2, 2)))
    out = hp.distribute_tensor(torch.zeros(8, 6, dtype=torch.float64), mesh, [hp.Shard(1)])
    assert torch.kron(a, b, out=out) is out
    torch.testing.assert_close(out.full_tensor(), torch.kron(tensor(4, 3), tensor(2, 2)))
    volume = hp.distribute_tensor(tensor(3, 2, 2, 2), mesh, [hp.Shard(0)])
    for training in (True, False):
        assert torch.nn.functional.dropout3d(volume, 0.5, training, inplace=True) is volume
        assert tuple(volume.shape) == (3, 2, 2, 2)
    assert volume.resize_((3, 2, 2, 2)) is volume and volume.resize_as_(volume) is volume
    with pytest.raises(RuntimeError, match="resize_ would change the memory of a distributed tensor"):
        volume.resize_(24)
    plain = tensor(4, 3)
    for place in (hp.Replicate(), hp.Shard(0), hp.Shard(1)):
        x = hp.distribute_tensor(plain, mesh, [place])
        for one, of in ((x, plain), (x.t().contiguous(), plain.t().contiguous())):
            torch.testing.assert_close(one.as_strided((5,), (2,)).full_tensor(), of.as_strided((5,), (2,)))
        turned = x.t()
        if place == hp.Replicate():
            torch.testing.assert_close(turned.as_strided((5,), (2,)).full_tensor(), plain.t().as_strided((5,), (2,)))
            turned = x[:, ::2]
        with pytest.raises(RuntimeError, match=r"as_strided of .*are not in order.*contiguous\(\) first"):
            turned.as_strided((2,), (1,))
