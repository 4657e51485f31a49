"""Plans made from a model's structure: PyTorch's own transformers, unknown models, and what stops a plan."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp
from hyper_parallel import models
from hyper_parallel.core.tensor_parallel.parameter_styles import ShardAttention, ShardParameters
from hyper_parallel.core.tensor_parallel.single_device_code import SingleDeviceCode
from tests.tensor_parallel.toy import parts_joined
from tests.world import run_on_ranks

only_on = "torch"  # PyTorch's transformers; cells: test_mindspore_models.py


def _mesh():
    return hp.init_device_mesh("cpu", (hp.get_platform().get_world_size(),), mesh_dim_names=("tp",))


class UnknownBlock(nn.Module):
    """Names that nobody has heard of; the sizes tell what is what."""

    def __init__(self, width=12, inner=20):
        super().__init__()
        self.scale = nn.LayerNorm(width)
        self.mixer = nn.ModuleDict({name: nn.Linear(width, width) for name in ("alpha", "beta", "gamma", "delta")})
        self.widen, self.narrow = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        h = self.scale(x)
        weights = (self.mixer["alpha"](h) @ self.mixer["beta"](h).transpose(1, 2)).softmax(-1)
        x = x + self.mixer["delta"](weights @ self.mixer["gamma"](h))
        return x + self.narrow(self.widen(x).tanh())


class Unknown(nn.Module):
    def __init__(self, vocabulary=11, width=12):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.stack = nn.ModuleList(UnknownBlock(width) for _ in range(2))
        self.answer = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.stack:
            x = block(x)
        return self.answer(x)


class _Memory(nn.Module):
    """A decoder with its memory as an input."""

    def __init__(self, **options):
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 24, dropout=0.0, **options), 2)

    def forward(self, x):
        return self.decoder(x, x.flip(-1).cos())


class _Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(16, 4, 1, 1, 24, dropout=0.0, batch_first=True)

    def forward(self, x):
        mask = self.transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.transformer(x, x.sin(), tgt_mask=mask)


def _ids():
    return torch.arange(15).reshape(3, 5) * 7 % 11


def _features(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _encoder(**options):
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


CASES = {
    "llama": lambda: (models.Llama(models.LlamaConfig(11, 16, 2, 4, 2, 20, 8)), _ids()),
    "llama_tied": lambda: (models.Llama(models.LlamaConfig(11, 16, 2, 4, 1, 20, 8, tie_head=True)), _ids()),
    "encoder": lambda: (_encoder(batch_first=True), _features(3, 5, 16)),
    "encoder_sequence_first": lambda: (_encoder(norm_first=True), _features(5, 3, 16)),
    "encoder_layer": lambda: (nn.TransformerEncoderLayer(16, 4, 24, 0.0, batch_first=True), _features(3, 5, 16)),
    "decoder": lambda: (_Memory(batch_first=True), _features(3, 5, 16)),
    "transformer": lambda: (_Pair(), _features(3, 5, 16)),
    "three_heads": lambda: (nn.TransformerEncoderLayer(12, 3, 10, 0.0, batch_first=True), _features(3, 5, 12)),
    "unknown": lambda: (Unknown(), _ids()),
    "chain": lambda: (nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 7)), _features(3, 5, 6)),
}


def _build(name):
    torch.manual_seed(0)
    model, x = CASES[name]()
    return model.double(), x


def _train(model, x):
    seen = {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    for step in range(2):
        optimizer.zero_grad()
        out = model(x)
        loss = out.sin().square().sum()
        loss.backward()
        seen[f"out {step}"] = out.detach()
        seen |= {f"grad {step} of {n}": p.grad for n, p in model.named_parameters()}
        optimizer.step()
    seen |= {f"weight of {n}": p.detach() for n, p in model.named_parameters()}
    return {name: t.full_tensor() if isinstance(t, hp.DTensor) else t for name, t in seen.items()}


@run_on_ranks(2, sweep=(4,))
@pytest.mark.parametrize("name", CASES)
def test_training_equals_one_device(name):
    model, x = _build(name)
    want = _train(copy.deepcopy(model), x)
    for options in ({}, {"sequence_parallel": True}, {"sequence_parallel": True, "split_fused": True}):
        cut = copy.deepcopy(model)
        hp.parallelize_module(cut, _mesh(), hp.plans.for_model(cut, **options))
        assert any(p.placements != (hp.Replicate(),) for p in cut.parameters())
        got = _train(cut, x)
        if "split_fused" in options:
            got = parts_joined(got, want)
        assert got.keys() == want.keys()
        for key in want:
            torch.testing.assert_close(got[key], want[key], rtol=1e-9, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")


@run_on_ranks(2, 4)
def test_the_frameworks_attention_keeps_its_heads_cut():
    cut, x = _build("encoder")
    hp.parallelize_module(cut, _mesh(), hp.plans.for_model(cut, plain_outputs=False, split_fused=True))
    with hp.CommRecorder() as recorder:
        loss = cut(x).sum()
    assert recorder.counts == {"all_reduce": 2 * 2}, recorder.table()
    with hp.CommRecorder() as recorder:
        loss.backward()
    assert {record.op for record in recorder.records if len(record.shape) == 3} == {"all_reduce"}, recorder.table()


@run_on_ranks(2, 4)
def test_everything_the_frameworks_attention_can_be_asked_for():
    query, key = _features(5, 2, 16), _features(3, 2, 16).cos()
    mask, per_head = _features(5, 3), _features(8, 5, 3)
    padding = torch.tensor([[False, False, True], [False, True, False]])
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    calls = {
        "cross": ((query, key, key), {}),
        "other values": ((query, key, key.sin()), {"need_weights": False}),
        "masks": ((query, key, key), {"attn_mask": mask, "key_padding_mask": padding}),
        "a mask for each head": ((query, key, key), {"attn_mask": per_head, "need_weights": False}),
        "a mask of bools": ((query, key, key), {"attn_mask": mask > 0.8, "average_attn_weights": False}),
        "padding alone": ((query, key, key), {"key_padding_mask": padding, "need_weights": False}),
        "causal": ((query, query, query), {"attn_mask": causal, "is_causal": True, "need_weights": False}),
        "causal weights": ((query, query, query), {"attn_mask": causal, "is_causal": True}),
        "without a batch": ((query[:, 0], key[:, 0], key[:, 0]), {"key_padding_mask": padding[0]}),
    }
    for options in ({}, {"bias": False, "batch_first": True}, {"add_bias_kv": True}, {"add_zero_attn": True}):
        torch.manual_seed(0)
        plain = nn.MultiheadAttention(16, 4, **options).double()
        cut = copy.deepcopy(plain)
        plan = {
            "": [SingleDeviceCode(plain_outputs=True), ShardAttention()],
            "out_proj": ShardParameters({"weight": hp.Shard(1)}),
        }
        hp.parallelize_module(cut, _mesh(), plan)
        for name, (inputs, asked) in calls.items():
            if options.get("batch_first") and name != "without a batch":
                inputs = tuple(one.transpose(0, 1) for one in inputs)
            if "add" in str(options) and name not in ("cross", "masks"):
                continue
            found, wanted = cut(*inputs, **asked), plain(*inputs, **asked)
            for one, other in zip(found, wanted, strict=True):
                assert (one is None) == (other is None), name
                if one is not None:
                    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
            for model, (out, *_) in ((cut, found), (plain, wanted)):
                model.zero_grad()
                out.sin().sum().backward()
            grads = [
                {
                    n: p.grad.full_tensor() if isinstance(p.grad, hp.DTensor) else p.grad
                    for n, p in model.named_parameters()
                }
                for model in (cut, plain)
            ]
            got = parts_joined(*grads)
            assert got.keys() == grads[1].keys()
            for path, gradient in grads[1].items():
                torch.testing.assert_close(got[path], gradient, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@run_on_ranks(2)
def test_padding_mask_and_eval_mode_of_the_encoder():
    model, x = _build("encoder")
    cut = copy.deepcopy(model)
    hp.parallelize_module(cut, _mesh(), hp.plans.for_model(cut, sequence_parallel=True))
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    for mode in (True, False):
        want = model.train(mode)(x, src_key_padding_mask=padding)
        got = cut.train(mode)(x, src_key_padding_mask=padding)
        torch.testing.assert_close(got[~padding], want[~padding], rtol=1e-9, atol=1e-9)


@run_on_ranks(2)
def test_an_error_inside_forward_ends_the_promise_about_plain_tensors():
    from hyper_parallel.core.shard.dispatching.mixing import replicating

    model, _ = _build("llama")
    hp.parallelize_module(model, _mesh(), hp.plans.for_model(model))
    with pytest.raises(ValueError, match="9 tokens, but max_length is 8"):
        model(torch.zeros(1, 9, dtype=torch.long))
    assert replicating.depth == 0
    with pytest.raises(RuntimeError, match="a plain tensor of shape"):
        model.norm.weight * torch.ones(16, dtype=torch.float64)


def test_the_plan_is_short_and_tells_what_happens():
    plan = hp.plans.for_model(_build("llama")[0], sequence_parallel=True)
    assert list(plan) == [
        "",
        "embedding",
        "blocks.*",
        "blocks.*.attention_norm",
        "blocks.*.attention",
        "blocks.*.attention.query",
        "blocks.*.attention.key",
        "blocks.*.attention.value",
        "blocks.*.attention.output",
        "blocks.*.feed_forward_norm",
        "blocks.*.feed_forward",
        "blocks.*.feed_forward.gate",
        "blocks.*.feed_forward.up",
        "blocks.*.feed_forward.down",
        "norm",
        "head",
    ]
    assert repr(plan["embedding"]) == (
        "[RowwiseParallel(input_layouts=Shard(-1), output_layouts=Shard(1), use_local_output=False)]"
    )
    assert repr(plan["blocks.*.attention"]) == "[GatherInputs()]"
    assert repr(plan["norm"]) == "[ReplicateParameters()]"


def test_unknown_names_are_read_by_size():
    plan = {path: type(styles[-1]).__name__ for path, styles in hp.plans.for_model(Unknown()).items()}
    columns = {path for path, style in plan.items() if style == "ColwiseParallel"}
    rows = {path for path, style in plan.items() if style == "RowwiseParallel"}
    assert columns == {"stack.*.mixer.alpha", "stack.*.mixer.beta", "stack.*.mixer.gamma", "stack.*.widen", "answer"}
    assert rows == {"stack.*.mixer.delta", "stack.*.narrow", "words"}


class Odd(nn.Module):
    def __init__(self, part, more=None):
        super().__init__()
        parts = {"part": part, "up": nn.Linear(4, 8), "down": nn.Linear(8, 4), "more": more or nn.Identity()}
        self.layers = nn.ModuleList([nn.ModuleDict(parts)])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            Odd(nn.Linear(4, 5)),
            r"cannot tell how to shard 'layers.0.part', a Linear: the linear layers beside each other, layers.0.part "
            r"\(4 -> 5\).*make no pair.*Leave it replicated with keep_whole=\['layers.\*.part'\]",
        ),
        (
            Odd(nn.ModuleDict({"a": nn.Linear(4, 5), "b": nn.Linear(3, 4)}), nn.Conv1d(1, 1, 1)),
            r"cannot tell how to shard 'layers.0.part', a ModuleDict: .*Leave what cannot be told replicated with "
            r"keep_whole=\['layers.\*.part', 'layers.\*.more'\]",
        ),
        (
            nn.ModuleList([nn.Conv2d(1, 2, 3), nn.LSTM(4, 4)]),
            r"cannot tell how to shard '0', a Conv2d .*Nothing else can: write a plan by hand, a dict from paths to",
        ),
        (
            Odd(nn.LSTM(4, 4)),
            r"cannot tell how to shard 'layers.0.part', a LSTM with weights of its own \(weight_ih_l0, weight_hh_l0\). "
            r"Leave it replicated with keep_whole=\['layers.\*.part'\]",
        ),
        (
            nn.Sequential(nn.Conv2d(1, 2, 3)),
            r"no linear layers in Sequential.*its largest.*Conv2d.weight of '0'",
        ),
        (nn.ReLU(), r"no linear layers in ReLU of which one leads into the other, and it has no parameters"),
    ],
)
def test_a_refusal_names_the_module(model, said):
    with pytest.raises(hp.plans.PlanError, match=said):
        hp.plans.for_model(model)


def test_keep_whole_answers_a_refusal():
    plan = hp.plans.for_model(Odd(nn.LSTM(4, 4)), keep_whole=["layers.*.part"])
    assert repr(plan["layers.*.part"]) == "[ReplicateParameters()]"
    assert "ColwiseParallel" in repr(plan["layers.*.up"])


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"takes a model, got dict"):
        hp.plans.for_model({})
    with pytest.raises(TypeError, match=r"write keep_whole=\['head'\]"):
        hp.plans.for_model(Unknown(), keep_whole="head")
    mixed = nn.ModuleList([nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2, batch_first=True)])
    with pytest.raises(hp.plans.PlanError, match="some attention modules have batch_first=True"):
        hp.plans.for_model(mixed, sequence_parallel=True)


class _StochasticBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(4, 6), nn.Linear(6, 4), nn.Dropout(0.5)

    def forward(self, x):
        keep = torch.rand(x.shape[0], 1) > 0.5  # drawn by the framework, a plain tensor
        return x + self.dropout(self.down(self.up(x).sigmoid())) * keep


class _StochasticModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(_StochasticBlock() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@run_on_ranks(2)
def test_what_a_model_draws_for_itself_is_the_same_on_every_rank():
    torch.manual_seed(0)
    model = _StochasticModel()
    hp.parallelize_module(model, _mesh(), hp.plans.for_model(model))
    hp.manual_seed(1)
    torch.manual_seed(hp.get_platform().get_rank())
    expected = torch.rand(6)
    torch.manual_seed(hp.get_platform().get_rank())
    drawn = [torch.rand(3)]
    x = torch.ones(8, 4, requires_grad=True)
    first, second = model(x), model(x)
    assert not torch.equal(first, second)
    drawn.append(torch.rand(3))
    assert torch.equal(torch.cat(drawn), expected), (
        "the framework's generator goes on as if the model had drawn nothing"
    )
    (gradient,) = torch.autograd.grad(first.sum(), x)
    hp.manual_seed(1)
    repeated = checkpoint(model, x, use_reentrant=False)
    torch.manual_seed(7)
    (of_repeated,) = torch.autograd.grad(repeated.sum(), x)
    for value in (first, second, gradient):
        both = [None] * 2
        hp.get_platform().all_gather_object(both, value.detach())
        assert torch.equal(*both)
    assert torch.equal(repeated, first) and torch.equal(of_repeated, gradient)
