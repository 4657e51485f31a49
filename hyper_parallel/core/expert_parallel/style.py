"""Styles for modules of experts, with HyperParallel 1.0's names: sharded by expert, by inner features, by both.

A style is for a module that is called with (tokens, chosen experts, weights) of this rank's own tokens, plain tensors,
and has weights whose first dim is the expert: ``models.GroupedExperts``, or one of Hugging Face. ``hp.parallelize``
does the same for a whole model.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.expert_parallel.dispatch_options import dispatching
from hyper_parallel.core.expert_parallel.module_experts import inner_dim, is_module_of_experts, use_operator
from hyper_parallel.core.modules.module_parameters import distribute_parameter
from hyper_parallel.core.tensor_parallel.single_device_code import map_tensors, to_full_plain
from hyper_parallel.core.tensor_parallel.style_base import ParallelStyle, described
from hyper_parallel.platform import get_platform

__all__ = [
    "AllToAllTokenDispatcher",
    "BaseExpertParallel",
    "DeredundencyTokenDispatcher",
    "ExpertParallel",
    "ExpertTensorParallel",
    "TensorParallel",
]

_platform = get_platform()


class AllToAllTokenDispatcher:
    """A token travels once for each of its experts: the sum over its choices is that of one device, bit for bit."""

    once_per_rank = False


class DeredundencyTokenDispatcher:
    """A token travels once for each rank that has an expert of its, which sends back the sum of them."""

    once_per_rank = True


_DISPATCHERS: dict[str, Any] = {"all_to_all": AllToAllTokenDispatcher, "deredundency": DeredundencyTokenDispatcher}


class BaseExpertParallel(ParallelStyle):
    """What the styles of experts share; a subclass says how a parameter lies and which axes have the same tokens."""

    once_per_rank, async_combine = False, True

    @abstractmethod
    def placements(self, module: Any, name: str, mesh: DeviceMesh) -> tuple[Placement, ...]:
        """How the parameter ``name`` lies on the mesh."""

    def alike(self, mesh: DeviceMesh) -> DeviceMesh | None:
        """The axes along which all ranks are given the same tokens; None: on all axes each has its own."""
        return None

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        where = f"{type(self).__name__} on {type(module).__name__}"
        if not is_module_of_experts(module):
            raise ValueError(
                f"{where}: it is for modules of experts, with weights whose first dim is the expert: "
                "models.GroupedExperts, or one of Hugging Face that runs under its experts interface"
            )
        for name in _platform.own_parameters(module):
            distribute_parameter(
                module, name, device_mesh, self.placements(module, name, device_mesh), self.src_data_rank, where
            )
        use_operator(module)
        alike, open_options = self.alike(device_mesh), []

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            open_options.append(dispatching(self.once_per_rank, self.async_combine))
            open_options[-1].__enter__()
            if alike is None:
                return None
            args = tuple(_replicated(value, alike) for value in args)
            return args, {name: _replicated(value, alike) for name, value in kwargs.items()}

        def after(_: Any, inputs: Any, output: Any) -> Any:
            open_options.pop().__exit__(None, None, None)
            return None if alike is None else map_tensors(to_full_plain, output)

        _platform.register_forward_pre_hook(module, before, with_kwargs=True)
        _platform.register_forward_hook(module, after, always_call=True)
        return module


class ExpertParallel(BaseExpertParallel):
    """A block of the experts on each rank of a mesh of one axis; tokens travel to them and back.

    ``token_dispatcher`` is ``"all_to_all"`` or ``"deredundency"``. With ``async_combine`` what the caller computes
    ``beside`` the experts, as ``models.MoE`` its shared expert, is computed while results travel back; without, behind.

    forward: all-gather of counts, all-to-all there and back; backward: all-to-all there and back.
    """

    def __init__(self, token_dispatcher: str = "all_to_all", async_combine: bool = True) -> None:
        if token_dispatcher not in _DISPATCHERS:
            raise ValueError(
                f"ExpertParallel: token_dispatcher={token_dispatcher!r} is none of {', '.join(map(repr, _DISPATCHERS))}"
            )
        self.token_dispatcher, self.async_combine = token_dispatcher, async_combine
        self.once_per_rank = _DISPATCHERS[token_dispatcher].once_per_rank

    def placements(self, module: Any, name: str, mesh: DeviceMesh) -> tuple[Placement, ...]:
        if mesh.ndim != 1:
            raise ValueError(f"ExpertParallel takes a mesh of one axis, got {mesh}; choose it: mesh['ep']")
        return (Shard(0),)

    def __repr__(self) -> str:
        return described(self, token_dispatcher=self.token_dispatcher, async_combine=self.async_combine)


class TensorParallel(BaseExpertParallel):
    """A part of every expert's inner features on each rank of a mesh of one axis, whose ranks have the same tokens.

    forward: all-reduce of the result; backward: all-reduce of the tokens' gradient.
    """

    def placements(self, module: Any, name: str, mesh: DeviceMesh) -> tuple[Placement, ...]:
        if mesh.ndim != 1:
            raise ValueError(f"TensorParallel takes a mesh of one axis, got {mesh}; choose it: mesh['tp']")
        return (_by_features(module, name),)

    def alike(self, mesh: DeviceMesh) -> DeviceMesh | None:
        return mesh

    def __repr__(self) -> str:
        return described(self)


class ExpertTensorParallel(BaseExpertParallel):
    """Experts in blocks over the first axis of a mesh and by inner features over the second, along which ranks have the
    same tokens.

    forward: all-gather of counts, all-to-all there and back over the first axis, all-reduce over the second; backward:
    the same.
    """

    def placements(self, module: Any, name: str, mesh: DeviceMesh) -> tuple[Placement, ...]:
        if mesh.ndim != 2:
            raise ValueError(f"ExpertTensorParallel takes a mesh of two axes, as mesh['ep', 'tp'], got {mesh}")
        return Shard(0), _by_features(module, name)

    def alike(self, mesh: DeviceMesh) -> DeviceMesh | None:
        return mesh[str(mesh.axis_label(1))]

    def __repr__(self) -> str:
        return described(self)


def _by_features(module: Any, name: str) -> Placement:
    if name.startswith("gate_up"):
        raise ValueError(
            f"{type(module).__name__} has gate and up in one tensor, {name!r}, whose parts would be no pairs; shard it "
            "by expert: ExpertParallel()"
        )
    dim = inner_dim(module, name)
    return Replicate() if dim is None else Shard(dim)


def _replicated(value: Any, mesh: DeviceMesh) -> Any:
    if not _platform.is_tensor(value) or isinstance(value, DTensor):
        return value
    return DTensor.from_local(value, mesh, Layout.of(mesh, ((),) * value.ndim))
