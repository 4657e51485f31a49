"""Styles for an attention module that works on plain shards of the sequence: it sees what it would see on one device.

The main road to long sequences is a layout (``hp.parallelize(cp=n)``). These are for code that cuts its batch by
itself: the module between the projections, ``forward(query, key, value, ...)``, gets distributed tensors in which its
``is_causal`` means the whole sequence, and what leaves it is this rank's shard again. Positions, masks that are
tensors, labels and the scale of the loss stay the caller's.

Note [An all-to-all behind each projection]
:class:`AsyncContextParallel` starts the all-to-all of the queries while the keys are projected. What goes into
attention must then be what left the projection, seen in heads: a view of the same memory that nobody wrote to. Where it
is not (rotary positions in between), the projection's own shard is out of date, and that input takes the all-to-all of
:class:`ContextParallel`, which waits. So the numbers are the same; only the overlap is lost, and the projection's
output is not sent again in later calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hyper_parallel.core.context_parallel.blocks.schemes import attention_scheme
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.shard.dispatching.mixing import implicit_replication
from hyper_parallel.core.tensor_parallel.style_base import ParallelStyle, described
from hyper_parallel.platform import get_platform

_platform = get_platform()

_ROLES = ("query", "key", "value")


class ContextParallel(ParallelStyle):
    """Attention over a sequence that is sharded over the mesh, for a module that is called with query, key and value.

    ``seq_dim``, ``head_dim``: dims of the three. ``ulysses_degree``: None: each rank computes some heads over the whole
    sequence; 1: keys and values are gathered; a divisor u of the ranks: heads over u neighbours, gathered over the
    others. ``qkv_indices``: which positional arguments they are; ``qkv_kwarg_names``: their names, where given by name.
    ``load_balance``: with ``ulysses_degree=1`` ranks swap halves of their queries, so that all have as much to compute
    under a causal mask. Plain inputs are shards, and the output is this rank's shard; distributed ones give a
    distributed output, with ``use_local_output`` its shard.

    forward: all-to-alls of query, key, value and output, or all-gathers of key and value; backward: the reverse.
    """

    def __init__(
        self,
        seq_dim: int = 1,
        head_dim: int = 2,
        ulysses_degree: int | None = None,
        qkv_indices: Sequence[int] = (0, 1, 2),
        qkv_kwarg_names: Sequence[str] = (),
        load_balance: bool = False,
        use_local_output: bool = False,
    ) -> None:
        if seq_dim == head_dim or min(seq_dim, head_dim) < 0:
            raise ValueError(
                f"{type(self).__name__}: seq_dim={seq_dim} and head_dim={head_dim} are two dims of query, key and "
                "value, counted from the front"
            )
        if ulysses_degree is not None and (isinstance(ulysses_degree, bool) or ulysses_degree < 1):
            raise ValueError(f"{type(self).__name__}: ulysses_degree is None or a number from 1, got {ulysses_degree}")
        if load_balance and ulysses_degree != 1:
            raise ValueError(
                f"{type(self).__name__}: load_balance swaps queries where keys are gathered (ulysses_degree=1); with "
                f"ulysses_degree={ulysses_degree} every rank has all of the sequence, and as much to compute"
            )
        for name, given in (("qkv_indices", qkv_indices), ("qkv_kwarg_names", qkv_kwarg_names)):
            if len(given) not in (0, 3):
                raise ValueError(f"{type(self).__name__}: {name} are those of query, key and value, got {given!r}")
        self.seq_dim, self.head_dim, self.ulysses_degree = seq_dim, head_dim, ulysses_degree
        self.qkv_indices, self.qkv_kwarg_names = tuple(qkv_indices), tuple(qkv_kwarg_names)
        self.load_balance, self.use_local_output = load_balance, use_local_output

    def __repr__(self) -> str:
        return described(
            self, seq_dim=self.seq_dim, head_dim=self.head_dim, ulysses_degree=self.ulysses_degree,
            load_balance=self.load_balance, use_local_output=self.use_local_output,
        )  # fmt: skip

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        """Make attention in ``module`` that over the whole sequence, in place, and return it."""
        mesh = self._mesh(device_mesh)
        open_calls: list[tuple[bool, list[AbstractContextManager[Any]]]] = []

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            new_args, new_kwargs = list(args), dict(kwargs)
            places = self._places(module, new_args, new_kwargs)
            is_plain = not isinstance(places[0][0][places[0][1]], DTensor)
            for role, (holder, key) in zip(_ROLES, places, strict=True):
                holder[key] = self._enter(role, holder[key], mesh)
            scheme = attention_scheme("gather", balance=True) if self.load_balance else nullcontext()
            contexts: list[AbstractContextManager[Any]] = [implicit_replication(), scheme]
            for context in contexts:
                context.__enter__()
            open_calls.append((is_plain, contexts))
            return tuple(new_args), new_kwargs

        def after(_: Any, inputs: Any, outputs: Any) -> Any:
            is_plain, contexts = open_calls.pop()
            for context in reversed(contexts):
                context.__exit__(None, None, None)
            is_local = is_plain or self.use_local_output
            if isinstance(outputs, (tuple, list)):
                return type(outputs)(
                    self._leave(one, mesh, is_local) if isinstance(one, DTensor) else one for one in outputs
                )
            return self._leave(outputs, mesh, is_local) if isinstance(outputs, DTensor) else outputs

        _platform.register_forward_pre_hook(module, before, with_kwargs=True)
        _platform.register_forward_hook(module, after, always_call=True)
        return module

    def _mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """The mesh as (ranks that gather, ranks that share heads) for a hybrid, else as it is."""
        name, degree = type(self).__name__, self.ulysses_degree
        if mesh.ndim > 1 and (degree in (None, 1) or mesh.ndim > 2 or mesh.shape[1] != degree):
            raise ValueError(
                f"{name} takes a mesh of one axis, or of two with ulysses_degree ranks along the second, got {mesh} "
                f"and ulysses_degree={degree}; take the axis of the sequence, mesh['cp']"
            )
        if degree is None or degree == 1 or mesh.ndim == 2:
            return mesh
        size = mesh.size()
        if size % degree:
            raise ValueError(
                f"{name}: ulysses_degree={degree} does not divide the {size} ranks of {mesh}; choose one of "
                f"{', '.join(str(one) for one in range(1, size + 1) if size % one == 0)}"
            )
        if degree == size:
            return mesh
        ranks = mesh.mesh.reshape((size // degree, degree))
        return DeviceMesh(mesh.device_type, ranks, ("cp_gather", "cp_heads"))

    def _places(self, module: Any, args: list[Any], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
        """Where query, key and value are: (arguments, position) or (keywords, name)."""
        if self.qkv_kwarg_names and all(name in kwargs for name in self.qkv_kwarg_names):
            return [(kwargs, name) for name in self.qkv_kwarg_names]
        if self.qkv_indices and len(args) > max(self.qkv_indices):
            return [(args, index) for index in self.qkv_indices]
        raise ValueError(
            f"{type(self).__name__}: {type(module).__name__} was called with {len(args)} arguments and the keywords "
            f"{', '.join(kwargs) or '(none)'}; query, key and value should be arguments {self.qkv_indices} or the "
            f"keywords {self.qkv_kwarg_names}"
        )

    # ---------------------------------------------------------------- layouts

    def _whole_sequence(self, role: str, mesh: DeviceMesh) -> list[Placement]:
        """How an input lies in the module."""
        if self.load_balance:
            return [Shard(self.seq_dim)]
        if mesh.ndim == 2:
            return [Shard(self.seq_dim) if role == "query" else Replicate(), Shard(self.head_dim)]
        if self.ulysses_degree == 1:
            return [Shard(self.seq_dim) if role == "query" else Replicate()]
        return [Shard(self.head_dim)]

    def _distributed(self, value: Any, mesh: DeviceMesh) -> DTensor:
        if isinstance(value, DTensor):
            if value.device_mesh != mesh:
                raise ValueError(
                    f"{type(self).__name__}: an input lies on {value.device_mesh}, but the style is for {mesh}"
                )
            return value
        if not _platform.is_tensor(value) or value.ndim <= max(self.seq_dim, self.head_dim):
            what = f"of shape {tuple(value.shape)}" if _platform.is_tensor(value) else f"a {type(value).__name__}"
            raise ValueError(
                f"{type(self).__name__}: query, key and value have the dims seq_dim={self.seq_dim} and "
                f"head_dim={self.head_dim}; got one that is {what}"
            )
        return DTensor.from_local(value, mesh, [Shard(self.seq_dim)] * mesh.ndim)

    def _enter(self, role: str, value: Any, mesh: DeviceMesh) -> DTensor:
        return self._distributed(value, mesh).redistribute(mesh, self._whole_sequence(role, mesh))

    def _leave(self, output: DTensor, mesh: DeviceMesh, is_local: bool) -> Any:
        dim = self.seq_dim
        output = output.redistribute(mesh, [Shard(dim)] * mesh.ndim)
        return output.to_local() if is_local else output


class AsyncContextParallel(ContextParallel):
    """:class:`ContextParallel` whose all-to-alls of query, key and value start behind their projections.

    Each travels while the next is projected, and its gradient while the projection before is differentiated. For
    ``ulysses_degree=None`` and heads that divide by the ranks; otherwise, and where an input is not its projection's
    output seen in heads, as :class:`ContextParallel`. See Note [An all-to-all behind each projection].
    """

    def apply(  # type: ignore[override]
        self, module: Any, device_mesh: DeviceMesh, q_proj: Any, k_proj: Any, v_proj: Any
    ) -> Any:
        """Make attention in ``module`` that over the whole sequence; what the three projections give travels early."""
        self._launched: dict[str, tuple[Any, ...]] = {}
        self._changed: set[str] = set()  # roles whose inputs are not what left the projection; alike on every rank
        if self.ulysses_degree is None and device_mesh.size() > 1:
            for role, projection in zip(_ROLES, (q_proj, k_proj, v_proj), strict=True):
                _platform.register_forward_hook(projection, self._launch_behind(role, device_mesh))
        return super().apply(module, device_mesh)

    def _launch_behind(self, role: str, mesh: DeviceMesh) -> Any:
        def launch(_: Any, inputs: Any, output: Any) -> None:
            self._launched.pop(role, None)
            is_shard = _platform.is_tensor(output) and not isinstance(output, DTensor) and output.ndim == 3
            if role not in self._changed and is_shard and output.shape[-1] % mesh.size() == 0 and 0 not in output.shape:
                box: list[Any] = []
                group = mesh.get_group()
                travelling, work = _platform.launch_async_all_to_all(output, group, mesh.size(), 2, box)
                self._launched[role] = (output, _writes(output), travelling, work, box)

        return launch

    def _enter(self, role: str, value: Any, mesh: DeviceMesh) -> DTensor:
        launched = self._launched.pop(role, None)
        if launched is None:
            return super()._enter(role, value, mesh)
        output, writes, travelling, work, box = launched
        size = mesh.size()
        whole = _platform.differentiable_async_a2a_wait(travelling, work, None, mesh.get_group(), size, 1, 2, box)
        if not self._is_seen_in_heads(value, output, writes, size):
            self._changed.add(role)
            return super()._enter(role, value, mesh)
        heads, width = value.shape[self.head_dim], value.shape[-1]
        whole = whole.reshape((*whole.shape[:2], heads // size, width))
        shape = [whole.shape[0], whole.shape[1], heads, width]
        if self.head_dim == 1:
            whole, shape = whole.transpose(1, 2), [shape[0], heads, shape[1], width]
        return DTensor.from_local(whole, mesh, [Shard(self.head_dim)], shape=tuple(shape))

    def _is_seen_in_heads(self, value: Any, output: Any, writes: Any, size: int) -> bool:
        """Whether ``value`` is ``output`` as it left the projection, with its features as heads."""
        if isinstance(value, DTensor) or value.ndim != 4 or {self.seq_dim, self.head_dim} != {1, 2}:
            return False
        heads = value.shape[self.head_dim]
        in_order = value if self.head_dim == 2 else value.transpose(1, 2)
        is_same = value.data_ptr() == output.data_ptr() and _writes(output) == writes
        return (
            is_same
            and heads % size == 0
            and tuple(in_order.shape[:2]) == tuple(output.shape[:2])
            and math.prod(in_order.shape[2:]) == output.shape[2]
            and in_order.is_contiguous()
        )


def _writes(tensor: Any) -> Any:
    """A value that changes when the tensor is written to."""
    return _platform.write_mark(tensor)[0]
