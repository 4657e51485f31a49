"""The reference model on axis ``tp`` of ``(cp, tp)``, its sequences sharded over ``cp``: loss and gradients of one
device, on both frameworks."""

import numpy as np
import pytest

import hyper_parallel as hp
from tests.frameworks import assert_close, on_mindspore, ours
from tests.frameworks.values import distribute_tensor
from tests.tensor_parallel.llama_training import SEED, SIZES
from tests.world import run_on_ranks, small_or_sweep

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5} if on_mindspore else {"rtol": 1e-9, "atol": 1e-9}


def _tokens():
    from torch import from_numpy

    return from_numpy(np.random.RandomState(0).randint(0, SIZES["vocab_size"], (2, 14)))


def _built(mesh=None, plan=None, **options):
    with hp.deferred_init():
        model = hp.models.Llama(hp.models.LlamaConfig(**SIZES, tie_head=options.pop("tied", False)))
    if not on_mindspore:
        model = model.double()
    if mesh is not None:
        make = hp.models.llama_plan if plan == "by hand" else lambda **known: hp.plans.for_model(model, **known)
        model = hp.parallelize_module(model, mesh, make(**options), axes="tp")
    hp.manual_seed(SEED)
    return hp.materialize(model)


def _step(model, ids, labels):
    """The loss and every gradient, whole."""
    parameters = hp.get_platform().parameters_dict(model)
    loss, gradients = hp.value_and_grad(lambda: model(ids, labels), list(parameters.values()))()
    found = {"loss": loss, **dict(zip(parameters, gradients, strict=True))}
    return {name: one.full_tensor() if isinstance(one, hp.DTensor) else one for name, one in found.items()}


@pytest.mark.sweep("mindspore")
@run_on_ranks(4, timeout=300)
@pytest.mark.parametrize("cp", small_or_sweep([2, 4], [2]))
@pytest.mark.parametrize("plan", ["by hand", "structure"])
def test_loss_and_gradients_are_those_of_one_device(plan, cp, sweep):
    mesh = hp.init_device_mesh("cpu", (cp, 4 // cp), mesh_dim_names=("cp", "tp"))
    tokens = _tokens()
    given = [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]
    on_sequence = [distribute_tensor(part, mesh, [hp.Shard(1), hp.Replicate()]) for part in given]
    for tied in (False, True):
        want = _step(_built(tied=tied), *ours(given))
        for sequence_parallel in (False, True) if sweep or not on_mindspore else (not tied,):
            model = _built(mesh, plan, tied=tied, sequence_parallel=sequence_parallel)
            parameters = hp.get_platform().parameters_dict(model).values()
            assert all(one.device_mesh == mesh and one.placements[0] == hp.Replicate() for one in parameters)
            got = _step(model, *on_sequence)
            assert got.keys() == want.keys()
            for name, value in want.items():
                assert_close(got[name], value, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")
