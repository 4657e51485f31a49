"""The second half of the contract between HyperParallel and a framework: what distributed tensors need.

Read ``platform.py`` first; :class:`Platform` derives from this class, so that there is one object. These methods know
nothing of layouts: they give a tensor type whose operators can be intercepted, call operators on blocks, move blocks
between ranks, and answer small questions. ``core/dtensor`` and ``core/shard`` do the rest.
"""

from __future__ import annotations

import contextlib
import inspect
from abc import ABC, abstractmethod
from typing import Any


class DistributedTensorSupport(ABC):
    """What a framework must provide for distributed tensors, grouped as the library uses it."""

    # ------------------------------ distributed tensors: a tensor type whose operators can be intercepted

    #: Whether a subclass of DTensor is asked by ``__torch_function__`` before an operator runs on it.
    asks_subclasses = False

    @staticmethod
    @abstractmethod
    def as_dtensor(kind: Any, plain: Any, layout: Any, shape: Any) -> Any:
        """Make ``plain`` itself a DTensor; the caller must own it."""

    @staticmethod
    @abstractmethod
    def alias(tensor: Any) -> Any:
        """A plain tensor with the same memory and gradient history, to be turned into a DTensor."""

    @staticmethod
    @abstractmethod
    def local_alias(tensor: Any) -> Any:
        """The block as a plain tensor: the same memory and the same gradient history."""

    @staticmethod
    @abstractmethod
    def detached(tensor: Any) -> Any:
        """The block as a plain tensor without gradient history."""

    @staticmethod
    @abstractmethod
    def without_interception(func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a C function, or an autograd function's ``apply``, directly on the blocks of DTensors."""

    @staticmethod
    @abstractmethod
    def graph_function(func: Any) -> Any:
        """Our form of a function about the autograd graph and not about values; None for other functions."""

    @staticmethod
    @abstractmethod
    def set_dispatcher(intercept: Any) -> Any:
        """Let ``intercept(kind, func, types, args, kwargs)`` answer every operator that meets a DTensor."""

    @staticmethod
    def take_masked_functions(promise: Any, refuse: Any) -> None:
        """Let functions of the framework that mask with plain tensors of their own be called with DTensors."""
        del promise, refuse  # most frameworks have none

    @staticmethod
    @abstractmethod
    def set_rebuilder(rebuild: Any) -> Any:
        """Let ``rebuild(local, layout_dict, shape, requires_grad, is_param)`` make DTensors of pickled parts."""

    @staticmethod
    @abstractmethod
    def body_of(func: Any) -> Any:
        """The twin of a Python-written function that does not ask to be intercepted; None for a C function."""

    @staticmethod
    @abstractmethod
    def is_intercepted(func: Any) -> Any:
        """Whether calling ``func`` with DTensors leads to the dispatcher by itself, as for operators of a library."""

    @staticmethod
    @abstractmethod
    def is_framework_service(func: Any) -> Any:
        """Whether ``func`` asks about, or marks, the tensor object and not its values."""

    # ------------------------------ distributed tensors: calling operators on blocks

    @staticmethod
    @abstractmethod
    def call_on_blocks(func: Any, args: Any, kwargs: Any) -> Any:
        """``func`` on the blocks of all DTensors among its arguments, as if they were plain tensors."""

    @staticmethod
    @abstractmethod
    def blocks_of(args: Any, kwargs: Any, gives_nothing: bool = False) -> Any:
        """The arguments with every DTensor replaced by its block as a plain tensor.

        ``gives_nothing``: the results have no elements on this rank, so that nothing flows back into the arguments.
        """

    @staticmethod
    @abstractmethod
    def result_wrapper(kind: Any, layouts: Any, shapes: Any, brings_blocks: Any) -> Any:
        """A function that calls an operator on blocks and makes DTensors of its results, in their order."""

    @staticmethod
    @abstractmethod
    def wrap_result(kind: Any, result: Any, layout: Any, shape: Any) -> Any:
        """Results of a local call as DTensors; those that are DTensors already (in-place operators) stay."""

    @staticmethod
    @abstractmethod
    def label_all(kind: Any, results: Any, layouts: Any, shapes: Any) -> Any:
        """The tensors of a list as DTensors, in place; those without a layout stay plain."""

    @staticmethod
    @abstractmethod
    def result_like(func: Any, results: Any) -> Any:
        """The results in the named tuple that ``func`` gives."""

    @staticmethod
    @abstractmethod
    def output_shapes(func: Any, args: Any, kwargs: Any) -> Any:
        """The global shapes of the tensors that ``func`` returns, found by calling it on tensors without memory."""

    @staticmethod
    @abstractmethod
    def depends_on_values(error: Any) -> Any:
        """Whether ``error`` of :func:`output_shapes` says that the shapes follow from the values."""

    @staticmethod
    @abstractmethod
    def silenced(tensor: Any) -> Any:
        """Zeros that keep ``tensor`` in the graph, with a gradient of zeros."""

    @staticmethod
    @abstractmethod
    def vary(data: Any, group: Any) -> Any:
        """Let a value that is whole on every rank meet values that differ from rank to rank."""

    @staticmethod
    @abstractmethod
    def needs_grad(tensor: Any) -> Any:
        """Whether autograd records what is done with ``tensor`` now."""

    @staticmethod
    @abstractmethod
    def requires_grad(tensor: Any) -> Any:
        """Whether ``tensor``, plain or distributed, has or asks for a gradient."""

    @staticmethod
    @abstractmethod
    def is_leaf(tensor: Any) -> Any:
        """Whether ``tensor`` was made by the program and not by an operator that is recorded."""

    @staticmethod
    @abstractmethod
    def copied(tensor: Any) -> Any:
        """The plain tensor's values in other memory; recorded."""

    @staticmethod
    @abstractmethod
    def write_mark(tensor: Any) -> Any:
        """(a value that changes when the plain tensor is written to, its place in the graph)."""

    @staticmethod
    @abstractmethod
    def set_function_handler(handler: Any) -> Any:
        """Let ``handler(function, args, kwargs)`` answer a user's autograd function that is given DTensors."""

    @staticmethod
    @abstractmethod
    def apply_function(function: Any, args: Any, kwargs: Any) -> Any:
        """A user's autograd function as the framework runs it, whatever its arguments."""

    @staticmethod
    @abstractmethod
    def counted_once(gradient: Any, mesh: Any, axes: Any) -> Any:
        """The gradient of a sum pending over ``axes`` as a whole value: one rank counts it in its own gradient."""

    @staticmethod
    @abstractmethod
    def carry_random_state(get_state: Any, set_state: Any) -> Any:
        """Let the framework's saved random state carry what ``get_state`` gives, for ``set_state`` to restore."""

    @staticmethod
    @abstractmethod
    def counting_versions() -> Any:
        """Context: new tensors count how often they are written to, also where the framework would leave that out."""

    @staticmethod
    @abstractmethod
    def owns_memory(tensor: Any) -> Any:
        """Whether no other tensor shares the memory of ``tensor``."""

    @staticmethod
    def argument_names(func: Any) -> tuple[str, ...]:
        """The names of a function's arguments in their order; empty when they are not known."""
        try:
            return tuple(inspect.signature(func).parameters)
        except (TypeError, ValueError):
            return ()

    @staticmethod
    def leave_uncompiled(kind: type) -> None:
        """Let compiled code, where the framework has a compiler, run operators on tensors of ``kind`` as they are."""
        del kind

    # ------------------------------ distributed tensors: views (the defaults: results never share memory with inputs)

    @staticmethod
    def view_ops() -> frozenset[str]:
        """Names of the operators whose result shares the memory of their first argument."""
        return frozenset()

    @staticmethod
    def version_of(tensor: Any) -> int | None:
        """How often the memory of ``tensor`` was written to; None where that is not counted."""
        return None

    @staticmethod
    def recording() -> Any:
        """Context: autograd records what is done inside, also under :func:`no_grad`."""
        return contextlib.nullcontext()

    @staticmethod
    def shares_memory(first: Any, second: Any) -> bool:
        """Whether two blocks lie in one memory."""
        return False

    @staticmethod
    def block_strides(tensor: Any) -> Any:
        """How a block lies in memory, for :func:`would_be_view`."""
        return None

    @staticmethod
    def would_be_view(calls: Any, shape: Any, block: Any) -> bool:
        """Whether the result of the last call shares memory with its argument on one device: the first is given a whole
        tensor whose blocks lie as ``block`` says, and each other one what the one before it gives."""
        return False

    # ------------------------------ distributed tensors: moving blocks (results come from ``wait()``; no gradients)

    @staticmethod
    @abstractmethod
    def gather_blocks(tensor: Any, dim: Any, sizes: Any, positions: Any, group: Any) -> Any:
        """All ranks' blocks of dim ``dim``, concatenated; ``sizes`` are theirs."""

    @staticmethod
    @abstractmethod
    def reduce_blocks(tensor: Any, dim: Any, sizes: Any, positions: Any, group: Any, op: Any, mine: Any) -> Any:
        """The reduction over the group, of which this rank keeps block ``mine`` of dim ``dim``."""

    @staticmethod
    @abstractmethod
    def reduce_whole(tensor: Any, group: Any, op: Any) -> Any:
        """The reduction over the group, whole on every rank; ``tensor`` is kept."""

    @staticmethod
    @abstractmethod
    def exchange_blocks(tensor: Any, sends: Any, receives: Any, kept: Any, shape: Any, group: Any) -> Any:
        """``sends[r]`` of my block goes to group rank r, ``receives[r]`` comes from it; ``kept`` stays here."""

    @staticmethod
    @abstractmethod
    def slice_block(tensor: Any, box: Any) -> Any:
        """A part of the tensor, in memory of its own."""

    @staticmethod
    @abstractmethod
    def embed_block(tensor: Any, box: Any, shape: Any) -> Any:
        """A tensor of zeros with ``tensor`` at ``box``."""

    @staticmethod
    @abstractmethod
    def neutral_like(tensor: Any, op: Any) -> Any:
        """What leaves a reduction unchanged: zeros for a sum, ones for a product, the tensor itself for the others."""

    @staticmethod
    @abstractmethod
    def fill_block(tensor: Any, values: Any) -> Any:
        """Copy ``values`` into the DTensor's own block; like any in-place write it is recorded unless under no_grad."""

    @staticmethod
    @abstractmethod
    def replace_block(tensor: Any, block: Any) -> Any:
        """Let the DTensor have ``block``, of the same shape, for its memory; its place in the graph stays."""

    # ------------------------------ distributed tensors: small services

    @staticmethod
    @abstractmethod
    def get_device_type() -> Any:
        """The device type that this process computes on: "cuda", "npu", ... or "cpu". Looked up once."""

    @staticmethod
    @abstractmethod
    def default_dtype() -> Any:
        """The dtype of new floating tensors."""

    @staticmethod
    @abstractmethod
    def is_dtype(value: Any) -> bool:
        """Whether ``value`` is a dtype of the framework."""

    @staticmethod
    @abstractmethod
    def dtype_name(dtype: Any) -> Any:
        """``"float32"`` for the framework's float32."""

    @staticmethod
    @abstractmethod
    def is_dense_tensor(value: Any) -> Any:
        """Whether ``value`` is a tensor with one memory cell per element."""

    @staticmethod
    @abstractmethod
    def from_numpy(array: Any, dtype: Any, device: Any) -> Any:
        """A tensor with the array's values."""

    @staticmethod
    @abstractmethod
    def index_tensor(rows: Any, device: Any) -> Any:
        """A matrix of int64."""

    @staticmethod
    @abstractmethod
    def to_device(tensor: Any, device_type: Any) -> Any:
        """The tensor on the current device of ``device_type``; meta tensors stay."""

    @staticmethod
    @abstractmethod
    def digest(tensor: Any) -> Any:
        """A checksum of the values' bytes; NaNs of equal bits are equal."""

    @staticmethod
    @abstractmethod
    def as_parameter(tensor: Any, requires_grad: Any = None) -> Any:
        """The DTensor as a module's parameter; it needs a gradient as ``tensor`` does, unless said otherwise."""

    @staticmethod
    @abstractmethod
    def convert(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """The tensor in another dtype or on another device; a reduction that this would change is done before."""

    @staticmethod
    @abstractmethod
    def replicate_plain_tensors(module: Any, distribute: Any) -> Any:
        """Replace every plain parameter and buffer by ``distribute`` of it; a tensor that appears twice stays one."""

    @staticmethod
    @abstractmethod
    def register_forward_hook(module: Any, hook: Any, prepend: bool = False, always_call: bool = False) -> Any:
        """Call ``hook(module, inputs, outputs)`` after forward, with ``always_call`` also when it raised; a handle with
        ``remove()``."""

    @staticmethod
    @abstractmethod
    def observe_collectives(tell: Any) -> Any:
        """Call ``tell(op, ranks, shape, dtype, num_bytes, async_op)`` before every collective; returns how to stop."""

    @staticmethod
    def drawing_alike(seed: int, number: int) -> Any:
        """:func:`seeded` where the framework's generator can be put back as it was; else nothing."""
        del seed, number
        return contextlib.nullcontext()

    @staticmethod
    @abstractmethod
    def seeded(seed: Any, number: Any) -> Any:
        """Context: the framework's own generator starts from the two numbers, the same on every rank."""

    @staticmethod
    def number_like(number: float, tensor: Any) -> Any:
        """``number`` as it meets ``tensor`` without being rounded to less than the tensor's precision."""
        return number

    @staticmethod
    def logarithm(tensor: Any) -> Any:
        """The natural logarithm, with the same bits on every rank."""
        return tensor.log()

    @staticmethod
    def power(tensor: Any, exponent: float) -> Any:
        """``tensor ** exponent``, with the same bits on every rank."""
        return tensor**exponent

    @staticmethod
    @abstractmethod
    def losing_value(dtype: Any, op: Any) -> Any:
        """The value that every other one beats in a maximum (``op`` "max") or a minimum ("min")."""

    @staticmethod
    @abstractmethod
    def machine_epsilon(dtype: Any) -> Any:
        """The distance from 1 to the next larger number of a floating-point dtype."""

    @staticmethod
    @abstractmethod
    def vector_norm(tensor: Any, p: Any, dims: Any, keepdim: Any) -> Any:
        """The p-norm over ``dims``."""

    @staticmethod
    @abstractmethod
    def get_total_norm(tensors: Any, norm_type: Any = 2.0, error_if_nonfinite: Any = False, foreach: Any = None) -> Any:
        """The ``norm_type`` norm (``inf`` included) of all tensors as one vector."""

    @staticmethod
    @abstractmethod
    def world_generation() -> Any:
        """How many worlds this process has left: what is remembered about groups holds for one of them.

        Asking forgets what is known of a world that was left with a function of the framework's own.
        """

    @staticmethod
    @abstractmethod
    def on_leaving(forget: Any) -> Any:
        """Call ``forget()`` whenever a group or the world is left: in the next one this rank may have another place."""
