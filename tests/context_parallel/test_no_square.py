"""No operator of a forward or backward over a sharded sequence makes a tensor of tokens by tokens."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import hyper_parallel as hp
from hyper_parallel.core.context_parallel.blocks import visibility
from hyper_parallel.platform.torch.private_api import DispatchMode, NoInterception
from hyper_parallel.testing import threads
from tests.context_parallel.cases import values
from tests.world import small_or_sweep

only_on = "torch"

TOKENS = 512
LARGEST = TOKENS * TOKENS // 8  # a pair of blocks of 2 ranks has twice as many, and masks are of 32 tokens by 32


class _Largest(DispatchMode):
    """The largest output of an operator, by name; views of a small tensor count as small."""

    def __init__(self) -> None:
        super().__init__()
        self.found = (0, "nothing")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with NoInterception():  # saved distributed tensors come in backward: their blocks are meant
            result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                held = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
                self.found = max(self.found, (held, f"{func} of {tuple(tensor.shape)}"))
        return result


@pytest.fixture(autouse=True)
def _small_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visibility, "LARGEST_MASK", 32)


def _visible(kind: str) -> hp.Visibility:
    if kind == "packed":
        return hp.Visibility(causal=True, documents=np.repeat(np.arange(4), TOKENS // 4))
    if kind == "padded":
        return hp.Visibility(causal=True, valid=np.arange(TOKENS)[None] < TOKENS - 40)
    return hp.Visibility(causal=True, window=100 if kind == "window" else None)


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    with _Largest() as largest:
        yield
    assert 0 < largest.found[0] < LARGEST, largest.found


def _ours(scheme: str, kinds: tuple[str, ...], options: tuple[dict[str, Any], ...]) -> None:
    mesh = hp.init_device_mesh("cpu", (hp.get_platform().get_world_size(),), mesh_dim_names=("cp",))
    for kind, more in itertools.product(kinds, options):
        query, key = (values(1, heads, TOKENS, 4) for heads in (2, 1))
        leaves = [hp.distribute_tensor(one, mesh, [hp.Shard(2)]).requires_grad_() for one in (query, key, key)]
        with _watched(), hp.attention_scheme(scheme.split()[-1], balance=scheme.startswith("balanced")):
            hp.attention(*leaves, visible=_visible(kind), **more).sum().full_tensor().backward()


KINDS = ("causal", "window", "packed", "padded")
FUSED, BY_STEPS = {}, {"soft_cap": 5.0}  # the second is computed without a kernel


@pytest.mark.parametrize("scheme", ["ring", "balanced ring", "ulysses", "hybrid", "gather"])
def test_attention(scheme: str, sweep: bool) -> None:
    kinds = KINDS if sweep else ("causal", "window") if scheme == "gather" else ("window",)
    options = (FUSED, BY_STEPS) if sweep or scheme == "gather" else (FUSED,)
    threads(4 if scheme == "hybrid" else 2).run(_ours, scheme, kinds, options)


def _model(name: str, scheme: str, order: str, kind: str) -> None:
    from tests.tensor_parallel.hugging_face import build

    run = hp.parallelize(
        build(name, num_blocks=1), "cp=4" if scheme == "hybrid" else "cp=2", attention=scheme, order=order
    )
    ids = torch.arange(TOKENS)[None] % 37
    given = {"input_ids": ids, "labels": ids}
    if kind == "packed":
        given["position_ids"] = torch.arange(TOKENS)[None] % 200
    if kind == "padded":
        given["attention_mask"] = (torch.arange(TOKENS)[None] < TOKENS - 40).long()
    with _watched():
        run.forward_backward(**given)


SMALL = [("llama", "ring", "zigzag", "packed"), ("gemma2", "ring", "contiguous", "padded")]
MATRIX = [
    (name, scheme, order, kind)
    for name, kind, (scheme, order) in itertools.product(
        ("llama", "mistral", "gemma2", "gpt_oss"),
        ("causal", "packed", "padded"),
        [
            ("ring", "zigzag"),
            ("ring", "contiguous"),
            ("ulysses", "zigzag"),
            ("hybrid", "contiguous"),
            ("gather", "zigzag"),
        ],
    )
    if (name, scheme, order, kind) not in SMALL
]


@pytest.mark.parametrize("case", small_or_sweep([*SMALL, *MATRIX], SMALL), ids="-".join)
def test_unmodified_models(case: tuple[str, str, str, str]) -> None:
    pytest.importorskip("transformers", reason="needs the extra transformers")
    from tests.tensor_parallel.hugging_face import build

    build(case[0])
    threads(4 if case[1] == "hybrid" else 2).run(_model, *case)


def test_the_watch_sees_a_square() -> None:
    with pytest.raises(AssertionError, match="mm"), _watched():
        torch.ones(TOKENS, 2) @ torch.ones(2, TOKENS)
