"""Plain parameters that are used on a part of the activations: their gradients would differ from rank to rank.

Note [A norm over each head]
Between two cut projections the activations are plain blocks: a rank sees its own heads only. A plain parameter used
there, such as the scale of a norm over each head, gets the gradient of these heads alone, another on every rank, and
the replicas drift apart without a word. Nothing tells plain code that a sum over the ranks is missing. But the graph
does: it is walked once, from the block that enters a module back to the edges at which layouts change, and a plain
parameter on the way is refused by name.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.platform import get_platform

_names: dict[int, tuple[Any, str]] = {}


def name_parameters(root: Any) -> None:
    """Remember the names of the plain parameters in ``root``, for messages."""
    for name, parameter in get_platform().parameters_dict(root).items():
        _names[id(parameter)] = (weakref.ref(parameter, functools.partial(_forget, id(parameter))), name)


def _forget(key: int, _: Any) -> None:
    _names.pop(key, None)


def _name_of(parameter: Any) -> str:
    reference, name = _names.get(id(parameter), (None, ""))
    if reference is not None and reference() is parameter:
        return f"{name!r} "
    return ""


def refuse_sharded_uses(block: Any, layout: Layout, where: str) -> None:
    """Raise if a plain parameter went into ``block``, a plain part of a value that lies under ``layout``."""
    known = [parameter for reference, _ in list(_names.values()) if (parameter := reference()) is not None]
    behind = get_platform().plain_parameters_behind(block, known)
    found = [parameter for parameter in behind if parameter.requires_grad]
    if not found:
        return
    listed = ", ".join(f"{_name_of(parameter)}of shape {tuple(parameter.shape)}" for parameter in found)
    raise RuntimeError(
        f"{where}: its input is the plain local tensor of a value under {layout}, and was computed with the plain "
        f"parameter {listed}. Each rank gets the gradient of its own part only. Give the module of that parameter "
        "a style too: NoParallel(input_layouts=..., output_layouts=...) with the layout of its activations, or "
        "SequenceParallel(); or keep the activations distributed with use_local_output=False"
    )
