"""What is PyTorch's own about state: names of wrapped and compiled modules, its options, its kinds of tensors."""

import pytest
import torch
from torch import nn

from hyper_parallel.platform.torch.modules.state import get_model_state_dict, load_checkpoint, save_checkpoint
from tests.world import run_on_ranks


def state_dict_options(**options):
    from torch.distributed.checkpoint.state_dict import StateDictOptions  # here: its import costs a second

    return StateDictOptions(**options)


def test_torch_s_options():
    model = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    state = get_model_state_dict(model, options=state_dict_options(ignore_frozen_params=True, strict=False))
    assert list(state) == ["bias"]
    assert not any(tensor.requires_grad for tensor in get_model_state_dict(model).values())
    whole = get_model_state_dict(model, options=state_dict_options(full_state_dict=True, cpu_offload=True))
    assert list(whole) == ["weight", "bias"]


def test_compiled_modules_give_the_names_of_the_bare_ones():
    model = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Sequential(torch.compile(nn.Linear(2, 2)))))
    assert list(model.state_dict())[-1] == "1._orig_mod.0._orig_mod.bias"
    assert list(get_model_state_dict(model)) == ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]
    assert list(get_model_state_dict(torch.compile(nn.Linear(1, 1)))) == ["weight", "bias"]


@run_on_ranks(2)
def test_wrapped_models_and_whole_state_on_rank_0_only():
    import torch.distributed as dist

    wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2)))
    wrapped.module[0].weight.requires_grad_(False)
    assert list(get_model_state_dict(wrapped)) == ["0.weight", "0.bias"]
    assert list(get_model_state_dict(wrapped, options={"ignore_frozen_params": True})) == ["0.bias"]
    whole = get_model_state_dict(wrapped, options=state_dict_options(full_state_dict=True, cpu_offload=True))
    assert list(whole) == (["0.weight", "0.bias"] if dist.get_rank() == 0 else [])


def test_conjugated_tensors_are_written_as_they_read(tmp_path):
    conjugated = torch.tensor([1 + 2j, 3 - 1j]).conj()
    save_checkpoint({"x": conjugated}, tmp_path / "file")
    assert load_checkpoint(tmp_path / "file")["x"].tolist() == [1 - 2j, 3 + 1j]


def test_sparse_tensors_are_refused(tmp_path):
    with pytest.raises(TypeError, match="'x' is a sparse tensor"):
        save_checkpoint({"x": torch.eye(2).to_sparse()}, tmp_path / "file")


def test_float8_comes_back(tmp_path):
    dtypes = [dtype for name, dtype in vars(torch).items() if name.startswith("float8")]
    tensors = {str(dtype): torch.tensor([[1, 2, 4]]).to(dtype) for dtype in dtypes}
    save_checkpoint(tensors, tmp_path / "file")
    loaded = load_checkpoint(tmp_path / "file")
    for name, tensor in tensors.items():
        assert loaded[name].dtype is tensor.dtype
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8)), name
