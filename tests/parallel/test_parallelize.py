"""`hp.parallelize` of unmodified Hugging Face models trains as plain PyTorch does on one device."""

import itertools

import pytest

pytest.importorskip("transformers", reason='these models are in an extra: pip install "hyper-parallel[transformers]"')

import torch

import hyper_parallel as hp
from hyper_parallel.testing import threads
from tests.parallel.layouts import LAYOUTS
from tests.parallel.training import batch, on_one_device, train
from tests.tensor_parallel.hugging_face import assert_same, build, in_double
from tests.world import run_on_ranks, small_or_sweep

FAMILIES = ("llama", "llama_tied", "qwen3", "gpt2", "gemma3", "phi3", "olmo2", "mixtral_without_balance", "bert_masked")
OTHERS = ("llama_odd_heads", "mistral", "gemma2", "phi", "gpt_neox", "opt", "gpt_oss", "deepseek_v3", "qwen3_next")
# Of every change: every layout with Llama, every family under one layout or two.
SMALL = [
    *(("llama", layout) for layout in LAYOUTS),
    *(("gpt2", layout) for layout in ("dp_shard=2, tp=2", "dp_shard=2, cp=2")),
    *(("qwen3", layout) for layout in ("cp=2, tp=2", "dp_replicate=2, dp_shard=2")),
    *zip(FAMILIES[3:], itertools.cycle(("dp_shard=2, cp=2", "tp=2")), strict=False),
    ("llama_tied", "dp_shard=2, tp=2"),
]
ALL = [(name, layout) for name in (*FAMILIES, *OTHERS) for layout in LAYOUTS]


def _trained(name, degrees, microbatches, **options):
    return train(hp.parallelize(build(name), degrees, microbatches=microbatches, **options), batch())


@pytest.mark.parametrize("case", small_or_sweep(ALL, list(dict.fromkeys(SMALL))), ids=": ".join)
def test_training_equals_one_device(case):
    """Loss, clip norm and every weight of 3 steps: 7 samples in 3 micro-batches, 13 tokens, uneven masks."""
    name, degrees = case
    build(name)  # its files must be there before they can be told to compute in double precision
    want = on_one_device(name, batch())
    for got in threads(LAYOUTS[degrees], timeout=300).run(_trained, name, degrees, 3):
        assert_same(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("microbatches", small_or_sweep([1, 2, 5], [5]))
def test_microbatches_do_not_change_the_numbers(microbatches):
    want = on_one_device("llama", batch())
    for got in threads(2).run(_trained, "llama", "dp_shard=2", microbatches):
        assert_same(got, want, rtol=1e-9, atol=1e-9)


def test_a_rank_without_samples():
    given = {name: value[5:6] for name, value in batch().items()}
    want = on_one_device("llama", given)
    for got in threads(2).run(lambda: train(hp.parallelize(build("llama"), microbatches=2), given)):
        assert_same(got, want, rtol=1e-9, atol=1e-9)


def test_balance_of_routers_counts_once():
    """The auxiliary loss of a part is weighted by its rows: here each sample is a part."""
    given = batch()
    model = build("mixtral")
    with in_double():
        number = (given["labels"][:, 1:] != -100).sum()
        losses = [model(**{key: value[row : row + 1] for key, value in given.items()}) for row in range(7)]
        sums = [one.loss - model.router_aux_loss_coef * one.aux_loss for one in losses]
        counts = [(given["labels"][row, 1:] != -100).sum() for row in range(7)]
        tokens = sum(mean * count for mean, count in zip(sums, counts, strict=True) if count) / number
        want = tokens + sum(model.router_aux_loss_coef * one.aux_loss for one in losses) / 7

    def work():
        run = hp.parallelize(build("mixtral"), microbatches=4)
        mine = run.mine(range(7))
        with in_double():
            return run.forward_backward(**{key: value[mine.start : mine.stop] for key, value in given.items()})

    for got in threads(2).run(work):
        torch.testing.assert_close(
            got, want.detach(), rtol=1e-9, atol=0
        )  # the model's own loss of routers is in float32


@pytest.mark.processes("one case of all features on real processes")
@run_on_ranks(4, timeout=300)
def test_on_processes():
    want = on_one_device("llama_tied", batch())
    assert_same(_trained("llama_tied", "dp_shard=2, tp=2", 3), want, rtol=1e-9, atol=1e-9)


def test_recomputation_changes_nothing():
    want = on_one_device("llama", batch())
    for degrees in ("dp_shard=2", "cp=2", "tp=2"):
        for got in threads(2).run(lambda degrees=degrees: _trained("llama", degrees, 2, recompute="full")):
            assert_same(got, want, rtol=1e-9, atol=1e-9)


def test_selective_recomputation_changes_nothing():
    from torch.utils.checkpoint import CheckpointPolicy

    def policy(ctx, op, *args, **kwargs):
        is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    want = on_one_device("llama", batch())
    for got in threads(2).run(lambda: _trained("llama", "dp_shard=2", 1, recompute=policy)):
        assert_same(got, want, rtol=1e-9, atol=1e-9)


def test_offloaded_parameters_train_alike():
    want = on_one_device("llama", batch())
    for got in threads(2).run(lambda: _trained("llama", "dp_shard=2", 2, offload=True)):
        assert_same(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("degrees", ["dp_shard=1", "dp_shard=2", "tp=2", "dp_replicate=2"])
def test_bf16_computes_in_bfloat16_and_keeps_parameters(degrees):
    def work():
        model = build("llama", torch.float32)
        seen = []
        model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        run = hp.parallelize(model, degrees, precision="bf16")
        given = batch()
        mine = run.mine(range(7))
        losses = []
        optimizer = torch.optim.AdamW(run.parameters(), lr=1e-3)
        for _ in range(2):
            losses.append(run.forward_backward(**{key: one[mine.start : mine.stop] for key, one in given.items()}))
            optimizer.step()
            optimizer.zero_grad()
        assert seen[0] == torch.bfloat16 and {one.dtype for one in run.parameters()} == {torch.float32}
        return torch.stack(losses)

    model = build("llama", torch.float32)
    optimizer, want = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(2):
        want.append(model(**batch()).loss)
        want[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    for got in threads(LAYOUTS[degrees]).run(work):
        torch.testing.assert_close(got.float(), torch.stack(want).detach(), rtol=2e-2, atol=2e-2)


def test_evaluation_is_without_gradients_and_without_training():
    def work():
        model = build("gpt2_dropout")
        model.transformer.h[1].eval()
        run = hp.parallelize(model, "dp_shard=2", microbatches=2)
        given = batch()
        mine = run.mine(range(7))
        with in_double():
            loss = run.loss_of(**{key: one[mine.start : mine.stop] for key, one in given.items()})
        assert all(gradient is None for gradient in run.gradients())
        assert model.training and not model.transformer.h[1].training and model.transformer.h[0].training
        return loss

    model = build("gpt2_dropout").eval()
    with in_double():
        want = model(**batch()).loss.detach()
    for got in threads(2).run(work):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("degrees", ["dp_shard=2, tp=2", "cp=2, tp=2"])
def test_a_call_is_the_models_forward(degrees):
    def work():
        run = hp.parallelize(build("llama"), degrees)
        with in_double():
            return run(input_ids=batch()["input_ids"]).logits

    model = build("llama")
    with in_double():
        want = model(input_ids=batch()["input_ids"]).logits
    for got in threads(4).run(work):
        assert type(got) is torch.Tensor
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def test_ranks_that_were_seeded_otherwise_train_the_model_of_rank_0():
    def work():
        torch.manual_seed(hp.get_platform().get_rank())
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        first = model[0].weight.detach().clone()
        run = hp.parallelize(model, loss=lambda outputs, batch: (outputs.sum(), len(outputs)))
        return first, dict(run.named_parameters())["0.weight"].full_tensor()

    results = threads(2).run(work)
    assert not torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][0], results[0][1]) and torch.equal(results[0][0], results[1][1])


@pytest.mark.parametrize("degrees", ["dp_shard=2, tp=2", "dp_replicate=2, cp=2", "dp_replicate=4", "dp_shard=2, cp=2"])
def test_parameters_lie_on_the_whole_mesh(degrees):
    def work():
        run = hp.parallelize(build("llama"), degrees)
        names = {parameter.device_mesh.mesh_dim_names for parameter in run.parameters()}
        assert names == {("dp_replicate", "dp_shard", "cp", "tp")}
        assert {parameter.device_mesh.size() for parameter in run.parameters()} == {4}
        assert run.mesh.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        assert [name for name, _ in run.named_parameters()] == [name for name, _ in build("llama").named_parameters()]

    threads(4).run(work)


def _with_dropout(degrees, microbatches, recompute=None, order="contiguous"):
    hp.manual_seed(5)
    options = {"microbatches": microbatches, "recompute": recompute, "order": order}
    return train(hp.parallelize(build("gpt2_dropout"), degrees, **options), batch())


def test_dropout_draws_the_bits_of_one_process():
    """Also under recomputation and in another order of tokens; another seed and the next step draw others."""
    build("gpt2_dropout")
    (want,) = threads(1).run(_with_dropout, "dp_shard=1", 1)
    without = on_one_device("gpt2", batch())
    assert abs(want["loss 0"] - without["loss 0"]) > 1e-3
    cases = [
        ("dp_shard=1", 2, None),
        ("dp_shard=2", 1, None),
        ("dp_replicate=2", 3, "full"),
        ("tp=2", 2, "full"),
        ("dp_shard=2, cp=2", 2, None),
        ("cp=2", 2, "full", "zigzag"),
    ]
    for case in cases:
        for got in threads(LAYOUTS[case[0]]).run(_with_dropout, *case):
            assert_same(got, want, rtol=1e-9, atol=1e-9)
