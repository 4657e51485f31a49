"""Values of a split model: built without memory, from files, to files, and from one layout to another."""

import json

import pytest

pytest.importorskip("transformers", reason='these models are in an extra: pip install "hyper-parallel[transformers]"')

import torch
import transformers
from safetensors.torch import load_file

import hyper_parallel as hp
from hyper_parallel.testing import threads
from tests.parallel.layouts import LAYOUTS
from tests.parallel.training import batch, on_one_device, train
from tests.tensor_parallel.hugging_face import CASES, OTHERS, assert_same, build, whole
from tests.world import small_or_sweep


def _deferred(name):
    model_class, config_class, sizes = {**CASES, **OTHERS}[name]
    with hp.deferred_init():
        return getattr(transformers, model_class)(getattr(transformers, config_class)(**sizes))


def _whole_state(run):
    return {name: whole(parameter) for name, parameter in run.named_parameters()}


@pytest.mark.parametrize("name", small_or_sweep(["llama", "gpt2", "qwen3"], ["gpt2"]))
def test_initial_values_are_those_of_one_process(name):
    def work(degrees):
        return _whole_state(hp.parallelize(_deferred(name), degrees).materialize(seed=3))

    (want,) = threads(1).run(work, "dp_shard=1")
    layouts = ("dp_shard=2, tp=2",) if name != "llama" else tuple(LAYOUTS)
    for degrees in layouts:
        for got in threads(LAYOUTS[degrees]).run(work, degrees):
            assert_same(got, want, rtol=0, atol=0)
    std = CASES[name][2]["initializer_range"]
    embedding = next(value for key, value in want.items() if "embed" in key or "wte" in key)
    assert abs(embedding.std() - std) < 0.15 * std  # the model's own distribution


@pytest.mark.parametrize("degrees", small_or_sweep(tuple(LAYOUTS), ("dp_shard=2, tp=2", "cp=2", "dp_replicate=2")))
def test_a_folder_of_hugging_face_there_and_back(degrees, tmp_path):
    source = build("llama_tied", torch.float32)
    source.save_pretrained(tmp_path / "from")
    (tmp_path / "from" / "tokenizer.json").write_text("{}")

    def work():
        run = hp.parallelize(_deferred("llama_tied"), degrees)
        run.load_hugging_face(tmp_path / "from")
        got = _whole_state(run)
        run.save_hugging_face(tmp_path / "to", tokenizer=tmp_path / "from")
        return got

    for got in threads(LAYOUTS[degrees]).run(work):
        assert_same(got, {name: whole(one) for name, one in source.named_parameters()}, rtol=0, atol=0)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "to")
    ids = batch()["input_ids"]
    torch.testing.assert_close(opened(ids).logits, source(ids).logits, rtol=0, atol=0)
    assert json.loads((tmp_path / "to" / "config.json").read_text())["use_cache"] is True
    assert (tmp_path / "to" / "generation_config.json").is_file() and (tmp_path / "to" / "tokenizer.json").is_file()


def test_files_that_call_a_tensor_otherwise(tmp_path):
    """Transformers knows it by the name of the class of the model."""
    source = build("gpt_neox", torch.float32)
    source.save_pretrained(tmp_path / "from")

    def work():
        run = hp.parallelize(_deferred("gpt_neox"), "dp_shard=2")
        run.load_hugging_face(tmp_path / "from")
        run.save_hugging_face(tmp_path / "to")
        return _whole_state(run)

    for got in threads(2).run(work):
        assert_same(got, {name: whole(one) for name, one in source.named_parameters()}, rtol=0, atol=0)
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("from", "to"))
    assert "embed_out.weight" in theirs
    assert_same(ours, theirs, rtol=0, atol=0)


def test_a_tokenizer_that_is_not_there(tmp_path):
    def work():
        hp.parallelize(build("llama"), "dp_shard=1").save_hugging_face(tmp_path / "to", tokenizer=tmp_path)

    with pytest.raises(ValueError, match="has no file of a tokenizer"):
        threads(1).run(work)


@pytest.mark.parametrize(
    ("before", "after"),
    [("dp_shard=1", "dp_shard=2, tp=2"), ("dp_shard=2, cp=2", "tp=2"), ("dp_replicate=2, dp_shard=2", "cp=2, tp=2")],
)
def test_training_goes_on_under_other_degrees(before, after, tmp_path):
    """3 steps in one layout, then 3 in another, with dropout and moments: those of 6 steps."""
    folder = tmp_path / "checkpoint"

    def whole_run():
        hp.manual_seed(7)
        return train(hp.parallelize(build("gpt2_dropout")), batch(), steps=6)

    def first():
        hp.manual_seed(7)
        run = hp.parallelize(build("gpt2_dropout"), before, microbatches=2)
        optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2, eps=1e-6)
        train(run, batch(), optimizer=optimizer)
        run.save(folder, optimizer=optimizer, order={"position": 21})

    def second():
        run = hp.parallelize(build("gpt2_dropout"), after)
        optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2, eps=1e-6)
        more = run.load(folder, optimizer=optimizer, order=None)
        assert more == {"order": {"position": 21}} and run.step == 3
        return train(run, batch(), optimizer=optimizer)

    build("gpt2_dropout")
    (want,) = threads(1).run(whole_run)
    threads(LAYOUTS[before]).run(first)
    for got in threads(LAYOUTS[after]).run(second):
        weights = {name: value for name, value in want.items() if name.startswith("weight")}
        assert_same({name: got[name] for name in weights}, weights, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(got["loss 2"], want["loss 5"], rtol=1e-9, atol=0)


def _tied_llama(num_blocks):
    sizes = {"vocab_size": 32, "dim": 16, "num_heads": 2, "num_kv_heads": 2, "hidden_dim": 24, "tie_head": True}
    return hp.models.Llama(hp.models.LlamaConfig(num_blocks=num_blocks, **sizes)).double()


@pytest.mark.parametrize(
    ("num_blocks", "kind", "said"),
    [
        (1, torch.optim.AdamW, "36 entries that this run has no place for: 'model.blocks.1.attention.key.weight', "),
        (2, torch.optim.SGD, "entries that this run has no place for: 'optimizer.state.blocks.0.attention.key.weight"),
        (2, torch.optim.AdamW, None),
    ],
)
def test_what_a_checkpoint_has_and_the_run_has_not_is_refused(num_blocks, kind, said, tmp_path):
    """A model that lost a block would go on as if it had never been; each of its stages has a part of the names."""

    def save():
        run = hp.parallelize(_tied_llama(2), "dp_shard=1")
        run.save(tmp_path / "checkpoint", torch.optim.AdamW(run.parameters()))

    def load(degrees):
        run = hp.parallelize(_tied_llama(num_blocks), degrees)
        run.load(tmp_path / "checkpoint", kind(run.parameters()))

    threads(1).run(save)
    for degrees in ["tp=2", "pp=2"][:num_blocks]:
        if said is None:
            threads(2).run(load, degrees)
        else:
            with pytest.raises(ValueError, match=said):
                threads(2).run(load, degrees)


def test_names_of_the_runs_own_state():
    def work():
        hp.parallelize(build("llama")).save("nowhere", model=1)

    with pytest.raises(ValueError, match="save: model is what its own state is called; take another name"):
        threads(1).run(work)


def test_a_deferred_model_trains_as_one_device():
    def work(degrees):
        run = hp.parallelize(_deferred("llama").double(), degrees).materialize(seed=1)
        return _whole_state(run), train(run, batch())

    (initial, _), *_ = threads(4).run(work, "dp_shard=2, tp=2")
    model = build("llama")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial[name])
    torch.manual_seed(0)
    want = on_one_device("llama", batch(), model=model)
    for _, got in threads(4).run(work, "dp_shard=2, tp=2"):
        assert_same(got, want, rtol=1e-9, atol=1e-9)
