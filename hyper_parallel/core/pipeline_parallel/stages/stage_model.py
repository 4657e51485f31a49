"""A stage of a model: the model's own class and forward, with the modules of other stages emptied.

Note [Hollow models]
The forward of the whole model runs on every stage, so positions, masks and whatever else is made of the inputs are made
where they are needed. Blocks of other stages hand their input on, modules before the blocks give shapes only
(``holes.py``), the first own block takes the received stream in place of its input, and the first block behind the own
ones leaves the run by an exception: what runs behind the blocks, such as a soft cap, must not touch the stream.

All of it is around the call of a module, in a subclass of its class: hooks of an emptied module do not run, and what a
block computes again in backward (``recompute``, or a model's own checkpointing, which is around the call too) is the
block with the stream that it was given, whichever micro-batch is at work by then.
"""

from __future__ import annotations

import threading
from typing import Any

from hyper_parallel.core.modules.first_names import note_first_names
from hyper_parallel.core.pipeline_parallel.stages.holes import hole_of
from hyper_parallel.core.pipeline_parallel.stages.refusals import check_call
from hyper_parallel.core.pipeline_parallel.stages.split import Split
from hyper_parallel.core.pipeline_parallel.stages.stream_arguments import stream_of, with_stream
from hyper_parallel.platform import get_platform

__all__ = ["StageModel"]

_platform = get_platform()
_ROLE = "_hyper_parallel_stage_role"
_kinds: dict[tuple[type, type], type] = {}
_kinds_lock = threading.Lock()


class _StageDone(Exception):
    """Carries the stream out of the model. An ``Exception``: hooks that must always run do so for no other."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self.stream = stream


class _Passage:
    """What the modules of one stage know about the run at work."""

    def __init__(self, num_outputs: int) -> None:
        self.num_outputs = num_outputs
        self.is_running = False
        self.received: Any = None
        self.is_entered = False
        self.blank: Any = None  # what the emptied blocks before the own ones give: the hole that the first was given


class _Role:
    """One module's part in a stage."""

    def __init__(self, path: str, passage: _Passage, is_behind: bool = False, hole: Any = None) -> None:
        self.path, self.passage, self.is_behind, self.hole = path, passage, is_behind, hole


class _Emptied:
    """A block of another stage."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        role: _Role = vars(self)[_ROLE]
        if not role.passage.is_running:
            raise RuntimeError(
                f"the block '{role.path}' belongs to another stage of this model: call the StageModel, not the model"
            )
        stream = stream_of(role.path, args, kwargs)
        if role.is_behind:
            raise _StageDone(stream)
        passage = role.passage
        if passage.is_entered:
            raise RuntimeError(
                f"the block '{role.path}' of an earlier stage ran behind blocks of this one: give split_stages blocks= "
                "in the order in which they run; models whose blocks run several times cannot be cut"
            )
        passage.blank = stream if passage.blank is None else passage.blank
        return (passage.blank, *[None] * (passage.num_outputs - 1)) if passage.num_outputs else passage.blank


class _Hole:
    """A module before the blocks that stage 0 has."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        role: _Role = vars(self)[_ROLE]
        return role.hole(stream_of(role.path, args, kwargs))


class _Entered:
    """The first block of a stage: it takes what was received."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        role: _Role = vars(self)[_ROLE]
        passage = role.passage
        if not passage.is_running:
            raise RuntimeError(
                f"the block '{role.path}' ran outside of a call of its stage: call the StageModel, not the model, and "
                "recompute() blocks before the model is cut"
            )
        if passage.is_entered and passage.received is not None:
            raise RuntimeError(
                f"the block '{role.path}' was called twice in one run, so stages cannot tell what comes in: models "
                "whose blocks run several times cannot be cut"
            )
        passage.is_entered = True
        if passage.received is not None:
            args, kwargs = with_stream(role.path, args, kwargs, passage.received)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


class StageModel:
    """Stage ``index`` of a split model, made in place: what belongs to other stages is taken out of ``model``.

    The model may have its styles and recomputation already, and may be without memory: then ``materialize`` gives only
    this part memory (``number_initial_values`` on the whole model before, for the values of one device). Names of
    parameters stay those of the whole model. A call takes the stream of the stage before (None on the first) and the
    inputs of the whole model, and gives the stream, or on the last stage what the model gives. No communication.
    """

    def __init__(self, model: Any, split: Split, index: int) -> None:
        if not 0 <= index < split.num_stages:
            raise ValueError(f"StageModel: stage {index} of a model in {split.num_stages} stages; count from 0")
        self.model, self.split, self.index = model, split, index
        self._passage = _Passage(split.num_outputs)
        self._keeps_cache = bool(getattr(getattr(model, "config", None), "use_cache", False))
        self._hollow()

    @property
    def is_first(self) -> bool:
        """Whether the stage has the model's inputs."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage gives the model's outputs."""
        return self.index == self.split.num_stages - 1

    def named_parameters(self) -> dict[str, Any]:
        """The parameters of this stage, each under the first name that it has in the whole model."""
        return self.split.own_parameters(self.model)

    def __call__(self, stream: Any = None, /, *args: Any, **inputs: Any) -> Any:
        """Run the stage. forward: the collectives of its modules; backward: theirs."""
        check_call(inputs)
        if (stream is None) != self.is_first:
            what = "takes no stream, the first one makes it" if self.is_first else "takes the stream of the one before"
            raise ValueError(f"stage {self.index} of {self.split.num_stages} {what}: got {type(stream).__name__}")
        if self._keeps_cache:
            inputs = {"use_cache": False, **inputs}
        passage = self._passage
        passage.is_running, passage.received, passage.is_entered = True, stream, False
        try:
            outputs = self.model(*args, **inputs)
        except _StageDone as done:
            self._check_entered()
            return done.stream
        finally:
            passage.is_running, passage.received, passage.blank = False, None, None
        self._check_entered()
        if not self.is_last:
            behind = self.split.stages[self.index + 1][0]
            raise RuntimeError(
                f"stage {self.index} ran to the model's end without a call of '{behind}', the block behind its own: "
                "give split_stages blocks= in the order in which they run"
            )
        return outputs

    def _check_entered(self) -> None:
        if not self._passage.is_entered:
            raise RuntimeError(
                f"stage {self.index} ended without a call of its first block '{self.split.stages[self.index][0]}': "
                "give split_stages blocks= in the order in which they run"
            )

    def _hollow(self) -> None:
        split, modules = self.split, dict(_platform.get_cells_and_names(self.model))
        own = split.stages[self.index]
        behind = None if self.is_last else split.stages[self.index + 1][0]
        if isinstance(modules[own[0]], (_Emptied, _Entered)):
            raise ValueError(f"StageModel: this {type(self.model).__name__} has been cut already; build it again")
        for path in split.blocks:
            if path not in own:
                inside = [one for name, one in modules.items() if name == path or name.startswith(f"{path}.")]
                _change(modules[path], _Emptied, _Role(path, self._passage, is_behind=path == behind))
                for module in inside:
                    _platform.take_out_tensors(module)
        if not self.is_first:
            for path in split.prologue:
                hole = hole_of(path, modules[path])
                _change(modules[path], _Hole, _Role(path, self._passage, hole=hole))
                _platform.take_out_tensors(modules[path])
        _change(modules[own[0]], _Entered, _Role(own[0], self._passage))
        if not self.is_last:
            for path in split.epilogue:
                _platform.take_out_tensors(modules[path])
        note_first_names(self.model, split.first_names)


def _change(module: Any, role_kind: type, role: _Role) -> None:
    kind = type(module)
    with _kinds_lock:
        if (role_kind, kind) not in _kinds:
            _kinds[role_kind, kind] = type(kind.__name__, (role_kind, kind), {"__module__": kind.__module__})
    module.__class__ = _kinds[role_kind, kind]
    object.__setattr__(module, _ROLE, role)
