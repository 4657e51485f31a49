"""Unmodified Hugging Face models under their ready plans: everything a training step makes is that of one device."""

import pytest
import torch
import torch.nn.functional as F

import hyper_parallel as hp
from hyper_parallel.checkpoint import load_hugging_face
from tests.world import run_on_ranks, small_or_sweep

pytest.importorskip("transformers", reason='these models are in an extra: pip install "hyper-parallel[transformers]"')

from tests.tensor_parallel.hugging_face import (
    CASES,
    OTHERS,
    VOCABULARY,
    assert_same,
    batch,
    build,
    in_double,
    loss_of,
    train,
    whole,
)
from tests.tensor_parallel.toy import parts_joined

only_on = "torch"  # models of transformers, which are PyTorch's

# Grouped heads that do not divide, fused and tied, experts: each structure once.
STRUCTURES = ("llama_odd_heads", "gpt2", "mixtral")
TIMEOUT = 600  # seconds; the first test on a world imports transformers on every rank


def _mesh():
    return hp.init_device_mesh("cpu", (hp.get_platform().get_world_size(),), mesh_dim_names=("tp",))


def _cut(name, dtype=torch.float64, **options):
    model = build(name, dtype)
    return hp.parallelize_module(model, _mesh(), hp.plans.for_model(model, **options))


@run_on_ranks(2, sweep=(4,), timeout=TIMEOUT)
@pytest.mark.parametrize("name", small_or_sweep(CASES, STRUCTURES))
def test_training_equals_one_device(name):
    plain, given = build(name), batch(name)
    cut = [_cut(name), _cut(name, sequence_parallel=True)]
    with in_double():
        want = train(plain, given)
        for model in cut:
            assert_same(train(model, given), want, rtol=1e-9, atol=1e-9)
    want = train(build(name, torch.float32), given)
    got = train(_cut(name, torch.float32, sequence_parallel=True), given)
    assert_same(got, want, rtol=1e-3, atol=1e-4)


@run_on_ranks(2, timeout=TIMEOUT)
@pytest.mark.parametrize("name", small_or_sweep(OTHERS, ["deepseek_v3"]))
def test_families_without_a_name_in_our_list(name):
    plain, cut, given = build(name), _cut(name, sequence_parallel=True), batch(name)
    with in_double():
        assert_same(train(cut, given), train(plain, given), rtol=1e-9, atol=1e-9)


@run_on_ranks(2, 4, timeout=TIMEOUT)
def test_a_tied_weight_stays_one_parameter_with_one_gradient():
    for name, head in (("llama_tied", "lm_head"), ("gpt2", "lm_head")):
        model = _cut(name)
        assert model.get_input_embeddings().weight is getattr(model, head).weight
        assert [path for path, _ in model.named_parameters()] == [path for path, _ in build(name).named_parameters()]


@run_on_ranks(2, timeout=TIMEOUT)
def test_weights_lie_as_the_plan_says():
    model = _cut("llama")
    layouts = {name: parameter.placements for name, parameter in model.named_parameters()}
    expected = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1}
    for name, placements in layouts.items():
        part = name.split(".")[-2]
        if part in ("embed_tokens", "lm_head"):
            assert placements == (hp.Shard(0),), name
        else:
            assert placements == ((hp.Shard(expected[part]),) if part in expected else (hp.Replicate(),)), name


@run_on_ranks(2, timeout=TIMEOUT)
def test_collectives_per_step():
    """Plain: one all-reduce per half block and pass, one for embedding and head. Sequence: gather and scatter."""
    num_layers, given = 2, batch("llama", length=8)
    for sequence_parallel in (False, True):
        model = _cut("llama", sequence_parallel=sequence_parallel, plain_outputs=False)
        with hp.CommRecorder() as forward:
            loss = model(**given).loss
        with hp.CommRecorder() as backward:
            loss.backward()
        in_loss = sum(record.asked_by == "inside cross_entropy_loss" for record in forward.records)
        if sequence_parallel:
            assert forward.counts["all_gather_into_tensor"] == 2 * num_layers + 1
            assert forward.counts["reduce_scatter_tensor"] == 2 * num_layers + 1
            assert backward.counts["all_gather_into_tensor"] == 2 * num_layers + 1
            assert backward.counts["reduce_scatter_tensor"] == 2 * num_layers + 1
            assert forward.counts["all_reduce"] == in_loss
            assert backward.counts["all_reduce"] == 2 * num_layers + 1  # the scales of the norms
        else:
            assert forward.counts == {"all_reduce": 2 * num_layers + 1 + in_loss}
            assert backward.counts == {"all_reduce": 2 * num_layers + 1}


@run_on_ranks(2, sweep=(4,), timeout=TIMEOUT)
@pytest.mark.parametrize("name", ["gpt2", "phi3"])
def test_fused_projections_can_become_parameters_of_their_own(name):
    plain, given = build(name), batch(name)
    cut = [_cut(name, split_fused=True), _cut(name, split_fused=True, sequence_parallel=True)]
    with in_double():
        want = train(plain, given)
        for model in cut:
            got = train(model, given)
            assert got.keys() != want.keys()
            assert_same(parts_joined(got, want), want, rtol=1e-9, atol=1e-9)


@run_on_ranks(2, sweep=(4,), timeout=TIMEOUT)
def test_fused_projections_need_no_gather():
    """Query, key and value, or gate and up, in one weight: the same collectives as where each has its own."""
    num_layers, divides = 2, hp.get_platform().get_world_size() == 2
    for name in ("gpt2", "gpt_neox", *(["phi3"] if divides else [])):  # it has 2 key heads
        model = _cut(name, plain_outputs=False, split_fused=True)
        with hp.CommRecorder() as forward:
            loss = model(**batch(name)).loss
        in_loss = sum(record.asked_by == "inside cross_entropy_loss" for record in forward.records)
        assert forward.counts == {"all_reduce": 2 * num_layers + 1 + in_loss}, (name, forward.table())
        with hp.CommRecorder() as backward:
            loss.backward()
        assert set(backward.counts) == {"all_reduce"}, (name, backward.table())


@run_on_ranks(2, timeout=TIMEOUT)
def test_a_fused_weight_of_files_is_read_into_its_parts(tmp_path):
    plain, cut = build("gpt2"), _cut("gpt2", split_fused=True)
    if hp.get_platform().get_rank() == 0:
        plain.save_pretrained(tmp_path)
    hp.get_platform().barrier()
    with torch.no_grad():
        for parameter in cut.parameters():
            parameter.zero_()
    fused, parts = "transformer.h.*.attn.c_attn", ("query", "key", "value")
    rules = [
        {"files": f"{fused}.{kind}", "ours": [f"{fused}.{kind}_{part}" for part in parts], "join": dim}
        for kind, dim in (("weight", 1), ("bias", 0))
    ]
    load_hugging_face(dict(cut.named_parameters()), tmp_path, mapping=rules)
    given = batch("gpt2")
    with in_double(), torch.no_grad():
        torch.testing.assert_close(cut(**given).logits, plain(**given).logits, rtol=1e-9, atol=1e-9)


@run_on_ranks(2, timeout=TIMEOUT)
def test_outputs_are_plain_and_whole_or_cut_as_asked():
    given = batch("llama")
    plain, cut = _cut("llama")(**given), _cut("llama", plain_outputs=False)(**given)
    assert type(plain.logits) is torch.Tensor and type(plain.loss) is torch.Tensor
    assert cut.logits.placements == (hp.Shard(2),)
    torch.testing.assert_close(cut.logits.full_tensor(), plain.logits)
    torch.testing.assert_close(plain[1], plain.logits)


@run_on_ranks(2, 4, timeout=TIMEOUT)
def test_a_loss_of_ones_own_on_the_plain_logits():
    given = {name: value for name, value in batch("qwen3").items() if name != "labels"}
    target = torch.arange(18).reshape(3, 6) % VOCABULARY
    grads = []
    for model in (build("qwen3"), _cut("qwen3", sequence_parallel=True)):
        with in_double():
            logits = model(**given).logits
            F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1).backward()
        grads.append({name: whole(parameter.grad) for name, parameter in model.named_parameters()})
    assert_same(grads[1], grads[0], rtol=1e-9, atol=1e-9)


@run_on_ranks(2, timeout=TIMEOUT)
@pytest.mark.parametrize("name", small_or_sweep(["llama", "gpt2", "bert", "mixtral"], ["gpt2", "mixtral"]))
def test_gradient_checkpointing(name):
    given = batch(name)
    plain = build(name).train()
    cut = _cut(name, sequence_parallel=True).train()
    cut.gradient_checkpointing_enable()
    with in_double():
        assert_same(train(cut, given, 1), train(plain, given, 1), rtol=1e-9, atol=1e-9)


@run_on_ranks(2, timeout=TIMEOUT)
@pytest.mark.parametrize("name", small_or_sweep(["qwen3", "mistral", "gpt2", "mixtral", "bart"], ["gpt2", "bart"]))
def test_generate(name):
    ids = batch(name)["input_ids"][:2, :4].clamp(min=3)
    mask = torch.ones_like(ids)
    arguments = {"max_new_tokens": 4, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    plain, cut = build(name).eval(), [_cut(name).eval(), _cut(name, sequence_parallel=True).eval()]
    with in_double():
        want = plain.generate(ids, **arguments)
        for model in cut:
            assert torch.equal(model.generate(ids, **arguments), want)
        assert torch.equal(cut[0].generate(ids, use_cache=False, **arguments), want)
        with hp.implicit_replication():  # beam search picks from the cache outside of the model
            beams = cut[0].generate(ids, num_beams=2, **arguments)
        assert torch.equal(beams, plain.generate(ids, num_beams=2, **arguments))


@run_on_ranks(2, timeout=TIMEOUT)
def test_eval_mode_left_padding_and_embeddings_as_inputs():
    plain, cut = build("llama").eval(), _cut("llama", sequence_parallel=True).eval()
    given = batch("llama")
    left = {name: value.flip(1) for name, value in given.items()}
    with in_double(), torch.no_grad():
        torch.testing.assert_close(cut(**left).logits, plain(**left).logits, rtol=1e-9, atol=1e-9)
    embedded = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    inputs = [embedded.clone().requires_grad_() for _ in range(2)]
    with in_double():
        for model, given_embeddings in zip((plain, cut), inputs, strict=True):
            model(inputs_embeds=given_embeddings).logits.sin().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-9, atol=1e-9)


@run_on_ranks(4, timeout=TIMEOUT)
def test_on_the_tensor_axis_of_a_larger_mesh():
    """Two replicas over dp, each cut over tp; the gradients of the replicas' own batches are averaged."""
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = build("llama")
    model = build("llama")
    model = hp.parallelize_module(model, mesh["tp"], hp.plans.for_model(model, sequence_parallel=True))
    given = batch("llama")
    with in_double():
        loss_of(plain(**given)).backward()
        loss_of(model(**given)).backward()
    for (name, mine), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert mine.device_mesh.size() == 2
        torch.testing.assert_close(whole(mine.grad), want.grad, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_the_structure_of_models():
    """Declared by the model, or read off the order of its modules."""
    expected = {
        "llama": (("model.embed_tokens",), ("model.norm", "lm_head")),
        "gpt2": (("transformer.wte", "transformer.wpe"), ("transformer.ln_f", "lm_head")),
        "opt": (
            ("model.decoder.embed_tokens", "model.decoder.embed_positions"),
            ("model.decoder.final_layer_norm", "lm_head"),
        ),
        "mixtral": (("model.embed_tokens",), ("model.norm", "lm_head")),
    }
    for name, (prologue, epilogue) in expected.items():
        model = build(name)
        found = hp.plans.structure_of(model)
        assert len(found.blocks) == 2 and model.get_submodule(found.blocks[1]) is not None
        assert (found.prologue, found.epilogue, found.heads) == (prologue, epilogue, ("lm_head",)), name
        assert found.mixtures == (tuple(f"{block}.mlp" for block in found.blocks) if name == "mixtral" else ())
