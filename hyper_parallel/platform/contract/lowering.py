"""What a framework must provide: recording a module's calls as a plain program, and running it in their place."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any


class LoweredPrograms:
    """Recording and running programs; ``core/lowering`` says what is recorded and when a recording may be used."""

    grad_mode: Any  # a context for True or False: whether gradients are recorded

    @staticmethod
    def recording_calls(recorder: Any, platform: Any, inputs: Any) -> Any:
        """A context: ``recorder`` is told of all that this thread calls; ``inputs`` must not be written to."""

    @staticmethod
    def can_record() -> Any:
        """Whether calls of this thread may be recorded and replaced now: not where tensors have no memory."""

    @staticmethod
    def known_as(tensor: Any) -> Any:
        """The object that stands for a tensor while calls are recorded."""
        return tensor

    @staticmethod
    def attributes_of(tensor: Any) -> dict[str, Any]:
        """What a program has set on a tensor besides its values."""
        return {}

    @staticmethod
    def is_dense(tensor: Any) -> bool:
        """Whether a tensor has one memory, with strides, that holds its values as they are."""
        return True

    @staticmethod
    def obstacle_in(module: Any) -> str | None:
        """What a module does that cannot be recorded; None where that is nothing."""
        return None

    @staticmethod
    def own_attributes() -> frozenset[str]:
        """Attributes of modules in which the framework keeps its own accounts."""
        return frozenset()

    @staticmethod
    def saves_otherwise() -> Any:
        """Whether hooks see what is saved for backward: recomputation, or saved tensors on the host."""

    @staticmethod
    def saving_as_ever() -> Any:
        """A context in which no such hooks see what is saved."""
        return nullcontext()

    @staticmethod
    def is_framework_constant(value: Any) -> Any:
        """Whether a value of the framework's own types stands for itself: a dtype, a device, a group."""

    @staticmethod
    def ambient_key() -> Any:
        """What operators depend on besides their arguments, as far as it may differ from call to call."""

    @staticmethod
    def ambient_state() -> Any:
        """What must stay as it is while a program is recorded."""

    @staticmethod
    def facts_of(tensors: Any) -> Any:
        """Of each tensor or block: shape, strides, dtype, device, whether it needs a gradient and is a leaf."""

    @staticmethod
    def tensor_names(module: Any) -> Any:
        """(table, name) of the module's own parameters and buffers."""

    @staticmethod
    def values_at(places: Any) -> Any:
        """What modules see under names; a place is (module, table, name)."""

    @staticmethod
    def hooks_of(module: Any) -> Any:
        """The functions that run before and behind the module's own forward and backward."""

    @staticmethod
    def run_locally(program: Any, args: Any) -> Any:
        """Call a recorded program on the blocks of DTensors."""

    @staticmethod
    def compiled(program: Any, failed: Any, identity: Any, shared: Any, reach: Any = None) -> Any:
        """A program as compiled code, made at its first call; where that fails, ``failed(why)`` is told.

        Programs of one ``identity`` that are called with tensors of the same facts have their code in common, in
        ``shared``. ``reach``: for each result which inputs its gradient reaches; None: all results the same.
        """

    @staticmethod
    def call_instead(module: Any, call: Any) -> Any:
        """Let ``call`` answer calls of the module; how the module is called itself."""

    @staticmethod
    def call_itself(module: Any) -> None:
        """Undo :meth:`call_instead`."""

    @staticmethod
    def is_called_otherwise(module: Any) -> Any:
        """Whether something answers calls of the module in its place."""

    @staticmethod
    def why_no_backend(backend: str) -> str | None:
        """Why programs cannot be run by ``backend`` here; None where they can."""

    @staticmethod
    def get_draw_state() -> Any:
        """The state of the framework's generators."""

    @staticmethod
    def set_draw_state(state: Any) -> None:
        """Return to a state that :meth:`get_draw_state` gave."""

    @staticmethod
    def gradients_of_sum(outputs: Any, inputs: Any) -> Any:
        """The gradients of the sum of all elements of all blocks of ``outputs``; None where there is none."""

    @staticmethod
    def relative_difference(one: Any, other: Any) -> Any:
        """The largest difference of two blocks, relative to the largest value of ``other``."""

    @staticmethod
    def rounding(tensor: Any) -> Any:
        """How many times coarser than float32 the tensor's dtype rounds, at least 1."""

    @staticmethod
    def repeatability() -> float:
        """How far apart results of the same operators on the same tensors may be, relative; 0: the same bits."""
        return 0.0
