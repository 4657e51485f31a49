"""What is PyTorch's own about tensors: all its dtypes, sparse and conjugated ones, containers, names of operators."""

import functools
import operator

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyper_parallel.platform.torch.base import tensors
from hyper_parallel.platform.torch.base.tensors import (
    apply_to_tensors,
    get_op_name,
    str_to_dtype,
    tensor_to_numpy,
    tree_map,
)


def test_every_dtype_of_torch_is_found_by_its_printed_name():
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        assert str_to_dtype(str(dtype)) is dtype


FLOAT8 = [dtype for name, dtype in vars(torch).items() if name.startswith("float8")]


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_types_that_numpy_lacks_become_float32_exactly(dtype):
    x = torch.tensor([0.25, 1.0, 2.0, 4.0]).to(dtype)
    array = tensor_to_numpy(x)
    assert array.dtype == np.float32
    assert array.tolist() == x.to(torch.float32).tolist() == [0.25, 1.0, 2.0, 4.0]


def test_tensor_to_numpy_takes_sparse_and_conjugated_tensors():
    z = torch.tensor([1 + 2j])
    assert tensor_to_numpy(z.conj()).tolist() == [1 - 2j]
    assert tensor_to_numpy(z.conj().imag).tolist() == [-2.0]
    assert tensor_to_numpy(torch.eye(2).to_sparse()).tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert tensors.get_tensor_storage_size(torch.empty(4, dtype=torch.float8_e5m2, device="meta")) == 4


def test_sizes_return_types_and_packed_sequences_are_containers():
    size = torch.Size([2, 3])
    assert tree_map(lambda leaf: leaf, [size])[0] is size
    largest = tree_map(lambda leaf: leaf + 1, torch.max(torch.tensor([[1.0, 5.0]]), 1))
    assert type(largest) is torch.return_types.max
    assert largest.values.tolist() == [6.0]
    assert type(tensors.list_to_size([2, 3])) is torch.Size
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    (doubled,) = apply_to_tensors(lambda tensor: tensor.double() * 2, [packed])
    assert type(doubled) is type(packed)
    assert doubled.data.dtype is torch.float64


class Doubling(torch.autograd.Function):
    pass


class NamedDoubling(torch.autograd.Function):
    _op_name = "double_it"


NAMES = {
    "add": [
        torch.add,
        torch.Tensor.add,
        torch.Tensor.__add__,
        torch.Tensor.__radd__,
        torch.ops.aten.add,
        torch.ops.aten.add.Tensor,
        operator.add,
        torch.zeros(1).add,
        functools.partial(torch.add, alpha=2),
        "add",
        "__add__",
    ],
    "add_": [torch.Tensor.add_, torch.Tensor.__iadd__, torch.ops.aten.add_.Tensor, operator.iadd],
    "sub": [torch.sub, torch.subtract, torch.Tensor.__sub__],
    "rsub": [torch.rsub, torch.Tensor.__rsub__],
    "mul": [torch.mul, torch.multiply, torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.Tensor.multiply],
    "mul_": [torch.Tensor.mul_, torch.Tensor.multiply_, torch.Tensor.__imul__],
    "div": [torch.div, torch.true_divide, torch.divide, torch.Tensor.__truediv__, operator.truediv],
    "rdiv": [torch.Tensor.__rtruediv__, torch.Tensor.__rdiv__],
    "floor_divide": [torch.floor_divide, torch.Tensor.__floordiv__],
    "remainder": [torch.remainder, torch.Tensor.__mod__],
    "pow": [torch.pow, torch.Tensor.pow, torch.Tensor.__pow__],
    "rpow": [torch.Tensor.__rpow__],
    "matmul": [torch.matmul, torch.Tensor.__matmul__, torch.linalg.matmul, operator.matmul],
    "neg": [torch.neg, torch.negative, torch.Tensor.__neg__],
    "eq": [torch.eq, torch.Tensor.__eq__],
    "ge": [torch.ge, torch.greater_equal, torch.Tensor.__ge__],
    "bitwise_and": [torch.bitwise_and, torch.Tensor.__and__, operator.and_],
    "bitwise_not": [torch.bitwise_not, torch.Tensor.__invert__, operator.inv],
    "bitwise_right_shift": [torch.bitwise_right_shift, torch.Tensor.__rshift__],
    "getitem": [torch.Tensor.__getitem__, operator.getitem],
    "setitem": [torch.Tensor.__setitem__],
    "linear": [F.linear, torch.ops.aten.linear.default],
    "relu": [F.relu, torch.relu, torch.Tensor.relu],
    "layer_norm": [F.layer_norm, torch.layer_norm],
    "max_pool2d": [F.max_pool2d],
    "softmax": [F.softmax, torch.softmax, torch.special.softmax],
    "sigmoid": [torch.sigmoid, torch.special.expit],
    "cat": [torch.cat, torch.concat, torch.concatenate],
    "transpose": [torch.transpose, torch.swapaxes, torch.Tensor.swapdims],
    "_softmax": [torch.ops.aten._softmax.default],
    "T": [torch.Tensor.T.__get__],
    "shape": [torch.Tensor.shape.__get__],
    "requires_grad.__set__": [torch.Tensor.requires_grad.__set__],
    "bool": [torch.Tensor.bool],
    "__bool__": [torch.Tensor.__bool__],
    "Doubling": [Doubling.apply],
    "double_it": [NamedDoubling.apply],
    "Linear": [torch.nn.Linear(1, 1)],
}


@pytest.mark.parametrize("name", NAMES)
def test_all_spellings_of_an_operator_have_one_name(name):
    assert {get_op_name(spelling) for spelling in NAMES[name]} == {name}


def test_every_overridable_function_of_torch_has_a_name():
    for functions in torch.overrides.get_overridable_functions().values():
        for function in functions:
            name = get_op_name(function)
            assert isinstance(name, str)
            assert name
