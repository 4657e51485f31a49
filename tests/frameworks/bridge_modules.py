"""The functions of MindSpore's platform that tests call, behind the bridge, by the names of PyTorch's modules."""

from __future__ import annotations

import types
from typing import Any

from hyper_parallel.platform.mindspore.communication import collectives as _collectives
from hyper_parallel.platform.mindspore.communication import differentiable as _differentiable
from hyper_parallel.platform.mindspore.communication import groups as groups
from hyper_parallel.platform.mindspore.communication import overlap as overlap
from tests.frameworks.bridge import differentiably_over_the_bridge, over_the_bridge


class _Module(types.SimpleNamespace):
    """A module whose switches are those of the module behind it."""

    _module: Any

    def __setattr__(self, name: str, value: Any) -> None:
        if name.isupper():
            setattr(self._module, name, value)
        super().__setattr__(name, value)


_PLAIN = (
    *("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_to_all_single"),
    *("isend", "irecv", "send_object_list", "recv_object_list", "all_gather_object"),
)
collectives = _Module(
    _module=_collectives,
    CollectiveCall=_collectives.CollectiveCall,
    COMPARES_RANKS=_collectives.COMPARES_RANKS,
    observers=_collectives.observers,
    **{name: over_the_bridge(getattr(_collectives, name)) for name in _PLAIN},
)

_WITH_GRADIENTS = (
    *("differentiable_all_gather_concat", "differentiable_all_reduce", "differentiable_reduce_scatter"),
    *("differentiable_all_to_all", "differentiable_all_to_all_single", "differentiable_all_to_all_single_async"),
    "p2p_exchange",
)
differentiable = types.SimpleNamespace(
    vary=differentiably_over_the_bridge(_differentiable.vary, gives_aliases=True),
    **{name: differentiably_over_the_bridge(getattr(_differentiable, name)) for name in _WITH_GRADIENTS},
)
