"""One step, looked at closely: its phases, modules, collectives and memory on this rank, in a file of the run's folder.

Every rank writes its own part; who makes the page or the trace reads all of them.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.comm_recorder import sent_bytes
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.drawing.scene import op_in_words
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.report.parts import PARTS_FOLDER

if TYPE_CHECKING:
    from hyper_parallel.parallel.parallel import Parallel

__all__ = ["StepRecording"]

_BLOCK = re.compile(r"\D\.\d+$")
_PHASES = {"data": "data", "forward_backward": "forward and backward", "optimizer": "optimizer"}


class StepRecording:
    """What one step of this rank did."""

    def __init__(self, run: Parallel, step: int) -> None:
        self.step = step
        self._run = run
        self._axes = _axes_by_ranks(run.mesh)
        self._spans: list[tuple[str, str, float, float]] = []  # row, name, begin, end
        self._collectives: list[tuple[str, str, int, float]] = []  # kind, axes, bytes sent, seconds
        self._memory: dict[str, int] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around the step."""
        with ExitStack() as stack:
            stack.callback(get_platform().time_collectives(self._communicated))
            for handle in self._watch_modules():
                stack.callback(handle.remove)
            yield

    def _communicated(
        self, op: str, ranks: Any, shape: Any, dtype: str, num_bytes: int, async_op: bool, begin: float, end: float
    ) -> None:
        kind, axes = op_in_words(op), self._axes.get(tuple(sorted(ranks))) or f"{len(ranks)} ranks"
        self._collectives.append((kind, axes, sent_bytes(op, num_bytes, len(ranks)), end - begin))
        self._spans.append(("in flight" if async_op else "collectives", f"{kind} over {axes}", begin, end))

    def _watch_modules(self) -> Iterator[Any]:
        """The model, and the blocks of it that are numbered."""
        platform = get_platform()
        for path, module in platform.get_cells_and_names(self._run.model):
            if path and not (_BLOCK.search(path) and not _BLOCK.search(path.rpartition(".")[0].rpartition(".")[0])):
                continue
            begins: list[float] = []
            yield platform.register_forward_pre_hook(module, _noting(begins))
            yield platform.register_forward_hook(module, self._noting_end(path, begins))

    def _noting_end(self, path: str, begins: list[float]) -> Any:
        row, name = ("modules", path) if path else ("model", "forward")

        def left(*_: Any) -> None:
            if begins:
                self._spans.append((row, name, begins.pop(), time.perf_counter()))

        return left

    def measure_memory(self, optimizer: Any) -> None:
        """Called while the gradients of the step are there."""
        platform = get_platform()
        parameters = self._run.parameters()
        gradients = [one for one in self._run.gradients() if one is not None]
        trained = [one for one in parameters if platform.requires_grad(one)]
        slots = [slot for one in trained for slot in platform.optimizer_slots(optimizer, one).values()]
        kinds = {"parameters": parameters, "gradients": gradients, "optimizer state": slots}
        self._memory = {kind: sum(_local_bytes(one) for one in tensors) for kind, tensors in kinds.items()}

    def write(self, folder: Path, begin: float, seconds: dict[str, float]) -> None:
        """Write this rank's part; ``begin`` is when the step began, ``seconds`` are those of its phases, in order."""
        platform = get_platform()
        rank = platform.get_rank()
        at, phases = begin, []
        for name, words in _PHASES.items():
            if name in seconds:
                phases.append(("phases", words, at, at + seconds[name]))
                at += seconds[name]
        part = {
            "step": self.step,
            "rank": rank,
            "host": socket.gethostname(),
            "begin": time.time() - (time.perf_counter() - begin),  # of the wall clock, which hosts share
            "place": {axis: self._run.mesh.get_local_rank(axis) for axis in self._run.mesh.mesh_dim_names},
            "spans": [
                [row, name, round((start - begin) * 1e6), round((end - begin) * 1e6)]
                for row, name, start, end in [*phases, *self._spans]
            ],
            "communication": self._by_kind_and_axes(),
            "memory": {**self._memory, "peak": platform.peak_memory()},
        }
        path = folder / PARTS_FOLDER / f"rank-{rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(part), encoding="utf-8")
        os.replace(temporary, path)

    def _by_kind_and_axes(self) -> list[dict[str, Any]]:
        found: dict[tuple[str, str], list[float]] = {}
        for kind, axes, sent, seconds in self._collectives:
            row = found.setdefault((kind, axes), [0, 0, 0.0])
            row[0], row[1], row[2] = row[0] + 1, row[1] + sent, row[2] + seconds
        return [
            {"kind": kind, "axes": axes, "calls": int(calls), "sent": int(sent), "seconds": round(seconds, 6)}
            for (kind, axes), (calls, sent, seconds) in found.items()
        ]


def _noting(begins: list[float]) -> Any:
    def entered(*_: Any) -> None:
        begins.append(time.perf_counter())

    return entered


def _local_bytes(tensor: Any) -> int:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.numel() * tensor.itemsize if get_platform().is_tensor(tensor) else 0


def _axes_by_ranks(mesh: Any) -> dict[tuple[int, ...], str]:
    """The name of the axes along which ranks lie in line, fewest axes first; axes of one rank have no line."""
    names = [name for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True) if size > 1]
    found: dict[tuple[int, ...], str] = {}
    for count in range(1, len(names) + 1):
        for axes in combinations(names, count):
            found.setdefault(tuple(sorted(mesh.line(axes))), " x ".join(axes))
    return found
