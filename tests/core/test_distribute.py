"""Making distributed tensors and modules: cutting, scattering, factories, and the hooks of ``distribute_module``."""

from __future__ import annotations

import itertools

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel import CommRecorder, DTensor, Partial, Replicate, Shard, distribute_module
from hyper_parallel.core.dtensor.device_mesh import init_device_mesh
from hyper_parallel.platform import get_platform
from tests.core.layout_cases import block_of
from tests.frameworks import (
    assert_close,
    backward,
    dist,
    distribute_tensor,
    dtype_of,
    equal,
    grad_of,
    leaf,
    ours,
    parameter,
    theirs,
    zero_grad,
)
from tests.frameworks.models import Module, fill, linear
from tests.world import run_on_ranks


def make_mesh(*shape, **options):
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)], **options)


# ---------------------------------------------------------------- tensors


@run_on_ranks(4)
def test_cutting_communicates_nothing():
    mesh = make_mesh(2, 2)
    with CommRecorder() as recorder:
        for shape, placements in itertools.product(
            [(5, 3), (4, 4), (1, 2), (0, 3)],
            [[Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(-1)], [Partial(), Replicate()]],
        ):
            whole = ours(torch.arange(float(torch.Size(shape).numel())).reshape(shape))
            made = distribute_tensor(whole, mesh, placements)
            assert type(made) is DTensor and made.is_leaf and not made.requires_grad
            if not made.layout.has_partial:
                assert equal(made.to_local(), block_of(theirs(whole), made.layout))
            assert made.to_local().numel() == 0 or made.to_local().data_ptr() != whole.data_ptr()
    assert recorder.records == []


@run_on_ranks(2)
def test_pending_values_are_held_once():
    mesh, rank = make_mesh(), dist.get_rank()
    blocks = {"sum": (5.0, 0.0), "prod": (5.0, 1.0), "avg": (5.0, 5.0), "max": (5.0, 5.0), "min": (5.0, 5.0)}
    for op, by_rank in blocks.items():
        made = distribute_tensor(torch.tensor([5.0]), mesh, [Partial(op)])
        assert made.to_local().item() == by_rank[rank] and made.full_tensor().item() == 5


@run_on_ranks(2)
def test_leaves_stay_leaves_and_computed_tensors_stay_connected():
    mesh = make_mesh()
    start = leaf(torch.arange(5.0))
    made = distribute_tensor(start, mesh, [Shard(0)])
    assert made.is_leaf and made.requires_grad
    backward(made.full_tensor().sum())
    assert made.grad is not None and grad_of(start) is None

    for placements in ([Shard(0)], [Replicate()], [Partial()], [Partial("avg")]):
        zero_grad(start)
        made = distribute_tensor(start * 2, mesh, placements)
        assert not made.is_leaf and made.requires_grad
        backward(made.full_tensor(), torch.arange(5.0))
        assert equal(grad_of(start), torch.arange(5.0) * 2), placements
    with get_platform().no_grad():
        assert not distribute_tensor(start * 2, mesh, [Shard(0)]).requires_grad

    Parameter = get_platform().Parameter
    made = distribute_tensor(parameter(torch.ones(3)), mesh, [Shard(0)])
    assert isinstance(made, Parameter) and made.requires_grad
    frozen = distribute_tensor(parameter(torch.ones(3), requires_grad=False), mesh, [Shard(0)])
    assert isinstance(frozen, Parameter) and not frozen.requires_grad


@run_on_ranks(4)
def test_scattering_from_one_rank():
    rank = dist.get_rank()
    whole = torch.arange(15.0).reshape(5, 3)
    mine = whole if rank == 2 else torch.full_like(whole, -1)
    for mesh in (make_mesh(2, 2), make_mesh(4), make_mesh(2, 2, rank_list=[3, 1, 0, 2])):
        for placements in (
            [Shard(0)] * mesh.ndim,
            [Shard(1)] * mesh.ndim,
            [Replicate()] * mesh.ndim,
            [Partial()] * mesh.ndim,
        ):
            with CommRecorder() as recorder:
                made = distribute_tensor(mine, mesh, placements, src_data_rank=2)
            assert equal(made.full_tensor(), whole), placements
            others = 4 * sum(
                torch.Size(made.layout.local_shape((5, 3), mesh.coordinate_of(r))).numel() for r in (0, 1, 3)
            )
            assert recorder.total_bytes == (others if rank == 2 else 0)  # its blocks and nothing else
    part = make_mesh(2, rank_list=[1, 2])
    made = distribute_tensor(mine, part, [Shard(0)], src_data_rank=2)
    assert made.local_shape == {1: (3, 3), 2: (2, 3)}.get(rank, (0, 0))
    with pytest.raises(ValueError, match="src_data_rank=0 is not a rank of DeviceMesh"):
        distribute_tensor(mine, part, [Shard(0)], src_data_rank=0)
    with pytest.raises(
        ValueError, match=r"computed tensor of shape \(5, 3\) .* cannot be sent from rank 2.*detach\(\) it"
    ):
        distribute_tensor(leaf(mine) * 2, make_mesh(4), [Shard(0)], src_data_rank=2)


@run_on_ranks(2)
def test_mistakes_with_tensors():
    mesh, other = make_mesh(), init_device_mesh("cpu", (1, 2))
    made = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    assert distribute_tensor(made, mesh, [Shard(0)]) is made
    with pytest.raises(ValueError, match=r"has Layout.* already; use redistribute"):
        distribute_tensor(made, mesh, [Replicate()])
    with pytest.raises(ValueError, match=r"is on DeviceMesh.* already; use redistribute to move it to DeviceMesh"):
        distribute_tensor(made, other, [Shard(0), Replicate()])
    with pytest.raises(TypeError, match="distribute_tensor takes a tensor, got list"):
        distribute_tensor([1.0], mesh, [Shard(0)])
    with pytest.raises(ValueError, match="distribute_tensor needs a mesh"):
        distribute_tensor(torch.ones(4), placements=[Shard(0)])
    with pytest.raises(ValueError, match=r"the tensor has 0 dims.*use Replicate\(\)"):
        distribute_tensor(torch.tensor(1.0), mesh, [Shard(0)])


@run_on_ranks(4)
def test_ranks_outside_hold_an_empty_block():
    mesh = make_mesh(2, rank_list=[3, 1])
    start = leaf(torch.arange(6.0))
    for made in (distribute_tensor(start, mesh, [Shard(0)]), distribute_tensor(start * 2, mesh, [Shard(0)])):
        assert made.shape == (6,) and made.requires_grad and made.placements == (Shard(0),)
        assert made.local_shape == ((0,), (3,), (0,), (3,))[dist.get_rank()]


# ---------------------------------------------------------------- factories

FACTORIES = {
    "ones": (hp.ones, torch.ones),
    "zeros": (hp.zeros, torch.zeros),
    "full": (
        lambda size, mesh, placements, **options: hp.full(
            size, 7.5, device_mesh=mesh, placements=placements, **options
        ),
        lambda size, **options: torch.full(size, 7.5, **options),
    ),
}


@run_on_ranks(4)
@pytest.mark.parametrize("name", list(FACTORIES))
def test_constants(name):
    make, plain = FACTORIES[name]
    mesh = make_mesh(2, 2)
    with CommRecorder() as recorder:
        made = [
            (
                shape,
                placements,
                dtype,
                make(shape, mesh, placements, dtype=ours(dtype), requires_grad=dtype is torch.float64),
            )
            for shape in [(5, 3), (4,), (0, 2), ()]
            for placements in [[Shard(0), Shard(-1)], [Shard(0)] * 2, [Replicate()] * 2, [Partial(), Partial("max")]]
            for dtype in (None, torch.float64, torch.int32, torch.bfloat16)
            if shape or not isinstance(placements[0], Shard)
        ]
    assert recorder.records == []
    for shape, placements, dtype, tensor in made:
        assert (
            tensor.shape == shape
            and tensor.placements == distribute_tensor(torch.empty(shape), mesh, placements).placements
        )
        assert tensor.requires_grad == (dtype is torch.float64) and tensor.is_leaf
        expected = plain(shape, dtype=dtype)
        assert dtype_of(tensor) is expected.dtype and equal(tensor.full_tensor(), expected), (
            shape,
            placements,
            dtype,
        )


@run_on_ranks(2)
def test_other_factories():
    mesh = make_mesh()
    with mesh:  # the mesh of the block is used when none is given
        made = hp.empty((5, 2), placements=[Shard(0)], dtype="int16", device="cpu")
        assert dtype_of(made) is torch.int16 and made.local_shape[1] == 2 and made.shape == (5, 2)
        assert hp.ones(3).shape == (3,)
        assert dtype_of(hp.full((3,), 2, placements=[Shard(0)])) is torch.int64
        assert equal(hp.full((3,), True, placements=[Shard(0)]).full_tensor(), torch.ones(3, dtype=torch.bool))
    for placements in ([Shard(0)], [Replicate()], [Partial()]):
        for bounds, options in (((7,), {}), ((2, 9, 3), {"dtype": torch.float64}), ((0.0, 1.0, 0.1), {}), ((0,), {})):
            made = hp.arange(*bounds, device_mesh=mesh, placements=placements, device="cpu", **ours(options))
            assert equal(made.full_tensor(), torch.arange(*bounds, **options))
    assert hp.arange(4.0, device_mesh=mesh, placements=[Shard(0)], requires_grad=True).requires_grad
    for make in (hp.rand, hp.randn):
        made = make((5, 3), mesh, [Shard(0)], dtype=ours(torch.float64), requires_grad=True)
        assert made.shape == (5, 3) and dtype_of(made) is torch.float64 and made.requires_grad and made.is_leaf
    with pytest.raises(ValueError, match=r"zeros: sizes cannot be negative, got \(-1, 2\)"):
        hp.zeros((-1, 2), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="ones needs a mesh"):
        hp.ones((2,))


# ---------------------------------------------------------------- modules


class Net(Module):
    def __init__(self):
        super().__init__()
        self.first = linear(4, 6, dtype=torch.float64)
        self.second = linear(6, 4, dtype=torch.float64)
        self.tied = self.second.weight
        self.register_buffer("scale", ours(torch.tensor(2.0, dtype=torch.float64)))
        self.register_buffer("nothing", None)

    def forward(self, data):
        return self.second(self.first(data).tanh()) * self.scale


def nets():
    return fill(Net()), fill(Net())


def parameters_of(net):
    return get_platform().parameters_dict(net)


DATA = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)


@run_on_ranks(2)
def test_what_is_left_becomes_replicated():
    mesh = make_mesh()
    net, plain = nets()
    assert distribute_module(net, mesh) is net
    kind = get_platform().Parameter
    assert all(isinstance(p, kind) and p.layout.is_replicated for p in parameters_of(net).values())
    assert isinstance(net.scale, DTensor) and net.nothing is None
    assert net.tied is net.second.weight
    assert list(parameters_of(net)) == list(parameters_of(plain))
    result, expected = net(distribute_tensor(DATA, mesh, [Shard(0)])), plain(ours(DATA))
    assert_close(result.full_tensor(), expected)
    result.sum().backward()
    backward(expected.sum())
    for name, theirs_ in parameters_of(plain).items():
        assert_close(parameters_of(net)[name].grad.full_tensor(), grad_of(theirs_))


@run_on_ranks(2)
def test_partition_fn_sees_every_module_first():
    mesh = make_mesh()
    net, plain = nets()
    seen = []

    def partition(name, module, its_mesh):
        seen.append((name, its_mesh))
        if name == "first":
            made = distribute_tensor(theirs(module.weight), its_mesh, [Shard(0)])
            get_platform().install_parameter(module, "weight", get_platform().as_parameter(made, True))

    with mesh:
        distribute_module(net, partition_fn=partition)
    assert seen == [("", mesh), ("first", mesh), ("second", mesh)]
    assert net.first.weight.placements == (Shard(0),) and net.first.bias.layout.is_replicated
    assert_close(net(distribute_tensor(DATA, mesh)).full_tensor(), plain(ours(DATA)))


@run_on_ranks(2)
def test_hooks_of_the_root():
    mesh = make_mesh()
    net, plain = nets()
    calls = []

    def before(module, inputs, its_mesh):
        calls.append((module is net, its_mesh == mesh))
        return tuple(distribute_tensor(value, its_mesh, [Shard(0)]) for value in inputs)

    def after(module, outputs, its_mesh):
        calls.append((module is net, its_mesh == mesh))
        return outputs.full_tensor()

    distribute_module(net, mesh, None, before, after)
    result = net(ours(DATA))
    assert type(result) is get_platform().Tensor
    assert_close(result, plain(ours(DATA)))
    assert calls == [(True, True)] * 2  # the root's own, and nothing on its children


@run_on_ranks(2)
def test_hooks_of_two_arguments_are_deprecated():
    mesh = make_mesh()
    net, plain = nets()
    with pytest.warns(FutureWarning, match=r"input_fn with 2 arguments, \(values, mesh\), is deprecated; give it 3"):
        distribute_module(
            net, mesh, input_fn=lambda inputs, its_mesh: distribute_tensor(inputs[0], its_mesh, [Shard(0)])
        )
    assert_close(net(ours(DATA)).full_tensor(), plain(ours(DATA)))
    net, plain = nets()
    with pytest.warns(FutureWarning, match="output_fn with 2 arguments"):
        distribute_module(net, mesh, output_fn=lambda outputs, its_mesh: outputs.to_local())
    assert_close(net(distribute_tensor(DATA, mesh)), plain(ours(DATA)))


@run_on_ranks(2)
def test_mistakes_with_modules():
    mesh = make_mesh()
    net, _ = nets()
    with pytest.raises(ValueError, match=r"input_fn must take 3 arguments, \(module, values, mesh\), but takes 1"):
        distribute_module(net, mesh, input_fn=lambda inputs: inputs)
    with pytest.raises(ValueError, match=r"output_fn must take 3 arguments.* but takes 4"):
        distribute_module(net, mesh, output_fn=lambda a, b, c, d: None)
    assert not any(
        isinstance(p, DTensor) for p in parameters_of(net).values()
    )  # nothing was changed by the failed calls
    with pytest.raises(ValueError, match="distribute_module needs a mesh"):
        distribute_module(net)
    distribute_module(net, mesh)
    with pytest.raises(RuntimeError, match="this Net was distributed before; a module can be distributed once"):
        distribute_module(net, mesh)
