"""DTensor as a PyTorch tensor: what it is, files, modules, skipping dispatch."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel import (
    CommRecorder,
    DTensor,
    Layout,
    Replicate,
    Shard,
    SkipDTensorDispatch,
    distribute_tensor,
)
from tests.core.layout_cases import PLACEMENTS, block_of, make_mesh, numbers
from tests.world import run_on_ranks

every_layout = pytest.mark.parametrize(("placements", "shape"), list(PLACEMENTS.values()), ids=list(PLACEMENTS))


# ---------------------------------------------------------------- what it is


@run_on_ranks(4)
@every_layout
def test_it_answers_as_the_whole_tensor(placements, shape):
    mesh = make_mesh(2, 2)
    whole = numbers(*shape)
    made = distribute_tensor(whole, mesh, placements)
    assert isinstance(made, torch.Tensor) and isinstance(made, DTensor)
    assert made.shape == made.size() == whole.shape and type(made.shape) is torch.Size
    assert made.ndim == made.dim() == len(shape)
    assert made.numel() == made.nelement() == whole.numel()
    assert [made.size(dim) for dim in range(-len(shape), len(shape))] == list(shape) * 2
    assert made.dtype is torch.float64 and made.device == torch.device("cpu") and made.is_floating_point()
    assert not made.is_complex() and not made.is_sparse and made.is_cpu and not made.is_cuda
    assert made.device_mesh == mesh and made.layout is Layout.resolve(mesh, placements, len(shape))
    asking = {"__name__": "transformers.models.of_one_device"}  # torch.zeros(2, layout=tensor.layout)
    exec("def layout_of(tensor): return tensor.layout", asking)
    assert asking["layout_of"](made) is torch.strided
    assert made.placements == made.layout.placements
    assert made.local_shape == tuple(made.to_local().shape) == made.layout.local_shape(shape)
    assert type(made.to_local()) is torch.Tensor
    assert torch.equal(made.full_tensor(), whole)
    assert torch.equal(made.reduce_partial().to_local(), block_of(whole, made.layout))
    if shape:
        assert len(made) == shape[0]
    else:
        with pytest.raises(TypeError, match=r"len.. of a 0-d tensor"):
            len(made)


@run_on_ranks(2)
def test_its_repr_shows_shape_layout_and_block():
    mesh = make_mesh()
    made = distribute_tensor(torch.arange(3), mesh, [Shard(0)])
    block = ("tensor([0, 1])", "tensor([2])")[hp.get_platform().get_rank()]
    assert repr(made) == f"DTensor(shape=(3,), Layout(mesh (dp=2), dims [dp]), local={block})"
    assert str(made) == repr(made)


@run_on_ranks(2)
def test_conversions_keep_the_layout():
    mesh = make_mesh()
    made = distribute_tensor(numbers(5, 2), mesh, [Shard(0)]).requires_grad_()
    for converted, dtype in (
        (made.to(torch.float16), torch.float16),
        (made.float(), torch.float32),
        (made.to("cpu", torch.int64), torch.int64),
        (made.to(torch.zeros(1, dtype=torch.bfloat16)), torch.bfloat16),
    ):
        assert converted.dtype is dtype and converted.layout is made.layout and converted.shape == made.shape
        assert torch.equal(converted.full_tensor(), numbers(5, 2).to(dtype))
    assert made.to(torch.float64) is made and made.cpu() is made
    made.float().full_tensor().sum().backward()
    assert made.grad.dtype is torch.float64 and torch.equal(made.grad.full_tensor(), torch.ones(5, 2).double())


# ---------------------------------------------------------------- copies and files


def check_same(made, original):
    assert type(made) is DTensor and made.layout is original.layout and made.shape == original.shape
    assert made.requires_grad == original.requires_grad and made.dtype is original.dtype
    assert isinstance(made, nn.Parameter) == isinstance(original, nn.Parameter)
    assert torch.equal(made.to_local(), original.to_local())
    assert made.to_local().data_ptr() != original.to_local().data_ptr() or not original.to_local().numel()


@run_on_ranks(4)
@every_layout
def test_copies_pickles_and_files(placements, shape):
    mesh = make_mesh(2, 2)
    plain = distribute_tensor(numbers(*shape), mesh, placements)
    parameter = nn.Parameter(distribute_tensor(numbers(*shape), mesh, placements))
    frozen = nn.Parameter(plain.detach(), requires_grad=False)
    for original in (plain, parameter, frozen):
        check_same(copy.deepcopy(original), original)
        check_same(pickle.loads(pickle.dumps(original)), original)
        for weights_only in (True, False):
            file = io.BytesIO()
            torch.save({"weight": original, "step": 3}, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=weights_only)
            check_same(loaded["weight"], original)
            assert torch.equal(loaded["weight"].full_tensor(), numbers(*shape))


@run_on_ranks(2)
def test_a_deep_copy_has_the_gradient_and_what_was_attached():
    mesh = make_mesh()
    parameter = nn.Parameter(distribute_tensor(numbers(3, 2), mesh, [Shard(0)]))
    parameter.note = ["mine"]
    parameter.full_tensor().sum().backward()
    copies = copy.deepcopy([parameter, parameter])
    assert copies[0] is copies[1]
    check_same(copies[0], parameter)
    assert copies[0].note == ["mine"] and copies[0].note is not parameter.note
    check_same(copies[0].grad, parameter.grad)
    copies[0].grad.zero_()
    assert torch.equal(parameter.grad.full_tensor(), torch.ones(3, 2).double())
    with pytest.raises(RuntimeError, match=r"only distributed tensors created by the user .* detach\(\) it first"):
        copy.deepcopy(parameter * 2)


# ---------------------------------------------------------------- modules


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.register_buffer("scale", torch.arange(5.0))


def distributed_net(mesh):
    torch.manual_seed(0)
    net = Net()
    net.linear.weight = nn.Parameter(distribute_tensor(net.linear.weight.detach(), mesh, [Shard(0)]))
    net.linear.bias = nn.Parameter(distribute_tensor(net.linear.bias.detach(), mesh, [Replicate()]))
    net.scale = distribute_tensor(net.scale, mesh, [Shard(0)])
    torch.manual_seed(0)
    return net, Net()


@run_on_ranks(2)
def test_a_module_with_distributed_parameters():
    mesh = make_mesh()
    net, plain = distributed_net(mesh)
    assert [name for name, _ in net.named_parameters()] == ["linear.weight", "linear.bias"]
    net.to(torch.float64)
    assert net.linear.weight.dtype is torch.float64 and net.scale.dtype is torch.float64
    assert type(net.linear.weight) is DTensor and isinstance(net.linear.weight, nn.Parameter)
    assert net.linear.weight.layout.placements == (Shard(0),)
    assert torch.equal(net.linear.weight.full_tensor(), plain.linear.weight.double())
    assert torch.equal(net.scale.full_tensor(), plain.scale.double())
    net.half().float()

    (net.linear.weight.full_tensor().sum() + net.linear.bias.full_tensor().sum()).backward()
    weight_grad = net.linear.weight.grad
    assert torch.equal(weight_grad.full_tensor(), torch.ones(5, 3))
    net.zero_grad(set_to_none=False)
    assert net.linear.weight.grad is weight_grad and not weight_grad.full_tensor().any()
    net.zero_grad()
    assert net.linear.weight.grad is None

    twin = copy.deepcopy(net)
    assert type(twin.linear.weight) is DTensor and twin.linear.weight is not net.linear.weight


@run_on_ranks(2)
def test_state_dicts():
    mesh = make_mesh()
    net, _ = distributed_net(mesh)
    other, _ = distributed_net(mesh)
    with torch.no_grad():
        for tensor in (*net.parameters(), net.scale):
            tensor.mul_(2)
    state = net.state_dict()
    assert {name: type(value) for name, value in state.items()} == dict.fromkeys(state, DTensor)
    assert not any(value.requires_grad for value in state.values())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    report = other.load_state_dict(torch.load(file, weights_only=True))
    assert not report.missing_keys and not report.unexpected_keys
    for name, value in other.state_dict().items():
        assert torch.equal(value.full_tensor(), state[name].full_tensor()), name
    assert other.linear.weight.layout.placements == (Shard(0),)

    # Under another layout the values move; plain values are refused.
    moved = {name: value.redistribute(placements=[Replicate()]) for name, value in state.items()}
    other.linear.weight.data.zero_()
    other.load_state_dict(moved)
    assert torch.equal(other.linear.weight.full_tensor(), net.linear.weight.full_tensor())
    with pytest.raises(RuntimeError, match=r"linear.weight.*plain tensor of shape \(5, 3\) meets a distributed one"):
        other.load_state_dict({name: value.full_tensor() for name, value in state.items()})

    net.load_state_dict(state, assign=True)
    assert type(net.linear.weight) is DTensor and isinstance(net.linear.weight, nn.Parameter)


# ---------------------------------------------------------------- skipping dispatch


@run_on_ranks(2)
def test_operators_can_see_the_blocks():
    mesh = make_mesh()
    made = distribute_tensor(numbers(5), mesh, [Shard(0)])
    with SkipDTensorDispatch():
        result = made * 2
        assert type(result) is torch.Tensor and torch.equal(result, made.to_local() * 2)
        assert torch.equal(torch.cat([made, made]), made.to_local().repeat(2))
        assert type(made.detach()) is torch.Tensor
        made.add_(1)
        with SkipDTensorDispatch(no_skip=["mul", torch.add]):
            assert type(made * 2) is DTensor and type(made + 2) is DTensor and type(made - 2) is torch.Tensor
            with SkipDTensorDispatch():
                assert type(made * 2) is torch.Tensor
            assert type(made * 2) is DTensor
        with SkipDTensorDispatch(no_skip=torch.mul):
            assert type(made * 2) is DTensor
    assert type(made * 2) is DTensor
    assert torch.equal(made.full_tensor(), numbers(5) + 1)


@run_on_ranks(2)
def test_reading_attributes_communicates_nothing():
    mesh = make_mesh()
    made = distribute_tensor(numbers(5, 2), mesh, [Shard(0)]).requires_grad_()
    with CommRecorder() as recorder:
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "grad", "is_leaf", "placements", "data"):
            getattr(made, name)
        repr(made), made.size(), made.numel(), made.nelement(), made.dim(), len(made), made.detach(), hash(made)
        made.is_contiguous(), made.stride(), made.element_size(), made.to_local(), copy.deepcopy(made), made * 2
    assert recorder.records == []


@run_on_ranks(2)
def test_other_data_of_a_computed_tensor_is_what_operators_see():
    """Operators remember what they made of an input until it is written to; new data is a write that is not counted."""
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    weight = hp.distribute_tensor(torch.ones(4, 2, dtype=torch.float64), mesh, [hp.Shard(0)]).requires_grad_()
    leaf = hp.distribute_tensor(torch.ones(3, 2, dtype=torch.float64), mesh, [hp.Replicate()]).requires_grad_()
    x = leaf * 2
    assert torch.nn.functional.linear(x, weight).full_tensor()[0, 0] == 4
    x.data = hp.distribute_tensor(torch.full((3, 2), 6.0, dtype=torch.float64), mesh, [hp.Replicate()])
    assert torch.nn.functional.linear(x, weight).full_tensor()[0, 0] == 12
    layer = torch.nn.Linear(2, 4, bias=False, dtype=torch.float64)
    torch.nn.init.ones_(layer.weight)
    layer = hp.parallelize_module(layer, mesh, hp.ColwiseParallel(output_layouts=hp.Replicate()))
    plain = torch.ones(3, 2, dtype=torch.float64, requires_grad=True) * 2
    assert layer(plain)[0, 0] == 4
    plain.data = torch.full((3, 2), 6.0, dtype=torch.float64)
    assert layer(plain)[0, 0] == 12
