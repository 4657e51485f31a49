"""From files and ``--set`` to a checked config, or all mistakes at once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hyper_parallel.trainer.config.known_model import problems_with_model
from hyper_parallel.trainer.config.merging import merge
from hyper_parallel.trainer.config.mistakes import ConfigError, Finding, Mistake, dotted, finding_of, mistakes_of
from hyper_parallel.trainer.config.run_config import RunConfig
from hyper_parallel.trainer.config.section import Problem
from hyper_parallel.trainer.config.toml_layers import Key, TomlProblem, file_layers, given_layer, option_layer

__all__ = ["LoadedConfig", "load_config"]

_MOST_ROUNDS = 8


@dataclass(frozen=True)
class LoadedConfig:
    """A checked config, and where each of its values was written."""

    config: RunConfig
    places: Mapping[Key, str]  # what is not here has its default
    path: str = ""

    def mistake(self, what: str, *keys: str) -> Mistake:
        """One that is found later; the first key is where it is reported, and all are what it is about."""
        return Mistake(_place(finding_of(Problem(keys, what)), self.places, self.path), keys[0], what)


def load_config(
    path: str | os.PathLike[str], sets: Sequence[str] = (), options: Mapping[str, tuple[str, Any]] | None = None
) -> LoadedConfig:
    """Read and check a config; all that is wrong is one :class:`ConfigError`.

    ``sets`` are texts ``"section.key=value"``, as ``--set`` takes them; ``options`` are command line options that stand
    for a key: ``{"--nproc": ("launch.nproc", 4)}``. Later ones count, and all of them count before the file.
    """
    mistakes: list[Mistake] = []
    try:
        layers = file_layers(Path(path))
    except TomlProblem as problem:
        raise ConfigError([Mistake(problem.where, problem.key, problem.what)]) from None
    for text in sets:
        try:
            layers.append(given_layer(text))
        except TomlProblem as problem:
            mistakes.append(Mistake(problem.where, problem.key, problem.what))
    layers += [option_layer(key, value, name) for name, (key, value) in (options or {}).items()]
    values, places = merge(layers, RunConfig)
    config, findings = _check(values)
    for finding in findings:
        mistakes.append(Mistake(_place(finding, places, str(path)), dotted(finding.key), finding.what))
    if config is None or mistakes:
        raise ConfigError(sorted(mistakes, key=_reading_order))
    return LoadedConfig(config, places, str(path))


def _check(values: dict[str, Any]) -> tuple[RunConfig | None, list[Finding]]:
    """The config, or what is wrong with it.

    Checks between keys need the keys. So what is wrong is taken out and the rest is looked at again; what is then said
    about a key that was taken out, or that a misspelt one meant, does not count.
    """
    adapter = TypeAdapter(RunConfig)
    findings: list[Finding] = []
    doubtful: set[Key] = set()
    left = deepcopy(values)
    for _ in range(_MOST_ROUNDS):
        try:
            # As JSON: from Python, strict sections take neither lists for tuples nor tables for sections.
            config = adapter.validate_json(json.dumps(left, default=str))
            found = [finding_of(problem) for problem in problems_with_model(config)]
            findings += [finding for finding in found if not _follows(finding, doubtful)]
            return (None if findings else config), findings
        except ValidationError as error:
            found = mistakes_of(error, RunConfig)
        meant = {finding.meant for finding in found if finding.meant is not None}
        doubtful |= meant | {key[:depth] for key in meant for depth in range(1, len(key))}
        new = [finding for finding in found if not _follows(finding, doubtful)]
        findings += new
        doubtful |= {finding.key for finding in new}
        taken_out = [_take_out(left, finding.key) for finding in found]
        if not any(taken_out):
            break
    return None, findings


def _follows(finding: Finding, doubtful: set[Key]) -> bool:
    """Whether it may be only because of a key that was taken out, itself or one below it."""
    return any(wrong[: len(key)] == key for key in finding.concerns for wrong in doubtful)


def _take_out(values: Any, key: Key) -> bool:
    """Remove the value at a key; what lies in a list goes with the list."""
    for depth, part in enumerate(key):
        if isinstance(values, list) or not isinstance(values, dict) or part not in values:
            return False
        if depth == len(key) - 1 or isinstance(values[part], list):
            del values[part]
            return True
        values = values[part]
    return False


def _place(finding: Finding, places: Mapping[Key, str], path: str) -> str:
    """Where the key was written; for one that was not, its section, or else what makes it a mistake."""
    key = finding.key
    above = [key[:depth] for depth in range(len(key), 0, -1)]
    below = [one for one in places if one[: len(key)] == key]
    return next(
        (places[one] for one in [key, *below, *above, *sorted(finding.concerns, key=dotted)] if one in places), path
    )


def _reading_order(mistake: Mistake) -> tuple[bool, str, int]:
    file, _, line = mistake.where.rpartition(":")
    is_line = line.isdigit()
    return mistake.where.startswith("--"), file if is_line else mistake.where, int(line) if is_line else 0
