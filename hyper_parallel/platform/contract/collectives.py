"""What a framework must provide: collectives and messages between ranks, plain and with gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any


class Collectives(ABC):
    """Communication between the ranks of a group."""

    # ``group_info`` is a group, None for the world, or anything with a ``group`` attribute. The result is returned, or
    # ``(result, handle)`` with ``async_op=True``; the result is complete after ``handle.wait()``.

    @staticmethod
    @abstractmethod
    def all_reduce(data: Any, group_info: Any, async_op: bool = False, op: str = "sum") -> Any:
        """Reduce ``data`` over the group, in place."""

    @staticmethod
    @abstractmethod
    def all_gather_into_tensor(data: Any, group_info: Any, async_op: bool = False, *, out: Any = None) -> Any:
        """The ranks' equally shaped ``data``, concatenated on dim 0 in group order; written into ``out`` if given."""

    @staticmethod
    @abstractmethod
    def reduce_scatter_tensor(
        data: Any, group_info: Any, async_op: bool = False, op: str = "sum", *, out: Any = None
    ) -> Any:
        """Reduce ``data`` over the group and keep this rank's equal part of dim 0; written into ``out`` if given."""

    @staticmethod
    @abstractmethod
    def all_gather_into_tensors(
        data: Sequence[Any], group_info: Any, async_op: bool = False, *, out: Sequence[Any] | None = None
    ) -> Any:
        """:meth:`all_gather_into_tensor` of each tensor of a list, in one call; the list of results."""

    @staticmethod
    @abstractmethod
    def reduce_scatter_tensors(
        data: Sequence[Any],
        group_info: Any,
        async_op: bool = False,
        op: str = "sum",
        *,
        out: Sequence[Any] | None = None,
    ) -> Any:
        """:meth:`reduce_scatter_tensor` of each tensor of a list, in one call; the list of results."""

    @staticmethod
    @abstractmethod
    def broadcast(data: Any, src: int, group: Any, async_op: bool = False) -> Any:
        """Overwrite ``data`` with that of world rank ``src``, in place."""

    @staticmethod
    @abstractmethod
    def all_to_all_single(
        input_tensor: Any,
        output_shape: Sequence[int],
        group: Any,
        async_op: bool = False,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> Any:
        """Part r of dim 0 goes to rank r: equal parts, or ``input_splits[r]`` rows, for which ``output_splits[r]`` come
        back. Always ``(output, handle)``, the handle None when it is done already."""

    @staticmethod
    @abstractmethod
    def isend(tensor: Any, dst: int | None = None, group: Any = None, tag: int = 0) -> Any:
        """Start sending to world rank ``dst``; a handle."""

    @staticmethod
    @abstractmethod
    def irecv(tensor: Any, src: int | None = None, group: Any = None, tag: int = 0) -> Any:
        """Start receiving into ``tensor`` from world rank ``src``; a handle."""

    @staticmethod
    @abstractmethod
    def send_object_list(obj_list: list[Any], dst: int | None = None, group: Any = None) -> None:
        """Send picklable objects to world rank ``dst``."""

    @staticmethod
    @abstractmethod
    def recv_object_list(obj_list: list[Any], src: int | None = None, group: Any = None) -> Any:
        """Fill ``obj_list`` with as many objects from world rank ``src``."""

    @staticmethod
    @abstractmethod
    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        """Fill ``object_list`` with every rank's ``obj``, in group order."""

    @staticmethod
    @abstractmethod
    def differentiable_all_gather_concat(data: Any, group: Any, concat_size: Any, concat_dim: int) -> Any:
        """forward: all ranks' shards concatenated on ``concat_dim``; backward: this rank's slice of the gradient."""

    @staticmethod
    @abstractmethod
    def differentiable_all_reduce(data: Any, op: str, group: Any) -> Any:
        """forward: the reduction over the group; backward: the identity (for a sum)."""

    @staticmethod
    @abstractmethod
    def differentiable_reduce_scatter(data: Any, dev_num: int, axis: int, op: str, group: Any) -> Any:
        """forward: reduce, keep this rank's chunk of dim ``axis``; backward: the gradient's chunks gathered."""

    @staticmethod
    @abstractmethod
    def differentiable_all_to_all(input_data: Any, output_shape: Sequence[int], group: Any) -> Any:
        """forward: even all-to-all on dim 0, shaped as ``output_shape``; backward: the reverse all-to-all."""

    @staticmethod
    @abstractmethod
    def differentiable_all_to_all_single(input_tensor: Any, input_splits: Any, output_splits: Any, group: Any) -> Any:
        """forward: ``input_splits[r]`` rows go to rank r; backward: the rows come back, splits swapped."""

    @staticmethod
    @abstractmethod
    def differentiable_all_to_all_single_async(
        input_tensor: Any, input_splits: Any, output_splits: Any, group: Any
    ) -> Any:
        """As :meth:`differentiable_all_to_all_single`, but only the stream waits; the host returns at once."""

    @staticmethod
    @abstractmethod
    def p2p_exchange(tensor: Any, peer_rank: int, group: Any = None) -> Any:
        """forward: send mine, receive world rank ``peer_rank``'s; backward: the same exchange of the gradients."""

    @staticmethod
    @abstractmethod
    def launch_async_all_to_all(
        t: Any, group: Any, world_size: int, split_dim: int, handle_box: list[Any] | None = None
    ) -> Any:
        """Start the all-to-all that :meth:`differentiable_async_a2a_wait` finishes; ``(x, work)`` to hand to it."""

    @staticmethod
    @abstractmethod
    def differentiable_async_a2a_wait(
        x: Any,
        work: Any,
        out_perm: Sequence[int] | None,
        group: Any,
        world_size: int,
        concat_dim: int,
        split_dim: int,
        handle_box: list[Any] | None = None,
    ) -> Any:
        """forward: finish an all-to-all launched earlier; backward: launch the reverse one into ``handle_box``."""

    @staticmethod
    @abstractmethod
    def differentiable_sync_hook(x: Any, hook_name: str, coordinator: Any) -> Any:
        """The identity that meets ``coordinator`` at hook "A", "B", "C" or "D" in forward and in backward."""

    @abstractmethod
    def set_grad_reduce_handle(self, handle: Any, post_process: Callable[[], None] | None = None) -> None:
        """Finish the gradient reduction in flight (wait, then its callback) on a stream of its own; keep this one."""

    @abstractmethod
    def wait_grad_handle(self) -> None:
        """Finish the last gradient reduction and let the main stream wait for it."""

    @staticmethod
    @abstractmethod
    def get_symmetric_memory_handler() -> Any:
        """Memory that every rank of a group on one host can read and write."""
