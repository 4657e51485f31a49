"""What one mesh axis does to a tensor: cut it, copy it, or leave a reduction pending."""

from __future__ import annotations

from dataclasses import dataclass

REDUCE_OPS = ("sum", "avg", "max", "min", "prod", "all", "any")


class Placement:
    """Base of :class:`Shard`, :class:`Replicate` and :class:`Partial`; one per mesh axis describes a tensor."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether it cuts the tensor (at ``dim``)."""
        return isinstance(self, Shard) and (dim is None or self.dim == dim)

    def is_replicate(self) -> bool:
        """Whether every rank of the axis holds the same values."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether a reduction (``reduce_op``) over the axis is pending."""
        return isinstance(self, Partial) and (reduce_op is None or self.reduce_op == reduce_op)


@dataclass(frozen=True)
class Shard(Placement):
    """The axis cuts tensor dim ``dim`` into blocks of ``ceil(size / parts)``; the last ones may be short or empty.

    Several axes may cut one dim, each cutting the block that the one before left. They cut in the order of the mesh
    axes unless ``order`` says otherwise, on each of them: the axis with the lowest ``order`` cuts first.

    >>> Shard(-1).is_shard()
    True
    """

    dim: int
    order: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise TypeError(f"Shard(dim): dim must be an int, got {self.dim!r}")
        if self.order is not None and (isinstance(self.order, bool) or not isinstance(self.order, int)):
            raise TypeError(f"Shard(dim, order): order must be an int or None, got {self.order!r}")

    def __repr__(self) -> str:
        return f"Shard({self.dim})" if self.order is None else f"Shard({self.dim}, order={self.order})"


@dataclass(frozen=True)
class Replicate(Placement):
    """Every rank of the axis holds the same values."""

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True)
class Partial(Placement):
    """Every rank of the axis holds a summand; the value is the reduction over the axis, not done yet.

    >>> Partial("max").is_partial("sum")
    False
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCE_OPS:
            raise ValueError(f"Partial({self.reduce_op!r}): the reductions are {', '.join(REDUCE_OPS)}")

    def __repr__(self) -> str:
        return "Partial()" if self.reduce_op == "sum" else f"Partial({self.reduce_op!r})"
