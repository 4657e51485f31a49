"""Compiled code that meets distributed tensors on MindSpore: refused, with what to write instead."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.world import run_on_ranks

REFUSED = r"is compiled .* and meets distributed tensors: .*PyNative mode: leave out jit"


class Layer(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(3, 2)

    def construct(self, x: Any) -> Any:
        return self.dense(x)


@run_on_ranks(2)
def test_what_is_compiled_refuses_distributed_tensors():
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain = Tensor(np.arange(12, dtype=np.float32).reshape(4, 3))
    x = hp.distribute_tensor(plain, mesh, [hp.Shard(0)])
    pair = [x]

    def twice(a: Any) -> Any:
        return a * 2

    def add(a: Any) -> Any:
        return a + x

    def add_first(a: Any) -> Any:
        return a + pair[0]

    layer = hp.parallelize_module(Layer(), mesh, {"dense": hp.ColwiseParallel()})
    calls = {
        "twice is compiled": lambda: ms.jit(twice)(x),
        "code that uses 'x'": lambda: ms.jit(add)(plain),
        "code that uses 'pair'": lambda: ms.jit(add_first)(plain),
        "a function": lambda: ms.jit(twice, capture_mode="bytecode")(x),
        "add is compiled": lambda: ms.jit(add, capture_mode="bytecode")(plain),
        "twice#": lambda: ms.jit(twice, capture_mode="trace")(x),
        "Layer.construct": lambda: ms.jit(layer)(plain),
    }
    for words, call in calls.items():
        with pytest.raises(RuntimeError, match=REFUSED) as caught:
            call()
        assert words in str(caught.value)
        weight = Parameter(Tensor(np.ones(3, np.float32)))
        hp.backward((weight * 2).sum())  # errors end no recording
        assert (hp.grad_of(weight).asnumpy() == 2).all()
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        with pytest.raises(RuntimeError, match=f"Layer {REFUSED}"):
            layer(plain)
        doubled = (x * 2).full_tensor()  # operators by themselves are not compiled
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    np.testing.assert_array_equal(doubled.asnumpy(), plain.asnumpy() * 2)
    # What is compiled may see blocks, where the program says so.
    on_blocks = hp.local_map(ms.jit(twice), [hp.Shard(0)], ([hp.Shard(0)],))
    np.testing.assert_array_equal(on_blocks(x).full_tensor().asnumpy(), plain.asnumpy() * 2)


@run_on_ranks(2)
def test_optimizers_that_use_full_parameters_are_refused():
    mesh = hp.init_device_mesh("cpu", (2,))
    x = hp.distribute_tensor(Tensor(np.ones((4, 3), np.float32)), mesh, [hp.Shard(0)])
    weight = Parameter(x, name="weight")
    assert isinstance(weight, get_platform().Parameter)
    for optimizer in (nn.LARS(nn.Momentum([weight], 0.1, 0.9)), nn.Lamb([weight], 0.1)):
        with pytest.raises(RuntimeError, match=r"needs norms or means of full parameters .*use AdamW, Adam, SGD"):
            optimizer((x,))
