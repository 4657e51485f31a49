"""Operators without a rule: right by gathering, one warning that says where, an error in strict mode."""

import warnings

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.shard.dispatching.strict_mode import gathered_ops
from tests.frameworks import assert_close, backward, dist, distribute_tensor, grad_of, leaf, on_mindspore
from tests.world import run_on_ranks

if on_mindspore:
    from mindspore import ops

NAME = "MatrixBandPart" if on_mindspore else "cov"


def _without_a_rule(x):
    return ops.matrix_band_part(x, 1, 0) if on_mindspore else torch.cov(x)


@run_on_ranks(2)
def test_it_is_right_and_warned_about_once():
    mesh = hp.init_device_mesh("cpu", (dist.get_world_size(),))
    values = torch.rand(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = values.clone().requires_grad_()
    expected = whole.tril().triu(-1) if on_mindspore else torch.cov(whole)
    x = distribute_tensor(leaf(values), mesh, [hp.Shard(0)])
    gathered_ops.pop(NAME, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [_without_a_rule(x), _without_a_rule(x)]
    (message,) = [str(warning.message) for warning in caught if "gathering" in str(warning.message)]
    assert message.startswith(f"{NAME} at {__file__}:"), message
    assert f"register a rule for '{NAME}'" in message
    for result in results:
        assert_close(result.full_tensor(), expected.detach())
    expected.square().sum().backward()
    backward((results[0] * results[0]).sum())
    assert_close(grad_of(x).full_tensor(), whole.grad)


@run_on_ranks(2)
def test_strict_mode_forbids_it(monkeypatch):
    mesh = hp.init_device_mesh("cpu", (dist.get_world_size(),))
    x, y = (distribute_tensor(torch.rand(4, 4), mesh, [hp.Shard(dim)]) for dim in (0, 1))
    forbidden = rf"{NAME} at .*test_fallback.py:\d+ has no sharding rule for .* strict mode forbids to gather"
    with hp.strict(), pytest.raises(RuntimeError, match=forbidden):
        _without_a_rule(x)
    with hp.strict():
        x + y  # a rule may move its inputs
    with hp.strict(implicit_redistribution=True), pytest.raises(RuntimeError, match=r"add at .* would redistribute"):
        x + y
    with monkeypatch.context() as environment:
        environment.setenv("HYPER_PARALLEL_STRICT", "1")
        with pytest.raises(RuntimeError, match=forbidden):
            _without_a_rule(x)
    _without_a_rule(x)
