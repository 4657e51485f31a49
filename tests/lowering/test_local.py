"""The recorded program gives the bits of dispatch: values, gradients and weights over steps whose batches differ."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.membership import Member, as_member
from tests.lowering.training import blocks_of, count_of, ids_and_labels, largest_difference, model_of, train
from tests.tensor_parallel.hugging_face import whole
from tests.world import run_on_ranks

only_on = "torch"  # Hugging Face models, and worlds of threads; MindSpore has a file of its own

TWO = [
    ("ours", "tp=2", {"sequence_parallel": False}),
    ("ours", "tp=2", {}),
    ("ours", "dp_shard=2", {}),
    ("llama", "tp=2", {"lengths": (9, 7, 9)}),
    ("llama_odd_heads", "tp=2", {}),
    ("gpt2_dropout", "tp=2", {"microbatches": 2, "recompute": "full"}),
    ("qwen3", "tp=2", {}),
    ("mixtral_without_balance", "tp=2", {}),
    ("llama", "tp=2", {"sequence_parallel": False}),
    ("llama", "cp=2", {}),
    ("gpt2", "tp=2", {"sequence_parallel": False}),
    ("llama", "dp_replicate=2", {}),
    ("gpt2_dropout", "dp_shard=2", {"microbatches": 2, "recompute": "full"}),
]
FOUR = [
    ("ours", "dp_shard=2, tp=2", {}),
    ("ours", "dp_shard=2, tp=2", {"recompute": "full"}),
    ("llama", "dp_shard=2, tp=2", {}),
    ("llama", "cp=2, tp=2", {}),
    ("gpt2_dropout", "dp_shard=2, tp=2", {"microbatches": 2}),
    ("ours", "tp=4", {}),  # more ranks than heads of keys
]
SMALL = 6  # of the first list at every change


def _check(name, degrees, options):
    with hp.CommRecorder() as dispatched:
        want, _ = train(name, degrees, **options)
    with hp.CommRecorder() as communicated:
        got, lowering = train(name, degrees, backend="local", **options)
    assert largest_difference(got, want) == (0.0, ""), (name, degrees, options)
    orders = [[(one.op, one.shape, one.ranks) for one in recorder.records] for recorder in (communicated, dispatched)]
    assert orders[0] == orders[1], (name, degrees, options)
    assert not lowering.refusals
    assert all(count_of(lowering, "lowered")), lowering


@run_on_ranks(2, timeout=400)
def test_two_ranks(sweep):
    for name, degrees, options in TWO if sweep else TWO[:SMALL]:
        _check(name, degrees, options)


@run_on_ranks(4, timeout=400)
def test_four_ranks(sweep):
    for name, degrees, options in FOUR if sweep else FOUR[:1]:
        _check(name, degrees, options)


@run_on_ranks(1)
def test_one_rank():
    _check("ours", "dp_shard=1", {})


@run_on_ranks(2, timeout=400)
def test_one_rank_lowers_and_the_other_does_not(sweep):
    """Sequences of seven tokens are cut unevenly between the blocks."""
    cases = [("ours", "tp=2", {"lengths": (8, 8, 8)})]
    for name, degrees, options in [*cases, *TWO] if sweep else cases:
        want, _ = train(name, degrees, **options)
        mine = "local" if hp.get_platform().get_rank() == 0 else None
        got, lowering = train(name, degrees, backend=mine, **options)
        assert largest_difference(got, want) == (0.0, ""), (name, degrees, options)
        assert lowering is None or all(count_of(lowering, "lowered"))


@run_on_ranks(2)
def test_the_source_is_a_program_that_can_be_read():
    _, lowering = train("ours", "tp=2", backend="local", sequence_parallel=False)
    source = lowering.source
    assert source.count("\n    ") < 70
    for line in (
        "v1 = rms_norm(arg0, (16,), weight=attention_norm_weight, eps=1e-05)",
        "scaled_dot_product_attention(",
    ):
        assert line in source
    assert "# layout: Layout(mesh" in source
    compile(source, "source", "exec")
    assert lowering["blocks.0"].source.splitlines()[1:] != []


@run_on_ranks(2)
def test_draws_by_sample_are_the_same():
    def run(backend):
        model = model_of("gpt2_dropout")
        hp.manual_seed(3)
        parallel = hp.parallelize(model, "tp=2")
        lowering = backend and hp.lower(model, blocks_of("gpt2"), backend=backend)
        losses = []
        for step in range(3):
            ids, _ = ids_and_labels(step, 8)
            with hp.draws_by_sample(step=step, rows=hp.SampleRows(0, 4)):
                losses.append(parallel.model(input_ids=ids, labels=ids, use_cache=False).loss.detach())
        assert not backend or all(count_of(lowering, "lowered"))
        return torch.stack(losses)

    assert torch.equal(run(None), run("local"))


def test_draws_of_plain_tensors_and_what_is_computed_again():
    """The recorded call is computed again by dispatch, the others as they were computed."""

    def run(is_lowered):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.5))
        lowering = hp.lower(model, "") if is_lowered else None
        seen = []
        for step in range(3):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step), requires_grad=True)
            with hp.draws_by_sample(step=step, rows=hp.SampleRows(0, 3)):
                out = checkpoint(model, x, use_reentrant=False)
            out.square().sum().backward()
            seen += [out.detach(), x.grad, *(one.grad.clone() for one in model.parameters())]
        return seen, lowering

    want, _ = run(False)
    got, lowering = run(True)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert lowering[""].num_calls == {"recorded": 1, "lowered": 4, "dispatched": 1, "verified": 0}


@run_on_ranks(2)
def test_every_call_compared_with_dispatch():
    def norms(degrees, verify_every, **options):
        model = model_of("gpt2_dropout")
        hp.manual_seed(3)
        run = hp.parallelize(model, degrees, **options)
        lowering = hp.lower(model, blocks_of("gpt2"), verify_every=verify_every)
        seen = []
        for step in range(3):
            ids, labels = ids_and_labels(step, 8)
            mine = run.mine(range(len(ids)))
            run.forward_backward(input_ids=ids[mine.start : mine.stop], labels=labels[mine.start : mine.stop])
            seen.append(whole(run.clip_grad_norm_(1.0)))
        return torch.stack(seen), lowering

    for degrees, options in (("tp=2", {}), ("dp_shard=2", {"recompute": "full"})):
        want, _ = norms(degrees, None, **options)
        got, lowering = norms(degrees, 1, **options)
        assert torch.equal(got, want), degrees
        assert all(count_of(lowering, "verified")), lowering


@run_on_ranks(2)
def test_what_no_guard_sees_is_found_by_comparison():
    scale = [1.0]

    class Scaled(torch.nn.Linear):
        def forward(self, x, by=scale):
            return super().forward(x) * by[0]

    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = torch.nn.Sequential(Scaled(4, 6))
    hp.parallelize_module(model, mesh, {"0": hp.ColwiseParallel()})
    hp.lower(model, "0", verify_every=2)
    for _ in range(4):
        model(torch.ones(2, 4))
    scale[0] = 2.0
    model(torch.ones(2, 4))  # wrong, and not compared
    with pytest.raises(hp.LoweringMismatch, match=r"0, output: the recorded program differs from dispatch by 0.5"):
        model(torch.ones(2, 4))


def test_without_devices_modules_run_by_dispatch():
    """As a rank of a pretend world, on meta: nothing is recorded, and sizes and collectives are those of dispatch."""
    with as_member(Member(1, 4, get_platform().silent_group)), torch.device("meta"):
        run = hp.parallelize(model_of("ours", torch.float32), "dp_shard=2, tp=2")
        lowering = hp.lower(run.model, "blocks.*")
        with hp.CommRecorder() as recorder:
            run.forward_backward(*(torch.zeros(2, 8, dtype=torch.long) for _ in range(2)))
    assert recorder.counts and count_of(lowering, "dispatched") == [1, 1]


def test_mistakes():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="backend='cuda' is none of 'local', 'inductor'"):
        hp.lower(model, "0", backend="cuda")
    with pytest.raises(ValueError, match="lower: no module matches the path 'blocks"):
        hp.lower(model, "blocks.*")
    with pytest.raises(ValueError, match="verify_every is a number of calls from 1, or None, got 0"):
        hp.lower(model, "0", verify_every=0)
    with pytest.raises(ValueError, match=r"'1.0' is inside of '1', which is lowered as a whole"):
        hp.lower(model, ["1", "1.0"])
    lowering = hp.lower(model, "0")
    with pytest.raises(ValueError, match="0 is lowered or compiled already"):
        hp.lower(model, "0")
    lowering.restore()
    hp.lower(model, "0").restore()
    with pytest.raises(TypeError, match="lower"):
        hp.lower(3)


@run_on_ranks(2)
def test_parallelize_lowers_blocks():
    def losses(compile):
        run = hp.parallelize(model_of("ours"), "dp_shard=2", compile=compile)
        seen = []
        for step in range(3):
            ids, labels = ids_and_labels(step, 9)
            mine = run.mine(range(len(ids)))
            seen.append(run.forward_backward(ids[mine.start : mine.stop, :-1], labels[mine.start : mine.stop, 1:]))
        return torch.stack([one.detach() for one in seen]), run.lowering

    want, none = losses(False)
    got, lowering = losses("local")
    assert none is None and torch.equal(got, want)
    assert count_of(lowering, "lowered") == [2, 2]
    with pytest.raises(ValueError, match="compile is False, True, 'local' or 'inductor', got 'fast'"):
        hp.parallelize(model_of("ours"), "dp_shard=2", compile="fast")
