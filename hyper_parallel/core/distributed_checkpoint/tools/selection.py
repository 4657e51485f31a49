"""Which part of a checkpoint is rewritten, and how its chunks are cut in the new one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hyper_parallel.core.distributed_checkpoint.foreign.key_mapping import name_pattern
from hyper_parallel.core.dtensor.layout import chunk_interval
from hyper_parallel.platform.shared.region import Region, Shape


class Selection:
    """The part of a source whose names fit one of the patterns, with a prefix taken off the names."""

    def __init__(self, source: Any, only: Sequence[str] = (), strip: str = "") -> None:
        self.source = source
        patterns = [name_pattern(pattern) for pattern in only]

        def taken(names: Iterable[str]) -> dict[str, str]:
            chosen = [name for name in names if not patterns or any(pattern.fullmatch(name) for pattern in patterns)]
            by_new_name = {name.removeprefix(strip): name for name in chosen}
            lost = sorted(set(chosen) - set(by_new_name.values()))
            if lost:
                raise ValueError(f"without '{strip}' two names are the same: {', '.join(lost)} and others")
            return by_new_name

        known = source.known()
        self.tensors = taken(known)
        self.object_names = taken(source.objects())
        self._known = {name: known[old] for name, old in self.tensors.items()}
        if only and not self.tensors and not self.object_names:
            raise ValueError(f"nothing in '{source.path}' fits {', '.join(only)}")

    def known(self) -> dict[str, tuple[Shape, str]]:
        return self._known

    def boxes(self, name: str) -> list[Region]:
        return self.source.boxes(self.tensors[name])

    def view(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> np.ndarray[Any, Any]:
        return self.source.view(self.tensors[name], offsets, sizes)

    def read(self, name: str, offsets: Sequence[int], out: np.ndarray[Any, Any]) -> None:
        out[...] = self.view(name, offsets, out.shape)


# ---------------------------------------------------------------------------------------------------------------------
# Where chunks are cut
# ---------------------------------------------------------------------------------------------------------------------


class LayoutsByName:
    """Layouts by name for a mesh: ``LayoutsByName({"dp": 2, "tp": 4}, {"layers.*.weight": ["tp", "None"]})``.

    A dim may be sharded by several axes, ``"dp+tp"``. Names that no pattern fits are not sharded.
    """

    def __init__(self, mesh: Mapping[str, int], patterns: Mapping[str, Sequence[str]]) -> None:
        self.names, self.shape = list(mesh), tuple(mesh.values())
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"a mesh has one or more axes of size 1 or more, got {dict(mesh)}")
        self._patterns = []
        for pattern, aliases in patterns.items():
            axes = [tuple(self._axis(name, pattern) for name in _axis_names(alias)) for alias in aliases]
            used = [axis for dim in axes for axis in dim]
            if len(set(used)) < len(used):
                raise ValueError(f"'{pattern}={','.join(aliases)}' uses an axis twice")
            self._patterns.append((pattern, name_pattern(pattern), tuple(axes)))

    def _axis(self, name: str, pattern: str) -> int:
        if name not in self.names:
            raise ValueError(
                f"the sharding of '{pattern}' names the axis {name!r}; the mesh has {', '.join(self.names)}"
            )
        return self.names.index(name)

    def of(self, name: str, shape: Shape) -> tuple[tuple[int, ...], ...] | None:
        """For each dim the axes that shard it; None when nothing is said about the name."""
        for pattern, compiled, axes in self._patterns:
            if compiled.fullmatch(name):
                if len(axes) != len(shape):
                    raise ValueError(f"'{pattern}' gives {len(axes)} dims, and '{name}' has shape {shape}")
                return axes
        return None

    def boxes(self, axes: tuple[tuple[int, ...], ...], shape: Shape) -> Iterator[tuple[Region, int]]:
        """(box, lowest rank that holds it) of each block that is not empty."""
        for rank in range(math.prod(self.shape)):
            place = np.unravel_index(rank, self.shape)
            if any(place[axis] for axis in range(len(self.shape)) if not any(axis in dim for dim in axes)):
                continue
            offsets, sizes = [], []
            for size, dim in zip(shape, axes, strict=True):
                start = 0
                for axis in dim:
                    at, size = chunk_interval(size, self.shape[axis], int(place[axis]))
                    start += at
                offsets.append(start)
                sizes.append(size)
            if 0 not in sizes:
                yield Region(tuple(offsets), tuple(sizes)), rank

    def check_used(self, names: Iterable[str]) -> None:
        """Raise if a pattern fits none of the names."""
        names = list(names)
        idle = [pattern for pattern, compiled, _ in self._patterns if not any(map(compiled.fullmatch, names))]
        if idle:
            raise ValueError(
                f"no tensor fits the sharding of {', '.join(map(repr, idle))}; there are {', '.join(names[:20])}"
            )

    def layout(self, axes: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
        """As ``Layout.to_dict`` has it."""
        return {
            "device_type": "cpu",
            "mesh_shape": list(self.shape),
            "mesh_dim_names": self.names,
            "rank_list": list(range(math.prod(self.shape))),
            "cuts": [list(dim) for dim in axes],
            "partials": [None] * len(self.shape),
        }


def _axis_names(alias: str) -> list[str]:
    return [] if alias in ("None", "-", "") else alias.split("+")
