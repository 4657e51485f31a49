"""Views along cut dims, which are copies: what is written into them, or into their base, is seen by the other."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.core.shard.dispatching.copied_views import CopiedView
from tests.shard.validator import layouts_of
from tests.world import run_on_ranks

only_on = "torch"  # writes through views are lost on MindSpore's plain tensors too, on a CPU

VIEWS = {
    "slice": lambda x: x[1:3],
    "slice of both dims": lambda x: x[1:5:2, 2:],
    "last row": lambda x: x[-1],
    "one element": lambda x: x[4, 3],
    "new dim": lambda x: x[None, 2:4],
    "narrow": lambda x: x.narrow(0, 1, 2),
    "narrow by name": lambda x: torch.narrow(x, dim=1, start=-2, length=2),
    "select": lambda x: x.select(0, 4),
    "select by name": lambda x: torch.select(x, dim=1, index=-1),
    "split": lambda x: x.split(4)[1],
    "chunk": lambda x: torch.chunk(x, 4, dim=1)[1],
    "tensor_split": lambda x: x.tensor_split(4)[1],
    "unbind": lambda x: x.unbind(0)[5],
    "diagonal": lambda x: x.diagonal(1),
    "view": lambda x: x.view(4, 9),
    "reshape": lambda x: x.reshape(3, 12),
    "flatten": lambda x: x.flatten(),
    "a reshape that copies": lambda x: x.t().reshape(4, 9),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 6)),
    "unfold": lambda x: x.unfold(0, 2, 2),
    "of a transposed": lambda x: x.t()[:, 1:3],
    "of a view": lambda x: x[1:5][1:3],
    "view of a view": lambda x: x[0:2].view(-1),
    "transposed view": lambda x: x[3:5].t()[0],
    "part of a row": lambda x: x[3][1:3],
    "flattened part of a transposed, a copy": lambda x: x.t()[1:3].flatten(),
    "contiguous part of a transposed, a copy": lambda x: x.t()[1:3].contiguous(),
    "flattened rows of a part of a transposed": lambda x: x.t()[1:4].t().flatten()[2:],
    "detached": lambda x: x.detach()[1:3],
    "detached view": lambda x: x[1:3].detach(),
    "data of a view": lambda x: x[1:3].data,
    "view of data": lambda x: x.data[1:3],
    "view of transposed data": lambda x: x.data.t()[1:3],
    "a mask, a copy": lambda x: x[x > 0.5],
    "rows by a list, a copy": lambda x: x[[1, 3]],
}


def _base() -> torch.Tensor:
    return torch.arange(36.0, dtype=torch.float64).reshape(6, 6) / 36


def _write(view, scale) -> None:
    view.mul_(scale)
    view += 1
    if view.ndim:
        view[..., 0] = 7


def _check(name: str, mesh, layout) -> None:
    take = VIEWS[name]
    plain, ours = _base(), hp.distribute_tensor(_base(), mesh, layout)
    view, other = take(plain), take(ours)
    _write(view, 2.0)
    _write(other, 2.0)
    torch.testing.assert_close(other.full_tensor(), view, msg=lambda text: f"{name} under {layout}: {text}")
    torch.testing.assert_close(ours.full_tensor(), plain, msg=lambda text: f"base of {name} under {layout}: {text}")
    plain.mul_(3.0)
    ours.mul_(3.0)
    torch.testing.assert_close((other * 1).full_tensor(), view, msg=lambda text: f"later {name}, {layout}: {text}")
    plain[2] = 5.0
    ours[2] = 5.0
    torch.testing.assert_close(other.full_tensor(), view, msg=lambda text: f"written {name}, {layout}: {text}")
    assert other.to_local().shape == other.layout.local_shape(tuple(view.shape))


@run_on_ranks(2)
def test_every_view_under_every_layout() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    for name in VIEWS:
        for layout in layouts_of(mesh, _base(), False):
            with torch.no_grad():
                _check(name, mesh, layout)


@run_on_ranks(4)
def test_uneven_shards_two_axes_and_inference_mode() -> None:
    for shape in ((4,), (2, 2)):
        mesh = hp.init_device_mesh("cpu", shape)
        for number, name in enumerate(VIEWS):
            layout = layouts_of(mesh, _base(), False)[1 + number % 2]
            _check(name, mesh, layout)
            with torch.inference_mode():
                _check(name, mesh, layout)


@run_on_ranks(2)
def test_gradients_of_written_views_and_bases() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    weight = torch.arange(36.0, dtype=torch.float64).reshape(6, 6).cos()

    def program(leaf, weight, take):
        x = leaf * 2
        view = take(x)
        view.mul_(3.0)
        x[1] = view.sum()
        y = x * weight + 1
        later = take(y)
        y.mul_(weight)
        return (later.sin().sum() + x.square().sum()) * 2

    for name in ("slice", "last row", "view", "diagonal", "of a view", "view of a view"):
        plain = _base().requires_grad_()
        expected = program(plain, weight, VIEWS[name])
        expected.backward()
        for layout in layouts_of(mesh, plain, False):
            ours = hp.distribute_tensor(_base().requires_grad_(), mesh, layout)
            other = hp.distribute_tensor(weight, mesh, [hp.Shard(0)])
            loss = program(ours, other, VIEWS[name])
            torch.testing.assert_close(loss.full_tensor(), expected)
            loss.backward()
            torch.testing.assert_close(ours.grad.full_tensor(), plain.grad, msg=lambda t, n=name: f"{n}: {t}")


@run_on_ranks(2)
def test_lists_out_copies_and_parameters() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    plain, ours = _base(), hp.distribute_tensor(_base(), mesh, [hp.Shard(0)])
    for x in (plain, ours):
        views = [x[0:2], x[4:]]
        torch._foreach_mul_(views, 2.0)
        torch._foreach_add_(views, [views[1] * 1, views[0] * 1])
        torch.add(x[2:4], 1.0, out=x[2:4])
        out = x[1:3]
        torch.mul(x[3:5], 2.0, out=out)
        nn.init.constant_(x[5:], 9.0)
    torch.testing.assert_close(ours.full_tensor(), plain)
    view = ours[1:4]
    assert isinstance(view, CopiedView)
    for copied in (copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
        assert type(copied) is hp.DTensor
        copied.fill_(0.0)
    torch.testing.assert_close(ours.full_tensor(), plain)
    weights = {}
    for name, x in (("plain", plain), ("ours", ours)):
        weight = weights[name] = nn.Parameter(x[1:4])
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            (weight * weight).sum().backward()
            optimizer.step()
    torch.testing.assert_close(weights["ours"].full_tensor(), weights["plain"].detach())
    torch.testing.assert_close(ours.full_tensor(), plain)


@run_on_ranks(2)
def test_a_view_of_a_leaf_cannot_be_written_into() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    leaf = hp.distribute_tensor(_base().requires_grad_(), mesh, [hp.Shard(0)])
    for row in (1, slice(1, 3), 4):
        with pytest.raises(RuntimeError, match=r"mul_: a view of a leaf that requires grad, of global shape \(6, 6\)"):
            leaf[row].mul_(2.0)
    with torch.no_grad():
        leaf[4].mul_(2.0)
    leaf[1:3].detach().mul_(3.0)
    copied = leaf.t()[:, 0:2].flatten()
    copied += 1.0
    expected = _base()
    expected[4] *= 2.0
    expected[1:3] *= 3.0
    torch.testing.assert_close(leaf.detach().full_tensor(), expected)
    torch.testing.assert_close(copied.detach().full_tensor(), expected.t()[:, 0:2].flatten() + 1.0)


@run_on_ranks(2)
def test_windows_that_overlap_cannot_be_written_into() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    x = hp.distribute_tensor(_base(), mesh, [hp.Shard(0)])
    windows = x.unfold(0, 2, 1)
    with pytest.raises(RuntimeError, match=r"add_: elements of a view by unfold overlap.*global shape \(6, 6\) itself"):
        windows[0].add_(1.0)
    torch.testing.assert_close(windows.full_tensor(), _base().unfold(0, 2, 1))
    torch.testing.assert_close(x.full_tensor(), _base())


@run_on_ranks(2)
def test_reading_a_view_costs_no_more() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    x = hp.distribute_tensor(_base(), mesh, [hp.Shard(0)])
    with hp.CommRecorder() as recorder:
        y = x[1:3]
        (y * 2 + y).sum()
    assert len(recorder.records) == 1


RESHAPES = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.t().contiguous(),
    "reshape": lambda x: x.t().reshape(2, 2, -1),
    "flatten": lambda x: x.unsqueeze(0).transpose(0, 2).flatten(1),
    "flatten of a transposed": lambda x: x.t().flatten(),
    "reshape that is a view": lambda x: x.reshape(x.shape[0], 1, x.shape[1]),
}


@run_on_ranks(4)
def test_blocks_of_one_row_share_memory_as_the_whole_does() -> None:
    for mesh_shape in ((4,), (2, 2)):
        mesh = hp.init_device_mesh("cpu", mesh_shape)
        for shape in ((4, 4), (4, 2), (2, 6)):
            for layout in layouts_of(mesh, torch.zeros(shape), False):
                if layout.local_shape(shape).count(1) == 2:
                    continue  # one element does not tell how the dims lie
                for name, take in RESHAPES.items():
                    plain = torch.arange(float(shape[0] * shape[1])).reshape(shape)
                    ours = hp.distribute_tensor(plain.clone(), mesh, layout)
                    for x in (plain, ours):
                        take(x).add_(1.0)
                    torch.testing.assert_close(
                        ours.full_tensor(), plain, msg=lambda t, n=name, s=shape, la=layout: f"{n} of {s}, {la}: {t}"
                    )


@run_on_ranks(2)
def test_saving_and_copying_a_model_with_views() -> None:
    """Parameters and buffers that are views, of each other too: values as on one device, other memory."""
    mesh = hp.init_device_mesh("cpu", (2,))
    for layout in layouts_of(mesh, _base(), False):
        module = nn.Module()
        table = hp.distribute_tensor(_base(), mesh, layout)
        module.register_buffer("table", table)
        module.register_buffer("rows", table[1:3])
        module.register_buffer("turned", table.t())
        module.weight = nn.Parameter(table[2:5])
        wanted = {name: value.full_tensor().clone() for name, value in module.state_dict().items()}
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file)
        copied = copy.deepcopy(module)
        table.fill_(9.0)
        for name, value in wanted.items():
            torch.testing.assert_close(loaded[name].full_tensor(), value)
            torch.testing.assert_close(getattr(copied, name).detach().full_tensor(), value)
        module.load_state_dict(loaded)
        torch.testing.assert_close(module.weight.detach().full_tensor(), _base()[2:5])


@run_on_ranks(2)
def test_a_view_stays_where_it_was_taken_when_the_program_moves_its_position() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    takes = [lambda x, at, sizes: x[at], lambda x, at, sizes: x[at:], lambda x, at, sizes: x.split(sizes)[1]]
    for take in takes:
        for layout in layouts_of(mesh, _base(), False):
            base = hp.distribute_tensor(_base(), mesh, layout)
            at, sizes = torch.tensor(1), [2, 4]
            view = take(base, at, sizes)
            at.add_(2)
            sizes[:] = [3, 3]
            base.mul_(10)
            torch.testing.assert_close(view.full_tensor(), take(_base() * 10, 1, [2, 4]))


@run_on_ranks(2)
def test_views_taken_under_no_grad_follow_their_base_and_those_of_inference_can_be_read() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    for take in (VIEWS["split"], VIEWS["slice"], VIEWS["last row"], VIEWS["reshape"]):
        for layout in layouts_of(mesh, _base(), False):
            base = hp.distribute_tensor(_base(), mesh, layout).requires_grad_() * 1
            with torch.no_grad():
                view = take(base)
                base.mul_(2)
                torch.testing.assert_close(view.full_tensor(), take(_base() * 2))
                view.add_(1)
                whole = _base() * 2
                take(whole).add_(1)
                torch.testing.assert_close(base.full_tensor(), whole)
            with torch.inference_mode():
                view = take(hp.distribute_tensor(_base(), mesh, layout) * 2)
            torch.testing.assert_close(view.full_tensor(), take(_base() * 2))


@run_on_ranks(2)
def test_copies_and_stretched_views() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    for layout in layouts_of(mesh, torch.ones(1, 3), False):
        base = hp.distribute_tensor(torch.ones(1, 3), mesh, layout)
        stretched = base.expand(4, 3)
        for copy_of in (torch.unsqueeze_copy(base, 0), torch.squeeze_copy(base)):
            copy_of.add_(1)
        assert torch.equal(base.full_tensor(), torch.ones(1, 3))
        base.mul_(3)
        assert torch.equal(stretched.full_tensor(), torch.full((4, 3), 3.0))
        with pytest.raises(RuntimeError, match="clone"):
            base[:, 1:].expand(4, 2).add_(1)
