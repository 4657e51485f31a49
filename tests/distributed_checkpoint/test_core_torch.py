"""Checkpoints of PyTorch's own kinds of tensors: parameters, views, conjugates, sparse ones."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel import checkpoint


def test_parameters_keep_their_identity_and_views_are_written_through(tmp_path):
    module = torch.nn.Linear(3, 2)
    wanted = {name: value.detach().clone() for name, value in module.state_dict().items()}
    checkpoint.save(module.state_dict(), checkpoint_id=tmp_path / "a")
    with torch.no_grad():
        module.weight.zero_()
    weight = module.weight
    checkpoint.load(module.state_dict(), checkpoint_id=tmp_path / "a")
    assert module.weight is weight
    assert torch.equal(module.weight, wanted["weight"])
    base = torch.zeros(4, 6)
    checkpoint.save({"v": torch.arange(6.0).reshape(3, 2)}, checkpoint_id=tmp_path / "b")
    checkpoint.load({"v": base[:2, ::2].T}, checkpoint_id=tmp_path / "b")
    assert torch.equal(base[:2, ::2].T, torch.arange(6.0).reshape(3, 2))
    assert base.sum() == 15
    conj = torch.tensor([1 + 2j, 3j]).conj()
    checkpoint.save({"c": conj}, checkpoint_id=tmp_path / "c")
    target = torch.zeros(2, dtype=torch.complex64)
    checkpoint.load({"c": target.conj()}, checkpoint_id=tmp_path / "c")
    assert torch.equal(target.conj(), conj)


def test_a_gradient_that_needs_the_values_before_a_load_is_an_error(tmp_path):
    weight = torch.nn.Parameter(torch.ones(3))
    checkpoint.save({"w": weight}, checkpoint_id=tmp_path)
    loss = (weight * weight).sum()
    checkpoint.load({"w": weight}, checkpoint_id=tmp_path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(("shape", "strides", "meets"), [((3, 4), (2, 1), True), ((2, 2), (3, 2), False)])
def test_elements_that_share_memory_cannot_be_loaded_into(tmp_path, shape, strides, meets):
    values = torch.randn(shape)
    checkpoint.save({"w": values}, checkpoint_id=tmp_path)
    target = torch.zeros(10).as_strided(shape, strides)
    if meets:
        with pytest.raises(ValueError, match="'w' cannot be loaded into: several of its elements are one place"):
            checkpoint.load({"w": target}, checkpoint_id=tmp_path)
    else:
        checkpoint.load({"w": target}, checkpoint_id=tmp_path)
        assert torch.equal(target, values)


def test_sparse_tensors_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"'w' cannot be saved: .*is not dense"):
        checkpoint.save({"w": torch.eye(2).to_sparse()}, checkpoint_id=tmp_path / "b")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(tmp_path):
    with pytest.raises(TypeError, match="'n' has no shape"):
        checkpoint.save({"n": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, checkpoint_id=tmp_path / "x")
