"""What an operator gave for such arguments before: the same operators come again in every block of a model.

PyTorch finds the result of an operator on tensors without memory in Python, in 30 to 200 microseconds. Looking it up
by shapes, strides and dtypes takes a tenth. Views are not remembered: they must share the memory of their input.
"""

from __future__ import annotations

from typing import Any

import torch


class _Result:
    """How to make it again."""

    __slots__ = ("flops", "kind", "place", "specs")

    def __init__(self, kind: Any, place: int | None, specs: list[Any], flops: int) -> None:
        self.kind, self.place, self.specs, self.flops = kind, place, specs, flops

    def make(self, args: Any) -> Any:
        if self.place is not None:
            return args[self.place]
        made = [
            None if spec is None else torch.empty_strided(spec[0], spec[1], dtype=spec[2], device="meta")
            for spec in self.specs
        ]
        return made[0] if self.kind is None else self.kind(made)


class RememberedShapes:
    """Results by operator and arguments."""

    def __init__(self) -> None:
        self._known: dict[Any, _Result] = {}

    @staticmethod
    def key_of(operator: Any, args: Any, kwargs: Any) -> Any:
        """None for arguments that cannot be told apart quickly."""
        try:
            key = (operator, *map(_described, args), *((name, _described(value)) for name, value in kwargs.items()))
            hash(key)
        except TypeError:
            return None
        return key

    def find(self, key: Any) -> _Result | None:
        return self._known.get(key)

    def remember(self, key: Any, args: Any, result: Any, flops: int) -> None:
        """The result must be new memory, or one of the arguments."""
        if isinstance(result, torch.Tensor):
            place = next((index for index, given in enumerate(args) if given is result), None)
            if place is not None or result.storage_offset() == 0:
                self._known[key] = _Result(None, place, [_spec(result)], flops)
        elif isinstance(result, (tuple, list)) and result:
            plain = all(item is None or type(item) is torch.Tensor for item in result)
            if plain and not any(item is given for item in result if item is not None for given in args):
                specs = [None if item is None else _spec(item) for item in result]
                self._known[key] = _Result(type(result), None, specs, flops)


def _spec(tensor: torch.Tensor) -> Any:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    return type(value), value
