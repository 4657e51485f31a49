"""Styles that leave a module's parameters alone and only say how its inputs and outputs lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import Placement
from hyper_parallel.core.modules.boundary import InputBoundary, OutputBoundary
from hyper_parallel.core.modules.placements import Placements, check_placements, per_axis
from hyper_parallel.core.tensor_parallel.style_base import ParallelStyle, described
from hyper_parallel.platform import get_platform

_platform = get_platform()

# One entry per value: its layout, or None for a value that is left alone.
ValueLayouts = Placement | Sequence[Placements | None] | None


class PrepareModuleInput(ParallelStyle):
    """Inputs come under ``input_layouts`` when they are plain and go in under ``desired_input_layouts``.

    forward: the redistribution between the two; backward: the same between the gradients' layouts. ``None`` in a tuple
    leaves that input alone. ``use_local_output`` hands plain blocks to the module.

    >>> from hyper_parallel import Replicate, Shard
    >>> PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None))
    PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None), \
input_kwarg_layouts={}, desired_input_kwarg_layouts={}, use_local_output=False)
    """

    def __init__(
        self,
        *,
        input_layouts: ValueLayouts = None,
        desired_input_layouts: ValueLayouts = None,
        input_kwarg_layouts: Mapping[str, Placements | None] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placements | None] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _one_per_value(input_layouts, "PrepareModuleInput: input_layouts")
        self.desired_input_layouts = _one_per_value(desired_input_layouts, "PrepareModuleInput: desired_input_layouts")
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        if self.input_layouts is not None and self.desired_input_layouts is None:
            raise ValueError("PrepareModuleInput: input_layouts needs desired_input_layouts of the same length")
        if self.desired_input_layouts is not None and self.input_layouts is None:
            raise ValueError("PrepareModuleInput: desired_input_layouts needs input_layouts of the same length")
        _check_lengths("PrepareModuleInput", "input_layouts", self.input_layouts, self.desired_input_layouts)
        if set(self.input_kwarg_layouts) != set(self.desired_input_kwarg_layouts):
            raise ValueError(
                f"PrepareModuleInput: input_kwarg_layouts names {sorted(self.input_kwarg_layouts)} and "
                f"desired_input_kwarg_layouts {sorted(self.desired_input_kwarg_layouts)}: give both for each argument"
            )
        for name, layout in (*self.input_kwarg_layouts.items(), *self.desired_input_kwarg_layouts.items()):
            if layout is not None:
                check_placements(layout, f"PrepareModuleInput: the layout of the argument {name!r}")

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        where = f"{type(self).__name__} on {type(module).__name__}"
        by_place = _passages(where, device_mesh, self.input_layouts or (), self.desired_input_layouts or ())
        by_name = {
            name: _passage(f"{where}, argument {name!r}", device_mesh, given, self.desired_input_kwarg_layouts[name])
            for name, given in self.input_kwarg_layouts.items()
        }
        on_output = OutputBoundary(device_mesh, None, self.use_local_output, where)

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if by_place and len(args) != len(by_place) and not by_name:
                raise ValueError(
                    f"{where}: the module got {len(args)} positional inputs, but input_layouts has {len(by_place)}; "
                    "give one per input, None for those to leave alone, or use input_kwarg_layouts for keywords"
                )
            moved = [on_output(passage(value)) for passage, value in zip(by_place, args, strict=False)]
            named = {
                name: on_output(by_name[name](value)) if name in by_name else value for name, value in kwargs.items()
            }
            return (*moved, *args[len(moved) :]), named

        if by_place or by_name:
            _platform.register_forward_pre_hook(module, before, with_kwargs=True)
        return module

    def __repr__(self) -> str:
        return described(
            self,
            input_layouts=self.input_layouts,
            desired_input_layouts=self.desired_input_layouts,
            input_kwarg_layouts=self.input_kwarg_layouts,
            desired_input_kwarg_layouts=self.desired_input_kwarg_layouts,
            use_local_output=self.use_local_output,
        )


class PrepareModuleOutput(ParallelStyle):
    """Outputs come under ``output_layouts`` when they are plain and leave under ``desired_output_layouts``.

    forward: the redistribution between the two; backward: the same between the gradients' layouts. ``None`` in a tuple
    leaves that output alone. ``use_local_output`` hands out plain blocks.
    """

    def __init__(
        self, *, output_layouts: ValueLayouts, desired_output_layouts: ValueLayouts, use_local_output: bool = True
    ) -> None:
        name = "PrepareModuleOutput"
        self.output_layouts = _one_per_value(output_layouts, f"{name}: output_layouts") or (None,)
        self.desired_output_layouts = _one_per_value(desired_output_layouts, f"{name}: desired_output_layouts") or (
            None,
        )
        self.use_local_output = use_local_output
        _check_lengths(name, "output_layouts", self.output_layouts, self.desired_output_layouts)

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        where = f"{type(self).__name__} on {type(module).__name__}"
        passages = _passages(where, device_mesh, self.output_layouts, self.desired_output_layouts)
        on_output = OutputBoundary(device_mesh, None, self.use_local_output, where)

        def after(_: Any, inputs: Any, outputs: Any) -> Any:
            del inputs
            if not isinstance(outputs, (tuple, list)):
                if len(passages) != 1:
                    raise ValueError(f"{where}: one output, but output_layouts has {len(passages)}; give one")
                return on_output(passages[0](outputs))
            if len(outputs) != len(passages):
                raise ValueError(
                    f"{where}: the module gave {len(outputs)} outputs, but output_layouts has {len(passages)}; give "
                    "one per output, None for those to leave alone"
                )
            moved = [on_output(passage(value)) for passage, value in zip(passages, outputs, strict=True)]
            return type(outputs)(*moved) if hasattr(outputs, "_fields") else type(outputs)(moved)

        _platform.register_forward_hook(module, after)
        return module

    def __repr__(self) -> str:
        return described(
            self,
            output_layouts=self.output_layouts,
            desired_output_layouts=self.desired_output_layouts,
            use_local_output=self.use_local_output,
        )


class PrepareModuleInputOutput(ParallelStyle):
    """:class:`PrepareModuleInput` and :class:`PrepareModuleOutput` in one."""

    def __init__(
        self,
        *,
        input_layouts: ValueLayouts = None,
        desired_input_layouts: ValueLayouts = None,
        input_kwarg_layouts: Mapping[str, Placements | None] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placements | None] | None = None,
        use_local_input: bool = False,
        output_layouts: ValueLayouts,
        desired_output_layouts: ValueLayouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        self.prepare_module_input.apply(module, device_mesh)
        return self.prepare_module_output.apply(module, device_mesh)

    def __repr__(self) -> str:
        before, after = self.prepare_module_input, self.prepare_module_output
        return described(
            self,
            input_layouts=before.input_layouts,
            desired_input_layouts=before.desired_input_layouts,
            input_kwarg_layouts=before.input_kwarg_layouts,
            desired_input_kwarg_layouts=before.desired_input_kwarg_layouts,
            use_local_input=before.use_local_output,
            output_layouts=after.output_layouts,
            desired_output_layouts=after.desired_output_layouts,
            use_local_output=after.use_local_output,
        )


def _one_per_value(layouts: Any, where: str) -> tuple[Any, ...] | None:
    if layouts is None:
        return None
    if isinstance(layouts, Placement):
        return (layouts,)
    if not isinstance(layouts, (tuple, list)):
        raise TypeError(f"{where}: give a layout, or a tuple with a layout or None for each value, got {layouts!r}")
    return tuple(None if item is None else check_placements(item, where) for item in layouts)


def _check_lengths(style: str, name: str, given: tuple[Any, ...] | None, wanted: tuple[Any, ...] | None) -> None:
    if len(given or ()) != len(wanted or ()):
        raise ValueError(
            f"{style}: {name} has {len(given or ())} entries and desired_{name} {len(wanted or ())}: give both for "
            "each value"
        )


def _passages(where: str, mesh: DeviceMesh, given: tuple[Any, ...], wanted: tuple[Any, ...]) -> list[Any]:
    return [
        _passage(f"{where}, value {place}", mesh, one, other)
        for place, (one, other) in enumerate(zip(given, wanted, strict=True))
    ]


def _passage(where: str, mesh: DeviceMesh, given: Any, wanted: Any) -> Any:
    return InputBoundary(
        mesh,
        None if given is None else per_axis(given, mesh),
        None if wanted is None or given is None else per_axis(wanted, mesh),
        where,
    )
