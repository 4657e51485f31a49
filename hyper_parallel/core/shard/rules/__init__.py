"""The rules, one file per family of operators."""


def load() -> None:
    """Register every rule of the library."""
    from hyper_parallel.core.shard.rules import einsum, elementwise, linalg, matmul  # noqa: F401
