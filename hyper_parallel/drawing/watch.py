"""Making the scene of a model: from its parameters alone, or from one forward pass that is watched by hooks."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.comm_recorder import CommRecord, CommRecorder
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.drawing.scene import CommLine, ModuleLine, Piece, Scene
from hyper_parallel.platform import get_platform


def scene_of_parameters(model: Any) -> Scene:
    """The modules with parameters, as they are listed in the model."""
    lines = []
    for path, module in get_platform().get_cells_and_names(model):
        parameters = _own_pieces(module)
        if parameters:
            lines.append(ModuleLine(path, type(module).__name__, parameters))
    return Scene(type(model).__name__, list(lines))


def scene_of_run(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scene:
    """The modules and collectives of one forward pass without gradients, in the order of the run."""
    platform = get_platform()
    watcher = _Watcher(Scene(type(model).__name__))
    handles = []
    try:
        for path, module in platform.get_cells_and_names(model):
            handles += watcher.hook(path, module)
        with watcher.recorder, platform.no_grad():
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return watcher.scene


def piece_of(value: Any, name: str = "") -> Piece | None:
    """The first tensor in ``value``, as a piece; None if there is none."""
    platform = get_platform()
    if isinstance(value, DTensor):
        return Piece(tuple(value.shape), value._layout, name)
    if platform.is_tensor(value):
        return Piece(tuple(value.shape), None, name)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return next((piece for item in value if (piece := piece_of(item, name)) is not None), None)
    return None


def _own_pieces(module: Any) -> tuple[Piece, ...]:
    pieces = (piece_of(parameter, name) for name, parameter in get_platform().own_parameters(module).items())
    return tuple(piece for piece in pieces if piece is not None)


class _Watcher:
    """Four hooks per module: before and after the styles' own, on the way in and on the way out."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.recorder = CommRecorder()
        self._num_seen = 0
        self._entered: dict[str, Piece | None] = {}

    def hook(self, path: str, module: Any) -> list[Any]:
        platform = get_platform()
        parameters = _own_pieces(module)

        def before_styles(_: Any, args: Any, kwargs: Any) -> None:
            self._tell_collectives(_parent(path), None)

        def after_styles(_: Any, args: Any, kwargs: Any) -> None:
            entered = piece_of((args, kwargs))
            self._entered[path] = entered
            self._tell_collectives(path, entered)

        def outputs_made(_: Any, inputs: Any, outputs: Any) -> None:
            if not parameters:
                self._tell_collectives(path, None)
                return
            made = piece_of(outputs)
            reducing = self._tell_gathers(path)
            left = None if reducing else made  # what came out before the reduction is not known
            line = ModuleLine(path, type(module).__name__, parameters, self._entered.get(path), left)
            self.scene.lines.append(line)
            self._tell(path, reducing, made)

        def outputs_left(_: Any, inputs: Any, outputs: Any) -> None:
            self._tell_collectives(path, piece_of(outputs))

        return [
            platform.register_forward_pre_hook(module, before_styles, prepend=True, with_kwargs=True),
            platform.register_forward_pre_hook(module, after_styles, with_kwargs=True),
            platform.register_forward_hook(module, outputs_made, prepend=True),
            platform.register_forward_hook(module, outputs_left),
        ]

    def _tell_collectives(self, path: str, result: Piece | None) -> None:
        """Lines for the collectives since the last call; ``result`` is what the last of them led to."""
        self._tell(path, self._new_records(), result)

    def _tell_gathers(self, path: str) -> list[CommRecord]:
        """Lines for what a layer with weights gathered before it computed; the reductions behind that are returned."""
        new = self._new_records()
        count = next((place for place, record in enumerate(new) if "reduce" in record.op), len(new))
        self._tell(path, new[:count], None)
        return new[count:]

    def _new_records(self) -> list[CommRecord]:
        new = self.recorder.records[self._num_seen :]
        self._num_seen += len(new)
        return new

    def _tell(self, path: str, records: list[CommRecord], result: Piece | None) -> None:
        for number, record in enumerate(records, 1):
            reason = f"inside {path}" if record.asked_by == "explicit" else record.asked_by
            led_to = result if number == len(records) else None
            self.scene.lines.append(CommLine(path, record.op, record.sent_bytes, _without_numbers(reason), led_to))


def _without_numbers(reason: str) -> str:
    """The reason without a block's number, so that blocks that do alike look alike."""
    return ".".join(name for name in reason.split(".") if not name.isdigit())


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
