"""What experts cost: bytes on the wire, memory, looks at values; the same bits every time; ranks without memory."""

import pytest
import torch
import torch.nn.functional as F

import hyper_parallel as hp
from hyper_parallel.core.expert_parallel.row_counts import host_reads
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.checks.collective_observers import observers
from hyper_parallel.testing import threads
from tests.expert_parallel.test_experts_op import routing
from tests.frameworks import on_mindspore
from tests.parallel.training import batch, train
from tests.tensor_parallel.hugging_face import assert_same, build, whole

pytestmark = pytest.mark.skipif(on_mindspore, reason="ranks of one process are PyTorch's")


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_travels_is_that_of_the_closed_forms(ranks):
    """R rows there and back for the R choices of experts elsewhere, in both passes, and the counts once."""

    def work():
        rank = get_platform().get_rank()
        mesh = hp.init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
        weight = hp.distribute_tensor(torch.randn(8, 16, 16), mesh, [hp.Shard(0)]).requires_grad_()
        tokens = torch.randn(11 + rank, 16, requires_grad=True)
        index = torch.tensor(routing("balanced", 11 + rank, 8, 3, seed=rank))
        before, rows_away = host_reads.number, []

        def observer(call):
            if call.splits is not None:
                rows_away.append(sum(call.splits[0]) - call.splits[0][rank])

        observers.append(observer)
        with hp.CommRecorder() as forward:
            out = hp.experts(tokens, index, torch.rand(11 + rank, 3), weight, weight, activation=F.silu)
        with hp.CommRecorder() as backward:
            out.sum().backward()
        observers.remove(observer)
        assert host_reads.number == before + 1, "one look at values in a layer, none in backward"
        counts, there, back = forward.records
        assert (counts.op, counts.num_bytes) == ("all_gather_into_tensor", 8 * 8)
        assert there.shape == (3 * (11 + rank), 16), "a row for each choice, of which those of this rank's experts stay"
        assert [one.op for one in (there, back, *backward.records)] == ["all_to_all_single"] * 4
        # all-to-all there takes what all-to-all back gives, and backward the other way round
        assert [one.shape for one in backward.records] == [there.shape, back.shape]
        return index, back.shape[0], rows_away

    seen = threads(ranks).run(work)
    places = [index // (8 // ranks) for index, _, _ in seen]
    for rank, (_, received, rows_away) in enumerate(seen):
        assert received == sum(int((place == rank).sum()) for place in places)
        there = int((places[rank] != rank).sum())
        back = received - int((places[rank] == rank).sum())
        assert rows_away == [there, back, there, back], "rows of 16 numbers for experts elsewhere, in both passes"
    away = sum(sum(rows_away) for _, _, rows_away in seen)
    assert away == 4 * sum(int((place != rank).sum()) for rank, place in enumerate(places))


def test_experts_take_their_share_of_memory():
    def work():
        run = hp.parallelize(build("qwen3_moe_without_balance"), "dp_shard=4, ep=2")
        found = [one for name, one in run.named_parameters() if ".experts." in name]
        return sum(one.to_local().numel() for one in found), sum(one.numel() for one in found)

    for local, total in threads(4).run(work):
        assert abs(local * 4 / total - 1) < 0.03  # half by expert, half of that by edp


def test_blocks_that_are_computed_again_use_the_routing_of_their_first_pass():
    given = batch()

    def work(recompute):
        run = hp.parallelize(build("olmoe"), "dp_shard=2, ep=2", recompute=recompute)
        before = host_reads.number
        with hp.CommRecorder() as recorder:
            seen = train(run, given, steps=1)
        counts = sum(one.asked_by == "counts of the experts' rows" for one in recorder.records)
        return seen["loss 0"], seen["norm 0"], counts, host_reads.number - before

    plain, again = (threads(2).run(work, recompute) for recompute in (None, "full"))
    for one, other in zip(plain, again, strict=True):
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(one[:2], other[:2], strict=True))
        assert one[2:] == other[2:] == (2, 2), "once for each of two layers"


def test_the_same_bits_every_time(sweep):
    given, steps = batch(), 20 if sweep else 4

    def work():
        seen = []
        for _ in range(2):
            seen.append(train(hp.parallelize(build("mixtral_without_balance"), "dp_shard=2, ep=2"), given, steps))
        return all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])

    assert threads(2).run(work) == [True, True]


@pytest.mark.sweep
@pytest.mark.parametrize(("dtype", "rate", "limit"), [(torch.float64, 1e-2, 1e-12), (torch.float32, 1e-3, 1e-6)])
def test_ten_steps_at_any_degree(dtype, rate, limit):
    config = hp.models.MixtureConfig(
        vocab_size=64, dim=32, num_blocks=2, num_heads=4, num_kv_heads=2, num_experts=8, top_k=2, expert_dim=16,
        shared_dim=16, load_balance_coeff=1e-3,
    )  # fmt: skip

    def work(degrees):
        torch.manual_seed(0)
        run = hp.parallelize(hp.models.Mixture(config).to(dtype), degrees)
        optimizer = torch.optim.AdamW(run.parameters(), lr=rate)
        rows = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(1))
        for _ in range(10):
            mine = rows[run.mine(range(8))]
            run.forward_backward(mine[:, :-1], labels=mine[:, 1:])
            run.clip_grad_norm_(1.0)
            optimizer.step()
            hp.models.update_expert_bias(run)
            run.zero_grad()
        return {name: whole(one) for name, one in run.named_parameters()}

    want = threads(1).run(work, "dp_shard=1")[0]
    for ep in (1, 2, 4):
        assert_same(threads(4).run(work, f"dp_shard=4, ep={ep}")[0], want, rtol=0, atol=limit)


@pytest.mark.parametrize("degrees", ["dp_shard=8, ep=4", "dp_shard=4, tp=2, ep=8"])
def test_a_rank_of_a_planned_world_runs_without_memory(degrees):
    """Without values every expert is taken to get as many rows."""
    config = hp.models.MixtureConfig(
        vocab_size=64, dim=32, num_blocks=2, num_heads=4, num_kv_heads=2, num_experts=8, top_k=2, expert_dim=16
    )
    for rank in (0, 5):
        report = hp.dry_run(
            lambda: hp.models.Mixture(config), degrees, world_size=8, rank=rank, batch=2, length=16, dtype="bfloat16"
        )
        text = str(report)
        assert "all_to_all_single" in text or "all-to-all" in text, text


@pytest.mark.parametrize("kind", ["to ep=4", "to ep=1"])
def test_a_checkpoint_opens_at_any_other_degree(kind, tmp_path):
    given = batch()
    ids = {name: value[:4] for name, value in given.items()}

    def save():
        run = hp.parallelize(build("olmoe"), "dp_shard=2, ep=2")
        run.save(tmp_path / "checkpoint")
        run.save_hugging_face(tmp_path / "folder")
        mine = run.mine(range(4))
        return run.loss_of(**{name: value[mine.start : mine.stop] for name, value in ids.items()})

    want = threads(2).run(save)[0]

    def load(how):
        model = build("olmoe")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        run = hp.parallelize(model, "dp_shard=4, ep=4" if kind == "to ep=4" else "dp_shard=1")
        getattr(run, how)(tmp_path / ("checkpoint" if how == "load" else "folder"))
        mine = run.mine(range(4))
        return run.loss_of(**{name: value[mine.start : mine.stop] for name, value in ids.items()})

    for how in ("load", "load_hugging_face"):
        for got in threads(4 if kind == "to ep=4" else 1).run(load, how):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
