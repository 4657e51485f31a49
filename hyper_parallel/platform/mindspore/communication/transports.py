"""What carries tensors between processes, chosen once: ``HcclTransport`` on Ascend, ``TcpTransport`` on a CPU.

Both have the same methods, as has ``SilentTransport`` for a world in which nobody else is (``silent_transport.py``);
``collectives.py`` makes the checks and calls them. Every operation gives ``(result,
handle)``: the result is complete once ``handle.wait()`` has returned. Results are new tensors, or are written
through pointer and strides into the tensor that was given, whatever it views.

Note [Why not mccl on a CPU]
    MindSpore's own transport for CPUs lacks all-to-all, reduce-scatter, gathering into a tensor and several dtypes, all
    of which could be composed. But it also gives up for good when a rank comes 30 seconds later than another (while
    rank 0 writes a checkpoint, say), does not say which rank has died, hangs when one dies at start, runs messages in
    one queue, so that two ranks that post their receives first wait for each other, cannot be joined a second time, and
    takes 3 seconds to start. So tensors go over connections of our own (``platform/host/transport.py``), and mccl is
    joined beside them only when a program asks for it by name.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint

from hyper_parallel.platform.host.host_collectives import HostGroup, reduce_arrays
from hyper_parallel.platform.host.transport import HostTransport
from hyper_parallel.platform.host.world_secret import find_secret
from hyper_parallel.platform.mindspore.base import start
from hyper_parallel.platform.mindspore.base.memory import bytes_of, copy_into, from_array, memory_of, numpy_type

__all__ = ["HcclTransport", "Pending", "TcpTransport", "get_transport"]


class Pending:
    """An operation in flight: ``wait`` completes it, local work included."""

    __slots__ = ("_error", "_finish", "_is_ready")

    def __init__(self, finish: Callable[[], Any], is_ready: Callable[[], bool] = lambda: False) -> None:
        self._finish: Callable[[], Any] | None = finish
        self._is_ready = is_ready

    def wait(self, timeout: timedelta | None = None) -> bool:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        return self._finish is None or self._is_ready()


class TcpTransport:
    """Tensors in host memory, over TCP connections between the processes."""

    carries_meta = False

    def __init__(self) -> None:
        self.backend = "tcp"
        self._connections: HostTransport | None = None

    # ---------------------------------------------------------------- worlds and groups

    def join(
        self,
        backend: str | None,
        rank: int,
        world_size: int,
        address: str,
        port: int,
        name: str,
        timeout: timedelta,
        pg_options: Any,
        device_id: Any,
    ) -> HostGroup:
        if backend not in (None, "tcp", "mccl"):
            raise ValueError(
                f"init_process_group: backend {backend!r} does not exist on a CPU; use 'tcp', or 'mccl' to join "
                "MindSpore's own world too"
            )
        self._connections = HostTransport(rank, world_size, address, port, name, timeout.total_seconds(), find_secret())
        self.backend = backend or "tcp"
        world = HostGroup(self._connections, range(world_size), name)
        if backend == "mccl":
            from hyper_parallel.platform.mindspore.communication import mccl

            try:
                mccl.join(world, rank, world_size, address, timeout)
            except BaseException:
                self.leave()
                raise
        return world

    def leave(self) -> None:
        assert self._connections is not None
        self._connections.close()
        self._connections = None

    def make_group(self, ranks: Sequence[int], name: str) -> HostGroup:
        assert self._connections is not None
        return HostGroup(self._connections, ranks, name)

    def drop_group(self, channel: HostGroup) -> None:
        """Nothing is held for a group."""

    def fail(self, channel: HostGroup, why: str) -> None:
        """Let the other members know that nothing more comes from this rank."""
        assert self._connections is not None
        self._connections.fail([rank for rank in channel.ranks if rank != self._connections.rank], why)

    # ---------------------------------------------------------------- collectives

    def barrier(self, channel: HostGroup) -> Pending:
        return Pending(channel.start_gather("barrier", np.empty(0, np.uint8)))

    def all_reduce(self, channel: HostGroup, data: Tensor, op: str, async_op: bool) -> tuple[Tensor, Pending]:
        """In place."""
        finish = channel.start_reduction("all_reduce", np.ascontiguousarray(memory_of(data)), op, async_op)
        return data, Pending(lambda: copy_into(data, finish()))

    def all_gather(self, channel: HostGroup, data: Tensor, shape: Sequence[int]) -> tuple[Tensor, Pending]:
        num_bytes = data.numel() * data.itemsize
        finish = channel.start_all_to_all(
            "all_gather_into_tensor", [bytes_of(data)] * len(channel.ranks), [num_bytes] * len(channel.ranks)
        )
        return self._filled(shape, data.dtype, finish)

    def reduce_scatter(
        self, channel: HostGroup, data: Tensor, op: str, shape: Sequence[int], async_op: bool
    ) -> tuple[Tensor, Pending]:
        result = _new(shape, data.dtype)
        finish = channel.start_reduce_scatter("reduce_scatter_tensor", np.ascontiguousarray(memory_of(data)), op)
        return result, Pending(lambda: copy_into(result, finish()))

    def broadcast(self, channel: HostGroup, data: Tensor, source: int) -> tuple[Tensor, Pending]:
        """In place."""
        finish = channel.start_broadcast("broadcast", bytes_of(data), source)

        def receive() -> None:
            if channel.place != source:
                copy_into(data, finish().view(numpy_type(data.dtype)))

        return data, Pending(receive)

    def all_to_all(
        self,
        channel: HostGroup,
        data: Tensor,
        shape: Sequence[int],
        sent: Sequence[int],
        received: Sequence[int],
    ) -> tuple[Tensor, Pending]:
        """``sent[r]`` elements go to rank r of the group, ``received[r]`` come from it; both in row-major order."""
        flat = bytes_of(data)
        bounds = np.cumsum([0, *sent]) * data.itemsize
        parts = [flat[begin:end] for begin, end in itertools.pairwise(bounds)]
        finish = channel.start_all_to_all("all_to_all_single", parts, [count * data.itemsize for count in received])
        return self._filled(shape, data.dtype, finish)

    @staticmethod
    def _filled(shape: Sequence[int], dtype: Any, finish: Callable[[], list[np.ndarray]]) -> tuple[Tensor, Pending]:
        result = _new(shape, dtype)

        def fill() -> None:
            flat, begin = bytes_of(result), 0
            for part in finish():
                flat[begin : begin + part.nbytes] = part
                begin += part.nbytes

        return result, Pending(fill)

    # ---------------------------------------------------------------- messages

    def send(self, channel: HostGroup, data: Tensor, target: int, tag: int) -> Pending:
        channel.send("isend", bytes_of(data), target, tag)
        return Pending(lambda: None, lambda: True)

    def receive(self, channel: HostGroup, data: Tensor, source: int | None, tag: int) -> Pending:
        def finish() -> None:
            place, came = channel.receive("isend", source, tag)
            if came.nbytes != data.numel() * data.itemsize:
                raise RuntimeError(
                    f"irecv on rank {channel.ranks[channel.place]}: rank {channel.ranks[place]} sent {came.nbytes} "
                    f"bytes, but the tensor of shape {tuple(data.shape)} and {data.dtype} has "
                    f"{data.numel() * data.itemsize}"
                )
            copy_into(data, came.view(numpy_type(data.dtype)))

        return Pending(finish, lambda: channel.has_message(source, tag))

    def exchange(self, channel: HostGroup, data: Tensor, peer: int) -> Tensor:
        """Send to and receive from the same rank of the group."""
        channel.send("p2p_exchange", bytes_of(data), peer, -1)
        came = channel.receive("p2p_exchange", peer, -1)[1]
        if came.nbytes != data.numel() * data.itemsize:
            raise RuntimeError(
                f"p2p_exchange on rank {channel.ranks[channel.place]}: rank {channel.ranks[peer]} sent {came.nbytes} "
                f"bytes for {data.numel() * data.itemsize}; both must have the same shape and dtype"
            )
        return from_array(came, data.shape, data.dtype)

    def send_bytes(self, channel: HostGroup, data: bytes, target: int) -> None:
        channel.send("send_object_list", np.frombuffer(data, np.uint8), target, -2)

    def receive_bytes(self, channel: HostGroup, source: int | None) -> tuple[int, bytes]:
        place, data = channel.receive("send_object_list", source, -2)
        return place, data.tobytes()

    def gather_bytes(self, channel: HostGroup, data: bytes) -> list[bytes]:
        came = channel.start_gather("all_gather_object", np.frombuffer(data, np.uint8))()
        return [part.tobytes() for part in came]


def _new(shape: Sequence[int], dtype: Any) -> Tensor:
    return from_array(np.empty(tuple(shape), numpy_type(dtype)))


# ---------------------------------------------------------------- Ascend


# What hccl reduces by itself; the rest is gathered and reduced on the host, in rank order.
_HCCL_OPS = ("sum", "max", "min", "prod")
_HCCL_TYPES = (ms.int8, ms.int16, ms.int32, ms.int64, ms.float16, ms.float32, ms.bfloat16)


class HcclTransport:
    """Tensors on Ascend devices, over MindSpore's hccl. A channel is hccl's name of the group."""

    backend = "hccl"
    carries_meta = False

    def __init__(self) -> None:
        self._distributed = mint.distributed

    def join(
        self,
        backend: str | None,
        rank: int,
        world_size: int,
        address: str,
        port: int,
        name: str,
        timeout: timedelta,
        pg_options: Any,
        device_id: Any,
    ) -> str:
        if backend not in (None, "hccl"):
            raise ValueError(f"init_process_group: backend {backend!r} does not exist on Ascend; use 'hccl'")
        self._distributed.init_process_group(
            "hccl",
            init_method=f"tcp://{address}:{port}",
            timeout=timeout,
            world_size=world_size,
            rank=rank,
            pg_options=pg_options,
            device_id=device_id,
        )
        self._members = {"hccl_world_group": list(range(world_size))}
        return "hccl_world_group"

    def leave(self) -> None:
        self._distributed.destroy_process_group()

    def make_group(self, ranks: Sequence[int], name: str) -> str:
        channel = self._distributed.new_group(list(ranks), group_desc=name, use_local_synchronization=True)
        self._members[channel] = list(ranks)
        return channel

    def drop_group(self, channel: str) -> None:
        self._members.pop(channel, None)
        self._distributed.destroy_process_group(channel)

    def barrier(self, channel: str) -> Any:
        return self._distributed.barrier(group=channel, async_op=True)

    def all_reduce(self, channel: str, data: Tensor, op: str, async_op: bool) -> tuple[Tensor, Any]:
        size = len(self._members[channel])
        if (op in _HCCL_OPS or (op == "avg" and data.dtype is ms.float32)) and data.dtype in _HCCL_TYPES:
            contiguous = data if data.is_contiguous() else data.contiguous()
            handle = self._distributed.all_reduce(
                contiguous, op="sum" if op == "avg" else op, group=channel, async_op=True
            )
            if contiguous is data and op != "avg":
                return data, handle
            return data, Pending(lambda: (handle.wait(), data.copy_(contiguous / size if op == "avg" else contiguous)))
        gathered, handle = self.all_gather(channel, data, (size, *data.shape))

        def finish() -> None:
            handle.wait()
            data.copy_(Tensor(reduce_arrays(list(gathered.asnumpy().reshape(size, -1)), op)).reshape(data.shape))

        return data, Pending(finish)

    def all_gather(self, channel: str, data: Tensor, shape: Sequence[int]) -> tuple[Tensor, Any]:
        result = mint.empty(tuple(shape), dtype=data.dtype)
        handle = self._distributed.all_gather_into_tensor(result, data.contiguous(), group=channel, async_op=True)
        return result, handle

    def reduce_scatter(
        self, channel: str, data: Tensor, op: str, shape: Sequence[int], async_op: bool
    ) -> tuple[Tensor, Any]:
        result = mint.empty(tuple(shape), dtype=data.dtype)
        if op in _HCCL_OPS and data.dtype in _HCCL_TYPES:
            return result, self._distributed.reduce_scatter_tensor(
                result, data.contiguous(), op=op, group=channel, async_op=True
            )
        contiguous = data.contiguous() * 1
        _, handle = self.all_reduce(channel, contiguous, op, True)
        place = self._members[channel].index(self._distributed.get_rank())
        rows = result.shape[0]
        return result, Pending(
            lambda: (handle.wait(), result.copy_(contiguous[place * rows : (place + 1) * rows].reshape(result.shape)))
        )

    def broadcast(self, channel: str, data: Tensor, source: int) -> tuple[Tensor, Any]:
        contiguous = data if data.is_contiguous() else data.contiguous()
        handle = self._distributed.broadcast(contiguous, self._members[channel][source], group=channel, async_op=True)
        if contiguous is data:
            return data, handle
        return data, Pending(lambda: (handle.wait(), data.copy_(contiguous)))

    def all_to_all(
        self, channel: str, data: Tensor, shape: Sequence[int], sent: Sequence[int], received: Sequence[int]
    ) -> tuple[Tensor, Any]:
        result = mint.empty(tuple(shape), dtype=data.dtype)
        handle = self._distributed.all_to_all_single(
            result.view(-1), data.contiguous().view(-1), list(received), list(sent), group=channel, async_op=True
        )
        return result, handle

    def send(self, channel: str, data: Tensor, target: int, tag: int) -> Any:
        return self._distributed.isend(data.contiguous(), self._members[channel][target], group=channel, tag=tag)

    def receive(self, channel: str, data: Tensor, source: int | None, tag: int) -> Any:
        if source is None:
            raise ValueError("irecv on Ascend: hccl receives from a rank that is named; give src")
        contiguous = data if data.is_contiguous() else data.contiguous()
        handle = self._distributed.irecv(contiguous, self._members[channel][source], group=channel, tag=tag)
        return handle if contiguous is data else Pending(lambda: (handle.wait(), data.copy_(contiguous)))

    def exchange(self, channel: str, data: Tensor, peer: int) -> Tensor:
        result = mint.empty(data.shape, dtype=data.dtype)
        p2p = self._distributed.P2POp
        rank = self._members[channel][peer]
        # In one batch: two ranks that each send first and receive after would block each other.
        for handle in self._distributed.batch_isend_irecv(
            [
                p2p(self._distributed.isend, data.contiguous(), rank, group=channel),
                p2p(self._distributed.irecv, result, rank, group=channel),
            ]
        ):
            handle.wait()
        return result

    def send_bytes(self, channel: str, data: bytes, target: int) -> None:
        self._distributed.send_object_list([data], self._members[channel][target], group=channel)

    def receive_bytes(self, channel: str, source: int | None) -> tuple[int, bytes]:
        if source is None:
            raise ValueError("recv_object_list on Ascend: hccl receives from a rank that is named; give src")
        came: list[Any] = [None]
        self._distributed.recv_object_list(came, self._members[channel][source], group=channel)
        return source, came[0]

    def gather_bytes(self, channel: str, data: bytes) -> list[bytes]:
        came: list[Any] = [None] * len(self._members[channel])
        self._distributed.all_gather_object(came, data, group=channel)
        return came


@functools.cache
def get_transport() -> TcpTransport | HcclTransport:
    """The transport of this process."""
    return HcclTransport() if start.on_ascend() else TcpTransport()
