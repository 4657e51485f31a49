"""Stages of our own model on both frameworks against the model in one piece, where it is cut, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel import checkpoint as ckpt
from hyper_parallel import models
from hyper_parallel.checkpoint import get_state_dict, set_state_dict
from hyper_parallel.core.activation_memory.recompute import recompute
from hyper_parallel.core.pipeline_parallel.stages.balance import balanced_counts
from hyper_parallel.core.pipeline_parallel.stages.grad_norm import clip_grad_norm_of_stages
from hyper_parallel.core.pipeline_parallel.stages.split import split_stages
from hyper_parallel.core.pipeline_parallel.stages.stage_model import StageModel
from hyper_parallel.platform import get_platform
from tests.frameworks import assert_close, equal, on_mindspore, ours
from tests.frameworks import models as small
from tests.pipeline_parallel.stages_by_hand import gradients_of, run, split_of
from tests.world import run_on_ranks

_SIZES = {"vocab_size": 37, "dim": 16, "num_blocks": 5, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 24}


def _llama(tied: bool = True, with_values: bool = False) -> Any:
    hp.manual_seed(5)
    with hp.deferred_init():
        model = models.Llama(models.LlamaConfig(**_SIZES, tie_head=tied, max_length=16))
        if not on_mindspore:
            model = model.double()
    hp.number_initial_values(model)
    return hp.materialize(model) if with_values else model


def _stages(num_stages: Any, prepare: Any = lambda model, split: None, tied: bool = True) -> list[StageModel]:
    """Each from a model without memory, as on a rank of its own."""
    made = []
    num = num_stages if isinstance(num_stages, int) else len(num_stages)
    for index in range(num):
        model = _llama(tied)
        split = split_of(model, num_stages)
        prepare(model, split)
        made.append(StageModel(model, split, index))
        hp.materialize(model)
    return made


def _batch(rows: int = 2) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows)
    ids, labels = (torch.randint(0, 37, (rows, 9), generator=generator) for _ in range(2))
    labels[0, :3] = -100
    return {"ids": ours(ids.int() if on_mindspore else ids), "labels": ours(labels.int() if on_mindspore else labels)}


def _whole(batches: list[dict[str, Any]], tied: bool = True) -> tuple[list[Any], dict[str, Any]]:
    platform = get_platform()
    model = _llama(tied, with_values=True)
    losses = [model(**batch) for batch in batches]
    for loss in losses:
        platform.backward(loss)
    return losses, {name: platform.get_grad(one) for name, one in platform.parameters_dict(model).items()}


_CLOSE = {"rtol": 0, "atol": 1e-6 if on_mindspore else 1e-12}


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.sweep("mindspore"))])
@pytest.mark.parametrize("recomputed", [pytest.param(False, marks=pytest.mark.sweep("mindspore")), True])
def test_stages_of_our_llama_give_the_gradients_of_one_piece(tied: bool, recomputed: bool) -> None:
    def prepare(model: Any, split: Any) -> None:
        modules = dict(get_platform().get_cells_and_names(model))
        for path in split.blocks if recomputed else ():
            recompute(modules[path])

    batches = [_batch(2), _batch(3)]
    losses, expected = _whole(batches, tied)
    stages = _stages(3, prepare, tied)
    found = run(stages, batches, lambda outputs: outputs)
    for one, other in zip(found, losses, strict=True):
        assert_close(one, other, **_CLOSE)
    gradients = gradients_of(stages)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(gradients[name], gradient, **_CLOSE)
    assert dict(stages[0].split.shared) == ({_embedding(): (0, 2)} if tied else {})


def _embedding() -> str:
    return "embedding.embedding_table" if on_mindspore else "embedding.weight"


def test_a_stage_holds_its_part_under_the_names_of_one_piece() -> None:
    platform = get_platform()
    whole = platform.named_state_parameters(_llama(with_values=True))
    stages = _stages([1, 3, 1])
    held = [platform.named_state_parameters(stage.model) for stage in stages]
    assert {name.split(".")[1] for name in held[1]} == {"1", "2", "3"}
    assert _embedding() in held[0] and "head.weight" not in held[0] and "head.weight" in held[2]
    assert _embedding() not in held[2] and _embedding() in stages[2].named_parameters()
    for names in held:
        for name, parameter in names.items():
            assert equal(platform.detached(parameter), platform.detached(whole[name])), name
    assert {name for names in held for name in names} == set(whole)
    assert list(stages[0].split.order) == list(platform.parameters_dict(_llama()))


@pytest.mark.sweep("mindspore")
@run_on_ranks(2)
def test_tied_stages_clip_and_go_on_from_a_checkpoint_as_one_piece(tmp_path: Any) -> None:
    platform = get_platform()
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    rank = platform.get_rank()

    def optimizer_of(model: Any) -> Any:
        parameters = list(platform.parameters_dict(model).values())
        return platform.new_optimizer("adamw", [{"params": parameters}], {"lr": 0.1})

    whole = _llama(with_values=True)
    one = optimizer_of(whole)
    stage = _stages(2)[rank]
    mine = optimizer_of(stage.model)
    for step in range(2):
        for name, parameter in platform.parameters_dict(whole).items():
            generator = torch.Generator().manual_seed(100 * step + list(stage.split.order).index(name))
            gradient = torch.randn(tuple(parameter.shape), generator=generator, dtype=torch.float64)
            gradient = gradient.float() if on_mindspore else gradient
            platform.set_grad(parameter, ours(gradient.clone()))
            if name in stage.named_parameters():
                platform.set_grad(stage.named_parameters()[name], ours(gradient))
        expected = platform.clip_grad_norm_(list(platform.parameters_dict(whole).values()), 1.0)
        found = clip_grad_norm_of_stages(stage.named_parameters(), 1.0, order=stage.split.order, stages=mesh)
        assert equal(found, expected)
        with pytest.raises(ValueError, match=r"is a parameter of a pipeline's stage.*run\.clip_grad_norm_"):
            platform.clip_grad_norm_(list(stage.named_parameters().values()), 1.0)
        platform.step_optimizer(one)
        platform.step_optimizer(mine)
    model_state, optimizer_state = get_state_dict(stage.model, mine)
    assert set(optimizer_state["stepped"]) == set(stage.named_parameters())
    ckpt.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "two")

    again = _llama(with_values=True)
    other = optimizer_of(again)
    model_state, optimizer_state = get_state_dict(again, other)
    ckpt.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / "two")
    set_state_dict(again, other, model_state_dict=model_state, optim_state_dict=optimizer_state)
    wanted = get_state_dict(whole, one)
    got = get_state_dict(again, other)
    for name, value in wanted[0].items():
        assert equal(platform.detached(got[0][name]), platform.detached(value)), name
    for name, slots in wanted[1]["state"].items():
        assert got[1]["stepped"][name]
        for slot, value in slots.items():
            assert equal(platform.detached(got[1]["state"][name][slot]), platform.detached(value)), (name, slot)


def test_balance() -> None:
    assert balanced_counts([1.0] * 8, 4, last=3.0) == (3, 2, 2, 1)
    assert balanced_counts([5, 1, 1, 1, 1, 1], 2) == (1, 5)
    assert balanced_counts([1, 1, 1], 3) == (1, 1, 1)
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]
    for stages in range(1, 8):
        cuts = itertools.combinations(range(1, 7), stages - 1)
        best = min(max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cut, 7))) for cut in cuts)
        counts = balanced_counts(costs, stages)
        ends = list(itertools.accumulate(counts, initial=0))
        assert max(sum(costs[a:b]) for a, b in itertools.pairwise(ends)) == best and sum(counts) == 7


def test_where_a_model_is_cut() -> None:
    model = _llama(tied=False)
    assert [len(stage) for stage in split_of(model, 2).stages] == [3, 2], "the head counts"
    assert [len(stage) for stage in split_of(model, 2, balance=[0, 9, 1, 1, 1, 1, 0]).stages] == [1, 4]
    assert [len(stage) for stage in split_of(model, [1, 1, 3]).stages] == [1, 1, 3]
    in_bytes = split_of(model, 5, balance="bytes")
    size = sum(get_platform().get_tensor_storage_size(one) for one in get_platform().parameters_dict(model).values())
    assert sum(in_bytes.costs) == size and in_bytes.costs[0] > in_bytes.costs[1]
    split = split_of(model, 2)
    assert split.stage_of("embedding") == 0 and split.stage_of("head") == 1
    assert split.stage_of("blocks.4.attention.query") == 1 and split.stage_of("blocks") is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stages": 6}, "6 stages of Llama, which has 5 blocks; give a number from 1 to 5"),
        ({"stages": 0}, "0 stages of Llama"),
        ({"stages": [2, 2]}, r"stages=\[2, 2\] are 4 blocks, and Llama has 5; give the number of blocks of each"),
        ({"stages": [5, 0]}, r"stages=\[5, 0\] are 5 blocks, .* at least one"),
        ({"stages": 2, "balance": "size"}, "balance='size'; write 'time', 'bytes' or a list of costs"),
        ({"stages": 2, "balance": [1, 2]}, r"balance= has 2 costs, \[1.0, 2.0\]; .* one for each of the 5 blocks"),
        ({"stages": 1, "blocks": ["blocks.7"]}, r"Llama has no module 'blocks\.7'"),
        ({"stages": 1, "blocks": []}, "no blocks were found in Llama: hold them in a ModuleList"),
        ({"stages": 1, "blocks": ["a.0", "b.0"]}, r"more than one row of blocks \('a', 'b'\), as encoders .* use tp"),
    ],
)
def test_stages_that_cannot_be_made(options: dict[str, Any], said: str) -> None:
    model = _llama()
    with pytest.raises(ValueError, match=said):
        split_stages(model, **{"blocks": [f"blocks.{number}" for number in range(5)], **options})


class _Block(small.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = small.linear(4, 4)

    def forward(self, x: Any) -> Any:
        return x + self.inner(x)


class _Row(small.Module):
    """A row of blocks behind something that is no embedding, or with a parameter around it, or run twice."""

    def __init__(self, before: Any = None, around: bool = False, rounds: int = 1, each: int = 1) -> None:
        super().__init__()
        if before is not None:
            self.before = before
        self.blocks = small.module_list(_Block(), _Block(), _Block())
        if around:
            self.scale = get_platform().Parameter(ours(torch.ones(4)), requires_grad=True)
        self.rounds, self.each = rounds, each

    def forward(self, x: Any) -> Any:
        for _ in range(self.rounds):
            for block in self.blocks:
                for _ in range(self.each):
                    x = block(x)
        return x


class _Odd(small.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = get_platform().Parameter(ours(torch.ones(2, 2, 2)), requires_grad=True)


def test_models_that_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match=r"'before' \(_Odd\) runs before the blocks, .* move it into the first block"):
        split_of(_Row(_Odd()), 2)
    with pytest.raises(ValueError, match=r"the parameter 'scale' belongs to the module around the blocks, .* its own"):
        split_of(_Row(around=True), 2)
    x = ours(torch.ones(2, 4))
    for options, said in (
        ({"rounds": 2}, r"'blocks\.0' of an earlier stage ran behind .* run several times cannot be cut"),
        ({"each": 2}, r"'blocks\.2' was called twice in one run, .* run several times cannot be cut"),
    ):
        twice = _Row(**options)
        with pytest.raises(RuntimeError, match=said):
            StageModel(twice, split_of(twice, 2), 1)(x, x)


class _Pairs(small.Module):
    """Blocks that hand two tensors on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = small.module_list(_Pair(), _Pair())

    def forward(self, x: Any) -> Any:
        beside = x
        for block in self.blocks:
            x, beside = block(x, beside)
        return x + beside


class _Pair(_Block):
    def forward(self, x: Any, beside: Any) -> Any:
        return x + self.inner(x), beside * 2


def test_a_look_at_the_first_blocks() -> None:
    x = ours(torch.ones(2, 4))
    pairs = _Pairs()
    with pytest.raises(ValueError, match=r"'blocks\.0' hands a tensor of shape \(2, 4\) on to the next block beside"):
        split_of(pairs, 2, inputs={"x": x})
    with pytest.raises(
        ValueError, match=r"the run up to the first block 'blocks\.0' failed: .*: .* or leave inputs= out"
    ):
        split_of(pairs, 2, inputs={"y": x})
    with pytest.raises(ValueError, match=r"'blocks\.0' was called with a NoneType, so there is no stream to hand on"):
        split_of(pairs, 2, inputs={"x": None})
    row = _Row()
    assert split_of(row, 2, inputs={"x": x}).stream.shape == (2, 4)
    with pytest.raises(ValueError, match=r"without a call of 'before', so it is not the first block: let the model"):
        split_stages(_Row(_Block()), 1, blocks=["before"], inputs={"x": x})


def test_calls_that_a_stage_cannot_answer() -> None:
    row = _Row()
    split = split_of(row, 2)
    with pytest.raises(ValueError, match="stage 2 of a model in 2 stages; count from 0"):
        StageModel(row, split, 2)
    stage = StageModel(row, split, 0)
    x = ours(torch.ones(2, 4))
    with pytest.raises(ValueError, match="stage 0 of 2 takes no stream, the first one makes it: got"):
        stage(x, x)
    with pytest.raises(
        RuntimeError, match=r"'blocks\.0' ran outside of a call of its stage: call the StageModel, not the"
    ):
        row(x)
    with pytest.raises(ValueError, match=r"this .*Row has been cut already; build it again"):
        StageModel(row, split, 1)
    last = StageModel(_Row(), split, 1)
    with pytest.raises(RuntimeError, match=r"'blocks\.0' ran outside of a call of its stage: call the StageModel"):
        last.model(x)
    with pytest.raises(ValueError, match="stage 1 of 2 takes the stream of the one before: got NoneType"):
        last(None, x)
    for name in ("output_router_logits", "output_hidden_states", "output_attentions", "use_cache"):
        with pytest.raises(ValueError, match=f"a stage was called with {name}=True.*: leave it out"):
            stage(None, x, **{name: True})
    with pytest.raises(ValueError, match="with past_key_values=, a state beside the stream that stages do not hand on"):
        stage(None, x, past_key_values=x)


def test_blocks_in_another_order_than_they_run() -> None:
    turned = split_stages(_Row(), 2, blocks=["blocks.2", "blocks.1", "blocks.0"])
    x = ours(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match=r"without a call of its first block 'blocks\.2': let .* in which they run"):
        StageModel(_Row(), turned, 0)(None, x)
    with pytest.raises(RuntimeError, match=r"'blocks\.1' of an earlier stage ran behind .* in which they run"):
        StageModel(_Row(), turned, 1)(x, x)


@pytest.mark.parametrize("key", ["output_router_logits", "output_hidden_states", "output_attentions"])
def test_configurations_that_cannot_be_cut(key: str) -> None:
    row = _Row()
    row.config = type("Config", (), {key: True})()
    with pytest.raises(ValueError, match=rf"_Row has config\.{key}=True, .*: set model\.config\.{key} = False"):
        split_of(row, 2)
    row.config = type("Config", (), {"is_encoder_decoder": True})()
    with pytest.raises(ValueError, match="_Row has more than one row of blocks, as encoders with decoders have"):
        split_of(row, 2)


class _ResidualOutside(_Row):
    """What runs around the blocks belongs to no stage."""

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_what_a_model_computes_between_its_blocks_is_refused() -> None:
    row = _ResidualOutside()
    split = split_stages(row, 2, blocks=[f"blocks.{number}" for number in range(len(row.blocks))])
    with pytest.raises(
        ValueError, match=r"'blocks\.\d' takes is not what the block before it gave, .* a residual around"
    ):
        StageModel(row, split, 0)(None, ours(torch.ones(2, 4)))


class _GivesMore(small.Module):
    def __init__(self, gives: Any) -> None:
        super().__init__()
        self.layer, self.gives = small.linear(4, 4), gives

    def forward(self, x: Any) -> Any:
        return self.gives(self.layer(x))


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        (lambda y: {"x": y}, r"'blocks\.0' gives a dict whose stream is not first: let it give the stream alone"),
        (lambda y: (y, (y * y).mean()), r"'blocks\.0' gives a number with a gradient .* have gives_loss = True"),
    ],
)
def test_what_blocks_give_beside_the_stream(gives: Any, said: str) -> None:
    row = _Row()
    row.blocks = small.module_list(*[_GivesMore(gives) for _ in range(3)])
    split = split_stages(row, 2, blocks=[f"blocks.{number}" for number in range(3)])
    with pytest.raises((TypeError, ValueError), match=said):
        StageModel(row, split, 0)(None, ours(torch.ones(2, 4)))
