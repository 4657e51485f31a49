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

    kind: Literal["python", "bytes", "tokens", "text", "chat", "synthetic"] = "python"
    """Python's own library sources; bytes of files; token files; text to tokenise; conversations; random tokens."""
    path: Text | None = None
    """The file or folder; not for python and synthetic, which need none."""
    tokenizer: Text | None = None
    """A tokenizer file, for text and chat."""
    length: Count = 512
    """Tokens of a sample."""
    packing: Flag = True
    """Put several short documents into one sample."""

    def problems(self) -> Iterator[Problem]:
        needs_path = self.kind not in ("python", "synthetic")
        if needs_path and self.path is None:
            yield Problem(("path", "kind"), f"is missing: kind = {self.kind!r} reads a file or folder")
        if not needs_path and self.path is not None:
            yield Problem(("path", "kind"), f"must not be given: kind = {self.kind!r} reads no file")
        needs_tokenizer = self.kind in ("text", "chat")
        if needs_tokenizer and self.tokenizer is None:
            yield Problem(("tokenizer", "kind"), f"is missing: kind = {self.kind!r} needs a tokenizer file")
        for key in ("path", "tokenizer"):
            value = getattr(self, key)
            if value is not None and not Path(value).exists():
                yield Problem((key,), f"must be a file or folder of this machine; there is no {value!r}")
