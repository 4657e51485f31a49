"""DTensor as a tensor: what it is, conversions and copies, leaves and hooks, skipping dispatch."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading

import pytest
import torch

from hyper_parallel import CommRecorder, DTensor, Layout, Partial, Replicate, Shard, SkipDTensorDispatch
from hyper_parallel.platform import get_platform
from tests.core.layout_cases import PLACEMENTS, block_of, make_mesh, numbers
from tests.frameworks import (
    backward,
    dist,
    distribute_tensor,
    dtype_of,
    equal,
    from_local,
    grad_of,
    leaf,
    ours,
    theirs,
)
from tests.world import run_on_ranks

Tensor, Parameter = get_platform().Tensor, get_platform().Parameter


def parameter_of(*args):
    return get_platform().as_parameter(distribute_tensor(*args), True)


# ---------------------------------------------------------------- what it is


@run_on_ranks(4)
def test_it_answers_as_the_whole_tensor():
    mesh = make_mesh(2, 2)
    for name, (placements, shape) in PLACEMENTS.items():
        whole = numbers(*shape)
        made = distribute_tensor(whole, mesh, placements)
        assert isinstance(made, Tensor) and isinstance(made, DTensor), name
        assert made.shape == shape and made.ndim == made.dim() == len(shape), name
        assert made.numel() == whole.numel(), name
        assert [made.size(dim) for dim in range(-len(shape), len(shape))] == list(shape) * 2, name
        assert dtype_of(made) is torch.float64 and made.is_floating_point() and not made.is_complex(), name
        assert made.device_mesh == mesh and made.layout is Layout.resolve(mesh, placements, len(shape)), name
        assert made.placements == made.layout.placements, name
        assert made.local_shape == tuple(made.to_local().shape) == made.layout.local_shape(shape), name
        assert type(made.to_local()) is Tensor, name
        assert equal(made.full_tensor(), whole), name
        assert equal(made.reduce_partial().to_local(), block_of(whole, made.layout)), name
        if shape:
            assert len(made) == shape[0], name
        else:
            with pytest.raises(TypeError, match=r"len.. of a 0-d tensor"):
                len(made)


@run_on_ranks(4)
def test_both_spellings_of_placements():
    mesh = make_mesh(2, 2)
    whole = numbers(5, 3)
    for aliases, placements in (
        (("dp", "None"), [Shard(0), Replicate()]),
        (("tp", "dp"), [Shard(1), Shard(0)]),
        ((("dp", "tp"), "None"), [Shard(0), Shard(0)]),
        ((("tp", "dp"), None), [Shard(0, order=1), Shard(0, order=0)]),
    ):
        spelled = [distribute_tensor(whole, mesh, either) for either in (aliases, placements)]
        assert spelled[0].layout is spelled[1].layout
        assert spelled[0].redistribute(placements=aliases) is spelled[0]
    with pytest.raises(ValueError, match=r"1 aliases \('dp',\) for a tensor of 2 dims: give one per dim"):
        distribute_tensor(whole, mesh, ("dp",))
    with pytest.raises(ValueError, match=r"3 aliases .* for a tensor of 2 dims"):
        spelled[0].redistribute(placements=("dp", "None", "None"))
    with pytest.raises(ValueError, match=r"1 placements \[Shard\(0\)\] for the 2 axes of DeviceMesh"):
        distribute_tensor(whole, mesh, [Shard(0)])


@run_on_ranks(2)
def test_its_repr_shows_shape_and_layout():
    made = distribute_tensor(torch.arange(3), make_mesh(), [Shard(0)])
    assert repr(made).startswith("DTensor(shape=(3,), Layout(mesh (dp=2), dims [dp]), local=")
    assert ("0" in repr(made).partition("local=")[2]) == (dist.get_rank() == 0)
    assert str(made) == repr(made)


@run_on_ranks(2)
def test_conversions_keep_the_layout():
    made = distribute_tensor(numbers(5, 2), make_mesh(), [Shard(0)]).requires_grad_()
    for dtype in (torch.float16, torch.float32, torch.int64, torch.bfloat16):
        converted = made.to(ours(dtype))
        assert dtype_of(converted) is dtype and converted.layout is made.layout and converted.shape == made.shape
        assert equal(converted.full_tensor(), numbers(5, 2).to(dtype))
    assert made.to(ours(torch.float64)) is made
    backward(made.to(ours(torch.float32)).full_tensor().sum())
    assert equal(made.grad.full_tensor(), torch.ones(5, 2).double())


@run_on_ranks(2)
def test_a_conversion_that_a_pending_reduction_does_not_pass_does_it_first():
    mesh, rank = make_mesh(), dist.get_rank()
    for op, source, target, stays in [
        ("sum", "float64", "float32", True),
        ("sum", "float64", "int64", False),
        ("sum", "int64", "float32", True),
        ("sum", "int64", "int32", True),
        ("sum", "int64", "bool", False),
        ("sum", "float64", "complex128", True),
        ("avg", "float64", "int64", False),
        ("max", "float64", "float32", True),
        ("max", "int64", "int8", False),
        ("max", "float64", "int64", False),
        ("any", "bool", "int64", False),
    ]:
        values = torch.tensor([[1, -1, 300], [-1, 1, 40]])
        values = values > 0 if source == "bool" else values + (0.5 if "float" in source else 0)
        pending = from_local(values[rank].to(getattr(torch, source)), mesh, [Partial(op)])
        expected = theirs(pending.full_tensor()).to(getattr(torch, target))
        converted = pending.to(ours(getattr(torch, target)))
        assert converted.layout.has_partial is stays, (op, source, target)
        assert equal(converted.full_tensor(), expected), (op, source, target)


# ---------------------------------------------------------------- copies


def check_same(made, original):
    assert isinstance(made, DTensor) and made.layout is original.layout and made.shape == original.shape
    assert made.requires_grad == original.requires_grad and made.dtype == original.dtype
    assert isinstance(made, Parameter) == isinstance(original, Parameter)
    assert equal(made.to_local(), original.to_local())
    assert made.to_local().numel() == 0 or made.to_local().data_ptr() != original.to_local().data_ptr()


@run_on_ranks(4)
def test_copies_and_pickles():
    mesh = make_mesh(2, 2)
    for placements, shape in PLACEMENTS.values():
        plain = distribute_tensor(numbers(*shape), mesh, placements)
        trained = parameter_of(numbers(*shape), mesh, placements)
        frozen = get_platform().as_parameter(distribute_tensor(numbers(*shape), mesh, placements), False)
        for original in (plain, trained, frozen):
            check_same(copy.deepcopy(original), original)
            check_same(pickle.loads(pickle.dumps(original)), original)


@run_on_ranks(2)
def test_a_deep_copy_has_the_gradient():
    trained = parameter_of(numbers(3, 2), make_mesh(), [Shard(0)])
    backward(trained.full_tensor().sum())
    copies = copy.deepcopy([trained, trained])
    assert copies[0] is copies[1]
    check_same(copies[0], trained)
    check_same(copies[0].grad, trained.grad)
    copies[0].grad = None
    assert equal(trained.grad.full_tensor(), torch.ones(3, 2).double())
    with pytest.raises(RuntimeError, match=r"only distributed tensors created by the user .* detach\(\) it first"):
        copy.deepcopy(trained * 2)


def pickled_bytes():
    return pickle.dumps(parameter_of(numbers(5, 2), make_mesh(2, 2), [Shard(0), Shard(0)]))


LOAD = """
import pickle, sys
made = pickle.load(sys.stdin.buffer)
from hyper_parallel import get_platform
platform = get_platform()
assert platform.get_world_size() == 1
values = [platform.tensor_to_numpy(block).tolist() for block in (made.to_local(), (made * 2).to_local())]
print(isinstance(made, platform.Parameter), tuple(made.shape), made.placements, made.device_mesh)
print(values[0], made.requires_grad, values[1])
"""


def test_a_pickle_opens_in_a_process_without_a_world(worlds):
    data = worlds(4).run(pickled_bytes)[0]
    ran = subprocess.run([sys.executable, "-c", LOAD], input=data, capture_output=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    assert ran.stdout.decode().splitlines() == [
        "True (5, 2) (Shard(0), Shard(0)) DeviceMesh('cpu', (dp=2, tp=2), ranks=[[0, 1], [2, 3]])",
        "[[1.0, 2.0], [3.0, 4.0]] True [[2.0, 4.0], [6.0, 8.0]]",
    ]


# ---------------------------------------------------------------- leaves, gradients and hooks


@run_on_ranks(4)
def test_a_parameter_gets_its_gradient_by_the_law():
    mesh = make_mesh(2, 2)
    for name, (placements, shape) in PLACEMENTS.items():
        trained = parameter_of(numbers(*shape), mesh, placements)
        assert isinstance(trained, Parameter) and isinstance(trained, DTensor), name
        assert trained.is_leaf and trained.requires_grad and trained.grad is None and trained.grad_fn is None, name
        weight = numbers(*shape) * 3
        for times in (1, 2):  # the second one accumulates
            backward(trained.full_tensor(), weight)
            assert isinstance(trained.grad, DTensor) and trained.grad.layout is trained.layout.gradient(), name
            assert trained.grad.shape == shape and equal(trained.grad.full_tensor(), weight * times), name
        trained.grad = None
        assert trained.grad is None, name


@run_on_ranks(4)
def test_loss_backward_for_every_kind_of_loss():
    mesh, rank = make_mesh(), dist.get_rank()
    expected = numbers(5, 3) * 2
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        start = distribute_tensor(numbers(5, 3), mesh, placements).requires_grad_()
        loss = (start**2).sum()  # pending where start is cut, whole where it is whole
        loss.backward()
        assert equal(start.grad.full_tensor(), expected), placements
        start.grad = None
        (start**2).sum().redistribute(placements=[Replicate()]).backward()
        assert equal(start.grad.full_tensor(), expected), placements
        start.grad = None
        backward((start**2).sum())
        assert equal(start.grad.full_tensor(), expected), placements
    for op, by_rank in (("avg", [0.25] * 4), ("max", [0, 0, 0, 1]), ("min", [1, 0, 0, 0]), ("prod", [24, 12, 8, 6])):
        summand = leaf(torch.tensor(float(rank + 1)))
        from_local(summand, mesh, [Partial(op)]).backward()
        assert equal(grad_of(summand), torch.tensor(float(by_rank[rank]))), op


@run_on_ranks(2)
def test_backward_of_a_tensor_that_is_no_scalar():
    mesh = make_mesh()
    start = distribute_tensor(numbers(5, 3), mesh, [Shard(0)]).requires_grad_()
    with pytest.raises(
        RuntimeError, match=r"only for scalar outputs, not for one of shape \(5, 3\); pass the gradient"
    ):
        (start * 2).backward()
    with pytest.raises(TypeError, match=r"the gradient of .* must be a distributed tensor, got Tensor; use"):
        (start * 2).backward(ours(torch.ones(5, 3)))
    with pytest.raises(ValueError, match=r"a gradient of shape \(3, 5\) for a tensor of shape \(5, 3\)"):
        (start * 2).backward(distribute_tensor(numbers(3, 5), mesh, [Shard(0)]))
    for placements in ([Shard(0)], [Shard(1)], [Partial()], [Replicate()]):
        start.grad = None
        (start * 2).backward(gradient=distribute_tensor(numbers(5, 3), mesh, placements))
        assert equal(start.grad.full_tensor(), numbers(5, 3) * 2)
    one = distribute_tensor(numbers(1), mesh, [Shard(0)]).requires_grad_()  # a scalar that only one rank holds
    (one * 3).backward()
    assert equal(one.grad.full_tensor(), torch.tensor([3.0]).double())


@run_on_ranks(2)
def test_hooks_see_distributed_gradients():
    start = distribute_tensor(numbers(3), make_mesh(), [Shard(0)]).requires_grad_()
    seen = []
    start.register_hook(lambda gradient: seen.append(gradient))
    doubling = start.register_hook(lambda gradient: gradient * 2)
    backward(start.full_tensor().sum())
    assert isinstance(seen[0], DTensor) and seen[0].layout is start.layout
    assert equal(seen[0].full_tensor(), torch.ones(3).double())
    assert equal(start.grad.full_tensor(), torch.full((3,), 2.0).double())
    doubling.remove()
    start.register_hook(lambda gradient: gradient.redistribute(placements=[Replicate()]) * 3)  # brought to its place
    backward(start.full_tensor().sum())
    assert equal(start.grad.full_tensor(), torch.full((3,), 5.0).double())
    start.register_hook(lambda gradient: gradient.to_local())
    with pytest.raises(TypeError, match=r"the hook of a distributed tensor of shape \(3,\) must return a distributed"):
        backward(start.full_tensor().sum())


@run_on_ranks(2)
def test_detach_data_and_requires_grad():
    mesh = make_mesh()
    start = distribute_tensor(numbers(3, 2), mesh, [Shard(0)])
    assert start.requires_grad_() is start and start.requires_grad
    for other in (start.detach(), start.data):
        assert isinstance(other, DTensor) and other.layout is start.layout and not other.requires_grad
        assert other.to_local().data_ptr() == start.to_local().data_ptr()
    start.data = distribute_tensor(numbers(5, 2), mesh, [Replicate()])
    assert start.shape == (5, 2) and start.layout.is_replicated and start.is_leaf and start.requires_grad
    with pytest.raises(TypeError, match="can only be set to a distributed tensor, got Tensor"):
        start.data = ours(torch.ones(5, 2))
    start.requires_grad = False
    assert not start.requires_grad
    assert equal(start.detach().full_tensor(), numbers(5, 2))


@run_on_ranks(2)
def test_the_gradient_that_is_set_is_checked():
    mesh = make_mesh()
    start = distribute_tensor(numbers(5, 2), mesh, [Shard(0)]).requires_grad_()
    start.grad = distribute_tensor(numbers(5, 2), mesh, [Shard(1)])
    assert start.grad.layout is start.layout and equal(start.grad.full_tensor(), numbers(5, 2))
    with pytest.raises(TypeError, match="must be a distributed tensor, got Tensor"):
        start.grad = ours(torch.ones(5, 2))
    del start.grad
    assert start.grad is None


# ---------------------------------------------------------------- skipping dispatch


@run_on_ranks(2)
def test_operators_can_see_the_blocks():
    made = distribute_tensor(numbers(5), make_mesh(), [Shard(0)])
    with SkipDTensorDispatch():
        result = made * 2
        assert type(result) is Tensor and equal(result, theirs(made.to_local()) * 2)
        with SkipDTensorDispatch(no_skip=["mul", "add"]):
            assert isinstance(made * 2, DTensor) and isinstance(made + 2, DTensor) and type(made - 2) is Tensor
            with SkipDTensorDispatch():
                assert type(made * 2) is Tensor
            assert isinstance(made * 2, DTensor)
    assert isinstance(made * 2, DTensor)


@run_on_ranks(2)
def test_skipping_holds_for_its_own_thread_and_ends_with_an_error():
    made = distribute_tensor(numbers(4), make_mesh(), [Shard(0)])
    kinds = []
    with SkipDTensorDispatch():
        thread = threading.Thread(target=lambda: kinds.append(type(made * 2)))
        thread.start()
        thread.join()
        kinds.append(type(made * 2))
    assert kinds == [DTensor, Tensor]
    with pytest.raises(KeyError), SkipDTensorDispatch():
        raise KeyError
    assert type(made * 2) is DTensor


@run_on_ranks(2)
def test_reading_attributes_communicates_nothing():
    made = distribute_tensor(numbers(5, 2), make_mesh(), [Shard(0)]).requires_grad_()
    with CommRecorder() as recorder:
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "grad", "is_leaf", "placements", "data"):
            getattr(made, name)
        repr(made), made.size(), made.numel(), made.dim(), len(made), made.detach(), hash(made)
        made.is_contiguous(), made.stride(), made.to_local(), copy.deepcopy(made), made * 2
    assert recorder.records == []
