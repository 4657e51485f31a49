"""Attributes of modules that a call changes: a tape would leave them as they were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.platform import get_platform

_platform = get_platform()


class AttributesBefore:
    """The attributes of modules before a call, to be compared with those behind it."""

    def __init__(self, modules: Mapping[str, Any]) -> None:
        self._modules = modules
        self._before = {path: _seen(module) for path, module in modules.items()}

    def find_change(self) -> str | None:
        """What the call has changed, and where; None where nothing."""
        for path, module in self._modules.items():
            before, now = self._before[path], _seen(module)
            for name in before.keys() | now.keys():
                if name not in before or name not in now or not _is_same(before[name], now[name]):
                    where = f"{path}.{name}" if path else name
                    return (
                        f"forward changes the attribute {where}, which a recorded program would leave as it is: return "
                        "the value instead"
                    )
        return None


def _seen(module: Any) -> dict[str, Any]:
    """The attributes, and what lists, dicts and sets among them hold."""
    accounts = _platform.own_attributes()
    return {name: (value, _held(value)) for name, value in vars(module).items() if name not in accounts}


def _held(value: Any) -> Any:
    if isinstance(value, (list, set)):
        return list(value)
    return [*value.items()] if isinstance(value, dict) else None


def _is_same(before: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    if before[0] is not now[0] and not (
        type(before[0]) is type(now[0]) in (int, float, str, bool) and before[0] == now[0]
    ):
        return False
    one, other = before[1], now[1]
    if one is None or other is None:
        return one is other
    return len(one) == len(other) and all(a is b or _pair(a, b) for a, b in zip(one, other, strict=True))


def _pair(a: Any, b: Any) -> bool:
    return isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b) == 2 and a[0] == b[0] and a[1] is b[1]
