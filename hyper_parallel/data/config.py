"""The section ``[data]`` of a run: what to read, with which tokenizer, in samples of which length."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

__all__ = ["DataConfig", "SourceConfig"]

_STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True, strict=True)
_Positive = Annotated[int, Field(ge=1)]
_Share = Annotated[float, Field(ge=0, lt=1)]
_Kind = Literal["corpus", "text", "chat", "tokens", "synthetic"]


@dataclass(config=_STRICT, kw_only=True, frozen=True)
class SourceConfig:
    """One source of a mixture."""

    kind: _Kind
    """corpus (Python's own library), text (files, folders, records), chat, tokens (a token file) or synthetic."""
    path: str | tuple[str, ...] | None = None
    """A file or folder, or several: text, chat, tokens."""
    pattern: str = "*"
    """Which files of a folder are read, as in "*.py"."""
    text_field: str = "text"
    """The field of a record that has the text."""
    chat_template: str | None = None
    """"chatml", a Jinja file, or "none"; without it the tokenizer's own (ChatML for bytes)."""
    too_long: Literal["error", "truncate"] = "error"
    """What to do with a conversation that is longer than a sample."""
    ends: str | None = None
    """tokens: the .npy file with the place behind each document's last token; by default next to the token file."""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """tokens: the type of its numbers."""
    vocab_size: _Positive | None = None
    """tokens, synthetic: how many ids there are; by default the largest in the token file and one, or 256."""
    num_samples: _Positive = 1024
    """synthetic: how many samples."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """The share of this source in a mixture, relative to the others."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths, always as several."""
        return () if self.path is None else (self.path,) if isinstance(self.path, str) else self.path

    @model_validator(mode="after")
    def _check(self) -> SourceConfig:
        if self.kind in ("text", "chat", "tokens") and not self.paths:
            raise ValueError(f'kind = "{self.kind}" needs path: the file or folder to read')
        if self.kind in ("corpus", "synthetic") and self.paths:
            raise ValueError(f'kind = "{self.kind}" reads no path; for files of your own write kind = "text"')
        if self.kind == "tokens" and len(self.paths) > 1:
            raise ValueError('kind = "tokens" reads one path; several token files are a mixture')
        return self


@dataclass(config=_STRICT, kw_only=True, frozen=True)
class DataConfig(SourceConfig):
    """What a run is trained on. ``sources`` makes it a mixture; the fields of a source are then theirs."""

    kind: Literal["corpus", "text", "chat", "tokens", "synthetic", "mixture"] = "corpus"  # type: ignore[assignment]
    """corpus (Python's own library), text (files, folders, records), chat, tokens, synthetic, or mixture."""
    tokenizer: str = "bytes"
    """"bytes", a tokenizer.json, or the folder that has one."""
    length: _Positive = 512
    """Tokens of a sample."""
    isolate: bool = True
    """Whether the documents in a sample are kept from seeing each other; false: a sample is one stretch of text."""
    packing: bool = True
    """chat: several conversations in one sample, kept apart; false: one, filled up with padding."""
    pad: Literal["longest", "length"] = "longest"
    """Fill batches up to their longest sample, or to length."""
    sources: tuple[SourceConfig, ...] = ()
    """mixture: what it is made of."""
    validation: _Share = 0.0
    """The share of the samples that is set apart for evaluation."""
    validation_path: str | tuple[str, ...] | None = None
    """Data for evaluation from files of its own, read as path is."""
    cache: str | None = None
    """The folder for prepared data; by default HYPER_PARALLEL_CACHE or the user's cache."""

    @model_validator(mode="after")
    def _check_whole(self) -> DataConfig:
        if (self.kind == "mixture") != bool(self.sources):
            raise ValueError('kind = "mixture" and sources belong together: give both or neither')
        if self.validation and self.validation_path:
            raise ValueError("validation and validation_path are two ways to say the same; give one of them")
        if self.validation_path and self.kind not in ("text", "chat", "tokens"):
            raise ValueError(f'validation_path is read as path is, but kind = "{self.kind}" reads none; use validation')
        return self
