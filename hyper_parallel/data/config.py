"""The section ``[data]`` of a run: what to read, with which tokenizer, in samples of which length."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

__all__ = ["LARGEST_WEIGHT", "DataConfig", "SourceConfig"]

LARGEST_WEIGHT = 1e12  # of a source in a mixture: any number of them adds up to a number
_STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True, strict=True)
_Positive = Annotated[int, Field(ge=1, le=2**63 - 1)]
_PREPARED, _TOKENIZER = "meta.json", "tokenizer.json"  # what a prepared folder, and that of a tokenizer, has
_Share = Annotated[float, Field(ge=0, lt=1)]
_Kind = Literal["corpus", "text", "chat", "tokens", "synthetic"]


def _says(text: str) -> Any:
    """What a field means. Unlike a docstring below the field, a class that inherits the field has it too."""
    return Field(description=text)


class Problem(NamedTuple):
    """Values that are each allowed and do not go together; the first key is where it is reported."""

    keys: tuple[str, ...]
    what: str


@dataclass(config=_STRICT, kw_only=True, frozen=True)
class SourceConfig:
    """One source of a mixture."""

    kind: Annotated[
        _Kind,
        _says(
            "corpus (Python's own library), text (files, folders, records), chat, tokens (a token file) or synthetic."
        ),
    ]
    path: Annotated[str | tuple[str, ...] | None, _says("A file or folder, or several: text, chat, tokens.")] = None
    pattern: Annotated[str, _says('Which files of a folder are read, as in "*.py".')] = "*"
    text_field: Annotated[str, _says("The field of a record that has the text.")] = "text"
    chat_template: Annotated[
        str | None, _says('"chatml", a Jinja file, or "none"; without it the tokenizer\'s own (ChatML for bytes).')
    ] = None
    too_long: Annotated[
        Literal["error", "truncate"], _says("What to do with a conversation that is longer than a sample.")
    ] = "error"
    ends: Annotated[
        str | None,
        _says(
            "tokens: the .npy file with the place behind each document's last token; by default next to the token file."
        ),
    ] = None
    dtype: Annotated[Literal["uint16", "uint32"], _says("tokens: the type of its numbers.")] = "uint16"
    vocab_size: Annotated[
        _Positive | None,
        _says("tokens, synthetic: how many ids there are; by default the largest in the token file and one, or 256."),
    ] = None
    num_samples: Annotated[_Positive, _says("synthetic: how many samples.")] = 1024
    weight: Annotated[
        float,
        Field(gt=0, le=LARGEST_WEIGHT, allow_inf_nan=False),
        _says("The share of this source in a mixture, relative to the others."),
    ] = 1.0

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths, always as several."""
        return () if self.path is None else (self.path,) if isinstance(self.path, str) else self.path

    def problems(self) -> Iterator[Problem]:
        """What does not go together, or is not there."""
        reads = self.kind in ("text", "chat", "tokens")
        if reads and not self.paths:
            yield Problem(("path", "kind"), f'is missing: kind = "{self.kind}" reads a file or folder')
        if not reads and self.paths:
            why = 'for files of your own write kind = "text"' if self.kind == "corpus" else "leave it out"
            yield Problem(("path", "kind"), f'must not be given: kind = "{self.kind}" reads no file; {why}')
        if self.kind == "tokens" and len(self.paths) > 1:
            yield Problem(("path", "kind"), 'must be one path for kind = "tokens"; several token files are a mixture')
        elif self.kind == "tokens":
            yield from self._problems_of_tokens(*self.paths)
        yield from _missing("path", self.paths)
        yield from _missing("ends", self.ends)
        if self.chat_template not in ("chatml", "none"):
            yield from _missing("chat_template", self.chat_template, ' of Jinja, "chatml" or "none"')

    def _problems_of_tokens(self, path: str = "") -> Iterator[Problem]:
        width = {"uint16": 2, "uint32": 4}[self.dtype]
        if os.path.isdir(path) and not os.path.isfile(os.path.join(path, _PREPARED)):
            yield Problem(
                ("path", "kind"),
                f"must be a token file or a prepared folder; '{path}' is a folder without {_PREPARED}; text is read "
                'with kind = "text"',
            )
        elif os.path.isfile(path) and (size := os.path.getsize(path)) % width:
            yield Problem(
                ("path", "dtype", "kind"),
                f"must be a file of {self.dtype} tokens, {width} bytes each; '{path}' has {size} bytes",
            )

    @model_validator(mode="after")
    def _raise_problems(self) -> SourceConfig:
        found = list(self.problems())
        if found:
            text = "; ".join(f"{problem.keys[0]}: {problem.what}" for problem in found)
            raise PydanticCustomError("problems", "{text}", {"text": text, "problems": found})
        return self


def _missing(key: str, paths: str | tuple[str, ...] | None, more: str = "") -> Iterator[Problem]:
    for path in (paths,) if isinstance(paths, str) else paths or ():
        if not os.path.exists(path):
            yield Problem((key,), f"must be a file or folder of this machine{more}; there is no {path!r}")


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

    def problems(self) -> Iterator[Problem]:
        """What does not go together, or is not there."""
        yield from super().problems()
        if self.kind == "mixture" and not self.sources:
            yield Problem(("sources", "kind"), 'is missing: kind = "mixture" is made of sources')
        if self.kind != "mixture" and self.sources:
            yield Problem(("sources", "kind"), f'must not be given with kind = "{self.kind}"; write kind = "mixture"')
        if self.validation and self.validation_path:
            yield Problem(
                ("validation_path", "validation"), "and validation say the same in two ways; give one of them"
            )
        if self.validation_path and self.kind not in ("text", "chat", "tokens"):
            yield Problem(
                ("validation_path", "kind"), f'is read as path is, but kind = "{self.kind}" reads none; use validation'
            )
        yield from _missing("validation_path", self.validation_path)
        if self.cache is not None and (
            not self.cache or (os.path.exists(self.cache) and not os.path.isdir(self.cache))
        ):
            yield Problem(("cache",), f"must be a folder, got '{self.cache}'")
        if os.path.isdir(self.tokenizer) and not os.path.isfile(os.path.join(self.tokenizer, _TOKENIZER)):
            yield Problem(("tokenizer",), f"must be a folder with a {_TOKENIZER}; '{self.tokenizer}' has none")
        elif self.tokenizer != "bytes":
            yield from _missing("tokenizer", self.tokenizer, ' that is a tokenizer.json or has one, or "bytes"')
