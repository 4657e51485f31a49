"""Tests of finding, replacing, reading and filling parameters, of hooks and of `init_parameters`."""

import pytest
import torch

from hyper_parallel import Replicate, Shard
from hyper_parallel.core.dtensor.device_mesh import init_device_mesh
from hyper_parallel.platform import get_platform
from tests.frameworks import (
    assert_close,
    backward,
    distribute_tensor,
    equal,
    grad_of,
    is_leaf,
    leaf,
    ours,
    parameter,
    platform_module,
    requires_grad,
    theirs,
    write,
    zero_grad,
)
from tests.frameworks.models import TABLE, Module, TiedModel, linear, sequential

modules = platform_module("modules")
init_on_device = get_platform().init_on_device
init_parameters, load_into_param = modules.init_parameters, modules.load_into_param
search_parameter_by_name, update_parameter_by_name = modules.search_parameter_by_name, modules.update_parameter_by_name
update_param_data, is_meta = modules.update_param_data, modules.has_no_memory


def parameters_of(module):
    return list(modules.parameters_dict(module).values())


# ---------------------------------------------------------------------------------------------------------------------
# Modules and hooks
# ---------------------------------------------------------------------------------------------------------------------


def test_what_is_inside_a_module():
    model = TiedModel()
    construct = modules.get_cell_construct(model)
    assert construct.__self__ is model and construct.__name__ in ("forward", "construct")
    names = dict(modules.get_cells_and_names(model))
    assert list(names) == ["", "embedding", "block", "block.norm", "block.linear", "head"]
    assert names["block.norm"] is model.block.norm
    assert modules.is_linear_module(model.head)
    assert not modules.is_linear_module(model.embedding)
    assert modules.is_embedding_module(model.embedding)
    assert not modules.is_embedding_module(None)
    assert get_platform().weight_name(model.embedding) == TABLE
    assert get_platform().weight_name(model.head) == "weight"
    assert modules.linear_weight_dims(model.head) == (0, 1)
    assert modules.linear_weight_dims(model.embedding) is None


def test_parameters_by_name():
    model = TiedModel()
    found = modules.parameters_dict(model)
    table = f"embedding.{TABLE}"
    # A module's own come before those of the modules in it.
    assert list(found) == ["scale", table, *(f"block.{name}" for name in BLOCK)]
    assert found[table] is getattr(model.embedding, TABLE)
    assert modules.parameters_dict(model, remove_duplicate=False)["head.weight"] is found[table]
    assert list(modules.own_parameters(model)) == ["scale"]
    assert list(modules.own_parameters(model.head)) == ["weight"]


BLOCK = ["norm.weight", "norm.bias", "linear.weight", "linear.bias"]


def test_forward_pre_hooks_see_kwargs_and_order():
    class Affine(Module):
        def forward(self, x, *, factor=1.0):
            return x * factor

    affine, calls = Affine(), []

    def scale(module, args, kwargs):
        calls.append("scale")
        return args, {"factor": kwargs["factor"] * 10}

    def shift(module, args):
        calls.append("shift")
        return (args[0] + 1,)

    one = ours(torch.tensor(1.0))
    with_kwargs = modules.register_forward_pre_hook(affine, scale, with_kwargs=True)
    modules.register_forward_pre_hook(affine, shift, prepend=True)
    assert affine(one, factor=2.0).item() == 40.0
    assert calls == ["shift", "scale"]
    with_kwargs.remove()
    assert affine(one, factor=2.0).item() == 4.0


def test_backward_hooks_change_gradients():
    layer, calls = linear(2, 2, bias=False, dtype=torch.float64), []

    def double_output(module, grad_output):
        calls.append("pre")
        return tuple(grad * 2 for grad in grad_output)

    def triple_input(module, grad_input, grad_output):
        calls.append("post")
        return tuple(grad * 3 for grad in grad_input)

    modules.register_full_backward_hook(layer, lambda *_: calls.append("later"))
    handles = [
        modules.register_full_backward_pre_hook(layer, double_output),
        modules.register_full_backward_hook(layer, triple_input, prepend=True),
    ]
    x = leaf(torch.randn(3, 2, dtype=torch.float64))
    backward(layer(x).sum())
    hooked = theirs(grad_of(x)).clone()
    for handle in handles:
        handle.remove()
    zero_grad(x)
    backward(layer(x).sum())
    assert_close(hooked, theirs(grad_of(x)) * 6)
    assert calls == ["pre", "post", "later", "later"]


# ---------------------------------------------------------------------------------------------------------------------
# Finding and replacing parameters
# ---------------------------------------------------------------------------------------------------------------------


def test_search_finds_exact_names_only():
    model = TiedModel()
    owner_name, owner, found = search_parameter_by_name(model, "block.linear.weight")
    assert owner_name == "block.linear"
    assert owner is model.block.linear
    assert found is model.block.linear.weight
    at_root = search_parameter_by_name(model, "scale")
    assert at_root.owner_name == "" and at_root.owner is model and at_root.parameter is model.scale
    assert search_parameter_by_name(model, "head.weight").owner is model.head
    for absent in ("weight", "block.linear", "head.bias", "no.such.weight", "forward", "block.forward.weight", ""):
        assert search_parameter_by_name(model, absent) is None


@pytest.mark.parametrize("name", [f"embedding.{TABLE}", "head.weight"])
def test_replacing_a_tied_parameter_keeps_the_tie(name):
    model = TiedModel()
    order = list(modules.parameters_dict(model))
    new = parameter(torch.zeros(6, 4))
    assert update_parameter_by_name(model, search_parameter_by_name(model, name), new) is new
    assert getattr(model.embedding, TABLE) is model.head.weight is new
    assert list(modules.parameters_dict(model)) == order
    assert not theirs(model(ours(torch.tensor([1], dtype=torch.int32)))).any()


def test_a_plain_tensor_becomes_a_parameter():
    model = TiedModel()
    model.scale.requires_grad = False
    installed = update_parameter_by_name(model, search_parameter_by_name(model, "scale"), ours(torch.tensor(2.0)))
    assert isinstance(model.scale, get_platform().Parameter)
    assert model.scale is installed
    assert model.scale.item() == 2.0
    assert not requires_grad(model.scale)


def test_replacing_says_what_is_wrong():
    model = TiedModel()
    found = search_parameter_by_name(model, "block.linear.weight")
    new = ours(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="the search found no parameter of that name"):
        update_parameter_by_name(model, None, new)
    with pytest.raises(TypeError, match="the new parameter must be a tensor, got list"):
        update_parameter_by_name(model, found, [1.0])
    update_parameter_by_name(model, found, new)
    with pytest.raises(ValueError, match=r"found in 'block.linear' is no longer in this module; search again"):
        update_parameter_by_name(model, found, new)


# ---------------------------------------------------------------------------------------------------------------------
# This rank's part of a parameter
# ---------------------------------------------------------------------------------------------------------------------


def test_plain_parameters_are_their_own_part():
    plain = parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    assert modules.get_param_local_shape(plain) == (2, 3)
    assert modules.get_param_type_size(plain) == 2
    data = modules.get_param_local_data(plain)
    assert not requires_grad(data)
    write(data, torch.ones(2, 3, dtype=torch.bfloat16))
    assert equal(plain, torch.ones(2, 3, dtype=torch.bfloat16))


def spread(values, *placements):
    """A tensor over two ranks as the first of them sees it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), init_backend=False)
    return distribute_tensor(values, mesh, list(placements))


def test_spread_parameters_are_read_and_written_by_their_part():
    made = spread(torch.zeros(5, 3), Shard(0))
    assert tuple(made.shape) == (5, 3)
    assert modules.get_param_local_shape(made) == (3, 3)
    assert type(modules.get_param_local_data(made)) is get_platform().Tensor
    load_into_param(made, ours(torch.ones(3, 3)))
    assert equal(made.to_local(), torch.ones(3, 3))
    update_param_data(made, ours(torch.full((3, 3), 2.0)))
    assert equal(made.to_local(), torch.full((3, 3), 2.0))
    load_into_param(made, spread(torch.arange(15.0).view(5, 3), Shard(0)))
    assert equal(made.to_local(), torch.arange(9.0).view(3, 3))
    with pytest.raises(
        ValueError, match=r"data of shape \(5, 3\) does not fit .* \(3, 3\) \(this rank's part of \(5, 3\)\)"
    ):
        load_into_param(made, ours(torch.ones(5, 3)))
    with pytest.raises(ValueError, match=r"the data has Layout.*\[-, dp\].* but the parameter has .*redistribute"):
        load_into_param(made, spread(torch.zeros(5, 3), Shard(1)))
    with pytest.raises(ValueError, match=r"the data has Layout.*\[dp, -\].* but the parameter is a plain tensor"):
        load_into_param(parameter(torch.zeros(5, 3)), made)


def test_layouts_are_kept_on_parameters():
    plain = parameter(torch.zeros(2))
    assert modules.set_layout_into_parameter(plain, "rows") is plain
    assert plain.hyper_parallel_layout == "rows"
    made, whole = spread(torch.zeros(4), Shard(0)), spread(torch.zeros(4), Replicate())
    assert modules.set_layout_into_parameter(made, made.layout) is made
    with pytest.raises(ValueError, match=r"already has Layout.*, which is not Layout.*; change it with redistribute"):
        modules.set_layout_into_parameter(made, whole.layout)


def test_update_param_data_takes_the_memory():
    taking, data = parameter(torch.zeros(2)), ours(torch.ones(3))
    update_param_data(taking, data)
    write(data, torch.full((3,), 5.0))
    assert equal(taking, torch.full((3,), 5.0))
    assert requires_grad(taking)
    with pytest.raises(
        ValueError, match=r"(?i)a parameter on meta.* cannot take data on cpu.*; replace .*update_parameter_by_name"
    ):
        update_param_data(parameter(torch.zeros(2, device="meta")), data)
    with pytest.raises(TypeError, match="update_param_data takes a tensor, got list"):
        update_param_data(taking, [1.0])


def test_load_into_param_copies_in_place():
    filled = parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    pointer = filled.data_ptr()
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    load_into_param(filled, leaf(values))
    assert filled.data_ptr() == pointer
    assert equal(filled, values.bfloat16())
    assert is_leaf(filled)
    load_into_param(parameter(torch.zeros(0, 3)), ours(torch.zeros(0, 3)))
    strided = ours(torch.zeros(4, 3))
    load_into_param(strided.T[:, ::2], ours(torch.ones(3, 2)))
    assert theirs(strided).sum(1).tolist() == [3, 0, 3, 0]


@pytest.mark.parametrize(
    ("values", "data", "error", "message"),
    [
        (torch.zeros(2), torch.zeros(3), ValueError, r"data of shape \(3,\) does not fit a parameter of shape \(2,\)$"),
        (torch.zeros(1, 2), torch.zeros(2), ValueError, r"data of shape \(2,\) does not fit"),
        (torch.zeros(2, dtype=torch.int32), torch.zeros(2), TypeError, r"float32 would lose its meaning .*int32"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.complex64), TypeError, "complex64 would lose its meaning"),
        (torch.zeros(2, device="meta"), torch.zeros(2), ValueError, "the parameter .* is on the meta device"),
        (torch.zeros(2), torch.zeros(2, device="meta"), ValueError, "the data .* is on the meta device"),
        (torch.zeros(2), [0.0, 0.0], TypeError, "takes a tensor, got list"),
    ],
)
def test_load_into_param_says_what_is_wrong(values, data, error, message):
    with pytest.raises(error, match=message):
        load_into_param(parameter(values, requires_grad=False), ours(data))


# ---------------------------------------------------------------------------------------------------------------------
# init_parameters
# ---------------------------------------------------------------------------------------------------------------------


def test_values_are_those_of_the_module_s_own_initialisation():
    with init_on_device("meta"):
        layer = linear(400, 30)
    assert all(is_meta(one) for one in parameters_of(layer))
    init_parameters(layer, 0)
    weight, direct = theirs(layer.weight), theirs(linear(400, 30).weight)
    assert weight.shape == (30, 400) and weight.dtype is torch.float32
    assert weight.std().item() == pytest.approx(direct.std().item(), rel=0.05)
    assert abs(weight.mean().item()) < 0.01
    assert requires_grad(layer.weight) and isinstance(layer.weight, get_platform().Parameter)


def test_what_has_values_keeps_them():
    kept_whole = linear(2, 2)
    with init_on_device("meta"):
        model = sequential(linear(2, 2), linear(2, 2), kept_whole)
    kept_weight = parameter(torch.full((2, 2), 7.0))
    update_parameter_by_name(model, search_parameter_by_name(model, "1.weight"), kept_weight)
    before = theirs(kept_whole.weight).clone()
    init_parameters(model, 1)
    assert model[1].weight is kept_weight
    assert equal(kept_weight, torch.full((2, 2), 7.0))
    assert equal(kept_whole.weight, before)
    assert not any(is_meta(one) for one in parameters_of(model))
    values = [theirs(one).clone() for one in parameters_of(model)]
    init_parameters(model, 1)
    assert all(equal(one, value) for one, value in zip(parameters_of(model), values, strict=True))


class Plain(Module):
    """Own parameters, and nothing that says how they begin."""

    def __init__(self):
        super().__init__()
        self.gain = parameter(torch.ones(2))
        self.register_buffer("steps", get_platform().zeros((), "int64", "meta"))


class Resetting(Module):
    """Says how its parameters begin."""

    def __init__(self):
        super().__init__()
        self.gain = parameter(torch.ones(2))

    def reset_parameters(self):
        load_into_param(self.gain, ours(torch.tensor([3.0, 4.0])))


def test_modules_that_say_how_they_begin_are_asked():
    with init_on_device("meta"):
        model = sequential(linear(2, 2), Resetting())
    assert is_meta(model[1].gain)
    init_parameters(model, 0)
    assert equal(model[1].gain, torch.tensor([3.0, 4.0]))
    kept = Resetting()
    init_parameters(kept, 0)
    assert equal(kept.gain, torch.ones(2))


def test_tensors_that_nobody_initialises_are_named():
    with init_on_device("meta"):
        model = sequential(linear(2, 2), Plain())
    with pytest.raises(
        RuntimeError,
        match=r"stage 2: no module gave a value to '1.gain' of Plain, '1.steps' of Plain; define reset_param",
    ):
        init_parameters(model, 2)
    with init_on_device("meta"):
        alone = Plain()
    with pytest.raises(RuntimeError, match="no module gave a value to 'gain' of Plain, 'steps' of Plain;"):
        init_parameters(alone, 0)


def test_tied_parameters_are_one():
    with init_on_device("meta"):
        model = TiedModel()
    table = getattr(model.embedding, TABLE)
    assert model.head.weight is table and is_meta(table)
    update_parameter_by_name(model, search_parameter_by_name(model, "scale"), ours(torch.ones(())))
    for name in ("weight", "bias"):
        found = search_parameter_by_name(model, f"block.norm.{name}")
        update_parameter_by_name(model, found, ours(torch.ones(4)))
    init_parameters(model, 0)
    assert model.head.weight is getattr(model.embedding, TABLE)
    assert torch.isfinite(theirs(model.head.weight)).all() and theirs(model.head.weight).any()


def test_attributes_of_parameters_are_kept():
    with init_on_device("meta"):
        layer = linear(2, 2)
    layer.weight.mark = "kept"
    layer.bias.requires_grad = False
    init_parameters(layer, 0, device="cpu")
    assert layer.weight.mark == "kept"
    assert not requires_grad(layer.bias)


def test_init_parameters_says_what_is_wrong():
    with pytest.raises(ValueError, match="module is None"):
        init_parameters(None, 0)
    with pytest.raises(ValueError, match="stage_index must be 0 or more, got -1"):
        init_parameters(linear(1, 1), -1)
    with pytest.raises(TypeError, match=r"stage_index must be an int, got 1\.0"):
        init_parameters(linear(1, 1), 1.0)
    with pytest.raises(TypeError, match="takes a module, got list"):
        init_parameters([], 0)
    with pytest.raises(ValueError, match="the meta device holds no values"):
        init_parameters(linear(1, 1), 0, device="meta")
    with init_on_device("meta"):
        layer = linear(1, 1)
        with pytest.raises(RuntimeError, match="called inside init_on_device"):
            init_parameters(layer, 0)
