"""Unmodified models of Hugging Face in three stages: loss and every gradient are those of the model in one piece."""

import copy

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.activation_memory.recompute import recompute
from hyper_parallel.core.pipeline_parallel.stages.stage_model import StageModel
from tests.pipeline_parallel.stages_by_hand import cut, gradients_of, run, split_of
from tests.world import run_on_ranks, small_or_sweep

transformers = pytest.importorskip("transformers", reason='an extra: pip install "hyper-parallel[transformers]"')

from tests.pipeline_parallel import hugging_face_models as toys  # noqa: E402

only_on = "torch"  # models of transformers, which are PyTorch's


def _expected(model, batch):
    whole = copy.deepcopy(model)
    whole.config.use_cache = False  # stages keep none, and GPT-J rounds keys on their way to it
    loss = whole(**batch).loss
    loss.backward()
    return loss, {name: one.grad for name, one in whole.named_parameters() if one.grad is not None}


def _assert_same(losses, gradients, loss, expected, shared):
    assert torch.equal(losses[0], loss)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        if name in shared:  # a sum of two, in another order
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-6, atol=1e-9)
        else:
            assert torch.equal(gradients[name], gradient), name


@pytest.mark.parametrize("kind", small_or_sweep(toys.SIZES, ["llama", "gpt2", "gemma2", "opt", "bert"]))
def test_three_stages_give_the_gradients_of_one_piece(kind):
    torch.manual_seed(0)
    model = toys.build(kind)
    batch = toys.batch()
    split = split_of(model, 3, inputs={"input_ids": batch["input_ids"]})
    assert split.num_stages == 3 and split.stream.shape == (2, 12, 32)
    static = split_of(model, 3)
    assert (static.stages, static.prologue, static.epilogue) == (split.stages, split.prologue, split.epilogue)
    with hp.deferred_init():
        deferred = toys.build(kind)
    assert split_of(deferred, 3, inputs={"input_ids": batch["input_ids"]}) == split, "on shapes alone"
    loss, expected = _expected(model, batch)
    for way in (static, split):
        stages = cut(model, way)
        losses = run(stages, [batch], lambda outputs: outputs.loss)
        _assert_same(losses, gradients_of(stages), loss, expected, split.shared)

    named = dict(model.named_parameters(remove_duplicate=False))
    held = [set(dict(stage.model.named_parameters(remove_duplicate=False))) for stage in stages]
    assert set.union(*held) == set(named), "names are those of one piece, and nothing is lost"
    for number, names in enumerate(held):
        assert not any(one is stages[number].model for one in stages[:number])
        for other in held[:number]:
            assert all(split.first_names[name] in split.shared for name in names & other)


def _trained(stages, batches):
    losses = run(stages, batches, lambda outputs: outputs.loss)
    return losses, gradients_of(stages)


@pytest.mark.parametrize("own_checkpointing", [False, True])
def test_recomputation_gets_the_stream_of_its_own_micro_batch(own_checkpointing):
    """All forwards come before all backwards, so the stage has another micro-batch at work when blocks run again."""
    torch.manual_seed(0)
    model = toys.build("llama")
    batches = [toys.batch(2), toys.batch(3)]
    split = split_of(model, 3)

    def recomputed(copied):
        if own_checkpointing:
            copied.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            for path in split.blocks:
                recompute(copied.get_submodule(path))

    whole = copy.deepcopy(model)
    losses = [whole(**batch).loss for batch in batches]
    sum(losses).backward()
    found, gradients = _trained(cut(model, split, recomputed), batches)
    assert all(torch.equal(one, other) for one, other in zip(found, losses, strict=True))
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12, msg=name)


def test_recomputation_behind_the_cut_is_an_error():
    model = toys.build("llama")
    split = split_of(model, 2)
    stages = cut(model, split)
    recompute(stages[1].model.get_submodule(split.stages[1][0]))
    with pytest.raises(
        RuntimeError, match=r"'model.layers.3' ran outside of a call of its stage.*recompute\(\) blocks before"
    ):
        _trained(stages, [toys.batch()])


def test_dropout_has_the_bits_of_one_piece():
    torch.manual_seed(0)
    config = transformers.GPT2Config(**toys.SIZES["gpt2"], bos_token_id=1, eos_token_id=2, use_cache=False)
    assert config.resid_pdrop == config.embd_pdrop == config.attn_pdrop == 0.1
    model = transformers.GPT2LMHeadModel(config).double().train()
    hp.number_blocks(model.transformer.h)
    split = split_of(model, 3)
    rows = {0: (0, 2), 1: (2, 3)}
    whole_batch = {name: torch.cat((toys.batch(2)[name], toys.batch(3)[name])) for name in toys.batch(2)}
    del whole_batch["attention_mask"]

    def part(begin, count):
        return {name: value[begin : begin + count] for name, value in whole_batch.items()}

    def drawn(begin, count, call):
        with hp.draws_by_sample(step=4, rows=hp.SampleRows(begin, count, 5)):
            return call()

    hp.manual_seed(3)
    expected = copy.deepcopy(model)
    drawn(0, 5, lambda: expected(**whole_batch)).logits.square().sum().backward()
    hp.manual_seed(3)
    stages = cut(model, split, lambda copied: [recompute(copied.get_submodule(path)) for path in split.blocks])
    for begin, count in rows.values():
        drawn(begin, count, lambda: run(stages, [part(begin, count)], lambda outputs: outputs.logits.square().sum()))  # noqa: B023
    gradients = gradients_of(stages)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-9, msg=name)


def test_a_stage_without_memory_gets_the_values_of_one_piece_and_no_more_than_its_part():
    def build():
        hp.manual_seed(11)
        with hp.deferred_init():
            model = toys.build("gpt2")
        hp.number_initial_values(model)
        return model

    expected = hp.materialize(build())
    sizes = []
    for index in range(3):
        model = build()
        split = split_of(model, 3, inputs={"input_ids": toys.batch()["input_ids"]})
        assert split.prologue == ("transformer.wte", "transformer.wpe") and split.stream.shape == (2, 12, 32)
        stage = StageModel(model, split, index)
        hp.materialize(model)
        named = stage.named_parameters()
        for name, parameter in named.items():
            assert torch.equal(parameter, expected.get_parameter(name)), name
        held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.parameters()}
        sizes.append(sum(held.values()))
        assert sizes[-1] == sum(one.numel() * one.element_size() for one in named.values())
    whole = sum(one.numel() * one.element_size() for one in expected.parameters())
    tied = expected.transformer.wte.weight
    assert sum(sizes) == whole + tied.numel() * tied.element_size() and max(sizes) < 0.5 * whole


@run_on_ranks(2)
@pytest.mark.parametrize("kind", small_or_sweep(["llama", "qwen3", "gpt2", "gemma3_text"], ["llama", "gpt2"]))
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_stages(kind, sequence_parallel):
    """The plan of the whole model first, then the cut; each rank hands on its slice of 13 tokens only."""
    torch.manual_seed(0)
    model = toys.build(kind)
    batch = {name: value for name, value in toys.batch(2, 13).items() if name != "attention_mask"}
    loss, expected = _expected(model, batch)
    split = split_of(model, 3)
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def parallelized(copied):
        hp.parallelize_module(copied, mesh, hp.plans.for_model(copied, sequence_parallel=sequence_parallel))

    stages = cut(model, split, parallelized)
    stream = stages[0](None, **batch)
    wanted = hp.Shard(1) if sequence_parallel else hp.Replicate()
    assert isinstance(stream, hp.DTensor) and stream.placements == (wanted,)
    if sequence_parallel:
        assert stream.to_local().shape[1] == (7, 6)[hp.get_platform().get_rank()]
    losses, gradients = _trained(stages, [batch])
    torch.testing.assert_close(losses[0], loss, rtol=0, atol=1e-6)  # transformers' loss is in float32
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-6, msg=name)
