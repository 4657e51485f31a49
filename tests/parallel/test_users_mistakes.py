"""What a user may write that would train other numbers without a word: it is refused, with what to write instead."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hyper_parallel as hp
from hyper_parallel.testing import threads

CLASSES = 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.fc2(torch.tanh(self.fc1(x)))

    def encode(self, x):
        return self.forward(x)


class Model(nn.Module):
    """``way`` says what is odd about it."""

    def __init__(self, way="plain"):
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, CLASSES)
        self.register_buffer("weights", torch.arange(1.0, CLASSES + 1))
        self.held = [self.blocks[0].fc1.weight] if way == "held" else []

    def features(self, x):
        for block in self.blocks:
            x = block.encode(x) if self.way == "method" else block(x)
        if self.way == "sibling":
            x = x + F.linear(x, self.blocks[0].fc1.weight).sum(-1, keepdim=True)
        for weight in self.held:
            x = x + F.linear(x, weight).sum(-1, keepdim=True)
        x = self.head(x)
        if self.way == "penalty":
            x = x * sum(parameter.square().sum() for parameter in self.parameters())
        return x

    def forward(self, x, labels=None):
        logits = self.features(x)
        return logits if labels is None else self.loss(logits, labels)

    def loss(self, logits, labels):
        rows = logits.reshape(-1, CLASSES)
        if self.way == "shifts":
            return F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1))
        if self.way == "weights":
            return nn.CrossEntropyLoss(self.weights)(rows, labels.reshape(-1))
        if self.way == "other ignored":
            return F.cross_entropy(rows, labels.reshape(-1).clamp(min=0), ignore_index=1)
        if self.way == "two":
            return F.cross_entropy(rows, labels.reshape(-1)) + F.mse_loss(rows[:, 0], rows[:, 1].detach())
        if self.way == "divided sum":
            return F.cross_entropy(rows, labels.reshape(-1), reduction="sum") / 10
        if self.way == "sum":
            return F.cross_entropy(rows, labels.reshape(-1), reduction="sum")
        if self.way == "ctc":
            log_probs = logits.log_softmax(-1).transpose(0, 1)
            lengths = (labels != -100).sum(1).clamp(max=3)
            frames = torch.full((len(labels),), logits.shape[1])
            return F.ctc_loss(log_probs, labels[:, :3].clamp(min=1), frames, lengths, zero_infinity=True)
        return F.cross_entropy(rows, labels.reshape(-1))


def _model(way):
    torch.manual_seed(0)
    return Model(way).double()


def _batch(rows=8, length=6):
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(1, CLASSES, (rows, length), generator=generator)
    labels[1] = labels[4, 2:] = labels[6, 1:] = -100
    return {"x": torch.randn(rows, length, 6, generator=generator, dtype=torch.float64), "labels": labels}


def _mine(run, batch):
    samples = run.mine(range(len(batch["x"])))
    return {name: value[samples.start : samples.stop] for name, value in batch.items()}


def squares(outputs, batch):
    return outputs.square().sum(), outputs.numel()


def _step(way, degrees, **options):
    run = hp.parallelize(_model(way), degrees, **options)
    loss = run.forward_backward(**_mine(run, _batch()))
    return loss, [one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad for one in run.parameters()]


@pytest.mark.parametrize(
    ("way", "degrees", "options", "what"),
    [
        ("method", "dp_shard=2", {"loss": squares}, "the parameter 'blocks.0.fc1.(weight|bias)', .* over dp_shard"),
        ("sibling", "dp_replicate=2", {}, "the parameter 'blocks.0.fc1.weight', .* over dp_replicate"),
        ("penalty", "dp_shard=2, tp=2", {}, "of shape .*weight_decay"),
    ],
)
def test_parameters_meet_samples_outside_of_their_module(way, degrees, options, what):
    """Ranks along the data axes have other samples: each would compute with its own as if all had them."""
    with pytest.raises(RuntimeError, match=what):
        threads(4 if "tp" in degrees else 2).run(_step, way, degrees, **options)


def test_a_parameter_held_beside_its_module():
    with pytest.raises(RuntimeError, match=r"computes with what was its parameter 'blocks.0.fc1.weight' .*self.layer"):
        threads(2).run(_step, "held", "dp_shard=2")


def test_an_optimizer_that_was_made_too_early():
    def before_parallelize():
        model = _model("plain")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = hp.parallelize(model, "tp=2")
        run.forward_backward(**_batch())
        with pytest.raises(RuntimeError, match=r"this SGD was made of parameters .* of run.parameters\(\)"):
            optimizer.step()

    def before_materialize():
        with hp.deferred_init():
            model = _model("plain")
        run = hp.parallelize(model, "dp_shard=2")
        optimizer = torch.optim.AdamW(run.parameters(), lr=0.1)
        run.materialize(seed=0)
        with pytest.raises(RuntimeError, match="since parallelize or materialize put others in their place"):
            optimizer.step()

    threads(2).run(before_parallelize)
    threads(2).run(before_materialize)


def test_hooks_on_gradients_of_parameters():
    def work():
        model = _model("plain")
        model.head.weight.register_hook(lambda gradient: gradient * 2)
        with pytest.raises(
            ValueError, match=r"hooks on the gradient of the parameter 'head.weight' .* behind paralleliz"
        ):
            hp.parallelize(model, "dp_shard=2")
        run = hp.parallelize(_model("plain"), "dp_shard=2")
        dict(run.named_parameters())["head.weight"].register_hook(lambda gradient: gradient * 2)
        run.forward_backward(**_mine(run, _batch()))
        return dict(run.named_parameters())["head.weight"].grad.full_tensor()

    plain = _model("plain")
    plain(**_batch()).backward()
    for got in threads(2).run(work):
        torch.testing.assert_close(got, plain.head.weight.grad * 2, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("way", "what"),
    [
        ("shifts", "cross_entropy as a mean over .* labels are targets .*hp.next_token_loss"),
        ("weights", "by weights of the classes"),
        ("other ignored", "cross_entropy as a mean over"),
        ("two", "mse_loss as a mean over"),
        ("divided sum", "as a sum, .* and of it its loss"),
    ],
)
def test_a_loss_that_is_no_mean_over_the_labels(way, what):
    with pytest.raises(ValueError, match=f"Model computed .*{what}"):
        threads(1).run(_step, way, "dp_shard=1", microbatches=3)


@pytest.mark.parametrize(
    ("way", "degrees", "parts"),
    [("plain", "cp=2", 3), ("sum", "cp=2", 2), ("sum", "dp_shard=2", 2), ("ctc", "dp_shard=2", 2)],
)
def test_losses_whose_parts_can_be_added_up(way, degrees, parts):
    plain = _model(way)
    want = plain(**_batch())
    want.backward()
    for loss, gradients in threads(2).run(_step, way, degrees, microbatches=parts):
        torch.testing.assert_close(loss, want.detach(), rtol=1e-9, atol=1e-9)
        for got, one in zip(gradients, plain.parameters(), strict=True):
            torch.testing.assert_close(got, one.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", ["shifts", "weights", "two"])
def test_a_batch_in_one_part_may_have_any_loss(way):
    plain = _model(way)
    want = plain(**_batch())
    for loss, _ in threads(2).run(_step, way, "tp=2"):
        torch.testing.assert_close(loss, want.detach(), rtol=1e-9, atol=1e-9)


def test_modules_that_a_forward_replaces():
    """Evaluation gives modules back what they did, also where a forward has put others in their place."""

    class Replaces(Model):
        def features(self, x):
            if not self.training:
                self.head = nn.Sequential(nn.Identity(), self.head)
            return super().features(x)

    model = Replaces().double()
    model.blocks[0].eval()
    run = hp.parallelize(model)
    run.loss_of(**_batch())
    assert model.training and model.head[0].training and not model.blocks[0].training


def test_the_norm_of_complex_gradients():
    class Complex(Model):
        def __init__(self):
            super().__init__()
            self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex128))

        def features(self, x):
            return super().features((x * self.turn).abs())

    def made():
        torch.manual_seed(0)
        return Complex()

    def work():
        torch.set_default_dtype(torch.float64)
        run = hp.parallelize(made(), "dp_shard=2")
        run.forward_backward(**_mine(run, _batch()))
        return run.clip_grad_norm_(1.0)

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        plain = made()
        plain(**_batch()).backward()
    finally:
        torch.set_default_dtype(before)
    want = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    for got in threads(2).run(work):
        torch.testing.assert_close(got.full_tensor() if hasattr(got, "full_tensor") else got, want)


def test_embeddings_that_write_into_their_weight():
    def work():
        with pytest.raises(ValueError, match="the embedding '0' has max_norm, which writes into its weight"):
            hp.parallelize(nn.Sequential(nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 2)), "dp_shard=2", loss=squares)

    threads(2).run(work)


def test_samples_inside_of_a_dict_or_a_list():
    class Nested(Model):
        def forward(self, x, labels, more):
            return super().forward(x + more["a"], labels)

    batch = _batch()
    for more, kind in (({"a": batch["x"]}, "dict"), (list(batch["x"]), "list")):
        run = hp.parallelize(Nested().double(), microbatches=2)
        with pytest.raises(ValueError, match=f"the batch's more is a {kind} with tensors of samples inside"):
            run.forward_backward(**batch, more=more)
    hp.parallelize(Nested().double()).forward_backward(**batch, more={"a": batch["x"]})


def test_averages_over_the_samples_of_a_part():
    def made():
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    with pytest.warns(
        RuntimeWarning, match=r"'1' \(BatchNorm1d\) takes its averages over the samples of one micro-batch"
    ):
        hp.parallelize(made(), loss=squares, microbatches=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hp.parallelize(made(), loss=squares)


def test_a_parameter_that_is_added_behind_parallelize():
    def work():
        run = hp.parallelize(_model("plain"), "dp_shard=2")
        run.model.blocks.append(Block().double())
        with pytest.raises(
            ValueError, match=r"'blocks.2.fc1.weight' of shape \(8, 6\) was added to the model, or repl"
        ):
            run.parameters()

    threads(2).run(work)


def test_a_model_inside_of_what_compiles_or_distributes_it():
    for wrapped, said in (
        (torch.compile(_model("plain")), r"OptimizedModule.* give the module inside, its \._orig_mod, .*compile=True"),
        (torch.nn.DataParallel(_model("plain")), r"DataParallel.* give the module inside, its \.module"),
    ):
        with pytest.raises(ValueError, match=f"the model is a {said}"):
            threads(1).run(lambda wrapped=wrapped: hp.parallelize(wrapped))


@pytest.mark.parametrize("degrees", ["tp=2", "dp_shard=2"])
def test_a_model_that_is_split_already(degrees):
    def work():
        run = hp.parallelize(_model("plain"), degrees)
        with pytest.raises(
            ValueError, match=r"'blocks.0.fc1.weight' is distributed already, by an earlier parallelize"
        ):
            hp.parallelize(run.model, degrees)

    threads(2).run(work)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_whole": "head"}, r"keep_whole takes a list of paths; write keep_whole=\['head'\]"),
        ({"keep_whole": ["head"], "plan": {}}, "keep_whole is an option of the ready plan"),
        ({"offload": "no"}, "offload is True or False, got 'no'"),
        ({"mesh": "cpu"}, "mesh is a DeviceMesh with the axes pp, .*, got 'cpu'"),
        (
            {"loss": nn.MSELoss()},
            r"and MSELoss\(\) of torch.nn.modules.loss takes outputs and labels; write loss=lambda",
        ),
    ],
)
def test_options_that_are_something_else(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        hp.parallelize(_model("plain"), **options)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda outputs, batch: (outputs, 1),
            r"got a tensor of shape \(8, 6, 5\) as the sum, which is",
        ),
        (lambda outputs, batch: (outputs.sum().item(), 1), "got .* as the sum"),
        (lambda outputs, batch: (outputs.sum(), "8"), "got '8' as the number"),
        (lambda outputs, batch: (outputs.detach().sum(), 1), "depends on no parameter that asks for a gradient"),
    ],
)
def test_losses_that_nothing_can_be_trained_by(loss, message):
    with pytest.raises((TypeError, ValueError), match=message):
        _step("plain", "dp_shard=1", loss=loss)
