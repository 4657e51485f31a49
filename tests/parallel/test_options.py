"""What `hp.parallelize` refuses and says; meshes of one's own, plans, a rank without memory, explanations."""

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.core.dtensor.random.sample_address import current
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.membership import Member, as_member
from hyper_parallel.testing import threads

SIZES = {"vocab_size": 37, "dim": 16, "num_blocks": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 24}


def _llama():
    torch.manual_seed(0)
    return hp.models.Llama(hp.models.LlamaConfig(**SIZES)).double()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"degrees": "tp=3"}, 'degrees "tp=3": a multiple of 3 ranks, but the world has 4; what fits is '),
        ({"degrees": "dp=4"}, "there is no axis 'dp'. The axes are pp, dp_replicate, dp_shard, cp, tp, ep"),
        ({"tp": 2, "degrees": "tp=2"}, "tp is given twice"),
        ({"pp": 2, "schedule": "1f2b"}, "there is no schedule '1f2b'; there are gpipe, 1f1b"),
        ({"ep": 2}, "ep=2: Llama has no experts; leave ep at 1"),
        (
            {"dp_shard": 1, "tp": 4, "ep": 2},
            "ep=2 must divide dp_shard=1, or be such a divisor times tp=4",
        ),
        ({"attention": "rings"}, "attention='rings' is none of 'auto', 'ring', 'ulysses', 'gather', 'hybrid'"),
        ({"microbatches": 0}, "microbatches is a number of parts from 1, got 0"),
        ({"precision": "int8"}, "precision is None, 'bf16', 'fp16' or a MixedPrecisionPolicy, got 'int8'"),
        ({"recompute": "some"}, "recompute is None, 'full' or a policy"),
        (
            {"tp": 2, "keep_whole": ["blocks.*.atention"]},
            "no module matches the path 'blocks.*.atention'; did",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_what_cannot_be_done_is_said(options, message):
    def work():
        with pytest.raises(ValueError) as raised:
            hp.parallelize(_llama(), **options)
        return str(raised.value)

    for said in threads(4).run(work):
        assert message in said


def test_models_that_are_none_or_have_no_blocks():
    def work():
        with pytest.raises(TypeError, match="parallelize"):
            hp.parallelize({"a": 1})
        with pytest.raises(ValueError, match=r"recompute is by block, and Linear has no list of blocks"):
            hp.parallelize(nn.Linear(2, 2), recompute="full")
        with pytest.raises(hp.plans.PlanError, match="Linear"):
            hp.parallelize(nn.Linear(2, 2), tp=2)

    threads(2).run(work)


def test_a_mesh_of_ones_own():
    def work():
        mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        run = hp.parallelize(_llama(), tp=2, mesh=mesh)
        assert str(run.degrees) == '"dp_shard=2, tp=2"'
        with pytest.raises(ValueError, match="is not what the degrees"):
            hp.parallelize(_llama(), cp=2, mesh=mesh)
        other = hp.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        with pytest.raises(ValueError, match="the axes of a mesh for parallelize are pp, dp_replicate"):
            hp.parallelize(_llama(), mesh=other)

    threads(4).run(work)


@pytest.mark.parametrize("plan", [hp.models.llama_plan(plain_outputs=False), lambda model: hp.plans.for_model(model)])
def test_a_plan_of_ones_own(plan):
    ids = torch.randint(37, (2, 8), generator=torch.Generator().manual_seed(0))
    want = _llama()(ids, ids)
    for got in threads(2).run(lambda: hp.parallelize(_llama(), tp=2, plan=plan).forward_backward(ids, labels=ids)):
        torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "degrees", ["dp_shard=4, tp=2", "dp_shard=2, cp=2, tp=2", "dp_replicate=2, dp_shard=4", "tp=8"]
)
def test_any_rank_runs_without_memory(degrees):
    """A step on meta, as one rank of eight that nobody answers."""
    platform = get_platform()
    for rank in (0, 5):
        with as_member(Member(rank, 8, platform.silent_group)), torch.device("meta"):
            model = hp.models.Llama(hp.models.LlamaConfig(**SIZES, max_length=16))
            run = hp.parallelize(model, degrees, microbatches=2, recompute="full")
            ids = torch.zeros(3, 8, dtype=torch.long)
            with hp.CommRecorder() as recorder:
                loss = run.forward_backward(ids, labels=ids)
            optimizer = torch.optim.AdamW(run.parameters())
            optimizer.step()
            assert current.address is None, "draws of the program would be addressed from now on"
            assert loss.device.type == "meta" and loss.shape == () and recorder.counts
            for parameter, gradient in zip(run.parameters(), run.gradients(), strict=True):
                assert gradient.shape == parameter.shape and gradient.device.type == "meta"


def test_explanation():
    def work():
        run = hp.parallelize(_llama(), "dp_shard=2, tp=2")
        ids = torch.zeros(1, 8, dtype=torch.long)
        text, with_step = run.explain(), run.explain(ids, labels=ids)
        assert all(gradient is None for gradient in run.gradients())
        run.forward_backward(ids, labels=ids)
        with pytest.raises(RuntimeError, match="call zero_grad\\(\\) first"):
            run.explain(ids, labels=ids)
        return text, with_step, str(run.draw()), repr(run)

    for text, with_step, drawing, name in threads(4).run(work):
        assert 'Llama on 4 ranks, "dp_shard=2, tp=2"' in text
        assert "blocks.*.attention.query.weight" in text and "sharded on dim 0 over tp x dp_shard" in text
        size = sum(one.numel() * 8 for one in _llama().parameters())
        assert f"of {size / 1024:.4g} KiB on this rank" in text, text
        assert "reduce_scatter_tensor" in with_step and with_step.startswith(text)
        assert "attention" in drawing and "/tp" in drawing
        assert name == 'Parallel(Llama, "dp_shard=2, tp=2", microbatches=1)'


def test_what_ranks_tell_travels_with_the_number_of_targets():
    def work():
        run = hp.parallelize(_llama(), "dp_shard=2, tp=2")
        run.tell = (int(get_platform().get_rank() == 3), 10)
        ids = torch.zeros(1, 8, dtype=torch.long)
        run.forward_backward(ids, labels=ids)
        return run.told.tolist(), int(run.counts.targets)

    assert threads(4).run(work) == [([1, 40], 16)] * 4
