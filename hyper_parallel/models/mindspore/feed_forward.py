"""The feed-forward network of the reference models."""

from __future__ import annotations

from mindspore import Tensor, nn, ops
from mindspore.common.initializer import Normal

__all__ = ["FeedForward", "linear", "std_into_stream"]


class FeedForward(nn.Cell):
    """SwiGLU: one projection is the other's gate."""

    def __init__(self, dim: int, hidden_dim: int, num_blocks: int | None = None) -> None:
        super().__init__()
        self.gate = linear(dim, hidden_dim)
        self.up = linear(dim, hidden_dim)
        self.down = linear(hidden_dim, dim, num_blocks)

    def construct(self, x: Tensor) -> Tensor:
        return self.down(ops.silu(self.gate(x)) * self.up(x))


def linear(num_inputs: int, num_outputs: int, num_blocks: int | None = None) -> nn.Dense:
    """A projection without bias; with ``num_blocks`` one that leads back into the stream to which they all add."""
    return nn.Dense(num_inputs, num_outputs, weight_init=Normal(std_into_stream(num_blocks)), has_bias=False)


def std_into_stream(num_blocks: int | None) -> float:
    """The spread of weights; smaller for those that lead into the residual stream, the more blocks add to it."""
    return 0.02 if num_blocks is None else 0.02 / (2 * num_blocks) ** 0.5
