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


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether hooks were registered on the tensor's gradient, before or behind its accumulation."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


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


def call_at_end_of_backward(call: Any) -> None:
    """Call ``call()`` when the backward that this thread runs has ended without an error."""
    torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


def is_node_of_backward(node: Any) -> bool:
    """Whether the running backward executes the node of the graph; RuntimeError for a leaf that torch.autograd.grad was
    asked about.
    """
    return torch._C._will_engine_execute_node(node)


_HOOKS: Any = torch.Tensor._backward_hooks
_LATE_HOOKS: Any = torch.Tensor._post_accumulate_grad_hooks


def hooks_of_leaf(node: Any) -> bool:
    """Whether the leaf behind a node that adds to a leaf's gradient has hooks of either kind."""
    return has_hooks_on_gradient(node.variable)


def has_hooks_on_gradient(tensor: torch.Tensor) -> bool:
    """Whether a tensor has hooks of either kind; there is no public way to ask."""
    with NoInterception():
        return bool(_HOOKS.__get__(tensor) or _LATE_HOOKS.__get__(tensor))


class ThreadValue:
    """A value of each thread, which the threads of autograd have from the one that asks for backward.

    On accelerators backward runs in threads of its own. They are given the state of C++, which Python can put objects
    into under private names only; ``threading.local`` is not carried over.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def value(self) -> Any:
        return torch._C._get_obj_in_tls(self._name) if torch._C._is_key_in_tls(self._name) else None

    @value.setter
    def value(self, value: Any) -> None:
        torch._C._stash_obj_in_tls(self._name, value)


def num_dispatch_modes() -> int:
    """How many dispatch modes this thread is in."""
    return torch._C._len_torch_dispatch_stack()


def num_function_modes() -> int:
    """How many function modes this thread is in."""
    return torch._C._len_torch_function_stack()


def saving_hooks() -> Any:
    """The hooks that tensors saved for backward go through now; None where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def is_transformed() -> bool:
    """Whether a transform of functions (vmap, grad) runs."""
    return torch._C._are_functorch_transforms_active()


def has_global_hooks() -> bool:
    """Whether hooks for all modules are registered."""
    return torch.nn.modules.module._has_any_global_hook()


def replace_call(module: Any, call: Any) -> Any:
    """Let ``call`` answer calls of the module, hooks included, as ``Module.compile`` does; how it was called before."""
    module._compiled_call_impl = call
    return module._call_impl


def restore_call(module: Any) -> None:
    """Undo :func:`replace_call`."""
    module._compiled_call_impl = None


def has_replaced_call(module: Any) -> bool:
    """Whether something answers calls of the module in its place."""
    return module._compiled_call_impl is not None


def is_without_values(tensor: Any) -> bool:
    """Whether a tensor stands for another one while a program is traced."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or torch._is_functional_tensor(tensor) or type(tensor) is _functional_tensor()


def _functional_tensor() -> type:
    from torch._subclasses.functional_tensor import FunctionalTensor

    return FunctionalTensor


def compile_both_passes(program: Any, examples: list[torch.Tensor]) -> Any:
    """``program(*tensors) -> tuple`` as compiled code with a compiled backward; nothing runs.

    AOTAutograd and inductor without dynamo, which traces Python and cannot look into distributed tensors.
    """
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    def compiler(**how: bool) -> Any:
        def compile_graph(graph: Any, inputs: Any) -> Any:
            code = compile_fx_inner(graph, inputs, **how)

            def run(args: Any) -> Any:  # parameters that were saved for backward come as distributed tensors
                with NoInterception():
                    return code(args)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return compile_graph

    class Recorded(torch.nn.Module):
        def forward(self, *tensors: Any) -> Any:
            return program(*tensors)

    return aot_module_simplified(
        Recorded(),  # type: ignore[arg-type]
        examples,
        fw_compiler=compiler(is_backward=False),
        bw_compiler=compiler(is_backward=True),
        inference_compiler=compiler(is_inference=True),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
