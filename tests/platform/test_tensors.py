"""Tests of making, cutting, casting and describing tensors, of containers of them and of operator names."""

import collections
import dataclasses
import operator

import numpy as np
import pytest
import torch

from hyper_parallel.platform import get_platform
from tests.frameworks import (
    backward,
    dtype_of,
    equal,
    grad_of,
    known_names,
    leaf,
    named,
    ours,
    parameter,
    platform_module,
    requires_grad,
    theirs,
    write,
)

tensors = platform_module("tensors")
str_to_dtype, tensor_to_numpy = tensors.str_to_dtype, tensors.tensor_to_numpy
chunk, construct_strided_slice = tensors.chunk, tensors.construct_strided_slice
tree_map, apply_to_tensors = tensors.tree_map, tensors.apply_to_tensors
get_op_name = get_platform().get_op_name

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
        ("bool", torch.bool),
        (torch.int8, torch.int8),
    ],
)
def test_str_to_dtype(name, dtype):
    assert str_to_dtype(ours(name)) == ours(dtype)


def test_unknown_dtypes_suggest_near_ones():
    with pytest.raises(ValueError, match=r"'flaot32' is not the name of a dtype; did you mean float32"):
        str_to_dtype("flaot32")
    with pytest.raises(ValueError, match=r"'zzz' is not the name of a dtype; the known names are .*bfloat16, .*uint8"):
        str_to_dtype("zzz")
    with pytest.raises(TypeError, match="takes a name such as 'float32', got 32 of type int"):
        str_to_dtype(32)


def test_casts():
    x = ours(torch.arange(3))
    assert dtype_of(tensors.tensor_type_cast(x, "float32")) is torch.float32
    assert dtype_of(tensors.tensor_type_cast(x, ours(torch.int8))) is torch.int8
    with pytest.raises(TypeError, match="tensor_type_cast takes a tensor, got list"):
        tensors.tensor_type_cast([1], "float32")
    assert tensors.cast_fp_tensor(ours(torch.bfloat16), x) is x
    assert tensors.cast_fp_tensor("bfloat16", "text") == "text"
    y = leaf(torch.ones(2))
    cast = tensors.cast_fp_tensor("float64", y)
    assert dtype_of(cast) is torch.float64
    backward(cast.sum())
    assert equal(grad_of(y), torch.ones(2))
    assert tensors.cast_fp_tensor(ours(torch.float32), y) is y


def test_sizes_in_bytes():
    view = ours(torch.zeros(8, 8, dtype=torch.bfloat16))[::2, :3]
    assert tensors.get_element_size(view) == 2
    assert tensors.get_tensor_storage_size(view) == 4 * 3 * 2
    assert tensors.get_tensor_storage_size(ours(torch.zeros(1)).expand((5,))) == 20
    assert tensors.get_tensor_storage_size(ours(torch.zeros(0, 3))) == 0
    assert tensors.get_tensor_storage_size(ours(torch.empty(4, dtype=torch.int16, device="meta"))) == 8
    with pytest.raises(TypeError, match="get_tensor_storage_size takes a tensor, got int"):
        tensors.get_tensor_storage_size(3)


def test_bfloat16_which_numpy_lacks_becomes_float32_exactly():
    array = tensor_to_numpy(ours(torch.tensor([0.25, 1.0, 2.0, 4.0]).bfloat16()))
    assert array.dtype == np.float32
    assert array.tolist() == [0.25, 1.0, 2.0, 4.0]


@pytest.mark.parametrize("name", known_names(["float64", "float16", "int8", "uint16", "bool", "complex64"]))
def test_other_types_keep_theirs_and_their_memory(name):
    x = ours(torch.ones(2, 3).to(getattr(torch, name)))
    array = tensor_to_numpy(x)
    assert array.dtype.name == name
    write(x, torch.zeros((), dtype=getattr(torch, name)))
    assert not array.any()
    array[0, 1] = 1
    assert theirs(x).to(torch.int64).tolist() == [[0, 1, 0], [0, 0, 0]]


def test_tensor_to_numpy_takes_any_kind_of_tensor():
    values = torch.randn(3, 4)
    assert np.array_equal(tensor_to_numpy(leaf(values).T), values.numpy().T)
    assert np.array_equal(tensor_to_numpy(leaf(values)[1:, ::2]), values[1:, ::2].numpy())
    assert tensor_to_numpy(ours(torch.tensor(2.5))).item() == 2.5
    assert tensor_to_numpy(ours(torch.zeros(0, 2))).shape == (0, 2)
    assert tensor_to_numpy(parameter(torch.ones(1, dtype=torch.bfloat16))).tolist() == [1.0]
    with pytest.raises(ValueError, match=r"a tensor of shape \(2, 3\) on the meta device has no values"):
        tensor_to_numpy(ours(torch.empty(2, 3, device="meta")))
    with pytest.raises(TypeError, match="tensor_to_numpy takes a tensor, got float"):
        tensor_to_numpy(1.0)


# ---------------------------------------------------------------------------------------------------------------------
# New tensors, cutting and joining
# ---------------------------------------------------------------------------------------------------------------------


def test_new_tensors():
    assert tensors.is_tensor(ours(torch.zeros(1)))
    assert not tensors.is_tensor(np.zeros(1))
    assert equal(tensors.arange(4), torch.arange(4))
    assert equal(tensors.arange(1, 7, 2, dtype="float32"), torch.arange(1, 7, 2, dtype=torch.float32))
    assert equal(tensors.arange(0.0, 1.0, 0.25), torch.arange(0.0, 1.0, 0.25))
    assert equal(tensors.zeros((2, 0), "int64"), torch.zeros(2, 0, dtype=torch.int64))
    assert equal(tensors.zeros(3), torch.zeros(3))
    assert equal(tensors.full_like(ours(torch.zeros(2)), 7, "int32"), torch.full((2,), 7, dtype=torch.int32))
    platform = get_platform()
    assert equal(platform.ones((2, 3)), torch.ones(2, 3))
    for value in (True, 3, 2.5):
        assert equal(platform.full((2,), value), torch.full((2,), value)), value
    made = tensors.new_tensor([2, 3], "bfloat16", "meta")
    assert (tuple(made.shape), dtype_of(made)) == ((2, 3), torch.bfloat16)
    assert platform.has_no_memory(made)
    frozen = tensors.new_zero_parameter((2, 2), ours(torch.float64), False, "cpu")
    assert isinstance(frozen, platform.Parameter)
    assert equal(frozen, torch.zeros(2, 2, dtype=torch.float64))
    assert not requires_grad(frozen)
    assert requires_grad(tensors.new_zero_parameter((1,), "float32", True, None))
    assert tensors.list_to_size([2, 3]) == (2, 3)


def test_pinned_memory_needs_no_accelerator():
    made = tensors.empty_like(ours(torch.zeros(2, 3)), dtype="float16", device="cpu", pin_memory=True)
    assert (tuple(made.shape), dtype_of(made)) == ((2, 3), torch.float16)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_chunk_follows_torch_and_fills_up_with_empty_parts(size, num_parts, dim):
    shape = [2, 2]
    shape[dim] = size
    x = torch.randn(shape)
    expected = list(torch.chunk(x, num_parts, dim)) if size else []
    parts = [chunk(ours(x), dim, num_parts, index) for index in range(num_parts)]
    for index, part in enumerate(parts):
        if index < len(expected):
            assert equal(part, expected[index])
        else:
            assert part.shape[dim] == 0
    assert equal(tensors.cat(parts, dim), x)


def test_chunk_has_a_gradient():
    x = leaf(torch.zeros(5, dtype=torch.float64))
    backward((chunk(x, 0, 2, 1) * 3).sum())
    assert equal(grad_of(x), torch.tensor([0, 0, 0, 3, 3], dtype=torch.float64))


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
        chunk(ours(torch.zeros(4, 6)), *arguments)


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
    made = construct_strided_slice(ours(torch.from_numpy(array)), begin, end, stride)
    assert np.array_equal(theirs(made).numpy(), expected)


def test_strided_slices_say_what_is_wrong():
    x = ours(torch.zeros(5, 7))
    with pytest.raises(ValueError, match=r"begin \(0,\), end \(1, 2\) .* equally long, .* shape \(5, 7\)"):
        construct_strided_slice(x, (0,), (1, 2), (1, 1))
    with pytest.raises(ValueError, match="at most one number for each dimension"):
        construct_strided_slice(x, (0, 0, 0), (1, 1, 1), (1, 1, 1))
    with pytest.raises(ValueError, match=r"stride \(1, 0\) contains 0"):
        construct_strided_slice(x, (0, 0), (1, 1), (1, 0))


def test_requires_grad_and_no_grad():
    x = ours(torch.zeros(2))
    assert tensors.set_tensor_requires_grad(x) is x
    assert requires_grad(x)
    y = x * 2
    assert tensors.set_tensor_requires_grad(y) is y
    with tensors.no_grad():
        assert not requires_grad(x * 2)
    assert requires_grad(x * 2)
    with pytest.raises(TypeError, match=rf"dtype {named(torch.int64)} and shape \(3,\) cannot have a gradient"):
        tensors.set_tensor_requires_grad(ours(torch.arange(3)))


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


def test_tree_map_keeps_default_factories():
    counts = collections.defaultdict(list, a=1)
    mapped = tree_map(lambda leaf: leaf + 1, counts)
    assert mapped["a"] == 2
    assert mapped["new"] == []
    assert tree_map(lambda leaf: leaf + 1, 1) == 2
    assert tree_map(lambda leaf: leaf, Batch) is Batch


def test_apply_to_tensors_touches_tensors_only():
    container = ours([torch.ones(1), {"k": (torch.ones(1), "text", 3)}, None, Batch(torch.ones(1))])
    out = apply_to_tensors(lambda tensor: tensors.tensor_type_cast(tensor, "float64") * 2, container)
    for made in (out[0], out[1]["k"][0], out[3].tokens):
        assert equal(made, torch.tensor([2.0], dtype=torch.float64))
    assert out[1]["k"][1:] == ("text", 3)
    assert out[2] is None


# ---------------------------------------------------------------------------------------------------------------------
# Names of operators
# ---------------------------------------------------------------------------------------------------------------------


def test_all_spellings_of_an_operator_have_one_name():
    assert {get_op_name(spelling) for spelling in (operator.add, "add", "__add__", "__radd__")} == {"add"}
    assert {get_op_name(spelling) for spelling in (operator.iadd, "__iadd__", "add_")} == {"add_"}
    assert {get_op_name(spelling) for spelling in (operator.matmul, "__matmul__", "matmul")} == {"matmul"}
    assert {get_op_name(spelling) for spelling in (operator.truediv, "true_divide", "__truediv__")} == {"div"}

    class Doubling(get_platform().Function):
        pass

    class NamedDoubling(get_platform().Function):
        _op_name = "double_it"

    assert get_op_name(Doubling.apply) == "Doubling"
    assert get_op_name(NamedDoubling.apply) == "double_it"


def test_what_is_no_operator_has_no_name():
    with pytest.raises(TypeError, match="takes an operator, got 3 of type int"):
        get_op_name(3)
