"""A module of your own as one stage of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.platform import get_platform

__all__ = ["PipelineStage", "SharedParameterInfo"]

_platform = get_platform()


@dataclass(frozen=True)
class SharedParameterInfo:
    """A parameter of which other stages have a copy, each under a ``SharedParameterInfo`` of its own.

    Copies of the same stages belong together in the order in which each stage lists them. They start with the values of
    the lowest stage, and each has the sum of their gradients behind a step.
    """

    parameter: Any
    shared_stage: int | Sequence[int]


class PipelineStage:
    """Stage ``stage_index`` of ``stage_num``: ``submodule`` is called with what the stage before gives.

    The first stage is called with the positional arguments of ``run``, all with the named ones; the last one gives the
    loss first. ``group`` has the ranks of the stages, by default all: stage i is on the rank of place i % its size.
    ``dyn_shape``: what crosses has other shapes in each microbatch and step, and is described with each. ``mesh``: the
    ranks of this stage, for activations that are DTensors; the meshes of all stages have the same axes.
    ``has_backward``: False runs forwards only.
    """

    def __init__(
        self,
        submodule: Any,
        stage_index: int,
        stage_num: int,
        device: Any = None,
        group: Any = None,
        src_stage: int | None = None,
        dst_stage: int | None = None,
        dyn_shape: bool = False,
        has_backward: bool = True,
        shared_parameters: Sequence[SharedParameterInfo] | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        if not isinstance(submodule, _platform.Module):
            raise TypeError(f"PipelineStage: submodule is a {type(submodule).__name__}, not a module")
        if not 0 <= stage_index < stage_num:
            raise ValueError(f"PipelineStage: stage {stage_index} of {stage_num}; count from 0")
        for name, given, wanted in (
            ("src_stage", src_stage, stage_index - 1),
            ("dst_stage", dst_stage, stage_index + 1),
        ):
            if given is not None and given != wanted:
                raise ValueError(
                    f"PipelineStage: {name}={given} of stage {stage_index}: stages are a chain, each gives to the "
                    "next; leave it out"
                )
        self.submodule, self.stage_index, self.stage_num = submodule, stage_index, stage_num
        self.device, self.group, self.mesh = device, group, mesh
        self.dyn_shape, self.has_backward = dyn_shape, has_backward
        self.shared_parameters = list(shared_parameters or ())
        for info in self.shared_parameters:
            if not isinstance(info, SharedParameterInfo):
                raise TypeError(
                    f"PipelineStage: shared_parameters has a {type(info).__name__}; give "
                    "SharedParameterInfo(parameter, stages)"
                )

    @property
    def is_first_stage(self) -> bool:
        """Whether nobody gives to it."""
        return self.stage_index == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it gives the loss."""
        return self.stage_index == self.stage_num - 1

    def shared_names(self) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """Shared parameters, with all stages that have them, by a name that these stages agree on."""
        found: dict[str, tuple[Any, tuple[int, ...]]] = {}
        numbers: dict[tuple[int, ...], int] = {}
        for info in self.shared_parameters:
            others = (info.shared_stage,) if isinstance(info.shared_stage, int) else tuple(info.shared_stage)
            stages = tuple(sorted({self.stage_index, *others}))
            wrong = [stage for stage in stages if not 0 <= stage < self.stage_num]
            if wrong or len(stages) < 2:
                raise ValueError(
                    f"PipelineStage: stage {self.stage_index} shares a parameter with {info.shared_stage}; give "
                    f"another stage, or a list of them, from 0 to {self.stage_num - 1}"
                )
            number = numbers[stages] = numbers.get(stages, -1) + 1
            found[f"{'-'.join(map(str, stages))} {number:04d}"] = (info.parameter, stages)
        return found

    def __repr__(self) -> str:
        return f"PipelineStage({type(self.submodule).__name__}, {self.stage_index} of {self.stage_num})"
