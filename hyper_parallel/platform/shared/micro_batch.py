"""Splitting the inputs of a call into micro-batches, on any framework whose tensors have ``shape`` and ``narrow``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hyper_parallel.platform.shared.trees import map_leaves

__all__ = ["micro_batch"]


def micro_batch(
    micro_batch_num: int,
    args_batch_dim: Sequence[int | None] | int | None = None,
    kwargs_batch_dim: Mapping[str, int | None] | None = None,
    *,
    is_tensor: Callable[[Any], bool],
) -> Callable[[Callable], Callable[..., list]]:
    """A decorator: the function is called ``micro_batch_num`` times, each time with one part of the inputs, in order.

    The decorated function returns the list of the results. ``args_batch_dim`` has one entry for each positional
    argument (or is one dim for all), ``kwargs_batch_dim`` one for each keyword: the dim to split, or ``None`` to hand
    the argument over whole. An argument without an entry is split along dim 0. An entry counts for every tensor inside
    a nested argument; what is not a tensor is handed over whole, and so is a 0-dim tensor without an entry.

    All tensors that are split must agree on the batch size. Parts differ in size by one sample at most, the larger ones
    first, and are never empty: fewer samples than micro-batches is an error. On methods, ``self`` is not counted as an
    argument.
    """
    if isinstance(micro_batch_num, bool) or not isinstance(micro_batch_num, int):
        raise TypeError(f"micro_batch: the number of micro-batches must be an int, got {micro_batch_num!r}")
    if micro_batch_num < 1:
        raise ValueError(f"micro_batch: the number of micro-batches must be at least 1, got {micro_batch_num}")
    if isinstance(args_batch_dim, str) or not isinstance(args_batch_dim, (int, Sequence, type(None))):
        raise TypeError(
            f"micro_batch: args_batch_dim must be a list with one dim or None for each argument, got {args_batch_dim!r}"
        )
    if not isinstance(kwargs_batch_dim, (Mapping, type(None))):
        raise TypeError(
            f"micro_batch: kwargs_batch_dim must be a dict of names and dims (or None), got {kwargs_batch_dim!r}"
        )
    return lambda func: _MicroBatched(func, micro_batch_num, args_batch_dim, kwargs_batch_dim, is_tensor)


_NO_ENTRY = object()


class _MicroBatched:
    def __init__(
        self,
        func: Callable,
        num_micro_batches: int,
        args_batch_dim: Sequence[int | None] | int | None,
        kwargs_batch_dim: Mapping[str, int | None] | None,
        is_tensor: Callable[[Any], bool],
    ) -> None:
        functools.update_wrapper(self, func, updated=())
        self._func = func
        self._num_micro_batches = num_micro_batches
        self._args_batch_dim = args_batch_dim
        self._kwargs_batch_dim = kwargs_batch_dim
        self._is_tensor = is_tensor

    def __get__(self, instance: object, owner: type | None = None) -> _MicroBatched:
        if instance is None:
            return self
        bound = self._func.__get__(instance, owner)
        return _MicroBatched(
            bound, self._num_micro_batches, self._args_batch_dim, self._kwargs_batch_dim, self._is_tensor
        )

    def __call__(self, *args: Any, **kwargs: Any) -> list:
        splitter = _Splitter(self._num_micro_batches, self._is_tensor)
        split_args = [
            splitter.split(f"argument {position}", arg, dim)
            for position, (arg, dim) in enumerate(zip(args, self._dims_of_args(len(args)), strict=True))
        ]
        dims = self._kwargs_batch_dim or {}
        split_kwargs = {
            name: splitter.split(f"argument '{name}'", arg, dims.get(name, _NO_ENTRY)) for name, arg in kwargs.items()
        }
        return [
            self._func(*(arg[index] for arg in split_args), **{name: arg[index] for name, arg in split_kwargs.items()})
            for index in range(self._num_micro_batches)
        ]

    def _dims_of_args(self, num_args: int) -> Sequence:
        if self._args_batch_dim is None:
            return [_NO_ENTRY] * num_args
        if isinstance(self._args_batch_dim, int):
            return [self._args_batch_dim] * num_args
        if len(self._args_batch_dim) != num_args:
            raise ValueError(
                f"micro_batch: args_batch_dim {list(self._args_batch_dim)} has {len(self._args_batch_dim)} entries, "
                f"but the call has {num_args} positional arguments; give one dim or None for each"
            )
        return self._args_batch_dim


class _Splitter:
    """Splits the arguments of one call; remembers the batch size of the first split tensor to hold the others to it."""

    def __init__(self, num_parts: int, is_tensor: Callable[[Any], bool]) -> None:
        self._num_parts = num_parts
        self._is_tensor = is_tensor
        self._first: tuple[int, str] | None = None

    def split(self, where: str, arg: Any, dim: Any) -> list:
        """The parts of one argument."""
        if dim is None:
            return [arg] * self._num_parts

        def parts_of(tensor: Any) -> tuple[Any, ...]:
            if tensor.ndim == 0 and dim is _NO_ENTRY:
                return (tensor,) * self._num_parts
            return self._split_tensor(where, tensor, 0 if dim is _NO_ENTRY else dim)

        # Each tensor is split once; the containers around it are rebuilt for every part.
        parts: list[tuple[Any, ...]] = []
        self._map(lambda tensor: parts.append(parts_of(tensor)), arg)
        return [self._take(arg, iter(parts), index) for index in range(self._num_parts)]

    def _take(self, arg: Any, parts: Any, index: int) -> Any:
        return self._map(lambda _: next(parts)[index], arg)

    def _map(self, fn: Callable[[Any], Any], arg: Any) -> Any:
        return map_leaves(lambda leaf: fn(leaf) if self._is_tensor(leaf) else leaf, arg)

    def _split_tensor(self, where: str, tensor: Any, dim: int) -> tuple[Any, ...]:
        what = f"{where} of shape {tuple(tensor.shape)}"
        if not -tensor.ndim <= dim < tensor.ndim:
            raise ValueError(f"micro_batch: {what} has no dim {dim} to split; give None to hand it over whole")
        size = tensor.shape[dim]
        if size < self._num_parts:
            raise ValueError(
                f"micro_batch: {what} has {size} samples along dim {dim}, too few for {self._num_parts} micro-batches; "
                "use fewer micro-batches or a larger batch, or give None to hand it over whole"
            )
        if self._first is None:
            self._first = (size, what)
        elif size != self._first[0]:
            raise ValueError(
                f"micro_batch: the batch sizes differ: {what} has {size} samples along dim {dim}, {self._first[1]} has "
                f"{self._first[0]}; name the dims to split in args_batch_dim and kwargs_batch_dim, None for what has "
                "no batch"
            )
        block, num_larger = divmod(size, self._num_parts)
        sizes = [block + (index < num_larger) for index in range(self._num_parts)]
        starts = [sum(sizes[:index]) for index in range(self._num_parts)]
        return tuple(tensor.narrow(dim, start, length) for start, length in zip(starts, sizes, strict=True))
