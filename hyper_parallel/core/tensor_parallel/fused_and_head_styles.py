"""Styles for weights that consist of parts: heads that do not divide the ranks, and several projections in one weight.

They compute on plain blocks: a rank's part of the output is not a block of the whole output in its order, so the output
leaves as a plain tensor, for code that reads the number of heads, or the width of a part, from what it gets. For code
that has these numbers from elsewhere, a fused projection can leave as a distributed tensor (``fused_output.py``).

Note [Parts as parameters]
The rows of a fused weight that a rank needs lie apart. So each part becomes a parameter of its own, ``weight_q`` beside
``weight_k``, cut like any other: a checkpoint of it is right under every layout, which it would not be if the rows of
the whole were put in another order for a certain number of ranks.

Note [Whole weights, own rows]
Where heads do not divide the ranks, the weight is whole on every rank and a rank multiplies with the rows of its heads
only; the gradient is the sum over the ranks. It costs memory for the weights of the heads that do not divide, as a rule
those few of keys and values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh_axes import axes_within, on_axes, replicated_elsewhere, widened
from hyper_parallel.core.dtensor.placement_types import Partial, Replicate, Shard
from hyper_parallel.core.modules.boundary import InputBoundary, OutputBoundary
from hyper_parallel.core.modules.linear_layers import bare, linear_function
from hyper_parallel.core.modules.lora import adapter_of
from hyper_parallel.core.modules.module_parameters import distribute_parameter, split_parameter
from hyper_parallel.core.modules.placements import Placements, check_placements, per_axis
from hyper_parallel.core.modules.plain_parameters import refuse_sharded_uses
from hyper_parallel.core.shard.dispatching.input_edges import bring_input
from hyper_parallel.core.shard.dispatching.mixing import on_wider_mesh
from hyper_parallel.core.shard.dispatching.reduce_later import by_the_law
from hyper_parallel.core.tensor_parallel.fused_output import FusedOutput
from hyper_parallel.core.tensor_parallel.head_share import HeadShare, rows_of
from hyper_parallel.core.tensor_parallel.projection import plus_bias
from hyper_parallel.core.tensor_parallel.style import ColwiseParallel, RowwiseParallel
from hyper_parallel.core.tensor_parallel.style_base import ParallelStyle, described
from hyper_parallel.platform import get_platform

_platform = get_platform()

_ROLES = ("query", "key_value", "output")


class HeadParallel(ParallelStyle):
    """A projection of an attention, cut by heads, also when the heads do not divide the ranks.

    ``role`` is ``"query"``, ``"key_value"`` or ``"output"``. Where heads divide the ranks the weight is cut, as by
    :class:`ColwiseParallel` and :class:`RowwiseParallel`. Otherwise it is whole, and each rank uses the rows of its own
    heads: query heads in blocks of ceil(num_heads / ranks), and for each the key and value head that it uses. Attention
    between the projections runs on plain tensors and reads the number of heads from them.
    forward: nothing for query, key and value, one all-reduce for the output; backward: one all-reduce of the gradient
    of the input, and one for each weight that is whole.

    >>> HeadParallel("key_value", num_heads=8, num_kv_heads=2)
    HeadParallel('key_value', num_heads=8, num_kv_heads=2)
    """

    def __init__(
        self,
        role: str,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        input_layouts: Placements | None = None,
        output_layouts: Placements | None = None,
        use_local_output: bool = True,
    ) -> None:
        if role not in _ROLES:
            raise ValueError(f"HeadParallel: the role {role!r} is none of {', '.join(map(repr, _ROLES))}")
        self.role = role
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.input_layouts = None if input_layouts is None else check_placements(input_layouts, "HeadParallel")
        self.output_layouts = None if output_layouts is None else check_placements(output_layouts, "HeadParallel")
        self.use_local_output = use_local_output
        if role != "output" and not (use_local_output and output_layouts is None):
            raise ValueError(
                f"HeadParallel({role!r}): the output is a plain local tensor of heads, without output_layouts or "
                "use_local_output=False; use ColwiseParallel to keep it distributed"
            )
        HeadShare(self.num_heads, self.num_kv_heads, 1)

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        where = f"{self!r} on {type(module).__name__}"
        share = HeadShare(self.num_heads, self.num_kv_heads, device_mesh.size())
        dims = _linear_dims(module, where)
        num_heads = self.num_kv_heads if self.role == "key_value" else self.num_heads
        num_rows = _platform.own_parameters(module)["weight"].shape[dims[1] if self.role == "output" else dims[0]]
        if num_rows % num_heads:
            raise ValueError(f"{where}: {num_rows} features cannot be divided over {num_heads} heads")
        if (share.kv_divides and share.divides) if self.role == "key_value" else share.divides:
            kind = RowwiseParallel if self.role == "output" else ColwiseParallel
            style: ParallelStyle = kind(
                input_layouts=self.input_layouts,
                output_layouts=self.output_layouts,
                use_local_output=self.use_local_output,
            )
            style.src_data_rank = self.src_data_rank
            return style.apply(module, device_mesh)
        replicated = (Replicate(),) * device_mesh.ndim
        for name in ("weight", "bias"):
            distribute_parameter(module, name, device_mesh, replicated, self.src_data_rank, where)
        rank = _position(device_mesh)
        heads = share.key_heads(rank) if self.role == "key_value" else share.query_heads(rank)
        rows = _index(rows_of(heads, num_heads, num_rows, where), device_mesh)
        linear = _linear_function(module, where)
        if self.role == "output":
            on_output = OutputBoundary(
                device_mesh, per_axis(self.output_layouts or Replicate(), device_mesh), self.use_local_output, where
            )
            forward: Any = _OutputOfHeads(device_mesh, linear, dims[1], rows, on_output, where)
        else:
            on_input = InputBoundary(
                device_mesh, per_axis(self.input_layouts or Replicate(), device_mesh), replicated, where
            )
            forward = _RowsOfReplicated(linear, dims[0], rows, on_input, where)
        _platform.replace_forward(module, forward)
        return module

    def __repr__(self) -> str:
        return f"HeadParallel({self.role!r}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads})"


class FusedColwiseParallel(ParallelStyle):
    """A linear layer that computes several projections at once, each of them cut: fused q, k, v, or gate and up.

    ``parts`` gives the names and widths of the projections in their order. Each part's rows become a parameter of their
    own, ``weight_<name>`` and ``bias_<name>``. The output is plain: this rank's block of each part, side by side. With
    ``num_heads`` (and ``num_kv_heads``) the first part is cut by query heads and the others by key heads, as by
    :class:`HeadParallel`. With ``use_local_output=False`` the output is a distributed tensor with the shape of the
    whole; ``split``, ``chunk`` or slices take the parts out of it as they lie, and any other operator gathers them.
    forward: nothing; backward: one all-reduce of the gradient of the input.

    >>> FusedColwiseParallel({"gate": 8, "up": 8})
    FusedColwiseParallel(parts={'gate': 8, 'up': 8})
    """

    def __init__(
        self,
        parts: Mapping[str, int],
        *,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        input_layouts: Placements | None = None,
        use_local_output: bool = True,
    ) -> None:
        if not parts or any(not name.isidentifier() or size < 0 for name, size in parts.items()):
            raise ValueError(
                f"FusedColwiseParallel: parts gives the width of each projection by name, as in "
                f"{{'gate': 8, 'up': 8}}; got {dict(parts)!r}"
            )
        self.parts = dict(parts)
        if num_heads is not None and not use_local_output:
            raise ValueError(
                "FusedColwiseParallel: parts that are sharded by heads become plain local tensors; leave out "
                "num_heads, or use_local_output=False"
            )
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.use_local_output = use_local_output
        self.input_layouts = check_placements(
            Replicate() if input_layouts is None else input_layouts, "FusedColwiseParallel"
        )

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        where = f"{self!r} on {type(module).__name__}"
        dims = _linear_dims(module, where)
        linear = _linear_function(module, where)
        if not self.use_local_output and not _platform.asks_subclasses:
            raise TypeError(
                f"{where}: on this framework the parts become plain local tensors; leave out use_local_output=False, "
                "and let the code behind the layer read the widths from what it gets"
            )
        own = _platform.own_parameters(module)
        if own["weight"].shape[dims[0]] != sum(self.parts.values()):
            raise ValueError(
                f"{where}: the parts have {sum(self.parts.values())} features together, but the layer gives "
                f"{own['weight'].shape[dims[0]]}"
            )
        indices = self._split(module, device_mesh, dims[0], where)
        replicated = (Replicate(),) * device_mesh.ndim
        on_input = InputBoundary(device_mesh, per_axis(self.input_layouts, device_mesh), replicated, where)
        widths = None if self.use_local_output else tuple(self.parts.values())
        _platform.replace_forward(module, _Parts(linear, dims[0], indices, "bias" in own, on_input, widths, where))
        return module

    def _split(self, module: Any, mesh: DeviceMesh, dim: int, where: str) -> dict[str, Any]:
        """Replace weight and bias by the parts' own; name -> None, or the rows of a whole part that this rank uses."""
        share = None
        if self.num_heads is not None:
            share = HeadShare(self.num_heads, self.num_kv_heads or self.num_heads, mesh.size())
        places = enumerate(self.parts.items())
        indices = {part: self._rows(share, place == 0, width, mesh, where) for place, (part, width) in places}
        for name in ("weight", "bias"):
            along = dim if name == "weight" else 0
            parts = {
                f"{name}_{part}": (width, (Shard(along) if indices[part] is None else Replicate(),) * mesh.ndim)
                for part, width in self.parts.items()
            }
            split_parameter(module, name, along, parts, mesh, self.src_data_rank, where)
        return indices

    @staticmethod
    def _rows(share: HeadShare | None, is_query: bool, width: int, mesh: DeviceMesh, where: str) -> Any:
        if share is None or (share.divides and (is_query or share.kv_divides)):
            return None
        rank = _position(mesh)
        heads = share.query_heads(rank) if is_query else share.key_heads(rank)
        return _index(rows_of(heads, share.num_heads if is_query else share.num_kv_heads, width, where), mesh)

    def __repr__(self) -> str:
        arguments: dict[str, Any] = {"parts": self.parts}
        if self.num_heads is not None:
            arguments |= {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads or self.num_heads}
        if not self.use_local_output:
            arguments["use_local_output"] = False
        return described(self, **arguments)


class _RowsOfReplicated:
    """forward of a linear layer of which a rank uses some rows."""

    def __init__(self, linear: Any, dim: int, rows: Any, on_input: InputBoundary, where: str) -> None:
        self.linear, self.dim, self.rows = linear, dim, rows
        self.enter = _Entrance(on_input, where, is_plain_behind=True)

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        (x,) = args or kwargs.values()
        x, own = self.enter(x)
        bias = None if module.bias is None else own(module.bias, 0, self.rows)
        return self.linear(_varying(x, self.enter.mesh), own(module.weight, self.dim, self.rows), bias)


class _Parts:
    """forward of a linear layer whose parts are parameters of their own; with ``widths`` the result is distributed."""

    def __init__(
        self,
        linear: Any,
        dim: int,
        indices: dict[str, Any],
        has_bias: bool,
        on_input: InputBoundary,
        widths: tuple[int, ...] | None,
        where: str,
    ) -> None:
        self.linear, self.dim, self.indices, self.has_bias = linear, dim, indices, has_bias
        self.widths = widths
        self.enter = _Entrance(on_input, where, is_plain_behind=widths is None)

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        (x,) = args or kwargs.values()
        x, own = self.enter(x)
        weights = [own(getattr(module, f"weight_{part}"), self.dim, rows) for part, rows in self.indices.items()]
        bias = None
        if self.has_bias:
            pieces = [own(getattr(module, f"bias_{part}"), 0, rows) for part, rows in self.indices.items()]
            bias = _platform.cat(pieces, 0)
        product = self.linear(_varying(x, self.enter.mesh), _platform.cat(weights, self.dim), bias)
        if self.widths is None:
            return product
        sharded = Layout.from_placements(self.enter.mesh, (Shard(-1),) * self.enter.mesh.ndim, x.ndim)
        return FusedOutput.of_blocks(product, self.widths, on_axes(x._layout, sharded), tuple(x._global_shape[:-1]))


class _Entrance:
    """An input on its way into a product of plain blocks, and the blocks of parameters that it meets there."""

    def __init__(self, on_input: InputBoundary, where: str, is_plain_behind: bool) -> None:
        self.on_input, self.mesh, self.where, self.is_plain_behind = on_input, on_input.mesh, where, is_plain_behind

    def __call__(self, x: Any) -> tuple[DTensor, Any]:
        """The input, replicated on the style's axes, and :func:`_own` for parameters that meet it."""
        x = by_the_law(self.on_input(x))
        if self.is_plain_behind and not replicated_elsewhere(x._layout, self.mesh):
            raise ValueError(
                f"{self.where}: the output leaves as a plain local tensor, but the input lies under {x._layout}, and "
                f"what is not on the axes of {self.mesh} would be lost; use ColwiseParallel(use_local_output=False) "
                "or, without num_heads, FusedColwiseParallel(use_local_output=False)"
            )
        if x._layout.has_partial or x._layout.shard_axes[-1]:  # on axes that are not the style's
            x = x.redistribute(x.device_mesh, Layout.of(x.device_mesh, (*x._layout.shard_axes[:-1], ())))
        met = {axis for sharding in x._layout.shard_axes for axis in sharding}

        def own(parameter: DTensor, dim: int, rows: Any) -> Any:
            return _own(parameter, dim, rows, self.mesh, x.device_mesh, met)

        return x, own


class _OutputOfHeads:
    """forward of the projection behind attention: each rank multiplies with the columns of its heads, then the sum."""

    def __init__(
        self, mesh: DeviceMesh, linear: Any, dim: int, columns: Any, on_output: OutputBoundary, where: str
    ) -> None:
        self.mesh, self.linear, self.on_output, self.where = mesh, linear, on_output, where
        self.dim, self.columns = dim, columns
        self._is_checked = False

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        (x,) = args or kwargs.values()
        if isinstance(x, DTensor):
            raise TypeError(
                f"{self.where}: heads that do not divide the ranks come as plain local tensors, got a distributed "
                f"tensor under {x._layout}; let the projections before it be HeadParallel too"
            )
        if not self._is_checked and _platform.needs_grad(x):
            refuse_sharded_uses(x, Layout.from_placements(self.mesh, (Shard(-1),) * self.mesh.ndim, x.ndim), self.where)
            self._is_checked = True
        mesh = self.on_output.move.plain_mesh
        product = self.linear(x, _own(module.weight, self.dim, self.columns, self.mesh, mesh), None)
        partial = widened(Layout.from_placements(self.mesh, (Partial(),) * self.mesh.ndim, product.ndim), mesh)
        out = self.on_output.move(DTensor.from_local(product, mesh, partial, shape=tuple(product.shape)))
        if module.bias is not None:
            out = plus_bias(out, module.bias)
        return self.on_output(out)


def _own(parameter: DTensor, dim: int, rows: Any, part: DeviceMesh, mesh: DeviceMesh, met: Collection[int] = ()) -> Any:
    """What this rank multiplies with: its block of a cut parameter, or ``rows`` of a whole one, on ``mesh``.

    ``met`` are the axes of ``mesh`` on which every rank multiplies it with something else; along ``part``, the axes of
    the style, that is so where ranks use rows of their own.
    backward: the sum over these axes, on which the parameter is replicated.
    """
    if parameter.device_mesh is not mesh:
        parameter = on_wider_mesh(parameter, mesh)
    varying = {*met, *(() if rows is None else axes_within(part, mesh) or ())}
    if not varying:
        return parameter.to_local()
    arriving = parameter._layout.with_partials(["sum" if axis in varying else None for axis in range(mesh.ndim)])
    block = parameter.to_local(grad_placements=arriving)
    if rows is None:
        return block
    return block.index_select(dim, rows) if rows.shape[0] else NoRows.apply(block, dim)


class NoRows(_platform.Function):  # type: ignore[name-defined]
    """forward: none of the rows; backward: zeros for all of them. MindSpore has no gradient of an empty selection."""

    @staticmethod
    def forward(ctx: Any, parameter: Any, dim: int) -> Any:
        ctx.like = _platform.detached(parameter)
        shape = [0 if d == dim else size for d, size in enumerate(parameter.shape)]
        return _platform.new_tensor(shape, parameter.dtype, parameter.device)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        del gradient
        return _platform.full_like(ctx.like, 0), None


def _varying(x: DTensor, part: DeviceMesh) -> Any:
    """The plain block of an input that each rank along ``part`` uses for something else; backward: one all-reduce."""
    axes = tuple(axis for axis in axes_within(part, x.device_mesh) or () if x.device_mesh.shape[axis] > 1)
    return _platform.local_alias(bring_input(x, x._layout, axes))


def _position(mesh: DeviceMesh) -> int:
    """This rank's place among all ranks of the mesh; 0 outside of it."""
    return 0 if mesh.get_coordinate() is None else mesh.get_local_rank(tuple(range(mesh.ndim)))


def _index(rows: list[int], mesh: DeviceMesh) -> Any:
    return _platform.index_tensor([rows], mesh.device_type).reshape(-1)


def _linear_dims(module: Any, where: str) -> tuple[int, int]:
    dims = _platform.linear_weight_dims(module)
    if dims is None:
        raise TypeError(
            f"{where}: only linear layers have rows to share out; use NoParallel() to keep a {type(module).__name__} "
            "replicated, or write a ParallelStyle for it"
        )
    return dims


def _linear_function(module: Any, where: str) -> Any:
    if adapter_of(module) is not None:
        raise ValueError(
            f"{where}: the layer has an adapter, which is for the whole weight; use ColwiseParallel or "
            "RowwiseParallel, or leave the layer out of add_lora's targets"
        )
    linear = linear_function(module)
    if linear is None:
        raise TypeError(
            f"{where}: the layer computes in a way of its own (an activation, or a forward of its class), so its rows "
            "cannot be told apart; use ColwiseParallel() or RowwiseParallel(), which leave its computation as it is, "
            "or make it a plain linear layer with what it adds behind it"
        )
    return bare(linear)
