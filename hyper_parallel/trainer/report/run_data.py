"""What is known of a run: everything that lies in its folder, read once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hyper_parallel.trainer.metrics import METRICS_FILE, count_damaged_lines, read_metrics
from hyper_parallel.trainer.report.parts import damaged_parts, read_parts

__all__ = ["CONFIG_FILE", "LAYOUT_FILE", "ConfigValue", "RunData"]

CONFIG_FILE = "resolved.toml"
LAYOUT_FILE = "layout.svg"
_QUIET_SECONDS = 120  # after which a run that wrote nothing is said to have ended


@dataclass(frozen=True)
class ConfigValue:
    """A line of a config."""

    section: str
    key: str
    value: str
    origin: str


@dataclass
class RunData:
    """A run's folder."""

    folder: Path
    events: list[Mapping[str, Any]]
    config: list[ConfigValue] = field(default_factory=list)
    layout: str = ""
    parts: list[dict[str, Any]] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)  # what could not be read

    @classmethod
    def read(cls, folder: Path) -> RunData:
        """All that a folder has; an error if it is none of a run."""
        if not folder.is_dir():
            raise ValueError(f"there is no folder '{folder}'; give the folder of a run, which log.folder names")
        if not (folder / METRICS_FILE).is_file():
            raise ValueError(
                f"'{folder}' has no {METRICS_FILE}, so no run has written there; give the folder of a run, which "
                "log.folder names"
            )
        config, layout = (_text(folder / name) for name in (CONFIG_FILE, LAYOUT_FILE))
        num_lines = count_damaged_lines(folder)
        damaged = [f"{num_lines} line{'s' * (num_lines > 1)} of {METRICS_FILE}"] if num_lines else []
        damaged += [name for name, text in ((CONFIG_FILE, config), (LAYOUT_FILE, layout)) if text is None]
        return cls(
            folder,
            list(read_metrics(folder)),
            _config_values(config or ""),
            layout or "",
            read_parts(folder),
            [*damaged, *damaged_parts(folder)],
        )

    # ---------------------------------------------------------------- events

    def of(self, event: str) -> list[Mapping[str, Any]]:
        """All events of a name, in the order of time."""
        return self._by_event.get(event, [])

    @cached_property
    def _by_event(self) -> dict[str, list[Mapping[str, Any]]]:
        found: dict[str, list[Mapping[str, Any]]] = {}
        for one in self.events:
            found.setdefault(one["event"], []).append(one)
        return found

    def last(self, event: str) -> Mapping[str, Any]:
        """The last one; empty if there is none."""
        found = self.of(event)
        return found[-1] if found else {}

    def series(self, name: str, event: str = "step") -> tuple[list[int], list[float]]:
        """Steps and values of a number that events have."""
        found = [(one["step"], one[name]) for one in self.of(event) if one.get(name) is not None]
        return [step for step, _ in found], [value for _, value in found]

    @property
    def start(self) -> Mapping[str, Any]:
        """How the run was started last."""
        return self.last("start")

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def num_steps(self) -> int:
        return int(self.start.get("steps", 0))

    @property
    def step(self) -> int:
        """The last step that is written down."""
        return max((one["step"] for one in self.events if one["event"] in ("step", "end")), default=0)

    @property
    def seconds(self) -> float:
        """All steps together, evaluations and saves among them."""
        return float(sum(one["seconds"]["all"] for one in self.of("step")))

    # ---------------------------------------------------------------- how it ended

    @property
    def end(self) -> Mapping[str, Any]:
        """The end of the last attempt; empty while it goes on, or where it was killed."""
        for one in reversed(self.events):
            if one["event"] == "end":
                return one
            if one["event"] == "start":
                break
        return {}

    @property
    def status(self) -> str:
        """ "finished", "stopped", "failed", "running", or "silent": no word for a while, and no end."""
        if self.end:
            return str(self.end["status"])
        last = self.events[-1]["time"] if self.events else 0
        return "running" if time.time() - last < _QUIET_SECONDS else "silent"

    @property
    def verdict(self) -> str:
        """How it went, in one line."""
        of = f"step {self.step} of {self.num_steps}" if self.num_steps else f"step {self.step}"
        reason = str(self.end.get("reason") or "")
        lines = reason.strip().splitlines()
        return {
            "finished": f"Finished: all {self.num_steps} steps",
            "stopped": f"Stopped at {of}{f' by {reason}' if reason else ''}; its state is saved",
            "failed": f"Failed at {of}: {lines[0] if lines else 'no reason was left'}",
            "running": f"Running: {of}",
            "silent": f"No end is written: killed, or waiting, at {of}",
        }[self.status]

    # ---------------------------------------------------------------- memory

    @property
    def peaks(self) -> dict[int, int]:
        """The peak of each rank, as it said last."""
        lists = [one["memory_per_rank"] for one in self.of("step") if "memory_per_rank" in one]
        told = lists[-1] if lists else []
        return {**{part["rank"]: part["memory"]["peak"] for part in self.parts}, **dict(enumerate(told))}

    @property
    def hosts(self) -> list[str]:
        found = [self.last("environment").get("host"), *(part["host"] for part in self.parts)]
        return sorted({host for host in found if host})


def _text(path: Path) -> str | None:
    """The text of a file, "" if there is none, None if it is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError):
        return None


def _config_values(text: str) -> list[ConfigValue]:
    """The lines of a config that says where each value is from."""
    section, found = "", []
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[] ")
        elif line and not line.startswith("#"):
            written, _, origin = line.rpartition("  # ")
            key, _, value = written.partition(" = ")
            found.append(ConfigValue(section, key.strip(), value.strip(), origin.strip()))
    return found
