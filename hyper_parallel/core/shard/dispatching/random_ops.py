"""Random operators on distributed tensors: the same bits under every layout; see ``docs/random.md``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.random import random_state
from hyper_parallel.core.dtensor.random.random_fill import fill_random_, next_block
from hyper_parallel.core.shard.dispatching.mixing import PartialWriteError, finish_sum_in_place
from hyper_parallel.platform import get_platform


def normal_(tensor: DTensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> DTensor:
    """Overwrite with normal values."""
    _no_generator("normal_", generator)
    return fill_random_(tensor, "normal", mean=float(mean), std=float(std))


def uniform_(
    tensor: DTensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None, **bounds: float
) -> DTensor:
    """Overwrite with uniform values in [low, high)."""
    _no_generator("uniform_", generator)
    low, high = bounds.get("from", low), bounds.get("to", high)  # keyword names of the framework's method
    return fill_random_(tensor, "uniform", low=float(low), high=float(high))


def trunc_normal_(
    tensor: DTensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, generator: Any = None
) -> DTensor:
    """Overwrite with normal values between ``a`` and ``b``."""
    _no_generator("trunc_normal_", generator)
    with get_platform().no_grad():
        return fill_random_(tensor, "trunc_normal", mean=float(mean), std=float(std), a=float(a), b=float(b))


def bernoulli_(tensor: DTensor, p: Any = 0.5, *, generator: Any = None) -> DTensor:
    """Overwrite with ones of probability ``p``, a number or a tensor of them, and zeros."""
    _no_generator("bernoulli_", generator)
    platform = get_platform()
    if platform.is_tensor(p) and p.ndim:
        drawn = (_like(tensor, platform.default_dtype()).uniform_() < p).to(tensor.dtype)
        platform.fill_block(tensor, drawn.redistribute(tensor.device_mesh, tensor.layout).to_local())
        return tensor
    return fill_random_(tensor, "bernoulli", p=float(p))


def dropout(tensor: DTensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> DTensor:
    """Zero elements with probability ``p`` and scale the rest by 1 / (1 - p)."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: p must be between 0 and 1, got {p}")
    if not training or p == 0.0:
        return tensor
    if inplace and tensor.layout.has_partial and not finish_sum_in_place(tensor):
        raise PartialWriteError(
            f"dropout cannot write into a tensor under {tensor.layout}: a partial value only passes through linear "
            "operators, and another tensor shares its memory: call reduce_partial() first, or leave inplace=True out"
        )
    tensor = tensor if not tensor.layout.has_partial else tensor.reduce_partial()
    mask = _keep_mask(tensor, 1.0 - p)
    scale = get_platform().number_like(0.0 if p == 1.0 else 1.0 / (1.0 - p), tensor)
    return tensor.mul_(mask).mul_(scale) if inplace else tensor * mask * scale


def dropout_(tensor: DTensor, p: float = 0.5, training: bool = True) -> DTensor:
    """:func:`dropout` in place."""
    return dropout(tensor, p, training, inplace=True)


def _keep_mask(tensor: DTensor, keep: float) -> DTensor:
    platform = get_platform()
    shape = tuple(tensor.shape)
    block = next_block("bernoulli", {"p": keep}, tensor.layout, shape, tensor.dtype, tensor.device)
    return platform.as_dtensor(DTensor, block, tensor.layout, shape)


def rand_like(tensor: DTensor, *, dtype: Any = None, **ignored: Any) -> DTensor:
    """Uniform values with the layout of ``tensor``."""
    return _like(tensor, dtype).uniform_()


def randn_like(tensor: DTensor, *, dtype: Any = None, **ignored: Any) -> DTensor:
    """Normal values with the layout of ``tensor``."""
    return _like(tensor, dtype).normal_()


@contextmanager
def same_draws() -> Iterator[None]:
    """Inside, plain tensors that the framework draws are the same on every rank; its generator is left as it was."""
    draw = random_state.draw_aside()
    inside = random_state.get_whole_state()
    try:
        with get_platform().drawing_alike(draw.seed, draw.number):
            try:
                yield
            finally:
                inside = random_state.get_whole_state()
    finally:
        random_state.set_whole_state(inside)  # putting the framework's state back has put back the library's


def _like(tensor: DTensor, dtype: Any) -> DTensor:
    platform = get_platform()
    layout = tensor.layout.reduced()
    block = platform.new_tensor(layout.local_shape(tuple(tensor.shape)), dtype or tensor.dtype, tensor.device)
    return platform.as_dtensor(DTensor, block, layout, tensor.shape)


def _no_generator(name: str, generator: Any) -> None:
    if generator is not None:
        raise ValueError(
            f"{name} on a distributed tensor: a generator= of the framework cannot be addressed by global index; "
            "seed with hyper_parallel.manual_seed instead"
        )


RANDOM_OPS: dict[str, Callable[..., Any]] = {
    "normal_": normal_,
    "uniform_": uniform_,
    "trunc_normal_": trunc_normal_,
    "bernoulli_": bernoulli_,
    "dropout": dropout,
    "dropout_": dropout_,
    "rand_like": rand_like,
    "randn_like": randn_like,
}

# Of these also the form that is written in Python is replaced as a whole; the others call the operators above.
RANDOM_BODIES = frozenset({"trunc_normal_", "dropout"})

# Random operators without a form of their own: every rank draws the whole result, from the same seed.
DRAWS_ON_THE_WHOLE = frozenset(
    {
        *("alpha_dropout", "bernoulli", "binomial", "cauchy", "exponential", "feature_alpha_dropout"),
        *(
            "feature_dropout",
            "fractional_max_pool2d",
            "fractional_max_pool3d",
            "geometric",
            "log_normal",
            "multinomial",
        ),
        *("native_dropout",),
        *("normal", "poisson", "rand_like", "randint_like", "randn_like", "random", "rrelu", "rrelu_with_noise"),
        "uniform",
        *("lstm", "gru", "rnn_tanh", "rnn_relu", "scaled_dot_product_attention", "svd_lowrank", "pca_lowrank"),
    }
)
