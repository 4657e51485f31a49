"""The checkpoints of a run: one folder each; the newest and chosen ones stay, and a run goes on from the newest."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.distributed_checkpoint.storage.cleanup import checkpoints, latest, remove_checkpoint
from hyper_parallel.launch.notes import note_checkpoint
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.config.sections.checkpoint import AUTO, NEVER

if TYPE_CHECKING:
    from hyper_parallel.parallel.parallel import Parallel
    from hyper_parallel.trainer.config.run_config import RunConfig

__all__ = ["Checkpoints"]

_NAME = re.compile(r"step-(\d+)")


class Checkpoints:
    """Saves and loads of one run. Every rank calls every method."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config.checkpoint
        self.folder = config.checkpoint_folder
        self.hold_frozen = config.model.lora is None or config.model.lora.save_frozen
        self._running: tuple[int, Any] | None = None

    def to_resume(self) -> Path | None:
        """The checkpoint to go on from, None: begin anew."""
        if self._config.resume == NEVER:
            return None
        if self._config.resume != AUTO:
            return Path(self._config.resume)
        found = latest(self.folder)
        newer = self._behind(found)
        if newer and get_platform().get_rank() == 0:
            so = "the run begins anew" if found is None else f"the run goes on from {found}"
            print(f"not whole, and passed over: {', '.join(map(str, newer))}; {so}", flush=True)
        return found

    def _behind(self, one: Path | None) -> list[Path]:
        found = checkpoints(self.folder)
        return found[found.index(one) + 1 :] if one in found else found

    def instead_of(self, damaged: Path) -> str:
        """What to write in the config to go on without a checkpoint whose content is damaged."""
        older = [one for one in checkpoints(self.folder) if one not in (damaged, *self._behind(damaged))]
        value, what = (older[-1], "go on from the one before") if older else (NEVER, "begin anew")
        return f'To {what} write checkpoint.resume = "{value}"'

    def is_due(self, step: int) -> bool:
        """Whether the config wants a checkpoint of this step."""
        return bool(self._config.every) and step % self._config.every == 0

    def save(self, run: Parallel, optimizer: Any, step: int, *, at_once: bool = False, **more: Any) -> float:
        """Save the state behind ``step``; the seconds that training waited.

        In the background unless ``at_once`` or the config says otherwise. The one before is finished first.
        """
        begin = time.perf_counter()
        self.finish()
        background = self._config.background and not at_once
        where = self.folder / f"step-{step}"
        handle = run.save(where, optimizer, background=background, frozen=self.hold_frozen, **more)
        if background:
            self._running = step, handle
        else:
            self._completed(step)
        return time.perf_counter() - begin

    def finish(self) -> None:
        """Wait for a save in the background; raise what went wrong with it."""
        if self._running is not None:
            (step, handle), self._running = self._running, None
            handle.result()
            self._completed(step)

    def poll(self) -> None:
        """Take note of a save in the background that has ended, if one has."""
        if self._running is not None and self._running[1].done():
            self.finish()

    def _completed(self, step: int) -> None:
        note_checkpoint(step)
        if get_platform().get_rank() == 0:
            self._remove_old()

    def _remove_old(self) -> None:
        found = [path for path in checkpoints(self.folder) if _NAME.fullmatch(path.name)]
        for path in found[: -self._config.keep_last]:
            step = int(_NAME.fullmatch(path.name)[1])  # type: ignore[index]
            if not self._config.keep_every or step % self._config.keep_every:
                remove_checkpoint(path)
