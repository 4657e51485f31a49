"""What is PyTorch's own about modules: `init_parameters` gives the values that building them directly gives."""

import pytest
import torch
from torch import nn

from hyper_parallel.platform.torch.base.devices import init_on_device
from hyper_parallel.platform.torch.modules.modules import init_parameters

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


def test_tied_parameters_are_one_and_keep_their_first_owners_values():
    with init_on_device("meta"):
        model = nn.ModuleDict({"embedding": nn.Embedding(50, 40), "head": nn.Linear(40, 50, bias=False)})
        model["head"].weight = model["embedding"].weight
    init_parameters(model, 0)
    assert model["head"].weight is model["embedding"].weight
    # An Embedding starts with deviation 1, a Linear with 1 / sqrt(3 * 40), about 0.09.
    assert 0.9 < model["embedding"].weight.std() < 1.1


def test_lazy_modules_can_be_used_afterwards():
    with init_on_device("meta"):
        lazy = nn.LazyLinear(3)
    init_parameters(lazy, 0)
    assert lazy(torch.zeros(1, 4)).shape == (1, 3)
    assert torch.isfinite(lazy.weight).all()
