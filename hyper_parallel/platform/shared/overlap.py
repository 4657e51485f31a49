"""Communication that runs while the device computes: an all-to-all launched early and awaited late in both directions,
the hook at which two threads take turns, and gradient reductions in flight.

Note [An all-to-all that overlaps in backward too]
    `launch_async_all_to_all` starts the all-to-all and `differentiable_async_a2a_wait` finishes it; what the program
    does between the two runs while the data travel. Autograd runs later calls first, so in backward the second function
    comes before the first: it *launches* the reverse all-to-all and leaves `(work, buffer)` in the list `handle_box`;
    then comes the backward of all that was done between the two; then the first one waits for its buffer and uses it.

        forward    q = Wq x | launch q | k = Wk x | launch k | v = Wv x | launch v | wait q, wait k, wait v | attention
        backward   attention | launch v, launch k, launch q | wait v | Wv | wait k | Wk | wait q | Wq

    Between the two functions the buffer is a gradient whose values have not come yet. So the tensor that goes from the
    first function to the second must go nowhere else, or autograd would add to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.platform.shared.coordinator import HookCoordinator, check_hook_name

HandleBox = list[tuple[Any, Any]]


class OverlapFunctions:
    """The functions of this file for one framework.

    Args:
        function: the base of its autograd functions, and ``once`` the decorator of a backward without second
            derivative.
        collectives: has ``all_to_all_single``.
        unwrap_group: gives the group, with ``rank()`` and ``size()``, that an argument means.
        alias: another tensor over the same memory.
        runs_in_backward: tells whether autograd's backward is running in this thread.
    """

    def __init__(
        self,
        function: Any,
        once: Callable[[Any], Any],
        collectives: Any,
        unwrap_group: Callable[[Any], Any],
        alias: Callable[[Any], Any],
        runs_in_backward: Callable[[], bool],
    ) -> None:
        self._unwrap_group = unwrap_group

        class LaunchAllToAll(function):
            """forward: launch the all-to-all; backward: wait for the reverse one, join the parts on `split_dim`."""

            @staticmethod
            def forward(ctx: Any, data: Any, group: Any, num_ranks: int, split_dim: int, box: HandleBox | None) -> Any:
                ctx.split_dim, ctx.handle_box = split_dim, box
                part_size = data.shape[split_dim] // num_ranks
                cut = data.reshape((*data.shape[:split_dim], num_ranks, part_size, *data.shape[split_dim + 1 :]))
                others = [dim for dim in range(cut.ndim) if dim != split_dim]
                slabs = cut.permute((split_dim, *others)).contiguous()
                return collectives.all_to_all_single(slabs, tuple(slabs.shape), group, async_op=True)

            @staticmethod
            @once
            def backward(ctx: Any, grad: Any, _: None = None) -> tuple[Any, ...]:
                _wait_for_buffer(grad, ctx.handle_box)
                at, shape = ctx.split_dim, tuple(grad.shape)
                moved = grad.permute((*range(1, at + 1), 0, *range(at + 1, grad.ndim)))
                joined = moved.reshape((*shape[1 : at + 1], shape[0] * shape[at + 1], *shape[at + 2 :]))
                return joined, None, None, None, None

        class WaitAllToAll(function):
            """forward: wait, identity; backward: launch the reverse all-to-all into a buffer, which is the gradient."""

            @staticmethod
            def forward(ctx: Any, x: Any, work: Any, group: Any, handle_box: HandleBox | None) -> Any:
                ctx.group, ctx.handle_box = group, handle_box
                if work is not None:
                    work.wait()
                return alias(x)

            @staticmethod
            @once
            def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
                shape = tuple(grad.shape)
                buffer, work = collectives.all_to_all_single(grad.contiguous(), shape, ctx.group, async_op=True)
                if ctx.handle_box is not None:
                    ctx.handle_box.append((work, buffer))
                elif work is not None:
                    work.wait()
                return buffer, None, None, None

        class SyncHook(function):
            """forward: meet the coordinator, identity; backward: the same."""

            @staticmethod
            def forward(ctx: Any, x: Any, hook_name: str, coordinator: HookCoordinator) -> Any:
                ctx.hook_name, ctx.coordinator = hook_name, coordinator
                # A checkpoint's second forward must not be taken for the forward thread.
                coordinator.rendezvous(hook_name, "recompute" if runs_in_backward() else "forward")
                return alias(x)

            @staticmethod
            def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
                ctx.coordinator.rendezvous(ctx.hook_name, "backward")
                return grad, None, None

        self._launch, self._wait, self._sync_hook = LaunchAllToAll, WaitAllToAll, SyncHook

    def launch_async_all_to_all(
        self, t: Any, group: Any, world_size: int, split_dim: int, handle_box: HandleBox | None = None
    ) -> tuple[Any, Any]:
        """Cut `split_dim` into `world_size` equal parts and start sending part r to rank r; give `(x, work)`.

        forward: launch the all-to-all; backward: wait for the reverse all-to-all left in `handle_box`, join the parts.

        `x` has shape [world_size, *shape of a part] and holds nothing before `work` is done: hand both, and the same
        `handle_box`, to `differentiable_async_a2a_wait`, and use `x` for nothing else. From sequence shards to head
        shards and back, as in Ulysses, for tensors [batch, sequence, heads, head_dim]:

            box = []
            q, q_work = launch_async_all_to_all(query(hidden), group, world_size, 2, box)
            k, k_work = launch_async_all_to_all(key(hidden), group, world_size, 2, box)  # while the queries travel
            v, v_work = launch_async_all_to_all(value(hidden), group, world_size, 2, box)
            q = differentiable_async_a2a_wait(q, q_work, None, group, world_size, 1, 2, box)  # whole sequence, some
            heads k = differentiable_async_a2a_wait(k, k_work, None, group, world_size, 1, 2, box)
            v = differentiable_async_a2a_wait(v, v_work, None, group, world_size, 1, 2, box)
        """
        function = "launch_async_all_to_all"
        group = self._checked_group(function, group, world_size)
        split_dim = _checked_dim(function, "split_dim", split_dim, t.ndim, t)
        if t.shape[split_dim] % world_size != 0:
            raise ValueError(
                f"{function}: dim {split_dim} of the tensor of shape {tuple(t.shape)} cannot be split into "
                f"{world_size} equal parts, one per rank"
            )
        x, work = self._launch.apply(t, group, world_size, split_dim, handle_box)
        x._handle_box_of_launch = handle_box
        return x, work

    def differentiable_async_a2a_wait(
        self,
        x: Any,
        work: Any,
        out_perm: Sequence[int] | None,
        group: Any,
        world_size: int,
        concat_dim: int,
        split_dim: int,
        handle_box: HandleBox | None = None,
    ) -> Any:
        """Finish an all-to-all launched earlier: the result is whole on `concat_dim` and one part of `split_dim`.

        forward: wait, join what came from each rank on `concat_dim`; backward: launch the reverse all-to-all, not
        awaited.

        Args:
            x: the buffer that is being filled, [world_size, ...]: `x[r]` comes from rank r.
            work: what to wait for, or None if the data are there.
            out_perm: the permutation of `x` that puts its dim 0 directly before the dim that `concat_dim` of the
                result is made of; None: that move and nothing else.
            concat_dim: the dim of the result that is gathered.
            split_dim: the dim that was split before the launch.
            handle_box: a list that gets `(work, buffer)` of the reverse all-to-all in backward. The gradient of `x` is
                that buffer: whoever uses it waits first, as `launch_async_all_to_all` does when it has the same list.
                None: backward waits by itself, without overlap.
        """
        function = "differentiable_async_a2a_wait"
        group = self._checked_group(function, group, world_size)
        if x.ndim < 2 or x.shape[0] != world_size:
            raise ValueError(
                f"{function}: x must have one slab per rank, [{world_size}, ...] with at least 2 dims; its shape is "
                f"{tuple(x.shape)}"
            )
        num_dims = x.ndim - 1
        concat_dim = _checked_dim(function, "concat_dim", concat_dim, num_dims, x)
        _checked_dim(function, "split_dim", split_dim, num_dims, x)
        if out_perm is None:
            perm = (*range(1, concat_dim + 1), 0, *range(concat_dim + 1, num_dims + 1))
        else:
            perm = tuple(out_perm)
            if sorted(perm) != list(range(x.ndim)) or perm[concat_dim] != 0:
                raise ValueError(
                    f"{function}: out_perm must be a permutation of the {x.ndim} dims of x that puts dim 0 at place "
                    f"{concat_dim} (concat_dim); got {perm}"
                )
        if handle_box is not None and getattr(x, "_handle_box_of_launch", handle_box) is not handle_box:
            raise ValueError(
                f"{function}: handle_box is not the list that launch_async_all_to_all got for this x, so nobody "
                f"would wait "
                "for the gradient; give the same list to both"
            )
        arrived = self._wait.apply(x, work, group, handle_box)
        shape = [arrived.shape[dim] for dim in perm]
        joined = (*shape[:concat_dim], shape[concat_dim] * shape[concat_dim + 1], *shape[concat_dim + 2 :])
        return arrived.permute(perm).reshape(joined)

    def differentiable_sync_hook(self, x: Any, hook_name: str, coordinator: HookCoordinator | None) -> Any:
        """Let the thread that computes `x` meet the other one at hook "A", "B", "C" or "D" of the coordinator.

        forward: identity after coordinator.rendezvous(hook_name, "forward"); backward: identity after the same,
        "backward".

        Without a coordinator, or while it is disabled, nobody is waited for. Whether it is enabled is asked in each
        direction anew: a forward that ran alone may have a backward that overlaps. A forward that is run again in
        backward (checkpointing) comes as "recompute".
        """
        check_hook_name("differentiable_sync_hook", hook_name)
        return x if coordinator is None else self._sync_hook.apply(x, hook_name, coordinator)

    def _checked_group(self, function: str, group: Any, world_size: int) -> Any:
        group = self._unwrap_group(group)
        if world_size != group.size():
            raise ValueError(f"{function}: world_size is {world_size} but the group has {group.size()} ranks")
        return group


class GradReduction:
    """Gradient reductions in flight, at most one at a time, finished on a stream of their own.

    Args:
        new_stream: makes a stream.
        get_stream_context: gives the context manager class that makes a stream the current one.
        get_current_stream: gives the current stream.
    """

    def __init__(
        self,
        new_stream: Callable[[], Any],
        get_stream_context: Callable[[], Callable[[Any], Any]],
        get_current_stream: Callable[[], Any],
    ) -> None:
        self._new_stream = new_stream
        self._get_stream_context = get_stream_context
        self._get_current_stream = get_current_stream
        self._stream: Any = None
        self._in_flight: tuple[Any, Callable[[], Any] | None] | None = None

    def set(self, handle: Any, post_process: Callable[[], Any] | None = None) -> None:
        """Finish the reduction before, then keep this one: `post_process()` runs once `handle` is done."""
        self._finish()
        self._in_flight = (handle, post_process)

    def wait(self) -> None:
        """Finish the last reduction; the current stream waits for it and for all before it."""
        self._finish()
        if self._stream is not None:
            self._get_current_stream().wait_stream(self._stream)

    def _finish(self) -> None:
        if self._in_flight is None:
            return
        handle, post_process = self._in_flight
        # Dropped first: a reduction that fails is reported once, not again by the next call.
        self._in_flight = None
        if self._stream is None:
            self._stream = self._new_stream()
        with self._get_stream_context()(self._stream):
            if handle is not None:
                handle.wait()
            if post_process is not None:
                post_process()


def _checked_dim(function: str, name: str, dim: int, num_dims: int, tensor: Any) -> int:
    if not -num_dims <= dim < num_dims:
        raise ValueError(
            f"{function}: {name} {dim} is out of range for {num_dims} dims (tensor of shape {tuple(tensor.shape)})"
        )
    return dim % num_dims


def _wait_for_buffer(buffer: Any, handle_box: HandleBox | None) -> None:
    """Wait for the entry of `buffer`, or for all if none is (then it is not known which one `buffer` was made of)."""
    if not handle_box:
        return
    entries = [entry for entry in handle_box if entry[1] is buffer] or list(handle_box)
    for work, _ in entries:
        if work is not None:
            work.wait()
    awaited = {id(entry) for entry in entries}
    handle_box[:] = [entry for entry in handle_box if id(entry) not in awaited]
