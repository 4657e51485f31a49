"""Dropout of an unmodified GPT-2 by sample: one plain process with the whole batch against every way to cut it."""

import itertools

import pytest
import torch

import hyper_parallel as hp
from tests.world import run_on_ranks, small_or_sweep

transformers = pytest.importorskip("transformers", reason='an extra: pip install "hyper-parallel[transformers]"')

only_on = "torch"  # models of transformers, which are PyTorch's
SAMPLES, LENGTH, WHOLE = 6, 13, ((0, 6),)
_SIZES = {"vocab_size": 37, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 32, "initializer_range": 0.3}


def _build(attention="sdpa"):
    torch.manual_seed(0)
    config = transformers.GPT2Config(**_SIZES, bos_token_id=1, eos_token_id=2, use_cache=False)
    config._attn_implementation = attention
    assert config.resid_pdrop == config.embd_pdrop == config.attn_pdrop == 0.1
    model = transformers.GPT2LMHeadModel(config).double().train()
    hp.number_blocks(model.transformer.h)
    hp.manual_seed(7)
    return model


def _ids():
    return torch.arange(SAMPLES * LENGTH).reshape(SAMPLES, LENGTH) * 7 % 37


def _trained(model, parts, step=3, place=lambda ids: ids):
    """Logits of all samples and the gradients of their squares, summed; backward comes when all forwards are done."""
    outputs = []
    for first, count in parts:
        with hp.draws_by_sample(step=step, rows=hp.SampleRows(first, count, SAMPLES)):
            outputs.append(model(place(_ids()[first : first + count])).logits)
    for logits in outputs:
        (logits * logits).sum().backward()
    whole = [logits.full_tensor() if isinstance(logits, hp.DTensor) else logits for logits in outputs]
    gradients = {name: one.grad for name, one in model.named_parameters()}
    for name, gradient in gradients.items():
        gradients[name] = gradient.full_tensor() if isinstance(gradient, hp.DTensor) else gradient
    model.zero_grad()
    return torch.cat(whole).detach(), gradients


def _assert_same(got, want):
    torch.testing.assert_close(got[0], want[0], rtol=1e-11, atol=1e-11)
    for name, gradient in want[1].items():
        torch.testing.assert_close(got[1][name], gradient, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("attention", small_or_sweep(["sdpa", "eager"], ["sdpa"]))
def test_any_micro_batches_and_recomputation_give_the_gradients_of_the_whole_batch(attention):
    model = _build(attention)
    state = torch.get_rng_state()
    want = _trained(model, WHOLE)
    cuts = (((0, 3), (3, 3)), ((0, 2), (2, 2), (4, 2)), ((0, 5), (5, 1)), tuple((one, 1) for one in range(SAMPLES)))
    for parts in cuts:
        _assert_same(_trained(model, parts), want)
    for reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for parts in (WHOLE, cuts[1]):
            _assert_same(_trained(model, parts), want)
    assert torch.equal(torch.get_rng_state(), state)
    other_step = _trained(model, WHOLE, step=4)[0]
    assert (other_step - want[0]).abs().max() > 0.1
    model.eval()
    with hp.draws_by_sample(step=3, rows=(0, SAMPLES)):
        evaluated = model(_ids()).logits
    assert torch.equal(evaluated, model(_ids()).logits)


def test_samples_of_equal_tokens_are_dropped_differently():
    model = _build()
    same = _ids()[:1].expand(SAMPLES, -1)
    with hp.draws_by_sample(step=0, rows=(0, SAMPLES)):
        logits = model(same).logits
    pairs = itertools.combinations(logits.unbind(), 2)
    assert all((one - other).abs().max() > 0.1 for one, other in pairs)


def test_a_stage_without_the_first_blocks_draws_what_they_draw_in_the_whole_model():
    model = _build()
    seen = {}
    for number, block in enumerate(model.transformer.h):
        block.mlp.dropout.register_forward_hook(lambda _, args, output, number=number: seen.update({number: output}))
    model.transformer.drop.register_forward_hook(lambda _, args, output: seen.update(before=output))
    with torch.no_grad():
        for parameter in model.parameters():  # what is dropped is all that differs between the runs
            parameter.fill_(0.0)
        for block in model.transformer.h:
            block.mlp.c_proj.bias.fill_(1.0)

    def kept():
        seen.clear()
        with torch.no_grad(), hp.draws_by_sample(step=1, rows=(0, SAMPLES)):
            model(_ids())
        return {number: output != 0 for number, output in seen.items()}

    whole = kept()
    assert 0.05 < 1 - torch.stack([whole[number] for number in range(3)]).double().mean() < 0.15
    assert not torch.equal(whole[0], whole[1])
    model.transformer.h = model.transformer.h[2:]  # the numbers stay with the blocks
    assert torch.equal(kept()[2], whole[2])


@run_on_ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel(sequence_parallel):
    want = _trained(_build(), WHOLE)
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = _build()
    hp.parallelize_module(model, mesh, hp.plans.for_model(model, sequence_parallel=sequence_parallel))
    for parts in (WHOLE, ((0, 3), (3, 3)), ((0, 5), (5, 1))):
        _assert_same(_trained(model, parts), want)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _assert_same(_trained(model, ((0, 3), (3, 3))), want)


@run_on_ranks(2)
def test_context_parallel():
    want = _trained(_build(), WHOLE)
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    for checkpointing in (False, True):
        model = hp.distribute_module(_build(), mesh)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for parts in (WHOLE, ((0, 3), (3, 3))):
            with hp.implicit_replication():
                got = _trained(model, parts, place=lambda ids: hp.distribute_tensor(ids, mesh, [hp.Shard(1)]))
            _assert_same(got, want)


@run_on_ranks(2)
def test_data_parallel_with_sharded_parameters():
    want = _trained(_build(), WHOLE)
    platform = hp.get_platform()
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = _build()
    for block in model.transformer.h:
        hp.fully_shard(block, mesh=mesh)
    hp.fully_shard(model, mesh=mesh)
    first = 3 * platform.get_rank()
    for parts in (((first, 3),), ((first, 1), (first + 1, 2))):
        logits, gradients = _trained(model, parts)
        torch.testing.assert_close(logits, want[0][first : first + 3], rtol=1e-11, atol=1e-11)
        for name, gradient in gradients.items():  # the mean of two ranks
            torch.testing.assert_close(2 * gradient, want[1][name], rtol=1e-10, atol=1e-10, msg=name)
