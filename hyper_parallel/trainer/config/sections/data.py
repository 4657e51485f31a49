"""``[data]``: what is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from hyper_parallel.trainer.config.section import STRICT, Count, Flag, Problem, Section, Text

__all__ = ["DataConfig"]


@dataclass(config=STRICT, kw_only=True, frozen=True)
class DataConfig(Section):
    """What is trained on, and how long a sample is."""

    kind: Literal["corpus", "text", "chat", "tokens", "synthetic"] = "corpus"
    """corpus (Python's own library), text (files or folders), chat, tokens (a token file) or synthetic."""
    path: Text | None = None
    """The file or folder: text, chat, tokens."""
    tokenizer: Text = "bytes"
    """ "bytes", a tokenizer.json, or the folder that has one."""
    length: Count = 512
    """Tokens of a sample."""
    packing: Flag = True
    """chat: several conversations in one sample, kept apart."""

    def problems(self) -> Iterator[Problem]:
        needs_path = self.kind not in ("corpus", "synthetic")
        if needs_path and self.path is None:
            yield Problem(("path", "kind"), f"is missing: kind = {self.kind!r} reads a file or folder")
        if not needs_path and self.path is not None:
            yield Problem(("path", "kind"), f"must not be given: kind = {self.kind!r} reads no file")
        for key in ("path", "tokenizer"):
            value = getattr(self, key)
            if value not in (None, "bytes") and not Path(value).exists():
                yield Problem((key,), f"must be a file or folder of this machine; there is no {value!r}")
