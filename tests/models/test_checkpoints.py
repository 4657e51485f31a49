"""Checkpoints of a model with mixtures of experts: saved with its experts on any number of ranks, loaded on any other,
by either framework, and still the same run."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.commands import command_environment
from tests.frameworks import on_mindspore
from tests.models.test_mixture import SIZES, values_of
from tests.world import run_on_ranks

CONFIG = {**SIZES, "sequence_loss": 0.1, "shared_dim": 6}
DEGREES = {1: "dp_shard=1", 2: "dp_shard=2, ep=2", 3: "dp_shard=3, ep=3", 4: "dp_shard=4, ep=4"}


def _run(degrees):
    with hp.deferred_init():
        model = hp.models.Mixture(hp.models.MixtureConfig(**CONFIG))
    return hp.parallelize(model, degrees)


def _batch(run):
    ids = np.random.default_rng(3).integers(0, 37, (6, 9))
    mine = run.mine(range(6))
    platform = get_platform()
    dtype, device = platform.str_to_dtype("int64"), platform.get_device_type()
    part = platform.from_numpy(np.ascontiguousarray(ids[mine.start : mine.stop]), dtype, device)
    return part[:, :-1], part[:, 1:]


def _trained(degrees):
    """A run of two steps, with moments and a bias."""
    run = _run(degrees).materialize(seed=3)
    optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2)
    for _ in range(2):
        run.forward_backward(*_batch(run))
        optimizer.step()
        hp.models.update_expert_bias(run)
        run.zero_grad()
    return run, optimizer


def _state(run):
    state = run.state_dict()["model"]
    return {name.replace("embedding_table", "weight"): values_of(one).copy() for name, one in state.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a checkpoint of four ranks with a block of experts each, and what is in it."""
    if on_mindspore:
        pytest.skip("saved by PyTorch")
    from hyper_parallel.testing import threads

    folder = tmp_path_factory.mktemp("saved") / "checkpoint"

    def program():
        run, optimizer = _trained(DEGREES[4])
        run.save(folder, optimizer=optimizer)
        loss = float(values_of(run.forward_backward(*_batch(run))))
        return _state(run), loss

    state, loss = threads(4).run(program)[0]
    return folder, state, loss


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.skipif(on_mindspore, reason="the same by PyTorch's ranks, which are threads here")
def test_saved_on_four_ranks_and_loaded_on_others(saved, ranks):
    from hyper_parallel.testing import threads

    folder, state, loss = saved
    assert any(np.abs(value).max() > 0 for name, value in state.items() if name.endswith("expert_bias"))

    def program():
        run = _run(DEGREES[ranks]).materialize(seed=8)
        optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2)
        run.load(folder, optimizer=optimizer)
        moments = {id(one): optimizer.state[one]["exp_avg"] for one in run.parameters()}
        sizes = {tuple(values_of(one).shape) for one in moments.values()}
        return _state(run), float(values_of(run.forward_backward(*_batch(run)))), sizes

    for got, found, sizes in threads(ranks).run(program):
        assert got.keys() == state.keys()
        for name, value in got.items():
            np.testing.assert_array_equal(value, state[name], err_msg=name)
        assert found == pytest.approx(loss, rel=1e-5) and (6, 10, 16) in sizes


_IN_FOUR_PARTS = """
import sys
from hyper_parallel.testing import threads
from tests.models.test_checkpoints import DEGREES, _state, _trained
import numpy as np

def program():
    run, _ = _trained(DEGREES[4])
    run.save(sys.argv[1])
    return _state(run)

np.savez(sys.argv[2], **threads(4).run(program)[0])
"""


@pytest.mark.skipif(not on_mindspore, reason="loaded by MindSpore")
@run_on_ranks(1, timeout=200)
def test_saved_by_pytorch_and_loaded_by_mindspore(tmp_path):
    folder = tmp_path / "checkpoint"
    command = [sys.executable, "-c", _IN_FOUR_PARTS, str(folder), str(tmp_path / "values.npz")]
    subprocess.run(command, check=True, env=command_environment(), timeout=180)
    run = _run(DEGREES[1]).materialize(seed=8)
    run.load(folder)
    with np.load(tmp_path / "values.npz") as values:
        got = _state(run)
        assert got.keys() == set(values)
        for name, value in got.items():
            np.testing.assert_array_equal(value, values[name], err_msg=name)
