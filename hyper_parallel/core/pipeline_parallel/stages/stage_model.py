"""The stages of a model that a rank holds: the model's own class and forward, with what others hold taken out.

Note [Hollow models]
The forward of the whole model runs on every stage, so positions, masks and whatever else is made of the inputs are made
where they are needed. Blocks of other stages hand their input on, modules before the blocks give shapes only
(``holes.py``), the first own block takes the received stream in place of its input, and the first block behind the own
ones leaves the run by an exception: what runs behind the blocks, such as a soft cap, must not touch the stream. A rank
with several stages has one model with the blocks of all of them, and each call says which stage runs.

All of it is around the call of a module, in a subclass of its class: hooks of an emptied module do not run, and what a
block computes again in backward (``recompute``, or a model's own checkpointing, which is around the call too) is the
block with the stream that it was given, whichever micro-batch is at work by then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hyper_parallel.core.modules.first_names import note_first_names
from hyper_parallel.core.modules.left_early import LeftEarly
from hyper_parallel.core.pipeline_parallel.stages.holes import hole_of, refusing_gradients
from hyper_parallel.core.pipeline_parallel.stages.losses_of_blocks import gives_loss
from hyper_parallel.core.pipeline_parallel.stages.refusals import check_call
from hyper_parallel.core.pipeline_parallel.stages.split import Split
from hyper_parallel.core.pipeline_parallel.stages.stream_arguments import stream_of, with_stream
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.tensor_arguments import note_stage

__all__ = ["StageModel", "refuse_stages"]

_platform = get_platform()
_ORDER = "let the model's list hold the blocks in the order in which they run, all in use, or give split_stages blocks="
_ROLE = "_hyper_parallel_stage_role"
_kinds: dict[tuple[type, type], type] = {}
_kinds_lock = threading.Lock()


def refuse_stages(model: Any, modules: Iterable[Any]) -> None:
    """Raise for a model of which a stage was made: what is left is not the whole."""
    if any(isinstance(one, _StageBlock) for one in modules):
        raise ValueError(f"StageModel: this {type(model).__name__} has been cut already; build it again")


class _Passage:
    """What the modules of a rank know about the run at work."""

    def __init__(self, num_outputs: int) -> None:
        self.num_outputs = num_outputs
        self.stage = -1  # none runs
        self.received: Any = None
        self.is_entered = False
        self.is_peek = False  # the call of the first block of the stage is enough
        self.output: Any = None  # of the stage's own block that ran last
        self.losses: list[Any] = []  # of the stage's own blocks
        self.blank: Any = None  # what the blocks before the stage's own give: the hole that the first was given


class _Role:
    """One module's part in the stages: of a block which stage is its own and whether it is the first there, of what
    runs before the blocks what it gives where stage 0 is not at work."""

    def __init__(self, path: str, passage: _Passage, stage: int = 0, is_entry: bool = False, hole: Any = None) -> None:
        self.path, self.passage, self.stage, self.is_entry, self.hole = path, passage, stage, is_entry, hole
        self.gives_loss = False


class _StageBlock:
    """A block: it runs in its own stage, hands its input on in later ones and ends the run in earlier ones."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        role: _Role = vars(self)[_ROLE]
        passage = role.passage
        if role.stage == passage.stage:
            if role.is_entry:
                args, kwargs = _entered(role, args, kwargs)
            else:
                _check_handed_on(role, stream_of(role.path, args, kwargs))
            outputs = super().__call__(*args, **kwargs)  # type: ignore[misc]
            passage.output = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
            if role.gives_loss:
                passage.losses.append(outputs[1])
            else:
                _check_outputs(role.path, outputs)
            return outputs
        if passage.stage < 0:
            raise RuntimeError(
                f"the block '{role.path}' ran outside of a call of its stage: call the StageModel, not the model; "
                "recompute() blocks before the model is cut, or parallelize(recompute='full'), in place of a "
                "checkpoint around them in the model's forward"
            )
        stream = stream_of(role.path, args, kwargs)
        if role.stage > passage.stage:
            _check_handed_on(role, stream)
            raise LeftEarly(stream)
        if passage.is_entered:
            raise RuntimeError(
                f"the block '{role.path}' of an earlier stage ran behind blocks of this one: {_ORDER}; models whose "
                "blocks run several times cannot be cut"
            )
        passage.blank = stream if passage.blank is None else passage.blank
        if role.gives_loss:
            return passage.blank, 0.0  # its own stage adds it
        return (passage.blank, *[None] * (passage.num_outputs - 1)) if passage.num_outputs else passage.blank


def _check_outputs(path: str, outputs: Any) -> None:
    """Refuse what a block gives beside the stream and a model adds up: it is not there of blocks of other stages."""
    stream, *beside = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    if not _platform.is_tensor(stream):
        raise TypeError(
            f"the block '{path}' gives a {type(outputs).__name__} whose stream is not first: let it give the stream "
            "alone, or first in a tuple"
        )
    for one in beside:
        if _platform.is_tensor(one) and not one.ndim and _platform.needs_grad(one):
            raise ValueError(
                f"the block '{path}' gives a number with a gradient beside the stream, and those of other stages' "
                "blocks are not there: if the model adds them to its loss, let the blocks have gives_loss = True"
            )


def _check_handed_on(role: _Role, stream: Any) -> None:
    """Refuse a model that computes between its blocks: a residual around a block is lost where the block is empty."""
    given = role.passage.output
    if stream is given or given is None or not _platform.is_tensor(stream):
        return
    if tuple(stream.shape) != tuple(given.shape) or not _platform.shares_memory(stream, given):
        raise ValueError(
            f"what the block '{role.path}' takes is not what the block before it gave, and what a model computes "
            "between its blocks, such as a residual around them, is not there on other stages: move it into the blocks "
            "(the stream is a block's first argument, or hidden_states=, or the first tensor given by name)"
        )


def _entered(role: _Role, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the first block of the stage that runs: with what was received."""
    passage = role.passage
    if passage.is_entered and passage.received is not None:
        raise RuntimeError(
            f"the block '{role.path}' was called twice in one run, so stages cannot tell what comes in: models "
            "whose blocks run several times cannot be cut"
        )
    passage.is_entered = True
    if passage.is_peek:
        raise LeftEarly(stream_of(role.path, args, kwargs))
    return (args, kwargs) if passage.received is None else with_stream(role.path, args, kwargs, passage.received)


class _BeforeBlocks:
    """A module before the blocks, which stage 0 runs; in others it gives the shape of its output."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        role: _Role = vars(self)[_ROLE]
        if role.passage.stage > 0:
            given, received = stream_of(role.path, args, kwargs), role.passage.received
            like = given if received is None else received
            hole = role.hole(given, like.device, None if received is None else received.dtype)
            return refusing_gradients(hole, role.path)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


class _BehindBlocks:
    """A module behind the blocks on a rank without the last stage, which ends before it is called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        role: _Role = vars(self)[_ROLE]
        raise ValueError(
            f"'{role.path}' was called on stage {role.passage.stage}, and it is on the last one: it was taken for what "
            "runs behind the blocks, as a run with the least inputs does not call it before them (a tower for pictures "
            "beside ids, for instance); leave what needs it out of the batch, or use tp, dp_shard or cp for this model"
        )


class StageModel:
    """Stages ``stages`` of a split model, one or several, made in place: what belongs to others is taken out of it.

    The model may have its styles and recomputation already, and may be without memory: then ``materialize`` gives only
    this part memory (``number_initial_values`` on the whole model before, for the values of one device). ``wrap`` is
    called with the model once it holds this rank's part alone: ``fully_shard`` for instance. Names of parameters stay
    those of the whole model. A call takes the stream of the stage before (None on the first) and the inputs of the
    whole model, and gives the stream, or on the last stage what the model gives. No communication.
    """

    def __init__(
        self,
        model: Any,
        split: Split,
        stages: int | Sequence[int],
        wrap: Callable[[Any], Any] | None = None,
    ) -> None:
        self.stages = (stages,) if isinstance(stages, int) else tuple(stages)
        for index in self.stages:
            if not 0 <= index < split.num_stages:
                raise ValueError(f"StageModel: stage {index} of a model in {split.num_stages} stages; count from 0")
        self.model, self.split = model, split
        self._passage = _Passage(split.num_outputs)
        self._keeps_cache = bool(getattr(getattr(model, "config", None), "use_cache", False))
        self._hollow(wrap)
        note_stage(self)

    @property
    def losses(self) -> list[Any]:
        """The auxiliary losses of the blocks of the stage that ran last."""
        return self._passage.losses

    def named_parameters(self) -> dict[str, Any]:
        """The parameters of this rank's stages, each under the first name that it has in the whole model."""
        return self.split.own_parameters(self.model)

    def __call__(self, stream: Any = None, /, *args: Any, **inputs: Any) -> Any:
        """Run the only stage. forward: the collectives of its modules; backward: theirs."""
        if len(self.stages) > 1:
            raise ValueError(f"this rank has the stages {self.stages}: call run(stage, stream, ...)")
        return self.run(self.stages[0], stream, *args, **inputs)

    def run(self, index: int, stream: Any, /, *args: Any, **inputs: Any) -> Any:
        """Run stage ``index``. forward: the collectives of its modules; backward: theirs."""
        split = self.split
        check_call(inputs)
        if index not in self.stages:
            raise ValueError(f"stage {index} is not one of this rank's, {self.stages}")
        if (stream is None) != (index == 0):
            what = "takes no stream, the first one makes it" if index == 0 else "takes the stream of the one before"
            raise ValueError(f"stage {index} of {split.num_stages} {what}: got {type(stream).__name__}")
        return self._run(index, stream, args, inputs)

    def peek(self, index: int, /, **inputs: Any) -> Any:
        """What stands in for the stream that stage ``index`` is to receive: zeros of its global shape."""
        self._passage.is_peek = True
        try:
            return self._run(index, None, (), inputs)
        finally:
            self._passage.is_peek = False

    def _run(self, index: int, stream: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
        split, passage = self.split, self._passage
        if self._keeps_cache:
            inputs = {"use_cache": False, **inputs}
        passage.stage, passage.received, passage.is_entered, passage.losses = index, stream, False, []
        try:
            outputs = self.model(*args, **inputs)
        except LeftEarly as left:
            self._check_entered(index)
            return left.outputs
        finally:
            passage.stage, passage.received, passage.blank, passage.output = -1, None, None, None
        self._check_entered(index)
        if index < split.num_stages - 1:
            raise RuntimeError(
                f"stage {index} ran to the model's end without a call of '{split.stages[index + 1][0]}', the block "
                f"behind its own: {_ORDER}"
            )
        return outputs

    def _check_entered(self, index: int) -> None:
        if not self._passage.is_entered:
            raise RuntimeError(
                f"stage {index} ended without a call of its first block '{self.split.stages[index][0]}': {_ORDER}"
            )

    def _hollow(self, wrap: Callable[[Any], Any] | None) -> None:
        split, modules = self.split, dict(_platform.get_cells_and_names(self.model))
        refuse_stages(self.model, modules.values())
        holes = {path: hole_of(path, modules[path]) for path in split.prologue}
        for number, paths in enumerate(split.stages):
            for path in paths if number not in self.stages else ():
                for name, module in modules.items():
                    if name == path or name.startswith(f"{path}."):
                        _platform.take_out_tensors(module)
        for number, paths in ((0, split.prologue), (split.num_stages - 1, split.epilogue)):
            for path in paths if number not in self.stages else ():
                _platform.take_out_tensors(modules[path])
        if wrap is not None:
            wrap(self.model)
        for number, paths in enumerate(split.stages):
            for path in paths:
                role = _Role(path, self._passage, number, is_entry=path == paths[0])
                role.gives_loss = gives_loss(modules[path])
                _change(modules[path], _StageBlock, role)
        for path in split.epilogue if split.num_stages - 1 not in self.stages else ():
            _change(modules[path], _BehindBlocks, _Role(path, self._passage))
        for path, hole in holes.items():
            _change(modules[path], _BeforeBlocks, _Role(path, self._passage, hole=hole))
        note_first_names(self.model, split.first_names)


def _change(module: Any, role_kind: type, role: _Role) -> None:
    kind = type(module)
    with _kinds_lock:
        if (role_kind, kind) not in _kinds:
            _kinds[role_kind, kind] = type(kind.__name__, (role_kind, kind), {"__module__": kind.__module__})
    module.__class__ = _kinds[role_kind, kind]
    object.__setattr__(module, _ROLE, role)
