"""A lowered module: its calls are recorded once for each key and run as plain programs afterwards.

Note [Recording is a call]
The first call with a key runs by dispatch and is written down; its results count. Later calls run the tape. What cannot
be recorded faithfully has a reason instead of a tape and runs by dispatch, always. Ranks need not agree on which: a
tape does what dispatch does, in the same order, so that one rank may run by dispatch what another has recorded. They
see other local shapes, too, and record at other calls. Only comparisons are agreed on (``verify.py``).

Note [Recomputed calls]
What is computed again in backward must save what was saved before, and recomputation compares the two. A call that was
recorded saved distributed tensors, the same call from the tape plain ones. So the recomputation of a recorded call,
known by its input, runs by dispatch too.
"""

from __future__ import annotations

import random
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from hyper_parallel.core.lowering.carried import carrying_nothing
from hyper_parallel.core.lowering.foreign_hooks import find_foreign_hook
from hyper_parallel.core.lowering.guards import CannotGuard, Inputs, describe_call, is_recomputed_later
from hyper_parallel.core.lowering.held_values import Holdings
from hyper_parallel.core.lowering.module_facts import ModuleGuard
from hyper_parallel.core.lowering.module_writes import AttributesBefore
from hyper_parallel.core.lowering.program import Program, make_program
from hyper_parallel.core.lowering.recorder import Recorder
from hyper_parallel.core.lowering.tape import Tape
from hyper_parallel.core.lowering.verify import all_agree, meshes_of, run_verified
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.checks.taps import tapped

_platform = get_platform()
MOST_TAPES = 8


def _host_draws() -> tuple[Any, ...]:
    """Where the generators of Python and numpy stand."""
    name, words, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, np.asarray(words).tobytes(), *rest


def _containers(value: Any) -> set[int]:
    """The ids of the lists and dicts in nested ones and tuples."""
    if not isinstance(value, (list, tuple, dict)):
        return set()
    items = value.values() if isinstance(value, dict) else value
    found = {one for item in items for one in _containers(item)}
    return found if isinstance(value, tuple) else {id(value), *found}


class Refusal:
    """Why calls with a key run by dispatch."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Region:
    """One lowered module; see Note [Recording is a call]."""

    def __init__(
        self, path: str, module: Any, backend: str, verify_every: int | None, shared: dict[Any, Any] | None = None
    ) -> None:
        """``shared``: what equal programs of several regions share, compiled code."""
        self.path, self.module, self.backend, self.verify_every = path, module, backend, verify_every
        self._shared = {} if shared is None else shared
        self.known: dict[tuple[Any, ...], Program | Refusal] = {}
        self.num_calls = {"recorded": 0, "lowered": 0, "dispatched": 0, "verified": 0}
        self._calls = 0  # outside of backward, the same on every rank
        self._guard: ModuleGuard | None = None
        self._told: set[str] = set()
        self._recorded_on: list[weakref.ref[Any]] = []
        self._call: Callable[..., Any] = _platform.call_instead(module, self)

    # ---------------------------------------------------------------- calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if tapped.tap is not None or not _platform.can_record():
            return self._dispatch(args, kwargs)
        is_compared = False
        if self.verify_every and not _platform.runs_in_backward():
            self._calls += 1
            is_compared = self._calls % self.verify_every == 0
        inputs, found = self._find(args, kwargs)
        if is_compared:
            program = found if isinstance(found, Program) else None
            meshes = meshes_of(_platform.state_tensors(self.module), (args, kwargs))
            if all_agree(meshes, program is not None) and program is not None and inputs is not None:
                self.num_calls["verified"] += 1
                self.num_calls["lowered"] += 1
                return run_verified(self, program, inputs, lambda: self._call(*args, **kwargs), meshes)
        if inputs is None:
            return self._dispatch(args, kwargs)
        if found is None and not _platform.runs_in_backward():  # what is computed again may end in the middle
            return self._record(args, kwargs)
        if found is None or isinstance(found, Refusal) or self._was_dispatched(inputs):
            return self._dispatch(args, kwargs)
        self.num_calls["lowered"] += 1
        return found(inputs.tensors)

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Inputs | None, Program | Refusal | None]:
        """The call for the guards, None for one that they cannot compare; and what is known for its key."""
        for _ in range(2):
            if self._guard is None:
                self._guard = ModuleGuard(self.module)
            try:
                inputs = describe_call(self._guard, args, kwargs)
                return inputs, next((self.known[key] for key in inputs.known_as() if key in self.known), None)
            except CannotGuard as why:
                self._tell(f"runs by dispatch: {why}")
                return None, None
            except (KeyError, ValueError, TypeError, AttributeError):  # what was read is gone, or of another kind
                self._forget()
        return None, None

    def _dispatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.num_calls["dispatched"] += 1
        return self._call(*args, **kwargs)

    def _was_dispatched(self, inputs: Inputs) -> bool:
        """See Note [Recomputed calls]."""
        if not self._recorded_on or not _platform.runs_in_backward():
            return False
        first = inputs.tensors[0] if inputs.tensors else None
        return any(one() is first for one in self._recorded_on)

    def note_dispatch(self, inputs: Inputs) -> None:
        """A call that could be lowered runs by dispatch; see Note [Recomputed calls]."""
        if inputs.tensors:
            self._recorded_on = [one for one in self._recorded_on if one() is not None]
            self._recorded_on.append(weakref.ref(inputs.tensors[0]))

    # ---------------------------------------------------------------- recording

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fresh = ModuleGuard(self.module)
        if self._guard is None or not fresh.reads_the_same(self._guard):
            self._forget()
        self._guard = fresh
        inputs = describe_call(fresh, args, kwargs)
        if len(self.known) >= MOST_TAPES:
            self._tell(
                f"runs by dispatch: there are {MOST_TAPES} recordings already, each for other shapes, layouts or "
                "settings: pad inputs to a few lengths"
            )
            return self._dispatch(args, kwargs)
        reason = find_foreign_hook(self.module) or fresh.obstacle
        if reason is not None:
            self._refuse(inputs.key, reason)
            return self._dispatch(args, kwargs)
        recorder = Recorder()
        names = recorder.take_inputs(inputs)
        before, drawn, facts = AttributesBefore(fresh.modules), _host_draws(), (fresh.facts(), fresh.contents())
        given = Holdings(()).content((args, kwargs))
        self.note_dispatch(inputs)
        self.num_calls["recorded"] += 1
        forgetful = carrying_nothing(inputs.tensors if is_recomputed_later() else ())
        with forgetful, _platform.recording_calls(recorder, _platform, inputs.tensors):
            outputs = self._call(*args, **kwargs)
        if _host_draws() != drawn:
            recorder.refuse(
                "Python's or numpy's random numbers are drawn, and what they decide would be decided for good"
            )
        changed = before.find_change()
        if changed is not None:
            recorder.refuse(changed)
        elif (fresh.facts(), fresh.contents()) != facts:
            recorder.refuse("forward changes a value that it depends on, of an object or a global: return it instead")
        elif Holdings(()).content((args, kwargs)) != given or _containers(outputs) & _containers((args, kwargs)):
            recorder.refuse("forward changes or returns a list or dict that it is given: return a new one")
        made = recorder.finish(names, outputs)
        if recorder.reason is not None or made is None:
            self._refuse(inputs.key, recorder.reason or "its outputs cannot be written down")
        else:
            self.known[inputs.key] = make_program(*made, self.backend, self._tell, self._shared)
        return outputs

    def _refuse(self, key: tuple[Any, ...], reason: str) -> None:
        self.known[key] = Refusal(reason)
        self._tell(f"runs by dispatch: {reason}")

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            warnings.warn(f"lower: {self.path or 'the model'}: {reason}", RuntimeWarning, stacklevel=2)

    def _forget(self) -> None:
        self.known.clear()
        self._guard = None

    # ---------------------------------------------------------------- what a user sees

    @property
    def tapes(self) -> list[Tape]:
        """The recordings, in their order."""
        return [one.tape for one in self.known.values() if isinstance(one, Program)]

    @property
    def source(self) -> str:
        """The last recording as Python; its reasons where there is none."""
        if self.tapes:
            return self.tapes[-1].source(self.path.replace(".", "_") or "model")
        return "".join(f"# {reason}\n" for reason in self.refusals) or "# not called yet\n"

    @property
    def refusals(self) -> list[str]:
        """Why calls ran by dispatch, each reason once."""
        return sorted(self._told)

    def restore(self) -> None:
        """Run by dispatch from now on, as before ``lower``."""
        _platform.call_itself(self.module)
        self.known.clear()
