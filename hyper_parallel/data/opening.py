"""The data of a run, opened: what the section ``[data]`` says, prepared where it must be."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hyper_parallel.data.config import DataConfig, SourceConfig
from hyper_parallel.data.dataset import Dataset, Subset
from hyper_parallel.data.mixture import Mixture
from hyper_parallel.data.preparing.cache import META, check_folder
from hyper_parallel.data.preparing.prepare import Progress, prepare_source
from hyper_parallel.data.preparing.tokenizer import load_tokenizer
from hyper_parallel.data.row_file import ENDS, TOKENS, RowFile
from hyper_parallel.data.synthetic import Synthetic
from hyper_parallel.data.token_file import TokenFile

__all__ = ["open_data", "open_validation"]


def open_data(config: DataConfig, *, seed: int, progress: Progress | None = None) -> Dataset:
    """The samples that a run is trained on.

    The same on every rank: each opens it by itself, and the first of a host prepares what is not prepared yet. ``seed``
    is that of the order of samples, which a mixture makes itself: ``data.order(batch=..., seed=seed)``.
    """
    return _open_all(config, seed, "training", progress)


def open_validation(config: DataConfig, *, seed: int, progress: Progress | None = None) -> Dataset | None:
    """The samples that a run is evaluated on: those set apart, or of ``validation_path``; None if there are none."""
    if config.validation_path:
        apart = dataclasses.replace(config, path=config.validation_path, validation_path=None)
        return open_data(apart, seed=seed, progress=progress)
    return _open_all(config, seed, "validation", progress) if config.validation else None


def _open_all(config: DataConfig, seed: int, part: str, progress: Progress | None) -> Dataset:
    if not config.sources:
        return _part(_open(config, config, progress), config.validation, part)
    sources = [_part(_open(source, config, progress), config.validation, part) for source in config.sources]
    names = [", ".join(Path(path).name for path in source.paths) or source.kind for source in config.sources]
    return Mixture(sources, [source.weight for source in config.sources], seed=seed, names=names)


def _part(data: Dataset, share: float, part: str) -> Dataset:
    """All of the data, or the part of it for training or validation."""
    if not share:
        return data
    num_apart = max(1, round(data.num_samples * share))
    if part == "validation":
        return Subset(data, 0, num_apart, part)
    return Subset(data, num_apart, data.num_samples, part)


def _open(source: SourceConfig, config: DataConfig, progress: Progress | None) -> Dataset:
    pad_to = config.length if config.pad == "length" else None
    if source.kind == "synthetic":
        return Synthetic(num_samples=source.num_samples, length=config.length, vocab_size=source.vocab_size or 256)
    if source.kind == "tokens":
        return _tokens(source, config)
    prepared = prepare_source(source, config, progress=progress)
    facts, decode = prepared.facts, prepared.tokenizer.decode
    if source.kind == "chat":
        return RowFile(
            prepared.folder,
            length=config.length,
            dtype=facts["dtype"],
            vocab_size=facts["vocab_size"],
            packing=config.packing,
            fingerprint=facts["fingerprint"],
            pad_to=pad_to,
            decode=decode,
            name=facts["names"],
            notes=_notes(facts, config.length),
        )
    return _prepared_tokens(prepared.folder, facts, config, decode, name=facts["names"])


def _prepared_tokens(folder: Path, facts: dict[str, Any], config: DataConfig, decode: Any, **more: Any) -> TokenFile:
    return TokenFile(
        folder / TOKENS,
        ends=folder / ENDS,
        length=config.length,
        dtype=facts["dtype"],
        vocab_size=facts["vocab_size"],
        isolate=config.isolate,
        fingerprint=facts["fingerprint"],
        decode=decode,
        **more,
    )


def _notes(facts: dict[str, Any], length: int) -> str:
    """What happened to rows on the way, in words."""
    cut, across = facts["num_truncated"], facts["num_straddling"]
    notes = f"; {cut:,} rows were longer than {length} and are cut short" if cut else ""
    if across:
        notes += (
            f"; in {across:,} rows a token holds the end of a prompt and the beginning of the answer, and is trained"
        )
    return notes


def _facts_of_documents(folder: Path) -> dict[str, Any]:
    """The facts of a prepared folder whose tokens are all trained."""
    facts = check_folder(folder)
    if facts["kind"] == "chat":
        raise ValueError(
            f"'{folder}' has prepared conversations, of which not every token is trained; give the files they were "
            'prepared from, with kind = "chat" and the same options: they are not prepared again'
        )
    return facts


def _tokens(source: SourceConfig, config: DataConfig) -> TokenFile:
    """A token file of the user's own, or a folder that was prepared."""
    path = Path(source.paths[0])
    decode = load_tokenizer(config.tokenizer).decode if config.tokenizer != "bytes" else None
    if (path / META).is_file():
        return _prepared_tokens(path, _facts_of_documents(path), config, decode)
    beside = next((p for p in (path.with_suffix(".ends.npy"), path.with_suffix(".npy")) if p.is_file()), None)
    return TokenFile(
        path,
        ends=source.ends or beside,
        length=config.length,
        dtype=source.dtype,
        vocab_size=source.vocab_size,
        isolate=config.isolate,
        decode=decode,
    )
