"""Ready plans on one axis of a wider mesh: activations sharded on the sequence over the others, as on one device."""

import pytest

import hyper_parallel as hp
from tests.world import run_on_ranks, small_or_sweep

pytest.importorskip("transformers", reason='these models are in an extra: pip install "hyper-parallel[transformers]"')

from tests.tensor_parallel.hugging_face import assert_same, batch, build, in_double, train
from tests.tensor_parallel.test_reduced_later_models import hand_over

only_on = "torch"  # models of transformers, which are PyTorch's
TIMEOUT = 600
FAMILIES = ("llama", "qwen3", "gpt2", "mixtral", "llama_odd_heads", "bert", "mistral")


def _mesh(cp):
    ranks = hp.get_platform().get_world_size()
    return hp.init_device_mesh("cpu", (cp, ranks // cp), mesh_dim_names=("cp", "tp"))


def _on_sequence(given, mesh):
    return {name: hp.distribute_tensor(value, mesh, [hp.Shard(1), hp.Replicate()]) for name, value in given.items()}


def _train(model, given):
    with in_double():
        return train(model, given)


@run_on_ranks(4, timeout=TIMEOUT)
@pytest.mark.parametrize("name", small_or_sweep(FAMILIES, ("gpt2", "mixtral")))
def test_training_equals_one_device(name):
    """13 tokens over 2 x 2 ranks: no block of the sequence is like the others."""
    mesh, given = _mesh(2), batch(name, length=13)
    want = _train(build(name), given)
    for sequence_parallel in (False, True):
        model = build(name)
        plan = hp.plans.for_model(model, sequence_parallel=sequence_parallel)
        hp.parallelize_module(model, mesh, plan, axes="tp")
        assert {parameter.device_mesh for parameter in model.parameters()} == {mesh}
        assert all(parameter.placements[0] == hp.Replicate() for parameter in model.parameters())
        assert_same(_train(model, _on_sequence(given, mesh)), want, rtol=1e-9, atol=1e-9)


@run_on_ranks(4, timeout=TIMEOUT)
@pytest.mark.parametrize("name", small_or_sweep(["llama", "gpt2"], ["gpt2"]))
def test_a_plan_on_a_part_of_the_mesh_takes_activations_on_the_whole(name):
    mesh, given = _mesh(2), batch(name, length=13)
    want = _train(build(name), given)
    for sequence_parallel in (False, True):
        model = build(name)
        plan = hp.plans.for_model(model, sequence_parallel=sequence_parallel)
        hp.parallelize_module(model, mesh["tp"], plan)
        assert {parameter.device_mesh for parameter in model.parameters()} == {mesh["tp"]}
        assert_same(_train(model, _on_sequence(given, mesh)), want, rtol=1e-9, atol=1e-9)


@run_on_ranks(2, timeout=TIMEOUT)
@pytest.mark.parametrize("name", small_or_sweep(["llama", "gpt2"], ["gpt2"]))
def test_other_axes_of_size_1_cost_nothing(name):
    mesh, given = _mesh(1), batch(name, length=13)
    counts = []
    for axes, inputs in (("tp", _on_sequence(given, mesh)), ("tp", given), (None, given)):
        model = build(name)
        plan = hp.plans.for_model(model, sequence_parallel=True)
        hp.parallelize_module(model, mesh if axes else mesh["tp"], plan, axes=axes)
        with hp.CommRecorder() as recorder:
            got = _train(model, inputs)
            counts.append(dict(recorder.counts))
        assert_same(got, _train(build(name), given), rtol=1e-9, atol=1e-9)
    assert counts[0] == counts[1] == counts[2]


@run_on_ranks(2, timeout=TIMEOUT)
@pytest.mark.parametrize("name", small_or_sweep(["llama", "qwen3", "gpt2", "gemma2"], ["qwen3", "gpt2"]))
def test_parameters_that_a_wrapper_reduces_cost_nothing_until_then(name):
    """Context parallelism alone: every weight is used with other tokens on every rank."""
    mesh, given = _mesh(2), batch(name, length=13)
    models = [build(name) for _ in range(3)]
    sent = []
    for model, is_later in zip(models, (None, False, True), strict=True):
        inputs = given
        if is_later is not None:
            hp.parallelize_module(model, mesh, hp.plans.for_model(model), axes="tp")
            inputs = _on_sequence(given, mesh)
        if is_later:
            hand_over(model, "cp")
        with in_double():
            loss = model(**inputs).loss
            with hp.CommRecorder() as recorder:
                loss.backward()
        sums = [record.shape for record in recorder.records if record.op == "all_reduce"]
        sent.append(sum(len(shape) <= 2 for shape in sums))  # of four dims: keys and values, which attention gathered
    assert sent[1] >= len(list(models[0].parameters())) and sent[2] == 0, recorder.table()
    want = {name: parameter.grad for name, parameter in models[0].named_parameters()}
    for model in models[1:]:
        got = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
        assert_same(got, want, rtol=1e-9, atol=1e-9)
