"""What a dry run says: figures as data, and whether the job fits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hyper_parallel.analysis.byte_sizes import byte_text
from hyper_parallel.analysis.memory_log import KINDS
from hyper_parallel.analysis.rank_run import Job, RankRun


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind in a step: alike in all that is said here. ``module`` has ``*`` for alike blocks."""

    phase: str
    module: str
    op: str
    axes: str
    shape: tuple[int, ...]
    dtype: str
    cause: str
    count: int
    num_bytes: int  # of this rank's inputs, all calls together
    sent_bytes: int  # what this rank puts on the wire, all calls together


@dataclass(frozen=True)
class DryRun:
    """One rank of a job, as it would run: memory, communication and operations of a step.

    ``ranks`` are those that do alike; ``rank`` is the one that was run. Bytes are those of the device.
    """

    model: str
    degrees: dict[str, int]
    world_size: int
    rank: int
    ranks: tuple[int, ...]
    batch: int
    length: int
    microbatches: int
    dtype: str
    recompute: bool
    optimizer: str
    device: str
    device_memory: int | None
    num_parameters: int
    num_local_parameters: int
    peak_bytes: int
    peak_by_kind: dict[str, int]
    peak_phase: str
    peak_module: str
    peak_line: str
    activations_by_module: dict[str, int]
    temporaries_by_module: dict[str, int]
    resting_bytes: int  # between steps
    flops_by_phase: dict[str, int]
    collectives: tuple[CollectiveRow, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory; True where none was given."""
        return self.device_memory is None or self.peak_bytes <= self.device_memory

    @property
    def missing_bytes(self) -> int:
        """By how much the peak exceeds the device's memory."""
        return 0 if self.device_memory is None else max(0, self.peak_bytes - self.device_memory)

    @property
    def flops(self) -> int:
        """Floating-point operations of a step on this rank; a multiplication and an addition are two."""
        return sum(self.flops_by_phase.values())

    @property
    def sent_bytes(self) -> int:
        """What this rank puts on the wire in a step."""
        return sum(row.sent_bytes for row in self.collectives)

    @property
    def num_collectives(self) -> int:
        return sum(row.count for row in self.collectives)

    def verdict(self) -> str:
        """Whether it fits, by how much, and what holds the bytes."""
        if self.device_memory is None:
            return f"peak {byte_text(self.peak_bytes)} on rank {self.rank}"
        limit = byte_text(self.device_memory)
        if self.fits:
            left = self.device_memory - self.peak_bytes
            return f"fits: peak {byte_text(self.peak_bytes)} of {limit}, {byte_text(left)} left on rank {self.rank}"
        held = sorted(self.peak_by_kind.items(), key=lambda item: -item[1])
        largest = ", ".join(f"{byte_text(size)} {kind}" for kind, size in held[:3])
        return (
            f"does not fit: peak {byte_text(self.peak_bytes)} exceeds {limit} by {byte_text(self.missing_bytes)} on "
            f"rank {self.rank}. It holds {largest}"
        )

    def peak_place(self) -> str:
        """Where the peak was reached, in words."""
        module = f" of {self.peak_module}" if self.peak_module else ""
        line = f" at {self.peak_line}" if self.peak_line else ""
        return f"in {self.peak_phase}{module}{line}"

    def as_data(self) -> dict[str, Any]:
        """Plain data for programs, with what follows from it; :meth:`from_data` reads it back."""
        derived = {
            "fits": self.fits,
            "missing_bytes": self.missing_bytes,
            "flops": self.flops,
            "sent_bytes": self.sent_bytes,
            "num_collectives": self.num_collectives,
        }
        return {**asdict(self), **derived}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> DryRun:
        given = {name: data[name] for name in cls.__dataclass_fields__}
        rows = tuple(CollectiveRow(**{**row, "shape": tuple(row["shape"])}) for row in given["collectives"])
        return cls(**{**given, "ranks": tuple(given["ranks"]), "collectives": rows, "notes": tuple(given["notes"])})

    def html(self) -> str:
        """The report as one page that needs nothing else."""
        from hyper_parallel.analysis.report_page import page

        return page([self])

    def __str__(self) -> str:
        from hyper_parallel.analysis.report_text import text

        return text(self)


def make_report(job: Job, run: RankRun, rank: int, ranks: tuple[int, ...], device_memory: int | None) -> DryRun:
    """The figures of a rank's run."""
    rows: dict[Any, list[int]] = {}
    for phase, path, axes, record in run.collectives:
        key = (phase, starred_path(path), record.op, axes, record.shape, record.dtype, record.asked_by)
        totals = rows.setdefault(key, [0, 0, 0])
        for index, value in enumerate((1, record.num_bytes, record.sent_bytes)):
            totals[index] += value
    optimizer = job.optimizer if isinstance(job.optimizer, str) else getattr(job.optimizer, "__name__", "none")
    return DryRun(
        model=job.source.name,
        degrees=_degrees(job) or {"dp_shard": 1},
        world_size=job.world_size,
        rank=rank,
        ranks=ranks,
        batch=job.batch,
        length=job.length,
        dtype=run.dtype,
        microbatches=job.microbatches,
        recompute=bool(job.recompute),
        optimizer=optimizer,
        device=job.device,
        device_memory=device_memory,
        num_parameters=run.num_parameters,
        num_local_parameters=run.num_local_parameters,
        peak_bytes=run.peak.num_bytes,
        peak_by_kind={kind: run.by_kind[kind] for kind in KINDS if kind in run.by_kind},
        peak_phase=run.peak.phase,
        peak_module=run.peak.path,
        peak_line=run.peak.line,
        activations_by_module=_largest_first(run.by_module["activations"]),
        temporaries_by_module=_largest_first(run.by_module["temporaries"]),
        resting_bytes=run.resting_bytes,
        flops_by_phase={phase: flops for phase, flops in run.flops.items() if flops},
        collectives=tuple(CollectiveRow(*key, *totals) for key, totals in rows.items()),
        notes=tuple(filter(None, [run.rank_spy.note()])),
    )


def _largest_first(by_path: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(by_path.items(), key=lambda item: (-item[1], item[0])))


def starred_path(path: str) -> str:
    """A path with alike blocks as one.

    >>> starred_path("blocks.11.attention"), starred_path("")
    ('blocks.*.attention', '(the model itself)')
    """
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path) or "(the model itself)"


def starred(by_path: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Bytes and number of modules by path, with alike blocks as one: ``blocks.*.attention``."""
    found: dict[str, tuple[int, int]] = {}
    for path, num_bytes in by_path.items():
        name = starred_path(path)
        before, count = found.get(name, (0, 0))
        found[name] = (before + num_bytes, count + 1)
    return dict(sorted(found.items(), key=lambda item: (-item[1][0], item[0])))


def _degrees(job: Job) -> dict[str, int]:
    """Those above 1; experts are on ranks that others name too."""
    return {axis: size for axis, size in (*job.degrees.sizes.items(), ("ep", int(job.degrees.ep))) if size > 1}
