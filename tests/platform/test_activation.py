"""Checkpoint and swap: the same numbers as without them, what is computed again, and modules that look as before."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref

import pytest
import torch

from hyper_parallel.platform import get_platform
from tests.frameworks import (
    assert_close,
    backward,
    equal,
    grad_of,
    leaf,
    on_mindspore,
    ours,
    platform_module,
    requires_grad,
    theirs,
)
from tests.frameworks.models import Module, dropout, fill, linear, module_list, sequential, set_training

activation = platform_module("activation")
CheckpointPolicy, SwapPolicy = activation.CheckpointPolicy, activation.SwapPolicy
async_save_on_cpu, checkpoint = activation.async_save_on_cpu, activation.checkpoint
ckpt_wrapper, swap_wrapper = activation.ckpt_wrapper, activation.swap_wrapper
create_selective_checkpoint_contexts = activation.create_selective_checkpoint_contexts
noop_context_fn = activation.noop_context_fn
cat, parameters_dict = get_platform().cat, get_platform().parameters_dict

# ---------------------------------------------------------------------------------------------------------------------
# The same numbers
# ---------------------------------------------------------------------------------------------------------------------


class Block(Module):
    """Nested modules, a buffer, views, a tensor saved three times, keywords, several outputs."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.query, self.key, self.value = (linear(width, width, bias, torch.float64) for bias in (True, False, True))
        self.mlp = sequential(
            linear(width, 2 * width, dtype=torch.float64), linear(2 * width, width, dtype=torch.float64)
        )
        self.register_buffer("scale", ours(torch.full((width,), 0.5, dtype=torch.float64)))

    def forward(self, x, shift=None, *, gain: float = 1.0, flags=None):
        h = x.tanh() * self.scale
        q, k, v = self.query(h), self.key(h), self.value(h)
        weights = (q @ k.T).exp()
        attention = (weights / weights.sum(-1, True)) @ v
        mixed = self.mlp(attention)
        left, right = mixed[:, :3], mixed[:, 3:]
        y = cat([left.sin() * right, right.exp()], 1) * gain
        if shift is not None:
            y = y + shift * y
        return y, {"inner": attention, "flags": flags}


WRAPPERS = {
    "checkpoint": ckpt_wrapper,
    "swap": swap_wrapper,
    "swap of checkpoint": lambda module: swap_wrapper(ckpt_wrapper(module)),
    "checkpoint of swap": lambda module: ckpt_wrapper(swap_wrapper(module)),
    "some of it": lambda module: swap_wrapper(module, lambda tensor: tensor.ndim == 2 and tensor.numel() % 4 != 0),
}


def run_block(module, num_rows: int = 5):
    torch.manual_seed(3)
    x, shift = leaf(torch.randn(num_rows, 6).double()), leaf(torch.randn(6).double())
    flags = ours(torch.arange(3))
    y, rest = module((x * 2.0).tanh(), shift=shift, gain=1.5, flags=flags)
    assert rest["flags"] is flags or equal(rest["flags"], flags)
    backward((y * y).sum() + rest["inner"].sum())
    parameters = module.tensors if hasattr(module, "tensors") else parameters_dict(module).values()
    return theirs([y, rest["inner"], *(grad_of(tensor) for tensor in (x, shift, *parameters))])


def test_same_numbers_as_without():
    for num_rows in (1, 5):
        expected = run_block(fill(Block()), num_rows)
        assert len(expected) == 4 + 9
        for name, wrap in WRAPPERS.items():
            for given, wanted in zip(run_block(wrap(fill(Block())), num_rows), expected, strict=True):
                assert_close(given, wanted, rtol=1e-13, atol=1e-13, msg=name)


def test_context_manager_gives_the_same_numbers():
    block = fill(Block())

    def under_context(*args, **kwargs):
        with async_save_on_cpu():
            return block(*args, **kwargs)

    under_context.tensors = list(parameters_dict(block).values())
    assert_close(run_block(under_context), run_block(fill(Block())), rtol=1e-13, atol=1e-13)


class Product(Module):
    def __init__(self):
        super().__init__()
        self.layer = linear(3, 2, dtype=torch.float64)

    def forward(self, input1, input2=None):
        return self.layer(input1) * input2


def test_checkpoint_takes_keywords():
    torch.manual_seed(0)
    first, second = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    results = []
    for wrap in (lambda module: module, functools.partial(ckpt_wrapper, use_reentrant=False)):
        a, b, module = leaf(first), leaf(second), wrap(fill(Product()))
        backward(module(a * 1.0, input2=b * 2.0).exp().sum())
        results.append([grad_of(tensor) for tensor in (a, b, *parameters_dict(module).values())])
    assert_close(*results)


@pytest.mark.parametrize("wrapper", ["checkpoint", "swap"])
def test_several_backwards(wrapper):
    torch.manual_seed(0)
    values = torch.randn(5, 3).double()
    results = []
    for wrap in (lambda module: module, WRAPPERS[wrapper]):
        module, x = (
            wrap(fill(sequential(linear(3, 4, dtype=torch.float64), linear(4, 1, dtype=torch.float64)))),
            leaf(values),
        )
        y = module((x * x).tanh()).exp().sum()
        backward(y, retain_graph=True)
        once = theirs([grad_of(one) for one in parameters_dict(module).values()])
        once = [gradient.clone() for gradient in once]
        backward(y)
        results.append([*once, *(theirs(grad_of(one)) for one in (x, *parameters_dict(module).values()))])
    assert_close(*results)


def test_dropout_draws_the_same_numbers_again():
    drop = set_training(ckpt_wrapper(dropout(0.5)))
    x = leaf(torch.ones(1000))
    y = drop(x * 1.0)
    set_training(dropout(0.5))(ours(torch.ones(7)))  # the generator moves on before backward
    backward(y.sum())
    assert equal(grad_of(x), y)
    assert 0.3 < float((theirs(y) == 0).float().mean()) < 0.7


def test_inputs_without_gradient():
    for wrap in (ckpt_wrapper, swap_wrapper):
        layer = wrap(linear(3, 2))
        backward(layer(ours(torch.ones(4, 3))).sum())
        assert equal(grad_of(layer.weight), torch.full((2, 3), 4.0))
        with get_platform().no_grad():
            assert not requires_grad(layer(ours(torch.ones(4, 3))))


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (1, 1)])
def test_sizes_of_one(shape):
    torch.manual_seed(0)
    values = torch.randn(shape).double()
    for wrap in (ckpt_wrapper, swap_wrapper):
        plain, wrapped = (fill(sequential(linear(shape[1], 2, dtype=torch.float64))) for _ in range(2))
        wrapped = wrap(wrapped)
        for module in (plain, wrapped):
            backward(module(ours(values)).tanh().sum())
        assert_close(grad_of(wrapped[0].weight), grad_of(plain[0].weight))


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoint
# ---------------------------------------------------------------------------------------------------------------------


class Counting(get_platform().Function):
    """x * x, and how often it was computed."""

    num_times = 0

    @staticmethod
    def forward(ctx, x):
        Counting.num_times += 1
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x * 2


def test_checkpoint_frees_activations_and_recomputes_once():
    activations = []

    def function(x):
        h = Counting.apply(x.exp())
        activations.append(weakref.ref(h))
        return h.sin()

    Counting.num_times = 0
    x = leaf(torch.full((10,), 0.5))
    y = checkpoint(function, x)
    assert Counting.num_times == 1
    gc.collect()
    assert activations[0]() is None
    backward(y.sum())
    assert Counting.num_times == 2
    value = torch.tensor(0.5)
    assert_close(grad_of(x), (value.exp() ** 2 * 2 * (value.exp() ** 2).cos()).expand(10))


def test_checkpoint_function_of_the_user_gets_its_own_keywords():
    seen = []

    def checkpoint_fn(function, *args, debug, level):
        seen.append((debug, level, len(args)))
        return checkpoint(function, *args)

    class Layer(Module):
        def forward(self, x, *, debug, use_reentrant):  # names that a checkpoint function also knows
            return x * debug * use_reentrant

    wrapped = ckpt_wrapper(Layer(), checkpoint_fn, debug="mine", level=3)
    x, factor = leaf(torch.ones(2)), leaf(torch.full((2,), 5.0))
    backward(wrapped(x, debug=factor, use_reentrant=2.0).sum())
    assert seen == [("mine", 3, 3)]
    assert equal(grad_of(x), torch.full((2,), 10.0))
    assert equal(grad_of(factor), torch.full((2,), 2.0))


def selective(policy):
    return functools.partial(create_selective_checkpoint_contexts, policy)


EXP = "Exp" if on_mindspore else torch.ops.aten.exp.default


def is_exp(op) -> bool:
    return getattr(op, "name", op) == EXP if on_mindspore else op == EXP


def test_selective_policies_are_asked_and_give_the_same_gradients():
    values = torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3)

    def function(a):
        return ((a @ a).exp() @ a).exp() @ a

    reference = leaf(values)
    backward(function(reference).sum())
    asked = []

    def keep_exponentials(ctx, op, *args, **kwargs):
        if is_exp(op):
            asked.append(ctx.is_recompute)
        return CheckpointPolicy.MUST_SAVE if is_exp(op) else CheckpointPolicy.PREFER_RECOMPUTE

    recompute_all = selective(lambda *args, **kwargs: CheckpointPolicy.MUST_RECOMPUTE)
    for context_fn in (noop_context_fn, selective(keep_exponentials), selective([EXP]), recompute_all):
        a = leaf(values)
        backward(checkpoint(function, a, context_fn=context_fn).sum())
        assert_close(grad_of(a), grad_of(reference))
    assert asked[:2] == [False, False] and set(asked[2:]) <= {True}
    layers = ckpt_wrapper(fill(sequential(linear(3, 3), linear(3, 3))), context_fn=selective([EXP]))
    plain = fill(sequential(linear(3, 3), linear(3, 3)))
    for module in (layers, plain):
        backward(module(ours(torch.ones(2, 3))).sum())
    assert_close(grad_of(layers[0].weight), grad_of(plain[0].weight))


# ---------------------------------------------------------------------------------------------------------------------
# Wrappers look like what they wrap
# ---------------------------------------------------------------------------------------------------------------------


class Nested(Module):
    def __init__(self, wrap):
        super().__init__()
        self.layers = module_list(wrap(Block()), wrap(sequential(wrap(linear(6, 2)))))
        self.head = wrap(linear(2, 2, bias=False))


@pytest.mark.parametrize("wrapper", ["checkpoint", "swap", "swap of checkpoint"])
def test_names_and_state_are_those_of_the_module(wrapper):
    platform = get_platform()
    plain, wrapped = fill(Nested(lambda module: module), 1), fill(Nested(WRAPPERS[wrapper]), 2)
    assert list(parameters_dict(wrapped)) == list(parameters_dict(plain))
    assert {name for name, _ in platform.get_cells_and_names(wrapped)} == {
        name for name, _ in platform.get_cells_and_names(plain)
    }
    assert list(platform.get_model_state_dict(wrapped)) == list(platform.get_model_state_dict(plain))
    assert list(platform.get_model_state_dict(wrapped.layers[0])) == list(
        platform.get_model_state_dict(plain.layers[0])
    )
    for name, tensor in platform.get_model_state_dict(plain).items():
        platform.load_into_param(platform.get_model_state_dict(wrapped)[name], tensor)
    assert equal(wrapped.head.weight, plain.head.weight)
    found = platform.search_parameter_by_name(wrapped, "layers.1.0.weight")
    new = platform.update_parameter_by_name(wrapped, found, ours(torch.zeros(2, 6)))
    assert wrapped.layers[1][0].weight is new
    x = ours(torch.ones(3, 6))
    assert equal(wrapped.layers[1](x), wrapped.layers[1][0].bias * ours(torch.ones(3, 1)))


@pytest.mark.parametrize("wrap", [ckpt_wrapper, swap_wrapper])
def test_attributes_reach_the_module(wrap):
    block = Block()
    wrapped = wrap(block)
    assert wrapped.wrapped_module is block
    assert wrapped.mlp is block.mlp
    assert wrapped.scale is block.scale
    wrapped.note = "here"
    assert block.note == "here"
    del wrapped.note
    assert not hasattr(block, "note")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = wrapped.nothing
    set_training(wrapped)
    assert block.training and block.mlp.training
    set_training(wrapped, False)
    assert not block.training and not block.mlp.training
    stack = wrap(sequential(linear(1, 1), dropout(0.5)))
    assert len(stack) == 2 and stack[1] is stack.wrapped_module[1]
    assert [type(layer) for layer in stack] == [type(layer) for layer in stack.wrapped_module]


@pytest.mark.parametrize("wrap", [ckpt_wrapper, swap_wrapper])
def test_wrappers_are_copied_and_pickled(wrap):
    x = ours(torch.randn(4, 3, dtype=torch.float64))
    wrapped, sine = wrap(fill(linear(3, 2, dtype=torch.float64))), wrap(Sine())
    for original, again in ((wrapped, copy.deepcopy(wrapped)), (sine, pickle.loads(pickle.dumps(sine)))):
        assert type(again) is type(original)
        assert again.wrapped_module is not original.wrapped_module
        assert equal(again(x), original(x))


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"ckpt_wrapper: module must be a \w+.nn.\w+, got function"):
        ckpt_wrapper(test_wrong_arguments)
    with pytest.raises(TypeError, match=r"swap_wrapper: module must be a \w+.nn.\w+, got list"):
        swap_wrapper([linear(1, 1)])
    with pytest.raises(TypeError, match="ckpt_wrapper: checkpoint_fn must be a function or None, got int"):
        ckpt_wrapper(linear(1, 1), 3)
    with pytest.raises(TypeError, match="swap_wrapper: policy_fn must be a function or None, got str"):
        swap_wrapper(linear(1, 1), "all")
    with pytest.raises(TypeError, match="async_save_on_cpu: policy_fn must be"), async_save_on_cpu("all"):
        pass


# ---------------------------------------------------------------------------------------------------------------------
# Swap
# ---------------------------------------------------------------------------------------------------------------------


def test_policies_are_not_asked_about_parameters():
    asked = []

    def policy(tensor):
        asked.append(tensor.data_ptr())
        return SwapPolicy.SWAP if len(asked) % 2 else SwapPolicy.KEEP

    layer, x = linear(4, 4), leaf(torch.ones(3, 4))
    with async_save_on_cpu(policy):
        y = layer(x * 2.0).sin()
    assert asked
    assert layer.weight.data_ptr() not in asked
    backward(y.sum())
    assert torch.isfinite(theirs(grad_of(x))).all()


def test_no_reference_cycle():
    gc.collect()
    gc.disable()
    try:
        with async_save_on_cpu():
            y = (leaf(torch.ones(5)) * 1.0).exp()  # exp saves its own output
        reference = weakref.ref(y)
        del y
        assert reference() is None
    finally:
        gc.enable()


def test_backward_inside_the_context():
    x = leaf(torch.ones(4))
    with async_save_on_cpu():
        backward((x * 2.0).sin().sum())
    assert_close(grad_of(x), 2 * torch.full((4,), 2.0).cos())


def test_a_policy_with_a_wrong_answer():
    layer = swap_wrapper(Sine(), lambda tensor: "yes")
    with pytest.raises(
        TypeError, match=r"(?i)must return a bool or a SwapPolicy, got 'yes' for .*float64 \[2\] on cpu"
    ):
        layer(leaf(torch.ones(2).double()) * 1.0)
    x = leaf(torch.ones(2))  # and nothing of it stays
    backward((x * 2.0).sin().sum())
    assert_close(grad_of(x), 2 * torch.full((2,), 2.0).cos())


class Sine(Module):
    def forward(self, x):
        return x.sin()


def test_nothing_stays_after_an_error_in_forward():
    class Fails(Module):
        def forward(self, x):
            x.sin()
            raise ValueError("in the middle")

    asked = []
    swapped = swap_wrapper(Fails(), lambda tensor: asked.append(tensor) or True)
    for module in (swapped, ckpt_wrapper(Fails()), swap_wrapper(ckpt_wrapper(Fails()))):
        x = leaf(torch.ones(3)) * 1.0
        with pytest.raises(ValueError, match="in the middle"):
            module(x)
        num_asked = len(asked)
        x.exp()
        assert len(asked) == num_asked, "the hooks are still there"
    x = leaf(torch.ones(2))
    backward(swap_wrapper(Sine())(x * 1.0).sum())
    assert_close(grad_of(x), torch.ones(2).cos())
