"""A nested state dict as flat names: ``{"model": {"w": tensor}, "step": 3}`` holds ``model.w`` and ``step``.

Dicts and lists are entered where there is a tensor inside; what holds no tensor is one object, whatever it is made of.
So the state to load into may have any placeholder for an object, ``None`` for instance. A dict of which ranks hold
different names is an :class:`Entries`, each of whose values has a name of its own in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hyper_parallel.platform import get_platform


class Entries(dict[str, Any]):
    """A dict whose values are kept apart in a checkpoint, also where none is a tensor: ranks may hold different ones.

    Of an ordinary dict without tensors, which is one object, only the first rank's would be kept.
    """


class Leaf(NamedTuple):
    """A tensor or an object, and where it is: ``container[place]``."""

    value: Any
    container: Any
    place: Any
    is_tensor: bool


def flatten(state_dict: Mapping[str, Any]) -> dict[str, Leaf]:
    """The leaves by name, in the order of the state dict."""
    _check_is_dict(state_dict)
    is_tensor = get_platform().is_tensor
    leaves: dict[str, Leaf] = {}
    for place, value in state_dict.items():
        if not isinstance(place, str):
            raise TypeError(f"the names in a state dict are strings, got {place!r} of type {type(place).__name__}")
        if is_tensor(value):
            _add(leaves, place, Leaf(value, state_dict, place, True))
        else:
            try:
                found = _walk(place, value, state_dict, place, is_tensor)[1]
            except RecursionError:
                raise ValueError(
                    f"'{place}' contains itself or is nested too deeply, so it cannot be saved or loaded"
                ) from None
            for name, leaf in found:
                _add(leaves, name, leaf)
    return leaves


def _add(leaves: dict[str, Leaf], name: str, leaf: Leaf) -> None:
    if name in leaves:
        raise ValueError(f"two entries of the state dict are both called '{name}' when flattened; rename one of them")
    leaves[name] = leaf


def _walk(name: str, value: Any, container: Any, place: Any, is_tensor: Any) -> tuple[bool, list[tuple[str, Leaf]]]:
    """Whether there is a tensor inside of the dicts and lists here, and the leaves."""
    if is_tensor(value):
        return True, [(name, Leaf(value, container, place, True))]
    if isinstance(value, dict):
        children: Any = value.items()
    elif type(value) is list:
        children = enumerate(value)
    else:
        children = ()
    found = isinstance(value, Entries)
    leaves: list[tuple[str, Leaf]] = []
    for key, item in children:
        has_tensor, inner = _walk(f"{name}.{key}", item, value, key, is_tensor)
        found |= has_tensor
        leaves += inner
    return (True, leaves) if found else (False, [(name, Leaf(value, container, place, False))])


def stateful_in(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The values that give and take their state by themselves, as models and optimizers do."""
    _check_is_dict(state_dict)
    return {key: value for key, value in state_dict.items() if _is_stateful(value)}


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _check_is_dict(state_dict: Any) -> None:
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a state dict is a dict by name, got a {type(state_dict).__name__}")
