"""``[checkpoint]``: when the run is saved, what is kept, where it goes on."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from hyper_parallel.trainer.config.section import STRICT, Count, Flag, Section, Text, Whole

__all__ = ["AUTO", "NEVER", "CheckpointConfig"]

AUTO, NEVER = "auto", "never"


@dataclass(config=STRICT, kw_only=True, frozen=True)
class CheckpointConfig(Section):
    """When the run is saved, what is kept, where it goes on."""

    folder: Text | None = None
    """Where checkpoints go; without it, checkpoints/ in the folder of the run, log.folder."""
    every: Whole = 500
    """Steps between saves; 0: only at the end and when the run is stopped."""
    keep_last: Count = 2
    """How many of the newest stay."""
    keep_every: Whole = 0
    """Checkpoints of steps that this divides stay for good; 0: none."""
    background: Flag = True
    """Training goes on while a save is written."""
    resume: Text = AUTO
    """ "auto": from the newest of this run's folder, or anew; "never": anew; else the checkpoint to go on from."""
    export_hugging_face: Flag = False
    """At the end, also write a folder that from_pretrained opens."""
