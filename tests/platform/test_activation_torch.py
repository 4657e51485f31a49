"""Checkpoint and swap of PyTorch's own modules: the same bits, and the memory they promise to save.

What every framework does is in ``test_activation.py``. On a CPU a swap has nothing to move. So copying is tested on a
pretended accelerator: CPU tensors that count as remote, and a side stream that runs its copies only when something
waits for them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.platform.torch.modules import swap
from hyper_parallel.platform.torch.modules.activation import (
    CheckpointPolicy,
    SwapPolicy,
    async_save_on_cpu,
    checkpoint,
    ckpt_wrapper,
    create_selective_checkpoint_contexts,
    noop_context_fn,
    swap_wrapper,
)

# ---------------------------------------------------------------------------------------------------------------------
# A pretended accelerator
# ---------------------------------------------------------------------------------------------------------------------


class LazyEvent:
    def __init__(self, stream: LazyStream, position: int) -> None:
        self.stream, self.position = stream, position

    def query(self) -> bool:
        return self.stream.num_done >= self.position


class LazyStream:
    """Work waits in a queue until somebody waits for it: whoever forgets to wait reads rubbish."""

    def __init__(self) -> None:
        self.queue: list = []
        self.num_done = 0
        self.has_waited = False

    def run_until(self, position: int) -> None:
        while self.num_done < position:
            self.queue[self.num_done]()
            self.queue[self.num_done] = None
            self.num_done += 1

    def record_event(self) -> LazyEvent:
        return LazyEvent(self, len(self.queue))

    def wait_event(self, event: LazyEvent) -> None:
        self.queue.append(functools.partial(event.stream.run_until, event.position))

    def wait_stream(self, stream: LazyStream | MainStream) -> None:
        self.wait_event(stream.record_event())
        self.has_waited = True


class MainStream(LazyStream):
    """The host's own order: what it is given runs at once."""

    def wait_event(self, event: LazyEvent) -> None:
        event.stream.run_until(event.position)


class PretendedAccelerator:
    def __init__(self, monkeypatch) -> None:
        self.main, self.side = MainStream(), LazyStream()
        self.current = self.main
        self.host_copies: list[torch.Tensor] = []
        monkeypatch.setattr(swap, "_is_in_host_memory", lambda tensor: False)
        monkeypatch.setattr(swap, "_side_stream", lambda device: self.side)
        monkeypatch.setattr(swap, "_copy", self.copy)
        functions = SimpleNamespace(
            get_current_stream=lambda: self.current,
            get_stream_context=lambda: self.stream_context,
            get_device_type=lambda: "cpu",
            record_stream=lambda tensor, stream: None,
        )
        monkeypatch.setattr(swap, "devices", functions)

    @contextlib.contextmanager
    def stream_context(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def copy(self, target, source):
        assert self.current is self.side, "copies belong on the side stream"
        if not any(source is copy for copy in self.host_copies):
            assert self.side.has_waited, "the side stream must wait for whoever computes the source"
            self.side.has_waited = False
            self.host_copies.append(target)
        target.fill_(255)
        self.side.queue.append(lambda: target.copy_(source))

    @property
    def num_host_bytes(self) -> list[int]:
        """The size of each copy to the host so far."""
        return [copy.numel() for copy in self.host_copies]


@pytest.fixture
def accelerator(monkeypatch):
    return PretendedAccelerator(monkeypatch)


@pytest.fixture(params=["cpu", "accelerator"])
def place(request, monkeypatch):
    return PretendedAccelerator(monkeypatch) if request.param == "accelerator" else None


# ---------------------------------------------------------------------------------------------------------------------
# The same numbers
# ---------------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Nested modules, buffers, dropout, views, a tensor saved three times, keywords, several outputs."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=b) for b in (True, False, True))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.3), nn.Linear(2 * width, width))
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x, shift=None, *, gain: float = 1.0, flags=None):
        h = self.norm(x) * self.scale
        q, k, v = self.query(h), self.key(h), self.value(h)
        attention = torch.softmax(q @ k.t(), dim=-1) @ v
        left, right = self.mlp(attention).chunk(2, dim=1)
        y = torch.cat([left.sin() * right, right.exp()], dim=1) * gain
        if shift is not None:
            y = y + shift.expand_as(y) * y
        return y, {"inner": attention, "flags": flags}


WRAPPERS = {
    "checkpoint": ckpt_wrapper,
    "swap": swap_wrapper,
    "swap of checkpoint": lambda module: swap_wrapper(ckpt_wrapper(module)),
    "checkpoint of swap": lambda module: ckpt_wrapper(swap_wrapper(module)),
    "some of it": lambda module: swap_wrapper(module, lambda tensor: tensor.dim() == 2 and tensor.numel() % 4 != 0),
}


def run_block(module, seed: int = 3, num_rows: int = 5):
    torch.manual_seed(seed)
    x = torch.randn(num_rows, 6, dtype=torch.float64, requires_grad=True)
    shift = torch.randn(6, dtype=torch.float64, requires_grad=True)
    flags = torch.arange(3)
    outer = (x * 2.0).tanh()
    y, rest = module(outer, shift=shift, gain=1.5, flags=flags)
    assert rest["flags"] is flags or torch.equal(rest["flags"], flags)
    (y.square().sum() + rest["inner"].sum()).backward()
    results = [y, rest["inner"], x.grad, shift.grad] + [parameter.grad for parameter in module.parameters()]
    return [result.detach().clone() for result in results]


@pytest.mark.parametrize("num_rows", [2, 5])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_same_bits_as_without(place, wrapper, num_rows):
    torch.manual_seed(0)
    plain = Block().double()
    wrapped = WRAPPERS[wrapper](copy.deepcopy(plain))
    results, expected = run_block(wrapped, num_rows=num_rows), run_block(plain, num_rows=num_rows)
    assert len(results) == len(expected) == 4 + len(list(plain.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    if place is not None and "swap" in wrapper:
        assert place.num_host_bytes, "nothing was swapped"


def test_context_manager_same_bits(place):
    torch.manual_seed(0)
    plain = Block().double()
    copied = copy.deepcopy(plain)

    def under_context(*args, **kwargs):
        with async_save_on_cpu():
            return copied(*args, **kwargs)

    under_context.parameters = copied.parameters
    assert all(torch.equal(a, b) for a, b in zip(run_block(under_context), run_block(plain), strict=True))


@pytest.mark.parametrize("wrapper", ["checkpoint", "swap", "swap of checkpoint"])
def test_autocast(place, wrapper):
    torch.manual_seed(0)
    plain = Block()
    wrapped = WRAPPERS[wrapper](copy.deepcopy(plain))
    results = []
    for module in (plain, wrapped):
        torch.manual_seed(1)
        x = torch.randn(4, 6, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, rest = module(x)
        assert rest["inner"].dtype == torch.bfloat16
        y.float().square().sum().backward()
        results.append([y, x.grad, module.mlp[0].weight.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("wrapper", ["checkpoint", "swap"])
def test_second_derivatives_and_retained_graphs(place, wrapper):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    wrapped = WRAPPERS[wrapper](copy.deepcopy(plain))
    x = torch.randn(5, 3, dtype=torch.float64)
    results = []
    for module in (plain, wrapped):
        leaf = x.clone().requires_grad_()
        y = module(leaf * leaf).exp().sum()
        (first,) = torch.autograd.grad(y, leaf, create_graph=True)
        first.square().sum().backward(retain_graph=True)
        first.sum().backward()
        results.append([first.detach(), leaf.grad] + [parameter.grad for parameter in module.parameters()])
        z = module(leaf).sum()
        z.backward(retain_graph=True)
        once = [parameter.grad.clone() for parameter in module.parameters()]
        z.backward()
        results[-1] += once + [parameter.grad for parameter in module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (1, 1)])
def test_sizes_zero_and_one(place, shape):
    for wrap in (ckpt_wrapper, swap_wrapper):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(shape[1], 2), nn.GELU()).double()
        wrapped = wrap(copy.deepcopy(plain))
        x = torch.randn(shape, dtype=torch.float64)
        plain(x).sum().backward()
        wrapped(x).sum().backward()
        assert torch.equal(wrapped[0].weight.grad, plain[0].weight.grad)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoint
# ---------------------------------------------------------------------------------------------------------------------


class CountOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] = self.counts.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


MM, EXP = torch.ops.aten.mm.default, torch.ops.aten.exp.default


def count_in_backward(context_fn) -> tuple[int, int]:
    """(matrix products, exponentials) that backward computes; forward has three of the one and two of the other."""
    a = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

    def function(a):
        return ((a @ a).exp() @ a).exp() @ a

    expected = torch.autograd.grad(function(a).sum(), a)[0]
    y = checkpoint(function, a, context_fn=context_fn, early_stop=False).sum()
    with CountOps() as ops:
        y.backward()
    assert torch.equal(a.grad, expected)
    return ops.counts.get(MM, 0), ops.counts.get(EXP, 0)


def test_selective_policies_recompute_what_they_say():
    def contexts(policy):
        return functools.partial(create_selective_checkpoint_contexts, policy)

    def keep_products(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op == MM else CheckpointPolicy.PREFER_RECOMPUTE

    backward_products = 6
    assert count_in_backward(noop_context_fn) == (backward_products + 3, 2)
    assert count_in_backward(contexts(keep_products)) == (backward_products, 2)
    assert count_in_backward(contexts([MM])) == (backward_products, 2)
    assert count_in_backward(contexts([EXP])) == (backward_products + 3, 0)
    assert count_in_backward(contexts(lambda *a, **k: CheckpointPolicy.MUST_RECOMPUTE)) == (backward_products + 3, 2)


def test_selective_checkpoint_through_the_wrapper():
    policy = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    layers = ckpt_wrapper(nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3), nn.GELU()), context_fn=policy)
    y = layers(torch.randn(2, 3)).sum()
    with CountOps() as ops:
        y.backward()
    assert torch.ops.aten.addmm.default not in ops.counts
    assert ops.counts[torch.ops.aten.gelu.default] >= 1


def test_mutating_a_cached_result_is_refused_unless_allowed():
    def function(x):
        y = x.exp()
        return y.add_(1.0).mul(x)

    for allowed in (False, True):
        x = torch.ones(3, requires_grad=True)
        contexts = functools.partial(create_selective_checkpoint_contexts, [EXP], allow_cache_entry_mutation=allowed)
        y = checkpoint(function, x, context_fn=contexts, early_stop=False).sum()
        expectation = contextlib.nullcontext() if allowed else pytest.raises(RuntimeError, match="mutated")
        with expectation:
            y.backward()


def test_checkpoint_frees_activations_and_recomputes_once():
    calls, activations = [], []

    def function(x):
        calls.append(torch.is_grad_enabled())
        h = x.exp()
        activations.append(StorageWeakRef(h.untyped_storage()))
        return h.sin()

    x = torch.randn(10, requires_grad=True)
    y = checkpoint(function, x)
    assert len(calls) == 1
    assert activations[0].expired()
    y.sum().backward()
    assert len(calls) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Wrappers look like what they wrap
# ---------------------------------------------------------------------------------------------------------------------


def nested_model(wrap=lambda module: module) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList([wrap(Block()), wrap(nn.Sequential(wrap(nn.Linear(6, 2)), nn.GELU()))])
    model.head = wrap(nn.Linear(2, 2, bias=False))
    model.tied = model.head
    return model


@pytest.mark.parametrize("wrapper", ["checkpoint", "swap", "swap of checkpoint"])
def test_names_and_state_dicts_are_those_of_the_module(wrapper):
    plain, wrapped = nested_model(), nested_model(WRAPPERS[wrapper])
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in wrapped.named_buffers()] == [name for name, _ in plain.named_buffers()]
    assert {name for name, _ in wrapped.named_modules()} == {name for name, _ in plain.named_modules()}
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert wrapped.state_dict()._metadata == plain.state_dict()._metadata
    assert list(wrapped.layers[0].state_dict(prefix="p.")) == list(plain.layers[0].state_dict(prefix="p."))
    with_duplicates = [name for name, _ in wrapped.named_parameters(remove_duplicate=False)]
    assert with_duplicates == [name for name, _ in plain.named_parameters(remove_duplicate=False)]

    for source, target in ((plain, wrapped), (wrapped, plain)):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.add_(1.0)
        saved = source.state_dict()
        target.load_state_dict(saved)
        assert list(saved) == list(plain.state_dict()), "loading must not change what it is given"
        assert all(torch.equal(a, b) for a, b in zip(saved.values(), target.state_dict().values(), strict=True))
    wrapped.head.load_state_dict({"weight": torch.zeros(2, 2)}, assign=True)
    assert not wrapped.head.weight.any()

    saved = plain.state_dict()
    del saved["layers.1.0.weight"]
    saved["layers.1.0.other"] = saved.pop("layers.0.scale")
    report = wrapped.load_state_dict(saved, strict=False)
    assert set(report.missing_keys) == {"layers.1.0.weight", "layers.0.scale"}
    assert report.unexpected_keys == ["layers.1.0.other"]
    saved = plain.state_dict() | {"layers.1.0.bias": torch.zeros(7)}
    with pytest.raises(RuntimeError, match=r"size mismatch for layers\.1\.0\.bias"):
        wrapped.load_state_dict(saved)


@pytest.mark.parametrize("wrap", [ckpt_wrapper, swap_wrapper])
def test_attributes_reach_the_module(wrap):
    block = Block()
    wrapped = wrap(block)
    assert wrapped.wrapped_module is block
    assert wrapped.mlp is block.mlp
    assert wrapped.scale is block.scale
    wrapped.scale = torch.ones(6)
    wrapped.query.weight = nn.Parameter(torch.zeros(6, 6))
    wrapped.note = "here"
    assert block.note == "here"
    assert torch.equal(block.scale, torch.ones(6))
    assert list(wrapped.state_dict()) == list(block.state_dict())
    del wrapped.note
    assert not hasattr(block, "note")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = wrapped.nothing
    wrapped.eval()
    assert not block.training
    assert not block.mlp[2].training
    wrapped.double()
    assert block.query.weight.dtype == torch.float64
    stack = wrap(nn.Sequential(nn.Linear(1, 1), nn.GELU()))
    assert isinstance(stack[1], nn.GELU)
    assert [type(layer) for layer in stack] == [nn.Linear, nn.GELU]


# ---------------------------------------------------------------------------------------------------------------------
# Swap
# ---------------------------------------------------------------------------------------------------------------------


def remote(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True) * 1.0


def test_bytes_saved_several_times_are_copied_once(accelerator):
    x = remote(4, 6)
    with async_save_on_cpu():
        for _ in range(3):
            x.sin()  # saves x
        (x.t() * x.t().view(6, 4)).sum()  # saves the same bytes under other strides
    assert accelerator.num_host_bytes == [x.numel() * 8]


def test_views_copy_what_they_cover(accelerator):
    big = remote(10, 6)
    with async_save_on_cpu():
        big[3:5].sin()
        assert accelerator.num_host_bytes == [2 * 6 * 8], "a dense view copies its own bytes"
        for part in big.chunk(3, dim=1):
            part.sin()
        assert accelerator.num_host_bytes[1:] == [10 * 6 * 8], "strided views share one copy of the storage"
        remote(1, 6).expand(1000, 6).sin()
        assert accelerator.num_host_bytes[2:] == [6 * 8], "an expanded tensor is not blown up"


@pytest.mark.parametrize("view", ["t", "slice", "columns", "every other", "expand", "chunk", "complex"])
def test_views_come_back_as_they_were(accelerator, view):
    views = {
        "t": lambda x: x.t(),
        "slice": lambda x: x[1:3],
        "columns": lambda x: x[:, 2:4],
        "every other": lambda x: x[::2, 1::2],
        "expand": lambda x: x[:1].expand(5, 6),
        "chunk": lambda x: x.chunk(2, dim=1)[1],
        "complex": lambda x: torch.view_as_complex(x.view(4, 3, 2)),
    }
    seen = []
    leaf = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    for context in (contextlib.nullcontext(), async_save_on_cpu()):
        with context:
            saved = views[view](leaf * 1.0)
            y = saved.sin()
        seen.append((y.grad_fn._saved_self.stride(), torch.autograd.grad(y.abs().sum(), leaf)[0]))
    assert seen[0][0] == seen[1][0]
    assert torch.equal(seen[0][1], seen[1][1])
    assert accelerator.num_host_bytes


def test_new_tensors_at_an_old_address_are_copied_again(accelerator):
    leaf = torch.ones(1000, requires_grad=True)
    outputs = []
    with async_save_on_cpu():
        for factor in range(1, 6):
            # The product dies after its copy, and the next one gets its memory.
            outputs.append((leaf * factor).sin())
            accelerator.main.wait_event(accelerator.side.record_event())
    torch.stack([y.sum() for y in outputs]).sum().backward()
    expected = sum(factor * torch.cos(torch.tensor(float(factor))) for factor in range(1, 6))
    assert torch.allclose(leaf.grad, expected.expand(1000))
    assert accelerator.num_host_bytes == [4000] * 5


def test_parameters_and_buffers_stay(accelerator):
    asked = []

    def policy(tensor):
        asked.append(tensor.untyped_storage().data_ptr())
        return True

    block = Block().double()
    stay = {t.untyped_storage().data_ptr() for t in [*block.parameters(), *block.buffers()]}
    wrapped = swap_wrapper(block, policy)
    run_block(wrapped)
    assert asked
    assert not stay & set(asked)

    asked.clear()
    linear = nn.Linear(4, 4).double()
    with async_save_on_cpu(policy):
        linear(remote(3, 4)).sin()
    assert linear.weight.untyped_storage().data_ptr() not in asked
    assert len(asked) == 2


def test_memory_of_the_device_is_free_before_backward(accelerator):
    leaf = torch.randn(50, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        with async_save_on_cpu():
            first, second = leaf * 2.0, leaf * 3.0
            y = first.sin() + second.sin()
            storages = [StorageWeakRef(t.untyped_storage()) for t in (first, second)]
            accelerator.main.wait_event(accelerator.side.record_event())
            del first, second
            assert not storages[0].expired(), "held until it is seen that the copy has finished"
            y = y.exp()
            assert storages[0].expired(), "the next saved tensor looks after the finished copies"
            assert storages[1].expired()
        assert not accelerator.side.queue or accelerator.side.num_done == len(accelerator.side.queue)
    finally:
        gc.enable()
    y.sum().backward()
    expected = (2 * (2 * leaf).cos() + 3 * (3 * leaf).cos()) * ((2 * leaf).sin() + (3 * leaf).sin()).exp()
    assert torch.allclose(leaf.grad, expected)


def test_no_reference_cycle(place):
    gc.collect()
    gc.disable()
    try:
        with async_save_on_cpu():
            y = (torch.ones(5, requires_grad=True) * 1.0).exp()  # exp saves its own output
        storage = StorageWeakRef(y.untyped_storage())
        del y
        assert storage.expired()
    finally:
        gc.enable()


def test_a_kept_tensor_that_is_modified_is_refused():
    x = torch.ones(3, requires_grad=True) * 1.0
    with async_save_on_cpu():
        y = x.sin()
    with torch.no_grad():
        x.add_(1.0)
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation: \[torch.float32 \[3\] on cpu\].*version 0"
    ):
        y.sum().backward()
    # Also one that is kept because it is a parameter, as without the context.
    linear = nn.Linear(2, 2)
    with async_save_on_cpu():
        y = linear(torch.ones(1, 2, requires_grad=True))
    with torch.no_grad():
        linear.weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_moved_tensor_that_is_modified(accelerator):
    leaf = torch.ones(3, requires_grad=True)
    with async_save_on_cpu():
        x = leaf * 2.0
        early = x.sin()
        x.add_(1.0)  # may overtake the copy
        late = x.cos()  # saves the new value
    late.sum().backward()
    assert torch.allclose(leaf.grad, -2 * torch.full((3,), 3.0).sin())
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*while it was copied to the host"):
        early.sum().backward()

    leaf = torch.ones(3, requires_grad=True)
    with async_save_on_cpu():
        x = leaf * 2.0
        y = x.sin()
    with torch.no_grad():
        x.add_(1.0)  # the copy is complete
    y.sum().backward()
    assert torch.allclose(leaf.grad, 2 * torch.full((3,), 2.0).cos())

    with async_save_on_cpu():
        x = leaf * 2.0
        y = x.sin()
        x.add_(1.0)
        with pytest.raises(RuntimeError, match="saved at version 0 and is at version 1"):
            y.sum().backward()


def test_backward_inside_the_context(place):
    leaf = torch.ones(4, requires_grad=True)
    with async_save_on_cpu():
        (leaf * 2.0).sin().sum().backward()
    assert torch.allclose(leaf.grad, 2 * torch.full((4,), 2.0).cos())


@pytest.mark.parametrize(("keep", "take"), [(False, True), (SwapPolicy.KEEP, SwapPolicy.SWAP)])
def test_policy_decides(accelerator, keep, take):
    layer = swap_wrapper(nn.Sequential(nn.GELU(), nn.Tanh()), lambda tensor: take if tensor.numel() > 10 else keep)
    small, large = remote(5), remote(20)
    layer(small)
    assert accelerator.num_host_bytes == []
    layer(large)
    assert accelerator.num_host_bytes == [160, 160]


def test_policy_with_a_wrong_answer(place):
    layer = swap_wrapper(nn.GELU(), lambda tensor: "yes")
    with pytest.raises(
        TypeError, match=r"must return a bool or a SwapPolicy, got 'yes' for torch.float64 \[2\] on cpu"
    ):
        layer(remote(2))


def test_nothing_stays_after_an_error_in_forward(place):
    class Fails(nn.Module):
        def forward(self, x):
            x.sin()
            raise ValueError("in the middle")

    asked = []
    swapped = swap_wrapper(Fails(), lambda tensor: asked.append(tensor) or True)
    for module in (swapped, ckpt_wrapper(Fails()), swap_wrapper(ckpt_wrapper(Fails()))):
        x = remote(3)
        with pytest.raises(ValueError, match="in the middle"):
            module(x)
        num_asked = len(asked)
        y = x.exp()
        assert len(asked) == num_asked, "the hooks are still there"
        assert y.grad_fn._saved_result.data_ptr() == y.data_ptr()
    assert num_asked == 1
    if place is not None:
        assert place.current is place.main
        assert place.side.num_done == len(place.side.queue), "a copy is still under way"
    leaf = torch.ones(2, requires_grad=True)
    swap_wrapper(nn.Tanh())(leaf).sum().backward()
    assert torch.allclose(leaf.grad, 1 - torch.tanh(torch.ones(2)) ** 2)


def test_tensors_without_plain_bytes_are_kept(accelerator):
    sparse = torch.eye(3).to_sparse()
    dense = torch.randn(3, 3, requires_grad=True)
    z = torch.randn(4, dtype=torch.complex128, requires_grad=True)
    with async_save_on_cpu():
        product = torch.sparse.mm(sparse, dense * 1.0)
        conjugated = (z * 1.0).conj().sin()
    product.sum().backward()
    conjugated.abs().sum().backward()
    assert torch.allclose(dense.grad, torch.ones(3, 3))
    expected = torch.autograd.grad((z * 1.0).conj().sin().abs().sum(), z)[0]
    assert torch.equal(z.grad, expected)


def test_conv_and_attention_under_swap(accelerator):
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3, padding=1).double()
    q = torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    image = torch.randn(2, 2, 5, 5, dtype=torch.float64, requires_grad=True)

    def function(image, q):
        h = conv(image * 1.0).to(memory_format=torch.channels_last)
        attention = F.scaled_dot_product_attention(q * 1.0, q * 2.0, q * 3.0, is_causal=True)
        return F.max_pool2d(h, 2).sum() + attention.square().sum()

    expected = torch.autograd.grad(function(image, q), [image, q, conv.weight])
    with async_save_on_cpu():
        y = function(image, q)
    assert all(
        torch.equal(a, b) for a, b in zip(torch.autograd.grad(y, [image, q, conv.weight]), expected, strict=True)
    )
    assert accelerator.num_host_bytes


def test_on_a_cpu_nothing_is_copied(monkeypatch):
    monkeypatch.setattr(swap, "_copy", lambda target, source: pytest.fail("copied"))
    x = remote(3)
    with async_save_on_cpu():
        y = x.exp()
        assert y.grad_fn._saved_result.data_ptr() == y.data_ptr()
    y.sum().backward()
