"""`hp.parallelize` of Hugging Face models and inputs that need something of their own: the numbers of one device."""

import pytest

pytest.importorskip("transformers", reason='these models are in an extra: pip install "hyper-parallel[transformers]"')

import torch

import hyper_parallel as hp
from hyper_parallel.testing import threads
from tests.parallel.training import batch
from tests.tensor_parallel.hugging_face import assert_same, build, in_double, whole


def _on_one_device(name, given):
    model = build(name)
    with in_double():
        loss = model(**given).loss
        loss.backward()
    return {"loss": loss.detach()} | {key: one.grad for key, one in model.named_parameters()}


def _on_a_rank(name, given, degrees, options):
    run = hp.parallelize(build(name), degrees, **options)
    mine = run.mine(range(len(next(iter(given.values())))))
    with in_double():
        loss = run.forward_backward(**{key: value[mine.start : mine.stop] for key, value in given.items()})
    return {"loss": loss} | {key: whole(one.grad) for key, one in run.named_parameters()}


def _check(name, given, degrees, ranks, **options):
    build(name)
    want = _on_one_device(name, given)
    for got in threads(ranks, timeout=300).run(_on_a_rank, name, given, degrees, options):
        assert_same(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_recomputed_blocks_of_a_decoder_with_a_config_of_its_own(name):
    """Its cache of keys is told apart from the model's: blocks that are run again must not add to it."""
    _check(name, batch(), "dp_shard=2", 2, recompute="full")


def test_recomputed_blocks_that_save_indices():
    """Eager attention with sinks takes a maximum over keys, and what it saves has no gradient."""
    _check("gpt_oss", batch(), "tp=2", 2, recompute="full")


@pytest.mark.parametrize(("degrees", "ranks"), [("cp=3", 3), ("dp_shard=2, cp=2", 4)])
def test_the_sequence_of_a_model_that_no_plan_can_shard(degrees, ranks):
    _check("mamba", batch(), degrees, ranks, microbatches=2)


@pytest.mark.parametrize(("degrees", "ranks"), [("tp=3", 3), ("dp_shard=2, cp=3", 6)])
def test_degrees_that_divide_nothing(degrees, ranks):
    _check("falcon", batch(), degrees, ranks)


def test_labels_of_samples_under_cp():
    given = {"input_ids": batch()["input_ids"], "labels": torch.arange(7) % 3}
    _check("bert_classes", given, "dp_shard=2, cp=2", 4, microbatches=2)


def test_sequences_shorter_than_cp_and_masks_of_four_dims():
    given = {name: value[:, 4:7].contiguous() for name, value in batch().items()}
    _check("llama", given, "cp=4", 4)
    seen = torch.rand(7, 1, 13, 13, generator=torch.Generator().manual_seed(0)) > 0.3
    mask = (seen & torch.ones(13, 13).tril().bool()) | torch.eye(13).bool()
    _check("llama", {**batch(), "attention_mask": mask}, "cp=3", 3)


def _with_labels_cut(model):
    """Gives its loss function the labels behind the first, as GIT does: not those that the batch has."""
    plain = type(model).forward

    class CutsLabels(type(model)):
        def forward(self, input_ids, labels):
            outputs = plain(self, input_ids)
            given = {"labels": None, "shift_labels": labels[:, 1:].contiguous(), "vocab_size": self.vocab_size}
            return {"loss": self.loss_function(logits=outputs.logits[:, :-1].contiguous(), **given)}

    model.__class__ = CutsLabels
    return model


def test_labels_that_a_model_cuts_before_its_loss_function():
    model = _with_labels_cut(build("llama"))
    with in_double():
        want = model(**batch())["loss"].detach()

    def work(degrees):
        run = hp.parallelize(_with_labels_cut(build("llama")), degrees)
        with in_double():
            return run.forward_backward(**batch())

    for got in threads(2).run(work, "tp=2"):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match=r"CutsLabels computed cross_entropy as a mean over 37 numbers .* where 40 "):
        threads(2).run(work, "dp_shard=2")


def _columns_and_rows(**options):
    paths = ("gate_proj", "up_proj", "down_proj")
    kinds = (hp.ColwiseParallel, hp.ColwiseParallel, hp.RowwiseParallel)
    return {f"model.layers.*.mlp.{path}": kind(**options) for path, kind in zip(paths, kinds, strict=True)}


@pytest.mark.parametrize(
    ("degrees", "ranks", "options"),
    [("tp=2", 2, {}), ("cp=2, tp=2", 4, {"use_local_output": False}), ("cp=2", 2, {"use_local_output": False})],
)
def test_a_plan_that_leaves_parameters_out(degrees, ranks, options):
    _check("llama", batch(), degrees, ranks, plan=lambda model: _columns_and_rows(**options))


def test_a_plan_with_local_outputs_is_refused_under_cp():
    def work():
        with pytest.raises(ValueError, match=r"under cp .* styles for model.layers.*gate_proj, .* give local ones"):
            hp.parallelize(build("llama"), "cp=2", plan=_columns_and_rows())

    threads(2).run(work)


def test_a_model_without_values_says_what_to_call():
    def work():
        with hp.deferred_init():
            model = build("llama")
        run = hp.parallelize(model, "dp_shard=2")
        with pytest.raises(RuntimeError, match=r"has no values yet.*call materialize\(\) or load_hugging_face"):
            run.forward_backward(**batch())
        with torch.device("meta"):
            model = type(build("llama"))(model.config)
        run = hp.parallelize(model, "dp_shard=2").materialize(seed=0)
        with pytest.raises(RuntimeError, match=r"buffers of .*Llama.* build the model under hp.deferred_init"):
            run.forward_backward(**batch())
        with pytest.raises(TypeError, match=r"given by name, forward_backward\(\*\*batch\), not as a dict"):
            run.forward_backward(batch())

    threads(2).run(work)


@pytest.mark.parametrize("degrees", ["tp=2", "dp_shard=2"])
def test_generate(degrees):
    ids, more = batch()["input_ids"][:, :4], {"max_new_tokens": 3, "pad_token_id": 0}
    plain = build("llama").eval()
    want = [plain.generate(ids, num_beams=beams, **more) for beams in (1, 2)]

    def work():
        model = hp.parallelize(build("llama").eval(), degrees).model
        with hp.implicit_replication():
            return [whole(model.generate(ids, num_beams=beams, **more)) for beams in (1, 2)]

    for got in threads(2).run(work):
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
