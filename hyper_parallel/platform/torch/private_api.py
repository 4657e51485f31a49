"""Names that PyTorch keeps to itself and that there is no public way around: what an upgrade must look at first.

What replaces a function of PyTorch is in ``takes_over/``; all other private names are here, checked with the version of
``constraints.txt``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.distributed import distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# ``OpOverload``: one form of an operator (``torch.ops.aten.add.Tensor``), as dispatch modes and checkpoint policies get
# it; ``OpOverloadPacket``: all its forms (``torch.ops.aten.add``).

# Around calls of C functions on a subclass of tensors that shall not be intercepted. torch's documentation of
# subclasses uses this name.
NoInterception = torch._C.DisableTorchFunctionSubclass

# Whether functions called with a subclass of tensors are intercepted now.
is_intercepting = torch._C._is_torch_function_enabled

# Around a call that no dispatch mode shall see, such as those that count operators or keep their results.
outside_of_modes = _disable_current_modes

# One kernel for the tensors of a list; torch.nn.utils uses them for norms and clipping.
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm


class DispatchMode(TorchDispatchMode):
    """Sees every operator that reaches a kernel; torch's documentation of modes uses the name of its base.

    Not hidden from torch.compile, which would load the compiler and cost a third of the time of an operator: programs
    are not compiled under our modes.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def remove_library(library: torch.library.Library) -> None:
    """Take back what ``library`` has registered; else it stays until the object is collected."""
    library._destroy()


def next_node_number() -> int:
    """The number that autograd gives to the next node which this thread makes."""
    return torch.autograd._get_sequence_nr()


def node_number() -> int | None:
    """The number of the node whose backward this thread runs; None outside of backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def is_in_backward() -> bool:
    """Whether this thread runs a backward."""
    return torch._C._current_graph_task_id() != -1


def num_storage_uses(storage: torch.UntypedStorage) -> int:
    """How many tensors and Python objects share the memory."""
    return torch._C._storage_Use_Count(storage._cdata)


def default_store() -> Any:
    """The store through which the ranks of the world have met."""
    return c10d._get_default_store()


def new_named_group(name: str, ranks: list[int], rank: int, store: Any, **options: Any) -> tuple[Any, Any]:
    """A process group with a name of our own, and its store; torch.distributed knows it afterwards.

    The public ``new_group`` cannot name a group, and one that torch.distributed does not know is of no use to the rest
    of PyTorch.
    """
    backend = options.pop("backend")
    group, own_store = c10d._new_process_group_helper(len(ranks), rank, ranks, backend, store, name, **options)
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group, own_store
