"""What a model declares goes before names and sizes, if it fits; and the structure that later parallelisms need."""

import copy
import warnings

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.plans import declared
from tests.world import run_on_ranks

only_on = "torch"  # models in the manner of Hugging Face


class Config:
    def __init__(self, **plans):
        vars(self).update(plans)


PLAN = {
    "stack.*.mix.one": "colwise",
    "stack.*.mix.two": "colwise_gather_output",
    "stack.*.mix.last": "rowwise",
    "stack.*.mix.small": "replicated_with_grad_allreduce",
}


class Mix(nn.Module):
    """Neither names nor sizes tell: three layers from 6 to 6, and one aside."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.last = (nn.Linear(6, 6) for _ in range(3))
        self.small, self.aside = nn.Linear(6, 4), nn.Linear(4, 6)

    def forward(self, x):
        return self.last(self.one(x).tanh() * self.two(x)) + self.aside(self.small(x).sin())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(6), Mix()

    def forward(self, x):
        return x + self.mix(self.norm(x))


class Base(nn.Module):
    base_model_prefix = "inner"

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.words = nn.Embedding(11, 6)
        self.final_scale = nn.LayerNorm(6)
        self.stack = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids):
        x = self.words(ids)
        for block in self.stack:
            x = block(x)
        return self.final_scale(x)


class Model(nn.Module):
    base_model_prefix = "inner"

    def __init__(self, **plans):
        super().__init__()
        self.config = Config(**plans)
        self.inner = Base(self.config)
        self.answer = nn.Linear(6, 11)

    def forward(self, ids):
        return self.answer(self.inner(ids))


@run_on_ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_declaration_cuts_what_nothing_else_tells(sequence_parallel):
    torch.manual_seed(0)
    plain = Model(base_model_tp_plan=PLAN).double()
    with pytest.raises(hp.plans.PlanError, match="cannot tell how to shard"):
        hp.plans.for_model(Model())
    cut = copy.deepcopy(plain)
    plan = hp.plans.for_model(cut, sequence_parallel=sequence_parallel)
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    hp.parallelize_module(cut, mesh, plan)
    mix = cut.inner.stack[1].mix
    assert mix.one.weight.placements == mix.two.weight.placements == (hp.Shard(0),)
    assert mix.last.weight.placements == (hp.Shard(1),)
    assert mix.small.weight.placements == mix.aside.weight.placements == (hp.Replicate(),)
    ids = torch.arange(10).reshape(2, 5)
    want, got = plain(ids), cut(ids)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    want.sin().sum().backward()
    got.sin().sum().backward()
    for (name, ours), theirs in zip(cut.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-9, atol=1e-9, msg=name)


class Llama(nn.Module):
    """A known model with a declaration of its own."""

    base_model_prefix = ""

    def __init__(self, **plans):
        super().__init__()
        self.config = Config(**plans)
        sizes = {"vocab_size": 11, "dim": 16, "num_blocks": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 18}
        self.model = hp.models.Llama(hp.models.LlamaConfig(**sizes))


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"layers.*.q": "colwise", "layers.*.o": "rowwise"}, r"no linear layer is called 'layers.\*.q', 'layers.\*.o'"),
        ({"model.blocks.*.attention.*": "colwise"}, r"in 'model.blocks.\*.attention' .*output are all colwise"),
        (
            {"model.blocks.*.feed_forward.gate": "colwise", "model.blocks.*.feed_forward.up": "rowwise"},
            r"in 'model.blocks.\*.feed_forward' up gives 18 features, but the layers before it start from 16",
        ),
    ],
    ids=["missing modules", "no pair", "wrong dims"],
)
def test_a_declaration_that_does_not_fit_falls_back_with_one_note(plan, said):
    declared._noted.clear()
    with pytest.warns(RuntimeWarning, match=f"plans: base_model_tp_plan of Config does not fit the model: {said}"):
        found = hp.plans.for_model(Llama(base_model_tp_plan=plan))
    assert repr(found) == repr(hp.plans.for_model(Llama()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hp.plans.for_model(Llama(base_model_tp_plan=plan))


def test_styles_that_nobody_knows_say_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = hp.plans.for_model(Llama(base_model_tp_plan={"model.blocks.*.attention.query": "diagonal"}))
    assert repr(found) == repr(hp.plans.for_model(Llama()))


def test_the_structure_of_a_model():
    found = hp.plans.structure_of(Model())
    assert found.blocks == ("inner.stack.0", "inner.stack.1")
    assert found.prologue == found.vocabularies == ("inner.words",)
    assert found.epilogue == ("inner.final_scale", "answer") and found.heads == ("answer",)
    assert found.mixtures == ()
    stages = {"words": (), "final_scale": (), "stack": ()}  # in this order it runs, says the model
    found = hp.plans.structure_of(Model(base_model_pp_plan=stages))
    assert found.prologue == ("inner.words", "inner.final_scale") and found.epilogue == ("answer",)
    declared._noted.clear()
    with pytest.warns(RuntimeWarning, match="base_model_pp_plan of Config does not fit the model: the model has no"):
        found = hp.plans.structure_of(Model(base_model_pp_plan={"words": (), "layers": ()}))
    assert found == hp.plans.structure_of(Model())


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(3, 6, 8))


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.route, self.all_of_them = nn.Linear(6, 3), Experts()


def test_mixtures_of_experts():
    model = Model(base_model_ep_plan={"stack.*.experts": "ep_dispatch_experts", "stack.*.ff.experts": "grouped_gemm"})
    model.inner.stack[0].experts = Experts()  # beside the other parts: the experts alone
    model.inner.stack[1].ff = Routed()
    model.inner.stack[1].ff.experts = Experts()  # with a module of their own around them
    assert hp.plans.structure_of(model).mixtures == ("inner.stack.0.experts", "inner.stack.1.ff")
