"""Every private name of MindSpore that HyperParallel uses, with the reason; nothing else in this package has one.

MindSpore 2.10 has an autograd tape, interception of operators and views like PyTorch's, but publicly only function
transforms (``value_and_grad``) and no ``.grad``, ``backward``, ``no_grad`` or autograd function. All names were checked
on the version below; another one is warned about at start (``start.py``).
"""

from __future__ import annotations

from typing import Any

from mindspore import Tensor
from mindspore._c_expression import NoFallbackGuard, run_backward
from mindspore._c_expression.amp import get_curr_amp_strategy
from mindspore.common import dtype as mstype
from mindspore.common._grad_function import _Function
from mindspore.graph import _parse, jit_trace
from mindspore.graph._utils import pijit_context
from mindspore.graph.api import _JitExecutor, _no_grad, _pynative_executor
from mindspore.ops._utils.arg_handler import dtype_to_type_id
from mindspore.ops.auto_generate import gen_ops_prim, pyboost_inner_prim

__all__ = ["CHECKED_VERSION", "Function", "NoFallbackGuard", "executor", "no_grad", "run_backward"]

CHECKED_VERSION = "2.10"

# ``run_backward(roots, gradients, retain_graph, create_graph, inputs, allow_unreachable, accumulate_grad)``, the tape.
# The public value_and_grad runs a function again for every call, so two backwards of one forward, a gradient given by
# the user, hooks between micro-batches and `p.grad` are impossible with it.

# The base of autograd functions; public is only Cell.bprop, which cannot be called with groups and shapes as arguments.
Function = _Function

# The context without recording; there is no public one in PyNative mode.
no_grad = _no_grad

# Recording must be switched on for the tape, and again after the public grad functions, which switch it off.
executor = _pynative_executor


def start_recording() -> None:
    """Let operators be recorded for ``run_backward``."""
    executor.set_grad_flag(True)


def has_started_recording() -> bool:
    """Whether recording is switched on; an operator that fails switches it off."""
    return executor.grad_flag()


def is_recording() -> bool:
    """Whether operators are recorded now: switched on, and not inside ``no_grad``."""
    return executor.enable_grad()


def set_recording(enabled: bool) -> None:
    executor.set_enable_grad(enabled)


# What the tape knows about a tensor has only private names: the leaf's gradient, whether it wants one, its node.


def get_grad(tensor: Any) -> Any:
    return tensor._grad


def set_grad(tensor: Any, gradient: Any) -> None:
    tensor._grad = gradient


def requires_grad(tensor: Any) -> bool:
    return tensor._requires_grad


def needs_grad(tensor: Any) -> bool:
    """Whether the tape records what is done with ``tensor`` now; asked for every operator, so in one call."""
    return tensor._requires_grad and executor.enable_grad()


def is_leaf(tensor: Any) -> bool:
    return tensor._is_leaf


def grad_node(tensor: Any) -> Any:
    return tensor._grad_node


def version_of(tensor: Any) -> int:
    """How often the tensor was written to in place, as the tape counts it."""
    return tensor._version


def join_mccl(store: Any, rank: int, world_size: int, timeout: Any) -> None:
    """Join MindSpore's own world on a CPU from a store, without a scheduler process.

    The public ``mint.distributed.init_process_group`` knows hccl only, and ``communication.init`` needs a scheduler.
    Two helpers of mint.distributed captured the name of the world group at import, when it was hccl's.
    """
    from mindspore.communication.management import _init_with_store
    from mindspore.mint.distributed import distributed

    _init_with_store(backend="mccl", timeout=timeout, world_size=world_size, rank=rank, store=store)
    distributed._GROUP_RANK_CACHE["hccl_world_group"] = rank
    distributed._GROUP_SIZE_CACHE["hccl_world_group"] = world_size


# ---------------------------------------------------------------- distributed tensors


# ``make_subclass(kind, tensor)``: a second Python object, of class ``kind``, over the C++ tensor behind ``tensor``,
# gradient history included. ``__fallback__``, by which operators on such objects are intercepted, has no public
# description either.
make_subclass = Tensor._make_subclass


# ``NoFallbackGuard``: parameters are objects of a subclass, so that ``__fallback__`` is asked for them too; under the
# guard it is not.


def set_requires_grad(tensor: Any, value: bool) -> None:
    """The public ``requires_grad_`` only switches it on."""
    tensor._requires_grad = value


def dtype_of_id(number: int) -> Any:
    """The dtype behind the number that operators get for a dtype argument."""
    return _DTYPES_BY_ID[number]


def parameters_of(cell: Any) -> dict[str, Any]:
    """A cell's own parameters, not those of its cells, by attribute name, to be replaced in place."""
    return cell._params


def buffers_of(cell: Any) -> dict[str, Any]:
    """A cell's own buffers, likewise."""
    return cell._buffers


_DTYPES_BY_ID = {
    dtype_to_type_id("cast", "dtype", getattr(mstype, name)): getattr(mstype, name)
    for name in (
        *("bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32"),
        *("float64", "bfloat16", "complex64", "complex128"),
    )
}


# ---------------------------------------------------------------- the tape's nodes


def node_number(node: Any) -> int:
    """What tells one node of the tape from another; Python objects for them are made anew at each look."""
    return node._unique_id()


def nodes_before(node: Any) -> list[Any]:
    """The nodes whose results went into this one; none for a leaf's."""
    return [before for before, _ in node.next_functions if before is not None]


def results_before(node: Any) -> list[tuple[Any, int]]:
    """The same, each with the number of its result."""
    return [(before, number) for before, number in node.next_functions if before is not None]


def runs_in_backward() -> bool:
    """Whether backward is running in this thread."""
    return executor.get_current_autodiff_engine_id() != -1


def move_hook_to_front(handle: Any) -> None:
    """Let the hook of this handle be called first; hooks of backward cannot be registered so."""
    handle.hook_dict_ref().move_to_end(handle.handle_id, last=False)


def transient_buffers_of(cell: Any) -> set[str]:
    """The names of the buffers that are not part of the state; there is no public way to ask."""
    return cell._non_persistent_buffers_set


def cells_of(cell: Any) -> dict[str, Any]:
    """A cell's own cells by attribute name; the public ``name_cells`` is what a wrapper overrides."""
    return cell._cells


# ---------------------------------------------------------------- recorded programs


# Where a cell keeps its own parameters and buffers.
TABLES = ("_params", "_buffers")

# The class of dtypes.
DtypeClass = type(mstype.float32).__mro__[1]

_HOOKS = ("_lazy_forward_pre_hook", "_lazy_forward_hook", "_lazy_backward_pre_hook", "_lazy_backward_hook")


def hooks_of(cell: Any) -> list[Any]:
    """The cell's own hooks; the public properties make empty tables where there are none."""
    own = vars(cell)
    return [hook for table in _HOOKS for hook in (own.get(table) or {}).values()]


def saves_otherwise() -> bool:
    """Whether hooks of saved tensors are active."""
    return executor.is_saved_tensor_hook_active()


def mixed_precision() -> Any:
    """What operators cast their arguments to, as ``amp`` was asked for it; None where nothing."""
    strategy = get_curr_amp_strategy()
    return None if strategy is None else (str(strategy.get_amp_level()), str(strategy.get_amp_dtype()))


_primitives: dict[str, Any] = {}


def primitive(call: Any) -> Any:
    """The primitive of an operator that arrived at ``__fallback__``, which can be called again; None for one without
    a primitive of its name."""
    name = getattr(call, "name", None)
    if not isinstance(name, str):
        return None
    if name not in _primitives:
        kind = getattr(gen_ops_prim, name, None)
        found = kind() if isinstance(kind, type) else getattr(pyboost_inner_prim, f"_{name}Prim", None)
        _primitives[name] = found() if isinstance(found, type) else found
    return _primitives[name]


# ---------------------------------------------------------------- compiled code


class Compiler:
    """Where compiled code can be looked at before it runs, for which there is no public hook.

    ``executor`` is the class behind ``mindspore.jit``: its ``_predict`` is the first thing in every call of a jitted
    function (``nn.Cell`` has one of that name, the first thing in every call of a cell in GRAPH_MODE). ``parsing`` has
    ``resolve_symbol``, which finds what compiled code uses by name. ``capturing`` and ``tracing`` are the same for the
    other ``capture_mode``s: ``PreJit``, ``PIJitCaptureContext`` and ``_jit_trace_begin`` come first there.
    """

    executor = _JitExecutor
    parsing = _parse
    capturing = pijit_context
    tracing = jit_trace
