"""What a framework must provide: local tensors moved between ranks, and small services about them."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import Any


class Blocks(ABC):
    """Moving blocks (results come from ``wait()``; no gradients), and small services."""

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
    def all_reduce_blocks(tensor: Any, group: Any, op: Any) -> Any:
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
    def identity_like(tensor: Any, op: Any) -> Any:
        """What leaves a reduction unchanged: zeros for a sum, ones for a product, the tensor itself for the others."""

    @staticmethod
    @abstractmethod
    def fill_block(tensor: Any, values: Any) -> Any:
        """Copy ``values`` into the DTensor's own block; like any in-place write it is recorded unless under no_grad."""

    @staticmethod
    @abstractmethod
    def replace_block(tensor: Any, block: Any) -> Any:
        """Let the DTensor have ``block``, of the same shape, for its memory; its place in the graph stays."""

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
        """Call ``tell(op, ranks, shape, dtype, num_bytes, async_op)`` before every collective; returns how to stop.

        Messages, barriers and what is done with objects are told too; the dtype is "" where there is no tensor. Peers,
        tags and splits: ``checks/collective_observers.py``.
        """

    @staticmethod
    @abstractmethod
    def observe_waits(tell: Any) -> Any:
        """Call ``tell`` with the same arguments when a handle's first wait has ended; returns how to stop.

        Of operations that are begun from now on.
        """

    @staticmethod
    @abstractmethod
    def time_collectives(tell: Any) -> Any:
        """Call ``tell(op, ranks, shape, dtype, num_bytes, async_op, begin, end)`` when a collective or message of
        tensors is complete; returns how to stop.

        The times are of ``time.perf_counter`` on the host; what the caller waits for itself ends with its first wait.
        """

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
    def extreme_identity(dtype: Any, op: Any) -> Any:
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
