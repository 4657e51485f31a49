"""The rules, one file per family of operators."""


def load() -> None:
    """Register every rule of the library."""
    from hyper_parallel.core.shard.rules import (  # noqa: F401
        attention,
        conversion,
        convolution,
        creation,
        cross_entropy,
        einsum,
        elementwise,
        extremes,
        index_writing,
        indexing,
        linalg,
        losses,
        matmul,
        moments,
        normalisation,
        ordering,
        reductions,
        scatter_gather,
        shape,
        softmax,
        spectral,
        views,
    )
