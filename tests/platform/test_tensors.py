"""Tests of making, cutting, casting and describing tensors, of containers of them and of operator names."""

import collections
import dataclasses
import functools
import operator

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyper_parallel.platform.torch import tensors
from hyper_parallel.platform.torch.tensors import (
    apply_to_tensors,
    chunk,
    construct_strided_slice,
    get_op_name,
    str_to_dtype,
    tensor_to_numpy,
    tree_map,
)

# ---------------------------------------------------------------------------------------------------------------------
# Types
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("torch.float32", torch.float32),
        ("float32", torch.float32),
        ("Float32", torch.float32),
        ("mindspore.bfloat16", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("half", torch.float16),
        ("torch.float8_e4m3fn", torch.float8_e4m3fn),
        ("bool", torch.bool),
        (torch.int8, torch.int8),
    ],
)
def test_str_to_dtype(name, dtype):
    assert str_to_dtype(name) is dtype


def test_every_dtype_of_torch_is_found_by_its_printed_name():
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        assert str_to_dtype(str(dtype)) is dtype


def test_unknown_dtypes_suggest_near_ones():
    with pytest.raises(ValueError, match=r"'flaot32' is not the name of a dtype; did you mean float32"):
        str_to_dtype("flaot32")
    with pytest.raises(ValueError, match=r"'zzz' is not the name of a dtype; the known names are .*bfloat16, .*uint8"):
        str_to_dtype("zzz")
    with pytest.raises(TypeError, match="takes a name such as 'float32', got 32 of type int"):
        str_to_dtype(32)


def test_casts():
    x = torch.arange(3)
    assert tensors.tensor_type_cast(x, "float32").dtype is torch.float32
    assert tensors.tensor_type_cast(x, torch.int8).dtype is torch.int8
    with pytest.raises(TypeError, match="tensor_type_cast takes a tensor, got list"):
        tensors.tensor_type_cast([1], "float32")
    assert tensors.cast_fp_tensor(torch.bfloat16, x) is x
    assert tensors.cast_fp_tensor("bfloat16", "text") == "text"
    y = torch.ones(2, requires_grad=True)
    cast = tensors.cast_fp_tensor("float64", y)
    assert cast.dtype is torch.float64
    cast.sum().backward()
    assert y.grad.tolist() == [1.0, 1.0]
    assert tensors.cast_fp_tensor(torch.float32, y) is y


def test_sizes_in_bytes():
    view = torch.zeros(8, 8, dtype=torch.bfloat16)[::2, :3]
    assert tensors.get_element_size(view) == 2
    assert tensors.get_tensor_storage_size(view) == 4 * 3 * 2
    assert tensors.get_tensor_storage_size(torch.zeros(1).expand(5)) == 20
    assert tensors.get_tensor_storage_size(torch.zeros(0, 3)) == 0
    assert tensors.get_tensor_storage_size(torch.empty(4, dtype=torch.float8_e5m2, device="meta")) == 4
    with pytest.raises(TypeError, match="get_tensor_storage_size takes a tensor, got int"):
        tensors.get_tensor_storage_size(3)


FLOAT8 = [dtype for name, dtype in vars(torch).items() if name.startswith("float8")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, *FLOAT8], ids=str)
def test_types_that_numpy_lacks_become_float32_exactly(dtype):
    x = torch.tensor([0.25, 1.0, 2.0, 4.0]).to(dtype)
    array = tensor_to_numpy(x)
    assert array.dtype == np.float32
    assert array.tolist() == x.to(torch.float32).tolist() == [0.25, 1.0, 2.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int8, torch.uint16, torch.bool, torch.complex64])
def test_other_types_keep_theirs_and_their_memory(dtype):
    x = torch.ones(2, 3).to(dtype)
    array = tensor_to_numpy(x)
    assert array.dtype.name == str(dtype).removeprefix("torch.")
    x.zero_()
    assert not array.any()


def test_tensor_to_numpy_takes_any_kind_of_tensor():
    x = torch.randn(3, 4, requires_grad=True)
    assert np.array_equal(tensor_to_numpy(x.t()), x.detach().numpy().T)
    assert tensor_to_numpy(torch.tensor(2.5)).item() == 2.5
    assert tensor_to_numpy(torch.zeros(0, 2)).shape == (0, 2)
    z = torch.tensor([1 + 2j])
    assert tensor_to_numpy(z.conj()).tolist() == [1 - 2j]
    assert tensor_to_numpy(z.conj().imag).tolist() == [-2.0]
    assert tensor_to_numpy(torch.eye(2).to_sparse()).tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert tensor_to_numpy(torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))).tolist() == [1.0]
    with pytest.raises(ValueError, match=r"a tensor of shape \(2, 3\) on the meta device has no values"):
        tensor_to_numpy(torch.empty(2, 3, device="meta"))
    with pytest.raises(TypeError, match="tensor_to_numpy takes a tensor, got float"):
        tensor_to_numpy(1.0)


# ---------------------------------------------------------------------------------------------------------------------
# New tensors, cutting and joining
# ---------------------------------------------------------------------------------------------------------------------


def test_new_tensors():
    assert tensors.is_tensor(torch.zeros(1))
    assert not tensors.is_tensor(np.zeros(1))
    assert torch.equal(tensors.arange(4), torch.arange(4))
    assert torch.equal(tensors.arange(1, 7, 2, dtype="float32"), torch.arange(1, 7, 2, dtype=torch.float32))
    assert torch.equal(tensors.zeros((2, 0), "int64"), torch.zeros(2, 0, dtype=torch.int64))
    assert torch.equal(tensors.zeros(3), torch.zeros(3))
    assert torch.equal(tensors.full_like(torch.zeros(2), 7, "int32"), torch.full((2,), 7, dtype=torch.int32))
    made = tensors.new_tensor([2, 3], "bfloat16", "meta")
    assert (made.shape, made.dtype, made.device.type) == ((2, 3), torch.bfloat16, "meta")
    parameter = tensors.new_zero_parameter((2, 2), torch.float64, False, "cpu")
    assert isinstance(parameter, torch.nn.Parameter)
    assert torch.equal(parameter, torch.zeros(2, 2, dtype=torch.float64))
    assert not parameter.requires_grad
    assert tensors.new_zero_parameter((1,), "float32", True, None).requires_grad
    assert tensors.list_to_size([2, 3]) == torch.Size([2, 3])
    assert type(tensors.list_to_size([2, 3])) is torch.Size


def test_pinned_memory_needs_no_accelerator():
    made = tensors.empty_like(torch.zeros(2, 3), dtype="float16", device="cpu", pin_memory=True)
    assert (made.shape, made.dtype) == ((2, 3), torch.float16)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_chunk_follows_torch_and_fills_up_with_empty_parts(size, num_parts, dim):
    shape = [2, 2]
    shape[dim] = size
    x = torch.randn(shape)
    expected = list(torch.chunk(x, num_parts, dim)) if size else []
    for index in range(num_parts):
        part = chunk(x, dim, num_parts, index)
        if index < len(expected):
            assert torch.equal(part, expected[index])
        else:
            assert part.shape[dim] == 0
    assert torch.equal(tensors.cat([chunk(x, dim, num_parts, i) for i in range(num_parts)], dim), x)


def test_chunk_has_a_gradient():
    x = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    (chunk(x, 0, 2, 1) * 3).sum().backward()
    assert x.grad.tolist() == [0, 0, 0, 3, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 2, 0), r"chunk: dim 2 of a tensor of shape \(4, 6\) does not exist; it has 2 dimension"),
        ((-3, 2, 0), "chunk: dim -3"),
        ((0, 0, 0), "the number of parts must be at least 1, got 0"),
        ((0, 2, 2), "part 2 of 2 parts does not exist; give 0 to 1"),
        ((0, 2, -1), "part -1 of 2 parts does not exist"),
    ],
)
def test_chunk_says_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        chunk(torch.zeros(4, 6), *arguments)


@pytest.mark.parametrize(
    ("begin", "end", "stride"),
    [
        ((0, 0), (5, 7), (1, 1)),
        ((1, 2), (4, 7), (2, 3)),
        ((-3, 0), (-1, 100), (1, 1)),
        ((4, 6), (0, 1), (-1, -2)),
        ((4, 0), (-100, 7), (-1, 1)),
        ((3, 0), (3, 7), (1, 1)),
        ((1, 0), (3, 7), (-1, 1)),
        ((2,), (4,), (1,)),
        ((), (), ()),
    ],
)
def test_strided_slices_follow_numpy(begin, end, stride):
    array = np.arange(35.0).reshape(5, 7)
    expected = array[tuple(slice(b, e, s) for b, e, s in zip(begin, end, stride, strict=True))]
    assert np.array_equal(construct_strided_slice(torch.from_numpy(array), begin, end, stride).numpy(), expected)


def test_strided_slices_say_what_is_wrong():
    x = torch.zeros(5, 7)
    with pytest.raises(ValueError, match=r"begin \(0,\), end \(1, 2\) .* equally long, .* shape \(5, 7\)"):
        construct_strided_slice(x, (0,), (1, 2), (1, 1))
    with pytest.raises(ValueError, match="at most one number for each dimension"):
        construct_strided_slice(x, (0, 0, 0), (1, 1, 1), (1, 1, 1))
    with pytest.raises(ValueError, match=r"stride \(1, 0\) contains 0"):
        construct_strided_slice(x, (0, 0), (1, 1), (1, 0))


def test_requires_grad_and_no_grad():
    x = torch.zeros(2)
    assert tensors.set_tensor_requires_grad(x) is x
    assert x.requires_grad
    y = x * 2
    assert tensors.set_tensor_requires_grad(y) is y
    with tensors.no_grad():
        assert not (x * 2).requires_grad
    assert (x * 2).requires_grad
    with pytest.raises(TypeError, match=r"dtype torch.int64 and shape \(3,\) cannot have a gradient"):
        tensors.set_tensor_requires_grad(torch.arange(3))


# ---------------------------------------------------------------------------------------------------------------------
# Nested containers
# ---------------------------------------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Batch:
    tokens: object
    rest: object = None
    length: int = dataclasses.field(init=False, default=0)


def test_tree_map_keeps_the_classes_of_containers():
    tree = {"a": [1, (2, 3)], "b": Pair(4, {5}), "c": Batch(6, [7]), "d": collections.OrderedDict(x=8), 9: None}
    mapped = tree_map(lambda leaf: None if leaf is None else leaf * 10, tree)
    expected = {
        "a": [10, (20, 30)],
        "b": Pair(40, {50}),
        "c": Batch(60, [70]),
        "d": collections.OrderedDict(x=80),
        9: None,
    }
    assert mapped == expected
    assert type(mapped["b"]) is Pair
    assert type(mapped["d"]) is collections.OrderedDict
    assert tree["a"] == [1, (2, 3)], "the input is left alone"
    assert tree["c"].tokens == 6


def test_tree_map_keeps_default_factories_sizes_and_return_types():
    counts = collections.defaultdict(list, a=1)
    mapped = tree_map(lambda leaf: leaf + 1, counts)
    assert mapped["a"] == 2
    assert mapped["new"] == []
    size = torch.Size([2, 3])
    assert tree_map(lambda leaf: leaf, [size])[0] is size
    largest = tree_map(lambda leaf: leaf + 1, torch.max(torch.tensor([[1.0, 5.0]]), 1))
    assert type(largest) is torch.return_types.max
    assert largest.values.tolist() == [6.0]
    assert tree_map(lambda leaf: leaf + 1, 1) == 2
    assert tree_map(lambda leaf: leaf, Batch) is Batch


def test_apply_to_tensors_touches_tensors_only():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    container = [torch.ones(1), {"k": (torch.ones(1), "text", 3)}, None, packed]
    out = apply_to_tensors(lambda tensor: tensor.double() * 2, container)
    assert out[0].tolist() == [2.0]
    assert out[1]["k"][0].dtype is torch.float64
    assert out[1]["k"][1:] == ("text", 3)
    assert out[2] is None
    assert type(out[3]) is type(packed)
    assert out[3].data.dtype is torch.float64


# ---------------------------------------------------------------------------------------------------------------------
# Names of operators
# ---------------------------------------------------------------------------------------------------------------------


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


def test_what_is_no_operator_has_no_name():
    with pytest.raises(TypeError, match="takes an operator, got 3 of type int"):
        get_op_name(3)
