"""Collectives with gradients, by the gradient law: the functions that programs call, and the checks of their arguments.

Which gradient each one gets and why: Note [Which gradient a collective gets]. Groups are process groups, None for the
world, or objects with a `group` attribute. Integers pass without a gradient.

Note [Every rank takes part in backward]
    The backward of most of these functions communicates. Either every rank of the group runs it or none does: a rank
    whose tensor does not require a gradient, or whose result is not used, leaves the others waiting.

Note [Groups of one]
    In a group of one rank nothing is to be done, and the result is the input tensor itself, not a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from types import SimpleNamespace
from typing import Any

from hyper_parallel.platform.shared.collective_gradients import chunk_sizes

Splits = Sequence[int] | None

_GATHER_GRADIENTS = ("slice", "reduce_scatter")


class DifferentiableCollectives:
    """The collectives with gradients of one framework.

    Args:
        functions: its autograd functions, from ``collective_gradients.make_functions``.
        tensor: its type of tensors, and ``tensor_name`` how messages call it.
        unwrap_group: gives the group, with ``rank()`` and ``size()``, that an argument means.
        check_peer: ``(function, tensor, rank, group)`` raises unless the group can send such a tensor to that world
            rank, and tells whether it is this process itself.
    """

    def __init__(
        self,
        functions: SimpleNamespace,
        tensor: type,
        tensor_name: str,
        unwrap_group: Callable[[Any], Any],
        check_peer: Callable[[str, Any, int, Any], bool],
    ) -> None:
        self._functions = functions
        self._tensor = tensor
        self._tensor_name = tensor_name
        self._unwrap_group = unwrap_group
        self._check_peer = check_peer

    def differentiable_all_gather_concat(
        self, data: Any, group: Any, concat_size: int | Sequence[int], concat_dim: int, grad: str = "slice"
    ) -> Any:
        """Join the shards of all ranks of `group` on `concat_dim`.

        forward: all-gather; backward: my slice of the gradient (grad="slice"), or reduce-scatter
        (grad="reduce_scatter").

        Args:
            concat_size: the number of ranks, when all shards have one size; or the size of each rank's shard on
                `concat_dim`, in the order of the group's ranks, when they differ (0 is allowed).
            grad: "slice" when every rank goes on to use the result in the same way, so that its gradient is whole on
                each; "reduce_scatter" when each rank uses it together with values of its own, so that the gradients
                are to be summed.
        """
        function = "differentiable_all_gather_concat"
        group = self._unwrap_group(group)
        rank, num_ranks = group.rank(), group.size()
        concat_dim = self._checked_dim(function, data, concat_dim, "concat_dim")
        if grad not in _GATHER_GRADIENTS:
            raise ValueError(f"{function}: grad must be one of {_GATHER_GRADIENTS}, got {grad!r}")
        if isinstance(concat_size, int):
            if concat_size != num_ranks:
                raise ValueError(
                    f"{function}: concat_size is {concat_size} but the group has {num_ranks} ranks; give the number of "
                    "ranks, or a sequence with the shard size of every rank"
                )
            sizes = (data.shape[concat_dim],) * num_ranks
        else:
            sizes = _checked_sizes(function, concat_size, num_ranks, "concat_size")
            if sizes[rank] != data.shape[concat_dim]:
                raise ValueError(
                    f"{function}: concat_size {sizes} gives rank {rank} of the group {sizes[rank]} elements on dim "
                    f"{concat_dim}, but its tensor has shape {tuple(data.shape)}"
                )
        if num_ranks == 1:
            return data
        return self._functions.AllGather.apply(data, group, sizes, concat_dim, grad)

    def differentiable_all_to_all(self, input_data: Any, output_shape: Sequence[int], group: Any) -> Any:
        """Cut dim 0 into equal parts, send part i to rank i, and give what came, in rank order, as `output_shape`.

        forward: all-to-all; backward: the reverse all-to-all.
        """
        function = "differentiable_all_to_all"
        group = self._unwrap_group(group)
        num_ranks = group.size()
        self._checked_row_splits(function, input_data, None, None, num_ranks)
        shape = tuple(output_shape)
        num_elements = prod(input_data.shape)
        known = prod(length for length in shape if length != -1)
        fits = known == num_elements if -1 not in shape else known and num_elements % known == 0
        if not fits or min(shape, default=0) < -1 or shape.count(-1) > 1:
            raise ValueError(
                f"{function}: output_shape {shape} does not hold the {num_elements} elements of the input of shape "
                f"{tuple(input_data.shape)}"
            )
        return self.differentiable_all_to_all_single(input_data, None, None, group).reshape(shape)

    def differentiable_all_reduce(self, data: Any, op: str, group: Any) -> Any:
        """Reduce the ranks' tensors element by element; `data` is not changed.

        forward: all-reduce; backward: identity for "sum", 1/n of it for "avg", for "max" and "min" shared among the
        ranks that attain the result, for "prod" times the product of the other ranks' values.
        """
        function = "differentiable_all_reduce"
        group = self._unwrap_group(group)
        num_ranks = group.size()
        self._check_tensor(function, data)
        op = _checked_op(function, op, ("sum", "avg", "max", "min", "prod"))
        if num_ranks == 1:
            return data
        if op in ("max", "min"):
            return self._functions.AllReduceExtreme.apply(data, op, group)
        if op == "prod":
            return self._functions.AllReduceProduct.apply(data, group)
        return self._functions.AllReduceLinear.apply(data, op, group)

    def differentiable_reduce_scatter(self, data: Any, dev_num: int, axis: int, op: str, group: Any) -> Any:
        """Reduce the ranks' tensors element by element and keep this rank's chunk of dim `axis`.

        forward: reduce-scatter; backward: all-gather of the chunks' gradients (1/n of it for "avg"; for "max" and "min"
        shared among the ranks that attain the result).

        There are always `dev_num` chunks, of ceil(length / dev_num) each: the last ones may be short or empty.
        """
        function = "differentiable_reduce_scatter"
        group = self._unwrap_group(group)
        num_ranks = group.size()
        dim = self._checked_dim(function, data, axis, "axis")
        op = _checked_op(function, op, ("sum", "avg", "max", "min"))
        if dev_num != num_ranks:
            raise ValueError(
                f"{function}: dev_num is {dev_num} but the group has {num_ranks} ranks; the two must be equal"
            )
        if num_ranks == 1:
            return data
        sizes = chunk_sizes(data.shape[dim], num_ranks)
        if op in ("max", "min"):
            return self._functions.ReduceScatterExtreme.apply(data, op, group, sizes, dim)
        return self._functions.ReduceScatterLinear.apply(data, op, group, sizes, dim)

    def vary(self, data: Any, group: Any) -> Any:
        """Let a value that is whole on every rank meet values that differ from rank to rank.

        forward: identity; backward: all-reduce (sum).
        """
        group = self._unwrap_group(group)
        self._check_tensor("vary", data)
        return data if group.size() == 1 else self._functions.Vary.apply(data, group)

    def p2p_exchange(self, tensor: Any, peer_rank: int, group: Any = None) -> Any:
        """Send `tensor` to a peer and give the peer's, which must have the same shape and dtype.

        forward: exchange with the peer; backward: the same exchange of the gradients.

        `peer_rank` is a rank of the world, also when `group` is a smaller one. With this process's own rank it is the
        identity. Both must require a gradient or neither: see Note [Every rank takes part in backward].
        """
        function = "p2p_exchange"
        group = self._unwrap_group(group)
        self._check_tensor(function, tensor)
        if self._check_peer(function, tensor, peer_rank, group):
            return tensor
        return self._functions.Exchange.apply(tensor, peer_rank, group)

    def differentiable_all_to_all_single(
        self, input_tensor: Any, input_splits: Splits, output_splits: Splits, group: Any
    ) -> Any:
        """Send the first `input_splits[0]` rows to rank 0 and so on; give what came, `output_splits[i]` rows from rank
        i.

        forward: all-to-all of rows; backward: all-to-all with the splits swapped.

        `None` for a split: as many rows as the input has, in equal parts.
        """
        function = "differentiable_all_to_all_single"
        return self._all_to_all_single(function, input_tensor, input_splits, output_splits, group, False)

    def differentiable_all_to_all_single_async(
        self, input_tensor: Any, input_splits: Splits, output_splits: Splits, group: Any
    ) -> Any:
        """`differentiable_all_to_all_single` that on an accelerator gives the host back at once, in both directions.

        forward: all-to-all of rows, awaited by the stream; backward: the same with the splits swapped.

        The stream waits for the data, so what is computed from the result is right without any further wait. A CPU has
        no stream to do the waiting: there the call returns when the data have come.
        """
        function = "differentiable_all_to_all_single_async"
        return self._all_to_all_single(function, input_tensor, input_splits, output_splits, group, True)

    def _all_to_all_single(
        self, function: str, data: Any, input_splits: Splits, output_splits: Splits, group: Any, asynchronous: bool
    ) -> Any:
        group = self._unwrap_group(group)
        rank, num_ranks = group.rank(), group.size()
        sent, received = self._checked_row_splits(function, data, input_splits, output_splits, num_ranks)
        if sent[rank] != received[rank]:
            raise ValueError(
                f"{function}: rank {rank} of the group sends itself {sent[rank]} rows (input_splits {sent}) but "
                f"expects "
                f"{received[rank]} from itself (output_splits {received})"
            )
        if num_ranks == 1:
            return data
        is_even = input_splits is None and output_splits is None
        return self._functions.AllToAllSingle.apply(data, None if is_even else (sent, received), group, asynchronous)

    # --- the checks, all made before anything is sent ---

    def _check_tensor(self, function: str, data: Any) -> None:
        if not isinstance(data, self._tensor):
            raise TypeError(f"{function}: expected a {self._tensor_name}, got {type(data).__name__}")

    def _checked_dim(self, function: str, data: Any, dim: int, name: str) -> int:
        self._check_tensor(function, data)
        if not -data.ndim <= dim < data.ndim:
            raise ValueError(f"{function}: {name} {dim} is out of range for a tensor of shape {tuple(data.shape)}")
        return dim % data.ndim

    def _checked_row_splits(
        self, function: str, data: Any, input_splits: Splits, output_splits: Splits, num_ranks: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        self._check_tensor(function, data)
        if data.ndim == 0:
            raise ValueError(f"{function}: a tensor with 0 dims has no rows to send; give at least 1 dim")
        num_rows = data.shape[0]
        if (input_splits is None or output_splits is None) and num_rows % num_ranks != 0:
            raise ValueError(
                f"{function}: dim 0 of the input of shape {tuple(data.shape)} cannot be split into {num_ranks} equal "
                "parts, one per rank; use differentiable_all_to_all_single with input_splits and output_splits"
            )
        even = (num_rows // num_ranks,) * num_ranks
        sent = even if input_splits is None else _checked_sizes(function, input_splits, num_ranks, "input_splits")
        received = (
            even if output_splits is None else _checked_sizes(function, output_splits, num_ranks, "output_splits")
        )
        if sum(sent) != num_rows:
            raise ValueError(
                f"{function}: input_splits {sent} add up to {sum(sent)} rows but the input has shape "
                f"{tuple(data.shape)}"
            )
        return sent, received


def _checked_op(function: str, op: Any, allowed: tuple[str, ...]) -> str:
    name = op.lower() if isinstance(op, str) else op
    if name not in allowed:
        raise ValueError(f"{function}: op must be one of {', '.join(allowed)}; got {op!r}")
    return name


def _checked_sizes(function: str, sizes: Sequence[int], num_ranks: int, name: str) -> tuple[int, ...]:
    checked = tuple(int(size) for size in sizes)
    if len(checked) != num_ranks:
        raise ValueError(f"{function}: {name} {checked} has {len(checked)} entries but the group has {num_ranks} ranks")
    if min(checked) < 0:
        raise ValueError(f"{function}: {name} {checked} has a negative entry")
    return checked
