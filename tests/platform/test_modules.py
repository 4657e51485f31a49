"""Tests of finding, replacing, reading and filling parameters, of hooks and of `init_parameters`."""

import pytest
import torch
from torch import nn

from hyper_parallel.platform.torch import modules
from hyper_parallel.platform.torch.devices import init_on_device
from hyper_parallel.platform.torch.modules import (
    init_parameters,
    load_into_param,
    search_parameter_by_name,
    update_param_data,
    update_parameter_by_name,
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(self.norm(x))


class TiedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.block = Block()
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids):
        return self.head(self.block(self.embedding(ids))) * self.scale


class Spread(torch.Tensor):
    """Stands for a parameter spread over ranks: rows [start, stop) of a tensor of ``global_rows`` rows are here."""

    @staticmethod
    def make(local, global_rows, layout):
        spread = local.as_subclass(Spread)
        spread.global_rows, spread.own_layout = global_rows, layout
        return spread

    layout = property(lambda self: self.own_layout)
    shape = property(lambda self: torch.Size([self.global_rows, *self.to_local().shape[1:]]))

    def to_local(self):
        return self.as_subclass(torch.Tensor)


# ---------------------------------------------------------------------------------------------------------------------
# Modules and hooks
# ---------------------------------------------------------------------------------------------------------------------


def test_what_is_inside_a_module():
    model = TiedModel()
    assert modules.get_cell_construct(model) == model.forward
    names = dict(modules.get_cells_and_names(model))
    assert list(names) == ["", "embedding", "block", "block.norm", "block.linear", "head"]
    assert names["block.norm"] is model.block.norm
    assert modules.is_linear_module(model.head)
    assert not modules.is_linear_module(model.embedding)
    assert modules.is_embedding_module(model.embedding)
    assert not modules.is_embedding_module(None)


def test_parameters_by_name():
    model = TiedModel()
    parameters = modules.parameters_dict(model)
    assert parameters == dict(model.named_parameters())
    assert "head.weight" not in parameters
    assert modules.parameters_dict(model, remove_duplicate=False)["head.weight"] is model.embedding.weight


def test_forward_pre_hooks_see_kwargs_and_order():
    class Affine(nn.Module):
        def forward(self, x, *, factor=1.0):
            return x * factor

    affine, calls = Affine(), []

    def scale(module, args, kwargs):
        calls.append("scale")
        return args, {"factor": kwargs["factor"] * 10}

    def shift(module, args):
        calls.append("shift")
        return (args[0] + 1,)

    with_kwargs = modules.register_forward_pre_hook(affine, scale, with_kwargs=True)
    modules.register_forward_pre_hook(affine, shift, prepend=True)
    assert affine(torch.tensor(1.0), factor=2.0).item() == 40.0
    assert calls == ["shift", "scale"]
    with_kwargs.remove()
    assert affine(torch.tensor(1.0), factor=2.0).item() == 4.0


def test_backward_hooks_change_gradients():
    linear, calls = nn.Linear(2, 2, bias=False, dtype=torch.float64), []

    def double_output(module, grad_output):
        calls.append("pre")
        return tuple(grad * 2 for grad in grad_output)

    def triple_input(module, grad_input, grad_output):
        calls.append("post")
        return tuple(grad * 3 for grad in grad_input)

    modules.register_full_backward_hook(linear, lambda *_: calls.append("later"))
    handles = [
        modules.register_full_backward_pre_hook(linear, double_output),
        modules.register_full_backward_hook(linear, triple_input, prepend=True),
    ]
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    linear(x).sum().backward()
    hooked = x.grad.clone()
    for handle in handles:
        handle.remove()
    x.grad = None
    linear(x).sum().backward()
    assert torch.allclose(hooked, x.grad * 6)
    assert calls == ["pre", "post", "later", "later"]


# ---------------------------------------------------------------------------------------------------------------------
# Finding and replacing parameters
# ---------------------------------------------------------------------------------------------------------------------


def test_search_finds_exact_names_only():
    model = TiedModel()
    owner_name, owner, parameter = search_parameter_by_name(model, "block.linear.weight")
    assert owner_name == "block.linear"
    assert owner is model.block.linear
    assert parameter is model.block.linear.weight
    assert search_parameter_by_name(model, "scale") == ("", model, model.scale)
    assert search_parameter_by_name(model, "head.weight").owner is model.head
    for absent in ("weight", "block.linear", "head.bias", "no.such.weight", "forward", "block.forward.weight", ""):
        assert search_parameter_by_name(model, absent) is None


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_replacing_a_tied_parameter_keeps_the_tie(name):
    model = TiedModel()
    order = list(model.state_dict())
    new = nn.Parameter(torch.zeros(6, 4))
    assert update_parameter_by_name(model, search_parameter_by_name(model, name), new) is new
    assert model.embedding.weight is model.head.weight is new
    assert list(model.state_dict()) == order
    assert not model(torch.tensor([1])).any()


def test_a_plain_tensor_becomes_a_parameter():
    model = TiedModel()
    model.scale.requires_grad_(False)
    installed = update_parameter_by_name(model, search_parameter_by_name(model, "scale"), torch.tensor(2.0))
    assert isinstance(model.scale, nn.Parameter)
    assert model.scale is installed
    assert not model.scale.requires_grad


def test_replacing_says_what_is_wrong():
    model = TiedModel()
    found = search_parameter_by_name(model, "block.linear.weight")
    with pytest.raises(ValueError, match="the search found no parameter of that name"):
        update_parameter_by_name(model, None, torch.zeros(1))
    with pytest.raises(TypeError, match="the new parameter must be a tensor, got list"):
        update_parameter_by_name(model, found, [1.0])
    update_parameter_by_name(model, found, torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"found in 'block.linear' is no longer in this module; search again"):
        update_parameter_by_name(model, found, torch.zeros(4, 4))


# ---------------------------------------------------------------------------------------------------------------------
# This rank's part of a parameter
# ---------------------------------------------------------------------------------------------------------------------


def test_plain_parameters_are_their_own_part():
    parameter = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    assert modules.get_param_local_shape(parameter) == (2, 3)
    assert modules.get_param_type_size(parameter) == 2
    data = modules.get_param_local_data(parameter)
    assert not data.requires_grad
    data.fill_(1)
    assert parameter.sum() == 6


def test_spread_parameters_are_read_and_written_by_their_part():
    local = torch.zeros(2, 3)
    spread = Spread.make(local, 5, "rows")
    assert spread.shape == (5, 3)
    assert modules.get_param_local_shape(spread) == (2, 3)
    assert type(modules.get_param_local_data(spread)) is torch.Tensor
    load_into_param(spread, torch.ones(2, 3))
    assert local.sum() == 6
    update_param_data(spread, torch.full((2, 3), 2.0))
    assert local.sum() == 12
    load_into_param(spread, Spread.make(torch.zeros(2, 3), 5, "rows"))
    assert local.sum() == 0
    with pytest.raises(
        ValueError, match=r"data of shape \(5, 3\) does not fit .* \(2, 3\) \(this rank's part of \(5, 3\)\)"
    ):
        load_into_param(spread, torch.ones(5, 3))
    with pytest.raises(ValueError, match="the data lies as columns but the parameter as rows; redistribute"):
        load_into_param(spread, Spread.make(torch.zeros(2, 3), 5, "columns"))
    with pytest.raises(ValueError, match="the data lies as rows but the parameter whole on this rank"):
        load_into_param(nn.Parameter(torch.zeros(2, 3)), spread)


def test_layouts_are_kept_on_parameters():
    parameter = nn.Parameter(torch.zeros(2))
    assert modules.set_layout_into_parameter(parameter, "rows") is parameter
    assert parameter.hyper_parallel_layout == "rows"
    spread = Spread.make(torch.zeros(2), 4, "rows")
    assert modules.set_layout_into_parameter(spread, "rows") is spread
    with pytest.raises(ValueError, match="already lies as rows, which is not columns; change it with redistribute"):
        modules.set_layout_into_parameter(spread, "columns")


def test_update_param_data_takes_the_memory():
    parameter = nn.Parameter(torch.zeros(2))
    data = torch.ones(3)
    update_param_data(parameter, data)
    data.fill_(5)
    assert parameter.tolist() == [5.0, 5.0, 5.0]
    assert parameter.requires_grad
    with pytest.raises(
        ValueError, match=r"a parameter on meta cannot take data on cpu; replace .*update_parameter_by_name"
    ):
        update_param_data(nn.Parameter(torch.zeros(2, device="meta")), data)
    with pytest.raises(TypeError, match="update_param_data takes a tensor, got list"):
        update_param_data(parameter, [1.0])


def test_load_into_param_copies_in_place():
    parameter = nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    pointer = parameter.data_ptr()
    data = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    load_into_param(parameter, data)
    assert parameter.data_ptr() == pointer
    assert parameter.tolist() == data.tolist()
    assert parameter.is_leaf
    load_into_param(nn.Parameter(torch.zeros(0, 3)), torch.zeros(0, 3))


@pytest.mark.parametrize(
    ("parameter", "data", "error", "message"),
    [
        (torch.zeros(2), torch.zeros(3), ValueError, r"data of shape \(3,\) does not fit a parameter of shape \(2,\)$"),
        (torch.zeros(1, 2), torch.zeros(2), ValueError, r"data of shape \(2,\) does not fit"),
        (torch.zeros(2, dtype=torch.int32), torch.zeros(2), TypeError, r"torch.float32 would lose its meaning .*int32"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.complex64), TypeError, "complex64 would lose its meaning"),
        (torch.zeros(2, device="meta"), torch.zeros(2), ValueError, "the parameter .* is on the meta device"),
        (torch.zeros(2), torch.zeros(2, device="meta"), ValueError, "the data .* is on the meta device"),
        (torch.zeros(2), [0.0, 0.0], TypeError, "takes a tensor, got list"),
    ],
)
def test_load_into_param_says_what_is_wrong(parameter, data, error, message):
    with pytest.raises(error, match=message):
        load_into_param(nn.Parameter(parameter, requires_grad=False), data)


# ---------------------------------------------------------------------------------------------------------------------
# init_parameters
# ---------------------------------------------------------------------------------------------------------------------

BUILDERS = {
    "linears": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
    "norms": lambda: nn.Sequential(nn.BatchNorm1d(3), nn.LayerNorm(3), nn.Conv1d(3, 3, 2)),
    "embedding": lambda: nn.Embedding(7, 3, padding_idx=2),
    "recurrent": lambda: nn.LSTM(3, 4, num_layers=2),
    "attention": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
    "transformer layer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "bfloat16": lambda: nn.Linear(3, 3, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("include_buffers", [False, True])
def test_the_same_seed_gives_the_same_values_as_building_directly(name, include_buffers):
    torch.manual_seed(3)
    expected = BUILDERS[name]()
    with init_on_device("meta", include_buffers=include_buffers):
        model = BUILDERS[name]()
    assert any(parameter.is_meta for parameter in model.parameters())
    torch.manual_seed(3)
    init_parameters(model, 0)
    state = model.state_dict()
    assert list(state) == list(expected.state_dict())
    for key, value in expected.state_dict().items():
        assert torch.equal(state[key], value), key
    assert all(isinstance(parameter, nn.Parameter) and parameter.requires_grad for parameter in model.parameters())


def test_what_has_values_keeps_them():
    with init_on_device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    kept_whole, kept_weight = nn.Linear(2, 2), nn.Parameter(torch.full((2, 2), 7.0))
    model.append(kept_whole)
    model[1].weight = kept_weight
    before = kept_whole.weight.clone()
    init_parameters(model, 1)
    assert model[1].weight is kept_weight
    assert torch.equal(kept_weight, torch.full((2, 2), 7.0))
    assert torch.equal(kept_whole.weight, before)
    assert not any(parameter.is_meta for parameter in model.parameters())
    values = {key: value.clone() for key, value in model.state_dict().items()}
    init_parameters(model, 1)
    assert all(torch.equal(values[key], value) for key, value in model.state_dict().items())


class Plain(nn.Module):
    """Own parameters, and nothing that says how they begin."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def test_tied_parameters_are_one_and_keep_their_first_owners_values():
    with init_on_device("meta"):
        model = nn.ModuleDict({"embedding": nn.Embedding(50, 40), "head": nn.Linear(40, 50, bias=False)})
        model["head"].weight = model["embedding"].weight
    init_parameters(model, 0)
    assert model["head"].weight is model["embedding"].weight
    # An Embedding starts with deviation 1, a Linear with 1 / sqrt(3 * 40), about 0.09.
    assert 0.9 < model["embedding"].weight.std() < 1.1


def test_tensors_that_nobody_initialises_are_named():
    with init_on_device("meta", include_buffers=True):
        model = nn.Sequential(nn.Linear(2, 2), Plain())
    with pytest.raises(
        RuntimeError,
        match=r"stage 2: no module gave a value to '1.gain' of Plain, '1.steps' of Plain; define reset_param",
    ):
        init_parameters(model, 2)
    with init_on_device("meta"):
        alone = Plain()
    with pytest.raises(RuntimeError, match="no module gave a value to 'gain' of Plain;"):
        init_parameters(alone, 0)


def test_subclasses_and_attributes_of_parameters_are_kept():
    with init_on_device("meta"):
        linear = nn.Linear(2, 2)
    linear.weight.mark = "kept"
    linear.bias.requires_grad_(False)
    init_parameters(linear, 0, device="cpu")
    assert linear.weight.mark == "kept"
    assert not linear.bias.requires_grad


def test_lazy_modules_can_be_used_afterwards():
    with init_on_device("meta"):
        lazy = nn.LazyLinear(3)
    init_parameters(lazy, 0)
    assert lazy(torch.zeros(1, 4)).shape == (1, 3)
    assert torch.isfinite(lazy.weight).all()


def test_init_parameters_says_what_is_wrong():
    with pytest.raises(ValueError, match="module is None"):
        init_parameters(None, 0)
    with pytest.raises(ValueError, match="stage_index must be 0 or more, got -1"):
        init_parameters(nn.Linear(1, 1), -1)
    with pytest.raises(TypeError, match=r"stage_index must be an int, got 1\.0"):
        init_parameters(nn.Linear(1, 1), 1.0)
    with pytest.raises(TypeError, match="takes a module, got list"):
        init_parameters([], 0)
    with pytest.raises(ValueError, match="the meta device holds no values"):
        init_parameters(nn.Linear(1, 1), 0, device="meta")
    with init_on_device("meta"):
        linear = nn.Linear(1, 1)
        with pytest.raises(RuntimeError, match="called inside init_on_device"):
            init_parameters(linear, 0)
