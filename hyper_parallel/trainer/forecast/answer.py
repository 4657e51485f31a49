"""``python -m hyper_parallel.trainer.forecast.answer``: the figures of a run, by a process that runs on PyTorch.

Reads ``{"config": ..., "world_size": ..., ...}`` from its input and prints lines of JSON as they are known: the state,
the peak of a step, and where that does not fit the cheapest change that would. Who asked may stop listening.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hyper_parallel.analysis.byte_sizes import byte_text, parse_bytes
from hyper_parallel.analysis.rank_run import run_rank
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.config.run_config import RunConfig
from hyper_parallel.trainer.forecast.job import job_of, state_of

_TEMPORARY = ("activations", "temporaries")


def main() -> None:
    asked = json.loads(sys.stdin.read())
    config = TypeAdapter(RunConfig).validate_json(json.dumps(asked["config"]))
    device = asked["device"] or get_platform().get_device_type()
    limit, says = _limit(config, asked)
    try:
        job = job_of(config, asked["world_size"], device)
        try:
            state = state_of(job, config)
        except (ValueError, TypeError) as error:
            if not asked["is_the_run"]:
                raise
            _tell(refused=" ".join(str(error).split()))  # as the ranks would say
            return
        _tell(device_memory=limit, device_memory_is=says, **state)
        peak = _peak(config, asked["world_size"], device)
        _tell(**peak)
    except Exception as error:
        _tell(note=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return
    if limit is not None and peak["peak"] > limit:
        _tell(change=_cheapest_change(config, asked["world_size"], device, limit))


def _tell(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def _limit(config: RunConfig, asked: dict[str, Any]) -> tuple[int | None, str]:
    """Bytes for one rank, and what they are."""
    given = config.launch.device_memory
    if given is not None:
        return parse_bytes(given), "launch.device_memory"
    if asked["device"] is not None:  # of a framework that this process does not run on
        return None, ""
    found = get_platform().device_memory()
    if get_platform().get_device_type() != "cpu":
        return found, "the device's own"
    share = asked["local_size"]
    return (
        (None, "") if found is None else (found // share, "free on this host" + f", for each of {share}" * (share > 1))
    )


def _peak(config: RunConfig, world_size: int, device: str) -> dict[str, Any]:
    run = run_rank(job_of(config, world_size, device), 0)
    module = f" of {run.peak.path}" if run.peak.path else ""
    return {
        "peak": run.peak.num_bytes,
        "activations": sum(run.by_kind.get(kind, 0) for kind in _TEMPORARY),
        "peak_place": f"in {run.peak.phase}{module}",
    }


def _cheapest_change(config: RunConfig, world_size: int, device: str, limit: int) -> str:
    for text, changed, size in _changes(config, world_size):
        try:
            peak = _peak(changed, size, device)["peak"]
        except (ValueError, RuntimeError):
            continue
        if peak <= limit:
            return f"with {text} the peak is {byte_text(peak)}"
    return ""


def _changes(config: RunConfig, world_size: int) -> Iterator[tuple[str, RunConfig, int]]:
    """Configs that need less, those that cost the least first: (what to write, the config, its ranks)."""
    sizes = config.parallel.degrees.fit(world_size).sizes
    rows = math.ceil(config.train.batch / (sizes["dp_replicate"] * sizes["dp_shard"]))
    parts = given = config.microbatches(world_size)
    ways: list[tuple[dict[str, dict[str, Any]], int]] = []
    while (parts := parts * 2) <= rows:
        ways.append(({"train": {"microbatches": parts}}, world_size))
    if sizes["dp_replicate"] > 1:
        shard = sizes["dp_replicate"] * sizes["dp_shard"]
        ways.append(({"parallel": {"dp_replicate": 1, "dp_shard": shard}}, world_size))
    if config.recompute.mode == "none":
        ways.append(({"recompute": {"mode": "full"}}, world_size))
        if rows > given:
            ways.append(({"recompute": {"mode": "full"}, "train": {"microbatches": rows}}, world_size))
    if sizes["dp_shard"] % 2 == 0:
        ways.append(({"parallel": {"tp": 2 * sizes["tp"], "dp_shard": sizes["dp_shard"] // 2}}, world_size))
    for factor in (2, 4, 8, 16):
        shard = sizes["dp_shard"] * factor
        if config.train.batch >= sizes["dp_replicate"] * shard:
            ways.append(({"parallel": {"dp_shard": shard}}, world_size * factor))
    for way, size in ways:
        launch = replace(config.launch, nproc=size, hosts=1, host_rank=0)
        try:
            sections = {name: replace(getattr(config, name), **values) for name, values in way.items()}
            changed = replace(config, **sections, launch=launch)
        except ValidationError:
            continue
        text = ", ".join(
            f"{section}.{key} = {json.dumps(value)}" for section, values in way.items() for key, value in values.items()
        )
        yield f"{text} on {size} ranks" if size != world_size else text, changed, size


if __name__ == "__main__":
    main()
