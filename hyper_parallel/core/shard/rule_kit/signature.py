"""What a rule says about an operator: which dims go together, and what may be cut, reduced or left pending.

A signature labels the dims of the tensor inputs and outputs with letters, as an einsum does. Dims with one letter are
cut together; a dim labelled None stays whole. ``matmul`` of two matrices is ``mk,kn->mn`` with k reduced by a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.layout import Layout, Shape

Labels = tuple["str | None", ...]
LetterAxes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TensorSpec:
    """What a rule knows of a distributed argument."""

    layout: Layout
    shape: Shape
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class OpCall:
    """One call of an operator, with :class:`TensorSpec` in place of distributed tensors."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: tuple[TensorSpec, ...]  # in the order of appearance, lists included
    outputs: tuple[Shape, ...]  # the global shapes of the tensor results

    def bind(self, *names: str, **defaults: Any) -> dict[str, Any]:
        """The arguments by name: ``names`` in positional order, then the keywords; ``defaults`` for those not given."""
        bound = dict(defaults)
        bound.update(zip(names, self.args, strict=False))
        bound.update(self.kwargs)
        return bound


@dataclass(frozen=True)
class LocalCall:
    """What a local implementation gets: the function, its arguments with plain blocks, and how letters were cut."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    mesh: DeviceMesh
    axes: LetterAxes
    inputs: tuple[Layout, ...]  # the layouts of the blocks, in the order of OpCall.tensors
    outputs: tuple[Layout, ...]
    input_shapes: tuple[Shape, ...]  # global
    output_shapes: tuple[Shape, ...]  # global
    # The tensor that the operator changes, itself: write into it with operators of the framework and return it. Its
    # ``.shape`` is global; the block in ``args`` is an alias that need not share its gradient history.
    written: Any = None

    def plain(self) -> Any:
        """The function as it is called; what it writes into is the tensor itself."""
        if self.written is None:
            return self.func(*self.args, **self.kwargs)
        return self.func(self.written, *self.args[1:], **self.kwargs)

    def local_output_shape(self, index: int = 0) -> Shape:
        """The shape of this rank's block of an output."""
        return self.outputs[index].local_shape(self.output_shapes[index])

    def counts_here(self, index: int = 0) -> bool:
        """Whether this rank is the one that adds whole terms (a bias) to a pending sum; on all ranks if none is
        pending.
        """
        return self.mesh.leads(axis for axis, op in enumerate(self.outputs[index].partials) if op == "sum")

    def group(self, letter: str) -> Any:
        """The group over which ``letter`` is cut, None when it is whole."""
        axes = self.axes.get(letter, ())
        return self.mesh.get_group(axes) if axes else None


@dataclass(frozen=True)
class Signature:
    """Which cuts of the inputs give which cuts of the outputs by a purely local call.

    ``inputs`` and ``outputs`` label the dims, one tuple per tensor. A letter that is in the inputs but not in the
    outputs may be cut only if ``reduces`` names the reduction that is then pending on the outputs, or ``handled`` says
    that ``local`` communicates itself. Letters in ``even`` may only be cut into equal parts. ``linear`` lists sets of
    inputs that may be pending sums together, all other inputs being whole: ``add`` has ({0, 1},), ``mul`` ({0}, {1}).
    ``local(call)`` replaces the plain call, where arguments must change or blocks must communicate.
    Letters in ``divisors`` may only be cut into a number of parts that divides the number given there. ``writes`` is 0
    when the operator changes its first argument without returning it, as ``x[i] = y`` does. ``rewrite(call)``, for
    operators on one tensor that comes first, gives the function (None: the same), the other arguments and the keywords
    for the blocks; it is asked once per plan, with specs in place of tensors, so a call costs no more than a plain one.
    ``needs_local(call)``, asked likewise, says whether ``local`` is needed on this rank; without it, it always is.
    ``offers`` are further axes that may cut a letter, though they cut other dims, or none, of the tensors that came:
    where moving a shard to another dim is cheaper than gathering it.
    ``updates`` are inputs that the operator changes besides, such as running statistics: where they had to be brought
    into another layout for the call, what was written is brought back.
    """

    inputs: tuple[Labels, ...]
    outputs: tuple[Labels, ...]
    reduces: Mapping[str, str] = field(default_factory=dict)
    handled: frozenset[str] = frozenset()
    even: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    local: Callable[[LocalCall], Any] | None = None
    divisors: Mapping[str, int] = field(default_factory=dict)
    writes: int | None = None
    rewrite: Callable[[LocalCall], tuple[Any, tuple[Any, ...], dict[str, Any]]] | None = None
    needs_local: Callable[[LocalCall], bool] | None = None
    updates: tuple[int, ...] = ()
    offers: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)


def letters(count: int, start: int = 0) -> tuple[str, ...]:
    """``count`` different letters.

    >>> letters(3)
    ('a', 'b', 'c')
    """
    return tuple(_letter(index) for index in range(start, start + count))


def _letter(index: int) -> str:
    return chr(ord("a") + index) if index < 26 else f"x{index}"


def without(labels: Labels, dims: Sequence[int]) -> Labels:
    """The labels with those of ``dims`` replaced by None."""
    return tuple(None if dim in dims else label for dim, label in enumerate(labels))


def broadcast_labels(shapes: Sequence[Shape], output: Shape) -> tuple[Labels, ...]:
    """Labels of inputs that broadcast to ``output``, whose dims are a, b, c, ...; stretched dims are None.

    >>> broadcast_labels([(4, 3), (3,), (4, 1)], (4, 3))
    (('a', 'b'), ('b',), ('a', None))
    """
    out = letters(len(output))
    return tuple(
        tuple(
            out[len(output) - len(shape) + dim] if size == output[len(output) - len(shape) + dim] else None
            for dim, size in enumerate(shape)
        )
        for shape in shapes
    )
